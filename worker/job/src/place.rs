//! The line of a key in a job file, from the TOML parser's spans.

use toml::de::{DeTable, DeValue};

/// The line, from 1, of the key `a.b` in a TOML text, or of the header of that table; `a.2.b` is a key of the third entry of
/// the list `a`. `None` if the text has no such key, or is not TOML.
pub fn line_of(text: &str, key: &str) -> Option<usize> {
    let table = DeTable::parse(text).ok()?;
    let mut parts = key.split('.').peekable();
    let mut at = table.get_ref();
    while let Some(part) = parts.next() {
        let (found, value) = at.iter().find(|(k, _)| k.get_ref() == part)?;
        if parts.peek().is_none() {
            return Some(line_at(text, found.span().start));
        }
        let mut value = value;
        if let DeValue::Array(entries) = value.get_ref() {
            value = entries.get(parts.next()?.parse::<usize>().ok()?)?;
            if parts.peek().is_none() {
                return Some(line_at(text, value.span().start));
            }
        }
        let DeValue::Table(inner) = value.get_ref() else { return None };
        at = inner;
    }
    None
}

/// Likewise, or the line of the table that lacks the key.
pub(crate) fn nearest(text: &str, key: &str) -> Option<usize> {
    let mut at = key;
    loop {
        if let Some(line) = line_of(text, at) {
            return Some(line);
        }
        at = at.rsplit_once('.')?.0;
    }
}

/// The line, from 1, of a byte in a text.
pub(crate) fn line_at(text: &str, byte: usize) -> usize {
    text.bytes().take(byte).filter(|b| *b == b'\n').count() + 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_found_by_line() {
        let text = "name = 1\n\n[train]\n# batch = 9\nbatch = 64\nx.y = \"\"\"\nseed = 1\n\"\"\"\n[cluster.extra]\nx = { y = 1 }\n";
        for (key, line) in [
            ("name", Some(1)),
            ("train", Some(3)),
            ("train.batch", Some(5)),
            ("train.x.y", Some(6)),
            ("seed", None),
            ("cluster.extra.x", Some(10)),
            ("cluster.extra.x.y", Some(10)),
            ("train.lr", None),
            ("name.x", None),
        ] {
            assert_eq!(line_of(text, key), line, "{key}");
        }
        assert_eq!((nearest(text, "train.lr"), nearest(text, "lr")), (Some(3), None));
        assert_eq!(line_of("no toml", "no"), None);
    }
}
