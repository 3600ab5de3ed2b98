//! Sealed records from one end to the other, without a socket.

use super::*;

const LENGTHS: [usize; 5] = [0, 1, RECORD, RECORD + 1, 1 << 20];

fn content(length: usize) -> Vec<u8> {
    (0..length).map(|i| (i % 251) as u8).collect()
}

/// What the near end sends for these messages.
fn sealed(lengths: &[usize]) -> Vec<u8> {
    let mut near = Sealed::near(Vec::<u8>::new()).expect("keys");
    for length in lengths {
        near.write_all(&content(*length)).expect("sealed");
        near.flush().expect("sent");
    }
    near.stream
}

/// What the far end reads of a message of this length.
fn opened(records: &[u8], length: usize) -> io::Result<Vec<u8>> {
    let mut content = vec![0; length];
    Sealed::far(records)?.read_exact(&mut content)?;
    Ok(content)
}

#[test]
fn what_one_end_seals_the_other_opens() {
    for length in LENGTHS {
        let records = sealed(&[length]);
        assert_eq!(records.len(), length + length.div_ceil(RECORD) * OVERHEAD);
        assert!(opened(&records, length).expect("opened") == content(length), "{length}");
    }
    // One connection carries them all, and nothing else.
    let records = sealed(&LENGTHS);
    let mut far = Sealed::far(&records[..]).expect("keys");
    for length in LENGTHS {
        let mut came = vec![0; length];
        far.read_exact(&mut came).expect("opened");
        assert!(came == content(length), "{length}");
    }
    assert_eq!(far.read(&mut [0]).expect_err("an end").kind(), ErrorKind::UnexpectedEof);
}

#[test]
fn a_flipped_bit_is_an_error() {
    let length = RECORD + 1;
    let records = sealed(&[length]);
    for at in [0, 2, 3, 4, HEADER, RECORD, HEADER + RECORD, RECORD + OVERHEAD - 1, records.len() - 1] {
        for bit in 0..8 {
            let mut changed = records.clone();
            changed[at] ^= 1 << bit;
            let error = opened(&changed, length).expect_err("a changed record");
            assert_eq!(error.kind(), ErrorKind::InvalidData, "bit {bit} of byte {at}");
        }
    }
}

#[test]
fn a_record_has_its_place_and_its_direction() {
    let records = sealed(&[1, 1]);
    let second = &records[1 + OVERHEAD..];
    assert_eq!(opened(second, 1).expect_err("the first is missing").kind(), ErrorKind::InvalidData);
    let mut back = Sealed::near(&records[..]).expect("keys");
    assert_eq!(back.read(&mut [0]).expect_err("a key of the other way").kind(), ErrorKind::InvalidData);
}
