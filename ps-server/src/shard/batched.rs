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
#[path = "batched_tests.rs"]
mod tests;
