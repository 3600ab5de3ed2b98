//! Tests of `round`.

use super::*;
use bytes::Bytes;
use paraft_common::{Seq, SessionId, Step, Version, WorkerId, encoding::Values};
use proptest::prelude::*;

fn part(worker: u32, payload: Payload) -> RoundPush {
    let worker = WorkerId(worker);
    let (session, seq, step, pulled) = (SessionId(1), Seq(1), Step(1), Version(0));
    RoundPush {
        contribution: Contribution { worker, session, seq, step, pulled, samples: 1 },
        payload,
        overrides: Overrides::default(),
        skip: false,
        clipped: false,
    }
}

#[test]
fn a_round_in_which_anybody_skips_has_nothing_but_its_workers() {
    let values = || part(1, 1f32.to_le_bytes().repeat(2).into());
    let skips = RoundPush { skip: true, ..part(2, Payload::EMPTY) };
    let sum = sum(vec![values(), skips.clone()], Encoding::F32, 2);
    assert!(sum.skip && sum.payload.is_empty() && sum.mean_sum_of_squares == 0.0);
    assert_eq!(sum.contributions, [values().contribution, skips.contribution]);
    assert!(!super::sum(vec![values(); 2], Encoding::F32, 2).skip);
}

proptest! {
    #[test]
    fn sum_adds_decoded_values_in_worker_order(
        parts in prop::collection::vec((-1f32..1.0, any::<prop::sample::Index>()), 1..5),
        len in 1usize..2500, encoding in prop::sample::select(Encoding::ALL.to_vec()),
    ) {
        let (mut came, mut expected) = (Vec::new(), vec![0f32; len]);
        for (worker, (size, cut)) in (0u32..).zip(&parts) {
            let values: Vec<f32> = (0..len).map(|i| size * ((i % 37) as f32 - 17.3)).collect();
            let mut sent = Vec::new();
            encoding.encode(&values, &mut sent);
            let mut decoded = vec![0f32; len];
            let payload = Payload::from(sent.clone());
            let read = Values::new(&payload, encoding, len).expect("its length").read(&mut decoded);
            prop_assert_eq!(read, Ok(()));
            if worker == 0 {
                expected = decoded;
            } else {
                expected.iter_mut().zip(&decoded).for_each(|(e, d)| *e += d);
            }
            let mut pieces = Bytes::from(sent);
            let first = pieces.split_to(cut.index(pieces.len()));
            came.push(part(worker, Payload::from_pieces(vec![first, pieces])));
        }
        let sum = sum(came, encoding, len);
        let (added, encoding) = match parts.len() {
            1 => (sum.payload, encoding),
            n => (BatchedPushes::read(&sum.payload, encoding, n, len).expect("as written").sum(), Encoding::F32),
        };
        let mut got = vec![0f32; len];
        let read = Values::new(&added, encoding, len).expect("its length").read(&mut got);
        prop_assert_eq!(read, Ok(()));
        let bits = |v: &[f32]| v.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        prop_assert_eq!(bits(&got), bits(&expected));
        let squares: f64 = got.iter().map(|v| (f64::from(*v) / parts.len() as f64).powi(2)).sum();
        prop_assert!((sum.mean_sum_of_squares - squares).abs() <= 1e-9 * squares);
    }
}
