//! Bytes from the network are either a message or an error.

use paraft_proto::{FromShard, PeerRequest, Push, ToShard, to_shard};
use proptest::prelude::*;
use prost::Message;

fn a_push() -> impl Strategy<Value = ToShard> {
    let numbers =
        (any::<u64>(), any::<u64>(), any::<u32>(), any::<u64>(), any::<f64>(), any::<Option<f64>>());
    (numbers, prop::collection::vec(any::<u8>(), 0..64)).prop_map(
        |((seq, step, bucket, version, sum_of_squares, rate), payload)| {
            let payload = payload.into();
            let push = Push {
                seq,
                step,
                bucket,
                version,
                sum_of_squares,
                payload,
                samples: 3,
                rate,
                ..Push::default()
            };
            ToShard { kind: Some(to_shard::Kind::Push(push)) }
        },
    )
}

proptest! {
    #[test]
    fn any_bytes_decode_or_fail_without_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..256)) {
        let _ = ToShard::decode(&bytes[..]);
        let _ = FromShard::decode(&bytes[..]);
        let _ = PeerRequest::decode(&bytes[..]);
    }

    #[test]
    fn message_with_flipped_bit_or_cut_end_decodes_or_fails(
        push in a_push(), at in any::<prop::sample::Index>(), bit in 0u8..8, keep in any::<prop::sample::Index>(),
    ) {
        let mut bytes = push.encode_to_vec();
        let cut = keep.index(bytes.len() + 1);
        let _ = ToShard::decode(&bytes[..cut]);
        let at = at.index(bytes.len());
        bytes[at] ^= 1 << bit;
        let _ = ToShard::decode(&bytes[..]);
        let _ = PeerRequest::decode(&bytes[..]);
    }

    #[test]
    fn a_message_reads_back_as_it_was_written(push in a_push()) {
        let back = ToShard::decode(&push.encode_to_vec()[..]).expect("what was encoded decodes");
        // Compared as bytes: a NaN is not equal to itself.
        prop_assert_eq!(back.encode_to_vec(), push.encode_to_vec());
    }
}

/// The bytes of this version of the protocol. If this fails, `PROTOCOL` must change too.
#[test]
fn a_push_has_the_bytes_of_its_protocol() {
    assert_eq!(paraft_proto::PROTOCOL, 7);
    let sample = [
        0x1a, 0x19, 0x08, 0x07, 0x10, 0x03, 0x18, 0x02, 0x20, 0x05, 0x29, 0, 0, 0, 0, 0, 0, 0x04, 0x40, 0x32,
        0x04, 0x00, 0x00, 0x80, 0x3f, 0x38, 0x03,
    ];
    let payload = 1f32.to_le_bytes().to_vec().into();
    let push = Push {
        seq: 7,
        step: 3,
        bucket: 2,
        version: 5,
        sum_of_squares: 2.5,
        payload,
        samples: 3,
        ..Push::default()
    };
    assert_eq!(ToShard::decode(&sample[..]), Ok(ToShard { kind: Some(to_shard::Kind::Push(push)) }));
}
