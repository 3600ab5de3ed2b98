//! Plain text as tokens, for language models. A token is a byte of the UTF-8 encoding.

use crate::{DataError, Place, input};
use std::path::Path;

/// The maximum text in bytes: a token takes four bytes, so this is 4 GiB of tokens.
const MAX_TEXT: u64 = 1 << 30;

/// All tokens are below this number.
pub(crate) const VOCAB: usize = 256;

/// A text, or a part of one.
#[derive(Clone, Debug, PartialEq)]
pub struct TextCorpus {
    tokens: Vec<u32>,
    context: usize,
}

impl TextCorpus {
    /// Reads UTF-8 text, plain or gzip.
    pub fn read(path: &Path, context: usize) -> Result<Self, DataError> {
        let mut file = input::open(path)?;
        let bytes = file.rest(MAX_TEXT)?;
        let text = std::str::from_utf8(&bytes).map_err(|e| {
            let at = e.valid_up_to();
            let what = format!("byte {:#04x} is not UTF-8", bytes[at]);
            file.malformed(Place::Byte(at as u64), what, "convert the file, for example with iconv -t utf-8")
        })?;
        Self::new(text, context)
    }

    /// The tokens of a text.
    pub fn new(text: &str, context: usize) -> Result<Self, DataError> {
        if context == 0 {
            return Err(DataError::Option { key: "context", why: "must be 1 or more".into() });
        }
        Ok(Self { tokens: text.bytes().map(u32::from).collect(), context })
    }

    /// Splits off the last `fraction` (above 0, below 1): training part, held-out part. It is not spread over the
    /// text, as table rows are: neighbouring passages would leak held-out text into training. Both parts must hold
    /// at least one sample.
    pub fn split(mut self, fraction: f64) -> Result<(Self, Self), DataError> {
        let option = |why| Err(DataError::Option { key: "test_fraction", why });
        if !(fraction > 0.0 && fraction < 1.0) {
            return option(format!("{fraction} is not above 0 and below 1"));
        }
        let at = (self.tokens.len() as f64 * (1.0 - fraction)).round() as usize;
        let held_out = Self { tokens: self.tokens.split_off(at), ..self };
        let (a, b) = (self.tokens.len(), held_out.tokens.len());
        if a.min(b) <= self.context {
            let need = self.context + 1;
            return option(format!(
                "parts of {a} and {b} tokens; each needs {need}, one more than `context`"
            ));
        }
        Ok((self, held_out))
    }

    /// All tokens, and the tokens of a sample.
    pub(crate) fn into_parts(self) -> (Vec<u32>, usize) {
        (self.tokens, self.context)
    }

    /// All tokens.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }
}

#[cfg(test)]
#[path = "text_tests.rs"]
mod tests;
