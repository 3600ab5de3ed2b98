//! Two ends without a socket.

use super::*;
use crate::{Credentials, access::Expected, authority::Authority, handshake::Handshake, incoming::Incoming};
use std::time::Duration;

/// Both ends of a connection: what the first seals the second opens, and the reverse.
fn ends() -> [(Sealer, Opener); 2] {
    let authority = Authority::new("test").expect("made");
    let peer = "peer".parse().expect("a role");
    let issued = authority.issue("test", &[peer], Duration::from_secs(60)).expect("issued");
    let ours = Credentials::of_issued(&issued).expect("good");
    let mut dials = Handshake::dials(&ours, &Expected::SERVER).expect("begun");
    let mut accepts = Handshake::accepts(&ours, &Expected::ANY_ROLE, false).expect("begun");
    let mut to_accept: Vec<u8> = Vec::new();
    let mut to_dial: Vec<u8> = Vec::new();
    let turn = |of: &mut Handshake, came: &mut Vec<u8>, to: &mut Vec<u8>| {
        let (used, over) = of.read(came, &mut |_| panic!("nothing is said yet")).expect("it goes on");
        came.drain(..used);
        to.extend_from_slice(of.out.waiting());
        of.out.sent(of.out.waiting().len());
        over
    };
    for _ in 0..8 {
        let one = turn(&mut dials, &mut to_dial, &mut to_accept);
        // In two pieces, as a network may deliver them.
        let rest = to_accept.split_off(to_accept.len() / 2);
        turn(&mut accepts, &mut to_accept, &mut to_dial);
        to_accept.extend(rest);
        let other = turn(&mut accepts, &mut to_accept, &mut to_dial);
        if one && other {
            return [dials.over().expect("over"), accepts.over().expect("over")];
        }
    }
    panic!("it does not end");
}

fn sealed(sealer: &mut Sealer, text: &[u8]) -> Vec<u8> {
    assert_eq!(sealer.seal(&[IoSlice::new(text)], usize::MAX).expect("sealed"), text.len());
    take(sealer)
}

fn take(sealer: &mut Sealer) -> Vec<u8> {
    let bytes = sealer.out().waiting().to_vec();
    sealer.out().sent(bytes.len());
    bytes
}

fn opened(opener: &mut Opener, bytes: &mut [u8]) -> Result<(Vec<u8>, OpenedRecords), TlsError> {
    let mut text = Vec::new();
    let came = opener.open(bytes, &mut |said| {
        text.extend_from_slice(said);
        true
    })?;
    Ok((text, came))
}

#[test]
fn a_record_opens_once_in_its_place_and_unchanged() {
    let [(mut seals, _), (_, mut opens)] = ends();
    let (one, two) = (sealed(&mut seals, b"one"), sealed(&mut seals, b"two"));
    assert!(!one.windows(3).any(|w| w == b"one"));
    for at in 0..one.len() {
        let [(mut seals, _), (_, mut opens)] = ends();
        let mut changed = sealed(&mut seals, b"one");
        changed[at] ^= 1;
        // A longer length waits for more bytes; every other change is detected at once.
        let (text, came) = opened(&mut opens, &mut changed)
            .unwrap_or((Vec::new(), OpenedRecords { used: 0, end: false, asks: false }));
        assert_eq!((text.len(), came.used), (0, 0), "byte {at}");
    }
    let mut part = one[..one.len() - 1].to_vec();
    assert_eq!(opened(&mut opens, &mut part).expect("not whole yet").1.used, 0);
    assert_eq!(opened(&mut opens, &mut one.clone()).expect("whole").0, b"one");
    assert!(opened(&mut opens, &mut one.clone()).is_err(), "once more");
    // The failed record has advanced its number: this end is over, as it should be.
    assert!(opened(&mut opens, &mut two.clone()).is_ok() || opened(&mut opens, &mut two.clone()).is_err());
    let [(mut seals, _), (_, mut opens)] = ends();
    let _lost = sealed(&mut seals, b"one");
    assert!(opened(&mut opens, &mut sealed(&mut seals, b"two")).is_err(), "one was left out");
}

#[test]
fn keys_change_each_way_while_more_is_said() {
    let [(mut seals, mut hears), (mut answers, mut opens)] = ends();
    for round in 0..5u8 {
        let long = vec![round; 3 * RECORD + 5];
        let mut bytes = sealed(&mut seals, &long);
        seals.update(true).expect("updated");
        bytes.extend(take(&mut seals));
        bytes.extend(sealed(&mut seals, b"after"));
        let (text, came) = opened(&mut opens, &mut bytes).expect("opened");
        assert_eq!(text, [&long[..], b"after"].concat());
        assert!(came.asks && came.used == bytes.len());
        answers.update(false).expect("updated");
        let mut back = take(&mut answers);
        back.extend(sealed(&mut answers, b"answer"));
        assert_eq!(opened(&mut hears, &mut back).expect("opened").0, b"answer");
    }
    // A key is changed after its last record.
    seals.key.used = MAX_RECORDS_PER_KEY;
    let mut bytes = sealed(&mut seals, b"more");
    assert_eq!(seals.key.used, 1);
    assert_eq!(opened(&mut opens, &mut bytes).expect("opened").0, b"more");
    seals.close();
    let (_, came) = opened(&mut opens, &mut take(&mut seals)).expect("opened");
    assert!(came.end);
}

