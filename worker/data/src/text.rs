//! Plain text as tokens, for language models.

use crate::{DataError, Place, input};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

/// The maximum text in bytes: a token takes four bytes, so this is 4 GiB of tokens.
const MAX_TEXT: u64 = 1 << 30;

/// The kind of tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TextVocab {
    /// A byte of the UTF-8 encoding: 256 tokens for every text.
    #[default]
    Byte,
    /// A character (Unicode scalar value) of the text, numbered in code point order.
    Char,
}

/// The tokens of a corpus.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Vocab {
    /// All bytes.
    Bytes,
    /// These characters, sorted; a token is an index.
    Chars(Vec<char>),
}

impl Vocab {
    /// The vocabulary for a text.
    pub fn of(kind: TextVocab, text: &str) -> Self {
        match kind {
            TextVocab::Byte => Self::Bytes,
            TextVocab::Char => Self::Chars(text.chars().collect::<BTreeSet<_>>().into_iter().collect()),
        }
    }

    /// Number of tokens.
    pub fn size(&self) -> usize {
        match self {
            Self::Bytes => 256,
            Self::Chars(chars) => chars.len(),
        }
    }

    /// The tokens of a text; fails if the vocabulary lacks a character.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, DataError> {
        match self {
            Self::Bytes => Ok(text.bytes().map(u32::from).collect()),
            Self::Chars(chars) => text
                .chars()
                .map(|c| match chars.binary_search(&c) {
                    Ok(token) => Ok(token as u32),
                    Err(_) => Err(DataError::Mismatch(format!("character {c:?} is not in the vocabulary"))),
                })
                .collect(),
        }
    }

    /// The text of some tokens. Invalid text (half a character, a token out of range) becomes U+FFFD, because a
    /// model may produce it.
    pub fn decode(&self, tokens: &[u32]) -> String {
        const UNKNOWN: char = char::REPLACEMENT_CHARACTER;
        match self {
            Self::Bytes => {
                // 0xFF never occurs in UTF-8.
                let bytes: Vec<u8> = tokens.iter().map(|&t| u8::try_from(t).unwrap_or(0xff)).collect();
                String::from_utf8_lossy(&bytes).into_owned()
            }
            Self::Chars(chars) => {
                tokens.iter().map(|&t| chars.get(t as usize).copied().unwrap_or(UNKNOWN)).collect()
            }
        }
    }
}

/// A text, or a part of one, as windows of tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct TextCorpus {
    vocab: Arc<Vocab>,
    tokens: Vec<u32>,
    context: usize,
}

impl TextCorpus {
    /// Reads UTF-8 text, plain or gzip.
    pub fn read(path: &Path, vocab: TextVocab, context: usize) -> Result<Self, DataError> {
        let mut file = input::open(path)?;
        let bytes = file.rest(MAX_TEXT)?;
        let text = std::str::from_utf8(&bytes).map_err(|e| {
            let at = e.valid_up_to();
            let what = format!("byte {:#04x} is not UTF-8", bytes[at]);
            file.malformed(Place::Byte(at as u64), what, "convert the file, for example with iconv -t utf-8")
        })?;
        Self::new(text, vocab, context)
    }

    /// The tokens of a text.
    pub fn new(text: &str, vocab: TextVocab, context: usize) -> Result<Self, DataError> {
        if context == 0 {
            return Err(DataError::Option { key: "context", why: "must be 1 or more".into() });
        }
        let vocab = Vocab::of(vocab, text);
        let tokens = vocab.encode(text)?;
        Ok(Self { vocab: Arc::new(vocab), tokens, context })
    }

    /// Splits off the last `fraction` (above 0, below 1): training part, held-out part. It is not spread over the
    /// text, as table rows are, because overlapping windows would leak held-out text into training. Both parts
    /// share the vocabulary and must hold at least one window.
    pub fn split(mut self, fraction: f64) -> Result<(Self, Self), DataError> {
        let option = |why| Err(DataError::Option { key: "test_fraction", why });
        if !(fraction > 0.0 && fraction < 1.0) {
            return option(format!("{fraction} is not above 0 and below 1"));
        }
        let at = (self.tokens.len() as f64 * (1.0 - fraction)).round() as usize;
        let held_out = Self { vocab: Arc::clone(&self.vocab), tokens: self.tokens.split_off(at), ..self };
        if self.is_empty() || held_out.is_empty() {
            let (a, b, need) = (self.tokens.len(), held_out.tokens.len(), self.context + 1);
            return option(format!(
                "parts of {a} and {b} tokens; each needs {need}, one more than `context`"
            ));
        }
        Ok((self, held_out))
    }

    /// All tokens, the tokens per window, and the number of distinct tokens.
    pub(crate) fn into_parts(self) -> (Vec<u32>, usize, usize) {
        let vocab = self.vocab.size();
        (self.tokens, self.context, vocab)
    }

    /// The vocabulary.
    pub fn vocab(&self) -> &Vocab {
        &self.vocab
    }

    /// All tokens.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Number of windows: one starts at every token with `context` tokens after it.
    pub fn len(&self) -> usize {
        self.tokens.len().saturating_sub(self.context)
    }

    /// Whether the text is shorter than a window.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Window `i`: `context` tokens, and the successor of each. `None` past the last.
    pub fn window(&self, i: usize) -> Option<(&[u32], &[u32])> {
        let end = i.checked_add(self.context)?;
        Some((self.tokens.get(i..end)?, self.tokens.get(i + 1..end.checked_add(1)?)?))
    }
}

#[cfg(test)]
#[path = "text_tests.rs"]
mod tests;
