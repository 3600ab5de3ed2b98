//! Tests of `kind`.

use super::*;
use crate::{algorithm::AlgorithmConfig, local::Diloco, optim::OptimizerConfig, round::RoundConfig};
use serde::{
    Serialize,
    de::{DeserializeOwned, IgnoredAny},
};

type Failed = serde::de::value::Error;

fn both<T: DeserializeOwned + PartialEq + fmt::Debug>(text: &str) -> Result<T, String> {
    let streamed: Result<T, _> = toml::from_str(text);
    let table: Table = toml::from_str(text).expect("TOML");
    let tree = T::deserialize(Tree::<Failed>::of(&Value::Table(table)));
    match (streamed, tree) {
        (Ok(a), Ok(b)) => {
            assert_eq!(a, b, "{text}");
            Ok(b)
        }
        (Err(_), Err(e)) => Err(e.to_string()),
        (a, b) => panic!("{text}: {a:?}, from a tree {b:?}"),
    }
}

#[test]
fn key_order_does_not_matter_and_every_source_is_checked() {
    let one: OptimizerConfig =
        both("lr = 0.5\nkind = \"momentum\"\nmomentum = 0.25").expect("kind in between");
    assert_eq!(one, both("kind = \"momentum\"\nmomentum = 0.25\nlr = 0.5").expect("kind first"));
    for (text, words) in [
        ("lr = 0.5", "missing field `kind`"),
        ("kind = \"sgdd\"", "unknown variant `sgdd`, expected one of `sgd`, `momentum`"),
        ("kind = \"sgd\"\nrate = 1", "unknown field `rate`"),
        ("kind = \"sgd\"\nlr = \"x\"", "invalid type: string \"x\", expected a number"),
        ("kind = 3", "invalid type: integer `3`, expected a text"),
    ] {
        let said = both::<OptimizerConfig>(text).expect_err(text);
        assert!(said.contains(words), "{said}");
    }
    both::<Diloco>("outer = 3").expect_err("a table is wanted");
    both::<Diloco>("outer = { lr = 1, kind = \"sgd\" }").expect("one in another");
}

/// The names in [`Kinds::KINDS`] are those that the derived writer uses.
#[test]
fn what_is_written_is_read_for_every_kind() {
    fn all<T: Kinds + Serialize + DeserializeOwned + PartialEq + fmt::Debug>(more: &[(&str, &str)]) {
        for kind in T::KINDS {
            let options = more.iter().find(|(k, _)| k == kind).map_or("", |(_, o)| *o);
            let read: T = both(&format!("kind = \"{kind}\"\n{options}")).expect(kind);
            let text = toml::to_string(&read).expect("written");
            assert!(text.contains(&format!("kind = \"{kind}\"")), "{text}");
            assert_eq!(both::<T>(&text).expect(kind), read);
        }
    }
    all::<OptimizerConfig>(&[]);
    all::<AlgorithmConfig>(&[]);
    all::<RoundConfig>(&[("backup", "spare = 1")]);
}

#[test]
fn out_of_range_and_ignored_values_match_serde() {
    let value = |text: &str| toml::from_str::<Table>(&format!("v = {text}")).expect("TOML")["v"].clone();
    let read = |text: &str| u32::deserialize(Tree::<Failed>::of(&value(text))).map_err(|e| e.to_string());
    assert_eq!(read("7"), Ok(7));
    for (text, is) in [("-1", "integer `-1`"), ("4294967296", "integer `4294967296`"), ("1.0", "floating")] {
        let said = read(text).expect_err(text);
        assert!(said.contains(is) && said.contains("from 0 to 4294967295"), "{said}");
    }
    assert_eq!(f64::deserialize(Tree::<Failed>::of(&value("2"))), Ok(2.0));
    assert_eq!(f32::deserialize(Tree::<Failed>::of(&value("16777217"))), Ok(16_777_217_i64 as f32));
    IgnoredAny::deserialize(Tree::<Failed>::of(&value("{ a = [1, 1979-05-27] }"))).expect("ignored");
    Value::deserialize(Tree::<Failed>::of(&value("1979-05-27"))).expect_err("no key takes a date");
}