#[test]
fn what_says_nothing_for_ever_is_an_end() {
    for flood in [|s: &mut Sealer| s.update(true), |s: &mut Sealer| s.record(CONTENT, 0, |_| {})] {
        let [(mut seals, _), (_, mut opens)] = ends();
        (0..=MAX_IDLE_RECORDS).for_each(|_| flood(&mut seals).expect("sealed"));
        assert!(opened(&mut opens, &mut take(&mut seals)).is_err());
    }
    // Not a message that we expect: a part of one, a ticket, an alert.
    for (kind, text) in [
        (HANDSHAKE, &[KEY_UPDATE, 0, 0][..]),
        (HANDSHAKE, &[4, 0, 0, 0]),
        (ALERT, &[2]),
        (ALERT, &[2, 45]),
        (99, &[1]),
    ] {
        let [(mut seals, _), (_, mut opens)] = ends();
        seals.record(kind, text.len(), |room| room.copy_from_slice(text)).expect("sealed");
        assert!(opened(&mut opens, &mut take(&mut seals)).is_err(), "{kind} {text:?}");
    }
}

#[test]
fn records_without_room_for_their_content_stay_sealed() {
    let [(mut seals, _), (_, mut opens)] = ends();
    let mut bytes = sealed(&mut seals, b"one");
    let first = bytes.len();
    bytes.extend(sealed(&mut seals, b"two"));
    let came = opens.open(&mut bytes, &mut |_| false).expect("opened");
    assert_eq!(came.used, first);
    assert_eq!(opened(&mut opens, &mut bytes[first..]).expect("opened").0, b"two");
}

#[test]
fn contents_of_whole_records_move_to_the_front() {
    let [(mut seals, _), (_, mut opens)] = ends();
    let text: Vec<u8> = (0..3 * RECORD + 100).map(|i| (i % 251) as u8).collect();
    let mut bytes = sealed(&mut seals, &text);
    seals.update(true).expect("changed");
    bytes.extend(take(&mut seals));
    bytes.extend(sealed(&mut seals, b"after"));
    let (whole, cut) = (bytes.len(), bytes.len() - 1);
    let (came, contents) = opens.open_to_front(&mut bytes[..cut]).expect("opened");
    assert!(came.asks && !came.end);
    assert_eq!(bytes[..contents], text);
    let rest = &mut bytes[came.used..];
    assert_eq!(rest.len(), whole - came.used);
    let (came, contents) = opens.open_to_front(rest).expect("opened");
    assert_eq!((&rest[..contents], came.used), (&b"after"[..], rest.len()));
}

/// What a reader gets that reads with room for so many bytes in turn, of what arrives in so large pieces.
fn read_all(opener: &mut Opener, mut came: &[u8], pieces: usize, rooms: &[usize]) -> Vec<u8> {
    let (mut incoming, mut got) = (Incoming::default(), Vec::new());
    let mut read = |to: &mut [u8]| {
        let n = to.len().min(pieces).min(came.len());
        to[..n].copy_from_slice(&came[..n]);
        came = &came[n..];
        Ok(n)
    };
    for room in rooms.iter().cycle() {
        let mut to = vec![0; *room];
        let mut n = 0;
        let mut take = |said: &[u8]| {
            let part = said.len().min(to.len() - n);
            to[n..][..part].copy_from_slice(&said[..part]);
            n += part;
            part
        };
        if incoming.give(&mut take) == 0 && incoming.has_raw() {
            incoming.open(opener, &mut take).expect("opened");
        }
        if n == 0 && !incoming.is_over() {
            match incoming.reads_directly(*room) {
                true => n = incoming.read_to(opener, &mut to, &mut read).expect("read").0,
                false => incoming.fill(&mut read).expect("read"),
            }
        }
        got.extend_from_slice(&to[..n]);
        if n == 0 && incoming.is_over() {
            break;
        }
    }
    got
}

#[test]
fn readers_with_any_room_get_the_same_bytes() {
    let text: Vec<u8> = (0..1_000_000_u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    for pieces in [1_000, 16_406, 70_000, usize::MAX] {
        for rooms in [&[1 << 20][..], &[8, 300_000], &[5, 65_536, 3_000], &[100]] {
            let [(mut seals, _), (_, mut opens)] = ends();
            let mut bytes = sealed(&mut seals, &text[..400_000]);
            seals.update(false).expect("changed");
            bytes.extend(take(&mut seals));
            bytes.extend(sealed(&mut seals, &text[400_000..]));
            seals.close();
            bytes.extend(take(&mut seals));
            assert!(read_all(&mut opens, &bytes, pieces, rooms) == text, "{pieces} {rooms:?}");
        }
    }
}
