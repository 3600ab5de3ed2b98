//! Tests of `batched`.

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
            assert!(encoding == Encoding::F32 || BatchedPushes::read(&entry, encoding, n + 1, LEN).is_err());
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
                if i == 0 { values.read(&mut direct) } else { values.add_to(&mut direct) }.expect("as many");
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
