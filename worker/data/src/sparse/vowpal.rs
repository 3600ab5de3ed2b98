//! Vowpal Wabbit's text: `label [importance [base]] ['tag]|namespace[:factor] feature[:value] ... |namespace ...`.
//!
//! The same feature gets the same index as in Vowpal Wabbit 9.11.9 (compared with the features that its Python
//! package reports): the hash of its name, seeded by the hash of its namespace's name, cut to `bits`. So a model moves
//! between the two. A feature whose value is 0 is left out, one named twice is there twice, and `name:text` is one
//! feature of value 1, as there. Quadratic and other crossed features are not made.
//!
//! Where Vowpal Wabbit goes on with a guess, this is an error: a label that is no number (it takes 0), a number
//! followed by letters (it takes the number), `name:` without a value (it takes the next word for the value), a
//! value that starts with nan, as `first:nancy` does (it leaves the feature out) or with inf (it takes infinity). So is a
//! label that it takes for a tag: `1|a b` has no label, `1 |a b` has.

use super::SparseBatch;
use super::lines::{Fault, cut_at_colon, fault, number, read_samples, shown};
use super::murmur::murmur3;
use super::targets::{Targets, importance};
use crate::{DataError, Task};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// Vowpal Wabbit's constant feature, before it is cut to `bits`.
const CONSTANT: u64 = 11_650_396;
const MAX_BITS: u32 = 61;

/// How to read Vowpal Wabbit's text. The defaults are its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VowpalOptions {
    /// Bits of an index (`-b`), 1 to 61. Default 18.
    pub bits: u32,
    /// The hash of names (`--hash`). Default [`VowpalHash::Strings`].
    pub hash: VowpalHash,
    /// Whether every sample has the constant feature, an intercept (false: `--noconstant`). Default true.
    pub constant: bool,
    /// Whether labels are classes, -1 and +1 or 0 and 1, or numbers to predict. Default classes.
    pub task: Task,
}

impl Default for VowpalOptions {
    fn default() -> Self {
        Self { bits: 18, hash: VowpalHash::Strings, constant: true, task: Task::Classification }
    }
}

/// Which names are hashed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum VowpalHash {
    /// A name of digits alone is its number, added to the seed; other names are hashed.
    #[default]
    Strings,
    /// All.
    All,
}

impl VowpalHash {
    fn of(self, name: &[u8], seed: u64) -> u64 {
        if self == Self::All {
            return u64::from(murmur3(name, seed as u32));
        }
        let is_space = |b: &u8| *b <= b' ';
        let from = name.iter().position(|b| !is_space(b)).unwrap_or(name.len());
        let to = name.iter().rposition(|b| !is_space(b)).map_or(from, |last| last + 1);
        let name = &name[from..to];
        if name.iter().all(u8::is_ascii_digit) {
            // A number of 2^64 and more wraps, as there.
            let number = name.iter().fold(0u64, |n, d| n.wrapping_mul(10).wrapping_add(u64::from(d - b'0')));
            return number.wrapping_add(seed);
        }
        u64::from(murmur3(name, seed as u32))
    }
}

/// Reads all samples, of one field, from a file, plain or gzip.
///
/// # Errors
/// [`DataError::Option`] of `bits`; [`DataError::Malformed`] with line and column; [`DataError::Read`],
/// [`DataError::TooLarge`].
pub fn read_vowpal(path: &Path, options: &VowpalOptions) -> Result<SparseBatch, DataError> {
    if !(1..=MAX_BITS).contains(&options.bits) {
        let why = format!("{} is not from 1 to {MAX_BITS}", options.bits);
        return Err(DataError::Option { key: "bits", why });
    }
    let mut targets = Targets::new(options.task);
    read_samples(path, 1, |line, samples| {
        let bar = line.iter().position(|b| *b == b'|').unwrap_or(line.len());
        let sample = head(&line[..bar], &mut targets)?;
        let mut features = Features { line, at: bar, options, samples };
        while features.next() == Some(b'|') {
            features.at += 1;
            features.namespace()?;
        }
        if options.constant {
            features.push(CONSTANT, 1.0);
        }
        Ok(Some(sample))
    })
}

