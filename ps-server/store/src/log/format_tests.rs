//! Tests of `format`.

use super::*;
use proptest::prelude::*;

const HEAD: Head = Head {
    kind: Kind::Record,
    header_bytes: 3,
    payload_bytes: 4,
    body_crc: 0x0102_0304,
    number: 9,
    synced: 8,
    group: 0x11,
    turn: 6,
    index: 5,
};

/// Files of released versions must stay readable: every change of these bytes raises the version.
#[test]
fn the_bytes_of_version_1_are_these() {
    let prefix = Prefix {
        salt: 0x1122_3344_5566_7788,
        first: 7,
        reserved: 3 * BLOCK_BYTES,
        table_bytes: 5,
        table_crc: 0x0a0b_0c0d,
    };
    let expected = b"PARAFTLG\x01\0\0\0\x03\0\0\0\x88\x77\x66\x55\x44\x33\x22\x11\x07\0\0\0\0\0\0\0\x05\0\0\0\x0d\x0c\x0b\x0a";
    assert_eq!(prefix.encode()[..40], expected[..]);
    assert_eq!(prefix.encode()[40..], crc32fast::hash(expected).to_le_bytes());
    assert_eq!(Prefix::decode(&prefix.encode()), Ok(prefix));
    let expected = b"\xF5P\xF7\x01\x03\0\0\0\x04\0\0\0\x04\x03\x02\x01\x09\0\0\0\0\0\0\0\x08\0\0\0\0\0\0\0\
        \x11\0\0\0\0\0\0\0\x06\0\0\0\0\0\0\0\x05\0\0\0\0\0\0\0";
    assert_eq!(HEAD.encode(5)[..56], expected[..]);
    let mut salted = 5u64.to_le_bytes().to_vec();
    salted.extend(expected);
    assert_eq!(HEAD.encode(5)[56..], crc32fast::hash(&salted).to_le_bytes());
    let entry = Entry {
        key: 1,
        damaged: true,
        turn: 2,
        first: 3,
        next: Some(4),
        purged: Some((2, Bytes::from_static(b"t"))),
    };
    let expected = b"\x01\0\0\0\0\0\0\0\x01\0\0\0\x02\0\0\0\0\0\0\0\x03\0\0\0\0\0\0\0\x04\0\0\0\0\0\0\0\
        \x02\0\0\0\0\0\0\0\x01\0\0\0t";
    assert_eq!(encode_table(&[entry]), expected);
}

#[test]
fn a_head_of_another_use_of_the_file_is_none() {
    assert_eq!(Head::decode(5, &HEAD.encode(5)), Some(HEAD));
    assert_eq!(Head::decode(6, &HEAD.encode(5)), None);
}

#[test]
fn sizes_beyond_bounds_are_refused_despite_good_checksum() {
    let none = |head: Head| assert_eq!(Head::decode(1, &head.encode(1)), None, "{head:?}");
    for (header_bytes, payload_bytes) in
        [(u32::MAX, 0), (0, u32::MAX), ((16 << 20) + 1, 0), (0, (16 << 20) + 1)]
    {
        none(Head { header_bytes, payload_bytes, ..HEAD });
    }
    none(Head { index: u64::MAX, ..HEAD });
    none(Head { number: MAX_NUMBER, ..HEAD });
    none(Head { turn: MAX_NUMBER, ..HEAD });
    for kind in [Kind::Mark, Kind::Truncate, Kind::Remove, Kind::Purge] {
        none(Head { kind, ..HEAD });
    }
}

fn entry() -> impl Strategy<Value = Entry> {
    let purged = prop::option::of((0..9u64, prop::collection::vec(any::<u8>(), 0..9)));
    (any::<bool>(), 0..9u64, 0..9u64, prop::option::of(0..9u64), purged).prop_map(
        |(damaged, turn, first, more, purged)| Entry {
            key: 0,
            damaged,
            turn,
            first,
            next: more.map(|more| first + more),
            purged: purged.map(|(upto, tag)| (upto, tag.into())),
        },
    )
}

proptest! {
    #[test]
    fn a_table_comes_back_as_it_was(mut entries in prop::collection::vec(entry(), 0..5), cut in 0usize..99) {
        (0..).zip(&mut entries).for_each(|(key, e)| e.key = key);
        let bytes = encode_table(&entries);
        prop_assert_eq!(decode_table(&bytes), Some(entries));
        let cut = &bytes[..cut.min(bytes.len())];
        if let Some(some) = decode_table(cut) {
            prop_assert_eq!(encode_table(&some), cut);
        }
    }

    #[test]
    fn any_bytes_decode_to_what_encodes_to_them(
        mut bytes in prop::collection::vec(any::<u8>(), HEAD_BYTES), salt: u64, mend: bool
    ) {
        if mend {
            // With a valid checksum, so that the checks after it are reached.
            bytes[..3].copy_from_slice(&ITEM_MAGIC);
            bytes[3] = 1 + bytes[3] % 6;
            let crc = head_crc(salt, &bytes[..HEAD_BYTES - 4]);
            bytes[HEAD_BYTES - 4..].copy_from_slice(&crc.to_le_bytes());
        }
        if let Some(head) = Head::decode(salt, &bytes) {
            prop_assert_eq!(head.encode(salt).to_vec(), bytes.clone());
        }
        bytes.truncate(PREFIX_BYTES);
        bytes[..8].copy_from_slice(&MAGIC);
        if mend {
            bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
            let crc = crc32fast::hash(&bytes[..40]);
            bytes[40..].copy_from_slice(&crc.to_le_bytes());
        }
        if let Ok(prefix) = Prefix::decode(&bytes) {
            prop_assert_eq!(prefix.encode().to_vec(), bytes);
        }
    }
}
