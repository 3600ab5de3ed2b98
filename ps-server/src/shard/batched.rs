//! The pushes of a round in one log entry.
//!
//! ```text
//!  | bytes of push 1, u32 | ... of push n | push 1 | ... | push n |     as they came, by rising worker
//!  | bytes of push 1, u32 | ... of push n | their sum, f32 |            where that is fewer bytes
//! ```
//!
//! So the bytes that compression saves between worker and leader are saved on the way to the followers and in the
//! log too. Each replica decodes the pushes and adds them in the order of the workers: the same additions as the
//! leader's, with the same bits. Pushes in f32 are never fewer bytes than their sum, so such an entry holds only
//! the sum.
//!
//! The pushes' workers and steps are not here but in the entry's command.

use paraft_common::{
    Encoding, Payload,
    codec::{F32_BYTES, put_f32_le},
    encoding::{BadPayload, Values},
};

/// Two or more pushes of one bucket.
#[derive(Clone, Debug)]
pub struct BatchedPushes {
    encoding: Encoding,
    /// Values of the bucket.
    len: usize,
    /// Bytes of each push.
    pushed: Vec<usize>,
    body: Body,
}

#[derive(Clone, Debug)]
enum Body {
    Pushes(Vec<Payload>),
    Sum(Payload),
}

/// Why a payload does not hold several pushes.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum BatchedError {
    /// It ends before its declared length.
    #[error("it ends within the lengths of its {0} pushes")]
    Short(usize),
    /// The data after the lengths is neither the pushes nor their sum.
    #[error("{got} bytes are neither its pushes, which are {pushed} bytes, nor their sum, which is {sum}")]
    Length {
        /// Bytes after the lengths.
        got: usize,
        /// Bytes of the pushes.
        pushed: usize,
        /// Bytes of the sum.
        sum: usize,
    },
    /// A push, or the sum, cannot be read.
    #[error(transparent)]
    Payload(#[from] BadPayload),
}

impl BatchedPushes {
    /// Pushes of a bucket of `len` values, ascending by worker. Fails if one of them does not fit the bucket.
    pub fn of(pushes: Vec<Payload>, encoding: Encoding, len: usize) -> Result<Self, BadPayload> {
        pushes.iter().try_for_each(|p| encoding.check(p, len))?;
        let pushed = pushes.iter().map(Payload::len).collect();
        Ok(Self { encoding, len, pushed, body: Body::Pushes(pushes) })
    }

    /// Reads the payload of an entry with `pushes` pushes.
    pub fn read(
        payload: &Payload,
        encoding: Encoding,
        pushes: usize,
        len: usize,
    ) -> Result<Self, BatchedError> {
        let sum = len * F32_BYTES;
        if encoding == Encoding::F32 {
            Encoding::F32.check(payload, len)?;
            let pushed = vec![sum; pushes];
            return Ok(Self { encoding, len, pushed, body: Body::Sum(payload.clone()) });
        }
        let mut reader = payload.reader();
        let mut pushed = Vec::new(); // grows with the data, not with the declared number
        let heads = reader.words(pushes, |words: &[[u8; 4]]| {
            pushed.extend(words.iter().map(|w| u32::from_le_bytes(*w) as usize));
        });
        heads.map_err(|_| BatchedError::Short(pushes))?;
        let (got, all) = (reader.left(), pushed.iter().sum::<usize>());
        let mut at = payload.len() - got;
        if got == sum && all >= sum {
            let body = payload.slice(at..payload.len()).map_err(|_| BatchedError::Short(pushes))?;
            Encoding::F32.check(&body, len)?;
            return Ok(Self { encoding, len, pushed, body: Body::Sum(body) });
        }
        if got != all {
            return Err(BatchedError::Length { got, pushed: all, sum });
        }
        let mut parts = Vec::with_capacity(pushed.len());
        for bytes in &pushed {
            let part = payload.slice(at..at + bytes).map_err(|_| BatchedError::Short(pushes))?;
            encoding.check(&part, len)?;
            at += bytes;
            parts.push(part);
        }
        Ok(Self { encoding, len, pushed, body: Body::Pushes(parts) })
    }

    /// The payload that [`Self::read`] reads; `sum` is [`Self::sum`]. It shares the pushes instead of copying them.
    pub fn payload(&self, sum: Payload) -> Payload {
        if self.encoding == Encoding::F32 {
            return sum;
        }
        let lengths: Vec<u8> = self.pushed.iter().flat_map(|n| (*n as u32).to_le_bytes()).collect();
        let mut pieces = vec![lengths.into()];
        match &self.body {
            Body::Pushes(pushes) if self.pushed.iter().sum::<usize>() < self.len * F32_BYTES => {
                pieces.extend(pushes.iter().flat_map(Payload::pieces).cloned());
            }
            _ => pieces.extend_from_slice(sum.pieces()),
        }
        Payload::from_pieces(pieces)
    }

    /// Bytes that the workers pushed.
    pub fn pushed(&self) -> u64 {
        self.pushed.iter().map(|n| *n as u64).sum()
    }

