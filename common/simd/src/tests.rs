//! Tests of `lib`.

use super::*;

fn by(value: &str) -> Result<Choice, Refused> {
    Choice::by(Some(OsStr::new(value)))
}

#[test]
fn the_default_is_the_best_instruction_set_unforced() {
    for value in [None, Some(OsStr::new(""))] {
        let choice = Choice::by(value).expect("every machine has something");
        assert_eq!((choice.isa(), choice.forced), (Isa::of(Level::new()), false));
    }
}

#[test]
fn a_named_instruction_set_is_forced_or_refused() {
    let best = Isa::of(Level::new());
    for isa in Isa::ALL {
        match by(isa.name()) {
            Ok(choice) => assert_eq!((choice.isa(), choice.forced, isa <= best), (isa, true, true)),
            Err(refused) => assert_eq!((refused, isa > best), (Refused::Missing(isa), true)),
        }
    }
    assert!(by("portable").is_ok(), "every machine of the target has it");
}

#[test]
fn a_word_that_is_no_set_is_refused_with_those_that_are() {
    for word in ["AVX2", "sse2", "avx2 ", "0"] {
        let refused = by(word).expect_err("not a set");
        assert_eq!(refused, Refused::Unknown(word.into()));
        let text = refused.to_string();
        assert!(Isa::ALL.iter().all(|isa| text.contains(isa.name())), "{text}");
    }
}
