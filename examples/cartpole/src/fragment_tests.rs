//! What travels, and what is refused.

use super::*;

fn fragment() -> Fragment {
    let step = |i: usize| Step {
        observation: [i as f32, -0.5, 0.25, 1.0],
        log_probability: -0.75,
        right: i.is_multiple_of(2),
        over: i == 2,
    };
    Fragment {
        version: 77,
        steps: (0..5).map(step).collect(),
        last: [1.0, 2.0, 3.0, 4.0],
        episodes: vec![30],
    }
}

fn sent(fragment: &Fragment) -> Vec<u8> {
    let mut bytes = Vec::new();
    fragment.write(&mut bytes).expect("a vector takes all");
    bytes
}

#[test]
fn fragment_arrives_as_it_was_sent() {
    let bytes = [sent(&fragment()), sent(&fragment())].concat();
    let mut from = bytes.as_slice();
    for _ in 0..2 {
        assert_eq!(Fragment::read(&mut from).expect("a fragment"), fragment());
    }
    assert!(Fragment::read(&mut from).expect_err("no more").is_end());
}

#[test]
fn answer_arrives_as_it_was_sent() {
    let answer = Answer { updates: 1 << 40, over: true };
    let mut bytes = Vec::new();
    answer.write(&mut bytes).expect("a vector takes all");
    assert_eq!(Answer::read(&mut bytes.as_slice()).expect("an answer"), answer);
}

#[test]
fn fragment_without_steps_is_not_sent() {
    let empty = Fragment { steps: Vec::new(), ..fragment() };
    assert_eq!(empty.write(&mut Vec::new()).expect_err("no steps").kind(), io::ErrorKind::InvalidInput);
}

#[test]
fn damaged_fragments_are_refused() {
    let whole = sent(&fragment());
    let with = |at: usize, bytes: &[u8]| {
        let mut damaged = whole.clone();
        damaged[at..at + bytes.len()].copy_from_slice(bytes);
        Fragment::read(&mut damaged.as_slice())
    };
    let refused = [
        with(0, b"GET "),
        with(12, &[0, 0]),
        with(12, &[0xff, 0xff]),
        with(14, &[6, 0]),
        with(HEADER, &f32::NAN.to_le_bytes()),
        with(HEADER + 16, &0.5f32.to_le_bytes()),
        with(HEADER + STEP - 1, &[4]),
        with(whole.len() - 4, &501u32.to_le_bytes()),
    ];
    for (i, refused) in refused.into_iter().enumerate() {
        assert!(matches!(refused, Err(WireError::Malformed(_))), "damage {i}: {refused:?}");
    }
    for len in 0..whole.len() {
        assert!(Fragment::read(&mut &whole[..len]).expect_err("cut off").is_end());
    }
}
