//! Tests of `readers`.

use super::*;
use futures::FutureExt;

#[test]
fn one_certificate_has_half_of_the_streams_and_of_the_bytes() {
    let readers = Readers::default();
    let mut hostile: Vec<Reader> = Vec::new();
    let refused = loop {
        match readers.reader("hostile") {
            Ok(reader) => hostile.push(reader),
            Err(refused) => break refused.to_string(),
        }
    };
    assert!(
        hostile.len() == MAX_STREAMS / SHARE_DIVISOR && refused.contains("with this certificate"),
        "{refused}"
    );
    let rooms: Vec<Room> =
        hostile.iter().filter_map(|reader| reader.room(MAX_BUCKET_BYTES).now_or_never()).collect();
    assert_eq!(
        (rooms.len() * MAX_BUCKET_BYTES, readers.held()),
        (MAX_COPY_BYTES / SHARE_DIVISOR, MAX_COPY_BYTES / SHARE_DIVISOR)
    );
    let honest = readers.reader("honest").expect("the other half");
    let room = honest.room(MAX_BUCKET_BYTES).now_or_never().expect("there is room");
    drop((rooms, room));
    assert_eq!(readers.held(), 0, "room comes back with the copies");
    hostile.pop();
    readers.reader("hostile").expect("one has ended");
}

#[test]
fn streams_of_all_certificates_together_have_a_bound() {
    let readers = Readers::default();
    let all: Vec<_> = (0..2 * MAX_STREAMS).map(|i| readers.reader(&i.to_string())).collect();
    assert_eq!(all.iter().filter(|r| r.is_ok()).count(), MAX_STREAMS);
}

#[test]
fn copies_of_all_certificates_together_have_a_bound() {
    let readers = Readers::default();
    let all: Vec<Reader> = (0..4).map(|i| readers.reader(&i.to_string()).expect("there is room")).collect();
    let asks = (0..MAX_COPY_BYTES / MAX_BUCKET_BYTES).flat_map(|_| &all);
    let rooms: Vec<Room> = asks.filter_map(|reader| reader.room(MAX_BUCKET_BYTES).now_or_never()).collect();
    assert_eq!(rooms.len() * MAX_BUCKET_BYTES, MAX_COPY_BYTES);
}
