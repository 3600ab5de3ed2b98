//! Tests of `text`.

use super::*;

#[test]
fn text_survives_the_round_trip() {
    let text = "Grüße, 世界!";
    for (kind, size, len) in [(TextVocab::Byte, 256, 16), (TextVocab::Char, 10, 10)] {
        let corpus = TextCorpus::new(text, kind, 3).expect("text");
        assert_eq!((corpus.vocab().size(), corpus.tokens().len()), (size, len), "{kind:?}");
        assert_eq!(corpus.vocab().decode(corpus.tokens()), text);
        assert_eq!(corpus.vocab().decode(&[u32::MAX]), "\u{fffd}");
    }
    assert!(Vocab::of(TextVocab::Char, "ab").encode("abc").is_err());
}

#[test]
fn a_window_is_followed_by_itself_moved_by_one() {
    let corpus = TextCorpus::new("abcdef", TextVocab::Char, 4).expect("text");
    assert_eq!(corpus.len(), 2);
    assert_eq!(corpus.window(1), Some((&[1, 2, 3, 4][..], &[2, 3, 4, 5][..])));
    assert_eq!(corpus.window(2), None);
    assert_eq!(corpus.window(usize::MAX), None);
}

#[test]
fn parts_share_the_vocabulary_and_too_short_ones_are_refused() {
    let corpus = TextCorpus::new("aaaaaaaabbbb", TextVocab::Char, 2).expect("text");
    let (train, held_out) = corpus.clone().split(0.25).expect("long enough");
    assert_eq!((train.tokens().len(), held_out.tokens()), (9, &[1, 1, 1][..]));
    assert_eq!(train.vocab(), held_out.vocab());
    assert!(corpus.clone().split(0.1).is_err());
    assert!(corpus.split(f64::NAN).is_err());
    assert!(TextCorpus::new("abc", TextVocab::Byte, 0).is_err());
}