    /// The sum as f32: the first push, then the others in order. Floating-point addition is not associative, so the
    /// order must be the same on every replica.
    pub fn sum(&self) -> Payload {
        const CHECKED: &str = "it was checked when it was made";
        let pushes = match &self.body {
            Body::Sum(sum) => return sum.clone(),
            Body::Pushes(pushes) => pushes,
        };
        // Block by block, so that the running sum stays in the first-level cache.
        const BLOCK: usize = 1024;
        let values = |p| Values::new(p, self.encoding, self.len).expect(CHECKED);
        let mut pushes: Vec<_> = pushes.iter().map(values).collect();
        let mut acc = [0f32; BLOCK];
        let mut out = Vec::with_capacity(self.len * F32_BYTES);
        let mut left = self.len;
        while left > 0 {
            let acc = &mut acc[..BLOCK.min(left)];
            for (i, push) in pushes.iter_mut().enumerate() {
                let read = if i == 0 { push.read(acc) } else { push.add_to(acc) };
                read.expect(CHECKED);
            }
            put_f32_le(acc, &mut out);
            left -= acc.len();
        }
        out.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;

    fn push(encoding: Encoding, worker: usize, len: usize) -> Payload {
        let values: Vec<f32> = (0..len).map(|i| (i * 7 % 23) as f32 * 0.37 - worker as f32).collect();
        let mut out = Vec::new();
        encoding.encode(&values, &mut out);
        let mut pieces = Bytes::from(out);
        Payload::from_pieces(vec![pieces.split_to(pieces.len() / 3), pieces])
    }

    #[test]
    fn pushes_smaller_than_their_sum_are_kept_unsummed() {
        const LEN: usize = 3000;
        for encoding in Encoding::ALL {
            for n in [2, 3, 4, 5, 40] {
                let pushes: Vec<Payload> = (0..n).map(|w| push(encoding, w, LEN)).collect();
                let bytes: usize = pushes.iter().map(Payload::len).sum();
                let batched = BatchedPushes::of(pushes.clone(), encoding, LEN).expect("they fit");
                let sum = batched.sum();
                let entry = batched.payload(sum.clone());
                let heads = if encoding == Encoding::F32 { 0 } else { 4 * n };
                assert_eq!(entry.len(), heads + bytes.min(4 * LEN), "{n} in {encoding}");
                assert!(encoding != Encoding::Sign || n > 5 || bytes == n * 387, "one bit a value");
                let read = BatchedPushes::read(&entry, encoding, n, LEN).expect("what was written");
                assert_eq!(read.sum(), sum, "{n} in {encoding}");
                assert_eq!(read.pushed(), bytes as u64);
                // A wrong number of pushes is refused.
                assert!(
                    encoding == Encoding::F32 || BatchedPushes::read(&entry, encoding, n + 1, LEN).is_err()
                );
                // In some encodings, one more value takes no more bytes.
                assert!(
                    !Encoding::DENSE.contains(&encoding)
                        || BatchedPushes::read(&entry, encoding, n, LEN + 1).is_err()
                );
                assert!(
                    BatchedPushes::read(&entry.slice(1..entry.len()).expect("shorter"), encoding, n, LEN)
                        .is_err()
                );
                // The sum is that of the decoded values, one after the other.
                let mut direct = vec![0f32; LEN];
                for (i, p) in pushes.iter().enumerate() {
                    let mut values = Values::new(p, encoding, LEN).expect("it fits");
                    if i == 0 { values.read(&mut direct) } else { values.add_to(&mut direct) }
                        .expect("as many");
                }
                let mut le = Vec::new();
                put_f32_le(&direct, &mut le);
                assert_eq!(sum, Payload::from(le));
            }
        }
    }

    #[test]
    fn an_entry_that_cannot_be_is_refused() {
        let sign = push(Encoding::Sign, 0, 10);
        let entry = |lengths: &[u32], rest: &[Payload]| {
            let heads: Vec<u8> = lengths.iter().flat_map(|n| n.to_le_bytes()).collect();
            Payload::from_pieces(
                [vec![heads.into()], rest.iter().flat_map(|p| p.pieces().to_vec()).collect()].concat(),
            )
        };
        let read = |p: &Payload, n| {
            BatchedPushes::read(p, Encoding::Sign, n, 10).map(|s| s.pushed()).map_err(|e| e.to_string())
        };
        assert_eq!(read(&entry(&[6, 6], &[sign.clone(), sign.clone()]), 2), Ok(12));
        for (lengths, parts, why) in [
            (&[6][..], 0, "ends within the lengths of its 2 pushes"),
            (&[6, 6], 1, "6 bytes are neither its pushes, which are 12 bytes, nor their sum, which is 40"),
            (&[u32::MAX, u32::MAX], 2, "which are 8589934590 bytes"),
            (&[5, 7], 2, "5 bytes are not 10 values in sign"),
            (&[0, 12], 2, "0 bytes are not 10 values in sign"),
        ] {
            let said = read(&entry(lengths, &vec![sign.clone(); parts]), 2).expect_err(why);
            assert!(said.contains(why), "{said}");
        }
        let many = entry(&[6], std::slice::from_ref(&sign));
        assert!(read(&many, usize::MAX / 8).is_err(), "and takes no memory for it");
    }
}