/// What is before the first bar: label and importance.
fn head(head: &[u8], targets: &mut Targets) -> Result<(f32, f32), Fault> {
    if let Some(tab) = head.iter().position(|b| *b == b'\t') {
        let what = "a tab before the bar, and Vowpal Wabbit leaves out what is before it";
        return fault(tab, what, "separate label, importance and tag by blanks");
    }
    let mut from = 0;
    let mut words: Vec<(usize, &[u8])> = head
        .split(|b| *b == b' ')
        .map(|word| {
            let at = from;
            from += word.len() + 1;
            (at, word)
        })
        .filter(|(_, word)| !word.is_empty())
        .collect();
    // The last word is a tag if it touches the bar or starts with an apostrophe.
    let touches = !head.is_empty() && head.last() != Some(&b' ');
    let tag = words.pop_if(|(_, word)| touches || word.starts_with(b"'"));
    match words[..] {
        [] => {
            let (at, remedy) = match tag {
                Some((at, tag)) if number(tag).is_some() => {
                    (at, "write a blank before the bar: a word that touches it is the sample's tag")
                }
                _ => (0, "write the label, or remove the row"),
            };
            fault(at, "the sample has no label", remedy)
        }
        [(at, label)] => Ok((targets.label(label, at)?, 1.0)),
        [(at, label), (place, factor)] => Ok((targets.label(label, at)?, importance(factor, place)?)),
        [(at, label), (place, factor), (base_at, base)] => {
            if number(base) != Some(0.0) {
                let what = format!("base {}: no model here starts from a prediction", shown(base));
                return fault(base_at, what, "remove it, or train with Vowpal Wabbit");
            }
            Ok((targets.label(label, at)?, importance(factor, place)?))
        }
        [.., (at, word)] => {
            let what = format!("{} is the fourth word or later before the bar", shown(word));
            fault(at, what, "write label, importance, base and 'tag")
        }
    }
}

/// The features of a line.
struct Features<'a> {
    line: &'a [u8],
    at: usize,
    options: &'a VowpalOptions,
    samples: &'a mut SparseBatch,
}

impl<'a> Features<'a> {
    fn next(&self) -> Option<u8> {
        self.line.get(self.at).copied()
    }

    fn push(&mut self, hash: u64, weight: f32) {
        self.samples.fields[0].push(hash & ((1 << self.options.bits) - 1), weight);
    }

    /// The bytes up to one of these, which are then the next.
    fn up_to(&mut self, ends: &[u8]) -> &'a [u8] {
        let rest = &self.line[self.at..];
        let word = &rest[..rest.iter().position(|b| ends.contains(b)).unwrap_or(rest.len())];
        self.at += word.len();
        word
    }

    /// A namespace and its features, from behind its bar to the next one.
    fn namespace(&mut self) -> Result<(), Fault> {
        let at = self.at;
        let word = self.up_to(b" \t|");
        let (name, factor) = cut_at_colon(word);
        let factor = match factor {
            None => 1.0,
            Some(factor) => match number(factor) {
                Some(factor) if !name.is_empty() => factor,
                _ => {
                    let what = format!("namespace {} is no name:factor", shown(word));
                    return fault(at, what, "write |name, |name:factor with a finite factor, or a blank");
                }
            },
        };
        let seed = if name.is_empty() { 0 } else { self.options.hash.of(name, 0) };
        let mut unnamed = 0;
        while let Some(b' ' | b'\t') = self.next() {
            self.at += 1;
            if !matches!(self.next(), None | Some(b' ' | b'\t' | b'|')) {
                self.feature(seed, factor, &mut unnamed)?;
            }
        }
        Ok(())
    }

    /// `name`, `name:value`, `name:text` or `:value`, of which the number before is `unnamed`.
    fn feature(&mut self, seed: u64, factor: f32, unnamed: &mut u64) -> Result<(), Fault> {
        let hash = self.options.hash;
        let name = self.up_to(b" \t|:");
        if self.next() != Some(b':') {
            self.push_value(hash.of(name, seed), factor);
            return Ok(());
        }
        self.at += 1;
        let at = self.at;
        let value = self.up_to(b" \t|");
        if let Some(value) = number(value) {
            let hash = if name.is_empty() {
                *unnamed += 1;
                seed.wrapping_add(*unnamed - 1)
            } else {
                hash.of(name, seed)
            };
            self.push_value(hash, value * factor);
            return Ok(());
        }
        if value.is_empty() || starts_a_number(value) {
            let what = format!("value {} of {} is no finite number", shown(value), shown(name));
            let remedy =
                "write a finite value, or a text that starts neither as a number does nor with nan or inf";
            return fault(at, what, remedy);
        }
        // A text extends to the next blank, bars included.
        self.at = at;
        let text = self.up_to(b" \t");
        self.push(hash.of(text, hash.of(name, seed)), 1.0);
        Ok(())
    }

    fn push_value(&mut self, hash: u64, value: f32) {
        if value != 0.0 {
            self.push(hash, value);
        }
    }
}

/// Whether Vowpal Wabbit takes a number from the start of this word and drops the rest, or the feature.
fn starts_a_number(word: &[u8]) -> bool {
    let starts = |with: &[u8]| word.get(..with.len()).is_some_and(|w| w.eq_ignore_ascii_case(with));
    matches!(word, [b'0'..=b'9' | b'+' | b'-' | b'.', ..]) || starts(b"nan") || starts(b"inf")
}

#[cfg(test)]
#[path = "vowpal_tests.rs"]
mod tests;
