//! A digest of a data set: two workers whose data differ in one value have different digests.
//!
//! It covers all values and labels, eight bytes at a time, at some GB/s, much faster than reading the files. It
//! detects mistakes (an older file on one host, another option of the reader), not deception.

use crate::values::{FileValues, ValueFormat, words};
use crate::{DataError, Dataset, Samples, SparseSplit, Split};
use std::fmt;

/// The digest that the workers of a job compare.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DataDigest {
    train: usize,
    test: usize,
    shape: Vec<usize>,
    classes: Option<usize>,
    content: u64,
}

/// The form in the job's fingerprint, for users to compare; it has no comma.
impl fmt::Display for DataDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shape: Vec<String> = self.shape.iter().map(ToString::to_string).collect();
        let classes = self.classes.map(|n| format!(" in {n} classes")).unwrap_or_default();
        let (train, test, content) = (self.train, self.test, self.content);
        write!(f, "data {train}+{test} samples of {}{classes} content {content:016x}", shape.join("x"))
    }
}

impl Split {
    /// The digest of all values and labels.
    ///
    /// # Errors
    /// The values' file can no longer be read.
    pub fn digest(&self) -> Result<DataDigest, DataError> {
        let mut hash = Hash(0xcbf2_9ce4_8422_2325);
        hash.dataset(&self.train)?;
        hash.dataset(&self.test)?;
        Ok(DataDigest {
            train: self.train.len(),
            test: self.test.len(),
            shape: self.train.shape().to_vec(),
            classes: self.train.classes(),
            content: hash.0,
        })
    }
}

impl SparseSplit {
    /// The digest of all labels, values and ids, and of how many bits they are hashed to.
    pub fn digest(&self) -> DataDigest {
        let mut hash = Hash(0xcbf2_9ce4_8422_2325);
        hash.word(u64::from(self.hashing.map_or(0, |h| h.bits())));
        self.train.words(|w| hash.word(w));
        self.test.words(|w| hash.word(w));
        DataDigest {
            train: self.train.len(),
            test: self.test.len(),
            shape: vec![self.train.fields(), self.train.dense()],
            classes: self.classes.then_some(2),
            content: hash.0,
        }
    }
}

/// Integers only, so it is the same on every host.
struct Hash(u64);

impl Hash {
    fn word(&mut self, word: u64) {
        let mixed = (self.0 ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = mixed ^ (mixed >> 32);
    }

    fn bytes(&mut self, bytes: &[u8]) {
        self.word(bytes.len() as u64);
        self.more(bytes);
        self.last(bytes);
    }

    /// Hashes the whole words of these bytes.
    fn more(&mut self, bytes: &[u8]) {
        let (words, _) = bytes.as_chunks::<8>();
        words.iter().for_each(|w| self.word(u64::from_le_bytes(*w)));
    }

    /// Hashes the remaining bytes.
    fn last(&mut self, bytes: &[u8]) {
        let (_, rest) = bytes.as_chunks::<8>();
        let mut last = [0; 8];
        last[..rest.len()].copy_from_slice(rest);
        self.word(u64::from_le_bytes(last));
    }

    /// Hashes the file's values as if they were in memory.
    fn file(&mut self, values: &FileValues) -> Result<(), DataError> {
        match values.of() {
            ValueFormat::Bytes { divisor } => self.word(u64::from(divisor.to_bits())),
            ValueFormat::Floats => {}
            ValueFormat::Tokens { context, vocab } => {
                self.word(context as u64);
                self.word(vocab as u64);
            }
        }
        self.word(values.len() as u64);
        if values.of().width() == 4 {
            return values.pieces(|piece| {
                words(piece).for_each(|w| self.word(u64::from(w)));
                Ok(())
            });
        }
        let mut rest = Vec::new();
        values.pieces(|piece| {
            self.more(piece);
            let whole = piece.len() / 8 * 8;
            rest = piece[whole..].to_vec();
            Ok(())
        })?;
        self.last(&rest);
        Ok(())
    }

    fn words(&mut self, words: impl ExactSizeIterator<Item = u32>) {
        self.word(words.len() as u64);
        words.for_each(|w| self.word(u64::from(w)));
    }

    fn dataset(&mut self, data: &Dataset) -> Result<(), DataError> {
        self.words(data.shape().iter().map(|d| *d as u32));
        self.word(data.classes().map_or(0, |n| n as u64 + 1));
        match data.samples() {
            Samples::Bytes { values, divisor } => {
                self.word(u64::from(divisor.to_bits()));
                self.bytes(values);
            }
            Samples::Floats(values) => self.words(values.iter().map(|v| v.to_bits())),
            Samples::Tokens { tokens, context, vocab } => {
                self.word(*context as u64);
                self.word(*vocab as u64);
                self.words(tokens.iter().copied());
            }
            Samples::File(values) => self.file(values)?,
        }
        self.words(data.labels().iter().copied());
        Ok(())
    }
}

#[cfg(test)]
#[path = "digest_tests.rs"]
mod tests;
