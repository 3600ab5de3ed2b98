//! Tests of `text`.

use super::*;

#[test]
fn a_token_is_a_byte_of_the_text() {
    let text = "Grüße, 世界!";
    let corpus = TextCorpus::new(text, 3).expect("text");
    assert_eq!(corpus.tokens(), text.bytes().map(u32::from).collect::<Vec<_>>());
    assert!(corpus.tokens().iter().all(|t| (*t as usize) < VOCAB));
    assert!(TextCorpus::new("abc", 0).is_err());
}

#[test]
fn parts_that_are_too_short_are_refused() {
    let corpus = TextCorpus::new("aaaaaaaabbbb", 2).expect("text");
    let (train, held_out) = corpus.clone().split(0.25).expect("long enough");
    assert_eq!((train.tokens().len(), held_out.tokens()), (9, &[98, 98, 98][..]));
    assert!(corpus.clone().split(0.1).is_err());
    assert!(corpus.split(f64::NAN).is_err());
}
