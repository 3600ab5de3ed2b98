//! Tests of `options`.

use super::*;

#[derive(Serialize, Deserialize, PartialEq, Debug)]
struct Table {
    encoding: Encoding,
}

fn read(text: &str) -> Result<Encoding, String> {
    let table: Result<Table, _> = toml::from_str(&format!("encoding = \"{text}\""));
    table.map(|t| t.encoding).map_err(|e| e.message().to_string())
}

#[test]
fn encodings_read_back_what_they_print() {
    for encoding in Encoding::ALL {
        assert_eq!(encoding.to_string().parse(), Ok(encoding));
        let text = toml::to_string(&Table { encoding }).expect("a table");
        assert_eq!(toml::from_str(&text), Ok(Table { encoding }), "{text}");
    }
    let kept = |n| Encoding::TopK(Fraction::millionths(n).expect("in its range"));
    for (text, encoding) in [
        ("top-k:0.001", kept(1000)),
        ("top-k:0.5", kept(500_000)),
        ("top-k:1e-6", kept(1)),
        ("top-k:0.100000", kept(100_000)),
    ] {
        assert_eq!(text.parse(), Ok(encoding));
    }
    assert_eq!(kept(1).to_string(), "top-k:0.000001");
    assert_eq!(kept(120_000).to_string(), "top-k:0.12");
    assert_eq!(format!("{:6}|", Encoding::F32), "f32   |");
}

#[test]
fn what_is_no_encoding_is_refused_with_what_would_be_one() {
    for (text, words) in [
        ("fp16", "unknown variant `fp16`, expected one of `f32`, `bf16`"),
        ("top-k", "`top-k:0.001`"),
        ("top-k:0", "above 0 and at most 0.5"),
        ("top-k:0.6", "above 0 and at most 0.5"),
        ("top-k:-0.1", "above 0 and at most 0.5"),
        ("top-k:nan", "above 0 and at most 0.5"),
        ("top-k:inf", "above 0 and at most 0.5"),
        ("top-k:0.0000001", "up to six digits"),
        ("top-k:0.12345678", "up to six digits"),
        ("powersgd", "from 1 to 64"),
        ("powersgd:0", "from 1 to 64"),
        ("powersgd:65", "from 1 to 64"),
        ("powersgd:300", "from 1 to 64"),
        ("f32:1", "unknown variant"),
    ] {
        let said = read(text).expect_err(text);
        assert!(said.contains(words), "{said}");
    }
}

#[test]
fn a_fraction_is_of_one_value_at_least() {
    let f = Fraction::millionths(1000).expect("in its range");
    for (values, kept) in [(0, 0), (1, 1), (999, 1), (1999, 1), (2000, 2), (262_144, 262)] {
        assert_eq!(f.of(values), kept, "{values}");
    }
}
