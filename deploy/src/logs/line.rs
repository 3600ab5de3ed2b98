//! A line of a log, for people.

use serde_json::{Map, Value};
use std::borrow::Cow;

/// A JSON line of ours as its time (UTC), level, message and fields; any other line as it is.
pub fn readable(line: &str) -> Cow<'_, str> {
    let parsed = serde_json::from_str::<Map<String, Value>>(line).ok();
    parsed.and_then(|parsed| words(&parsed)).map_or(Cow::Borrowed(line), Cow::Owned)
}

fn words(line: &Map<String, Value>) -> Option<String> {
    let at = line.get("timestamp")?.as_str()?;
    let level = line.get("level")?.as_str()?;
    let fields = line.get("fields")?.as_object()?;
    // A second is precise enough for people: 2026-11-29T03:33:21.336615Z.
    let at = at.get(..19)?.replace('T', " ");
    let mut words = format!("{at} {level:5}");
    if let Some(message) = fields.get("message") {
        words += &format!(" {}", text(message, false));
    }
    for (name, value) in fields.iter().filter(|(name, _)| name.as_str() != "message") {
        words += &format!(" {name}={}", text(value, true));
    }
    Some(words)
}

/// Text without quotes, unless it has spaces between other fields.
fn text(value: &Value, is_field: bool) -> String {
    match value.as_str() {
        Some(text) if !is_field || !text.is_empty() && !text.contains(char::is_whitespace) => {
            text.to_string()
        }
        _ => value.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_lines_become_words_and_others_stay() {
        let json = r#"{"timestamp":"2026-11-29T03:33:21.380251Z","level":"INFO","fields":{"message":"connected to it","worker":"w0","over":"a Unix socket","n":3},"target":"t"}"#;
        let said = readable(json);
        assert!(said.starts_with("2026-11-29 03:33:21 INFO  connected to it"), "{said}");
        for field in [" worker=w0", r#" over="a Unix socket""#, " n=3"] {
            assert!(said.contains(field), "{said}");
        }
        for other in [
            "epoch 1",
            "",
            "{\"level\":\"INFO\"}",
            "[1]",
            "{\"timestamp\":\"\u{e4}\",\"level\":\"\",\"fields\":{}}",
        ] {
            assert_eq!(readable(other), other);
        }
    }
}
