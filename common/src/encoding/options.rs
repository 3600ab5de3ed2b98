//! Encodings by name: `top-k:0.001` in a job file, a number in a log.
//!
//! A log's entries and the commands of earlier versions have the encodings by their place in [`Code`]: new ones go behind
//! the others.

use super::Encoding;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use std::{fmt, str::FromStr};

/// The fraction of a bucket's values that is sent, in millionths: more than none, at most a half. (Of more than a half f32
/// takes fewer bytes than the values with their places.)
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fraction(u32);

/// Columns of the two factors of a matrix, 1 to 64.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rank(u8);

const MILLION: u32 = 1_000_000;

impl Fraction {
    pub(super) const TENTH: Fraction = Fraction(MILLION / 10);

    /// `None` where it is outside its range.
    pub fn millionths(n: u32) -> Option<Self> {
        (1..=MILLION / 2).contains(&n).then_some(Self(n))
    }

    /// How many of so many values: rounded down, but one of one or more.
    pub fn of(self, values: usize) -> usize {
        let kept = values as u64 * u64::from(self.0) / u64::from(MILLION);
        (kept as usize).max(1).min(values)
    }
}

impl Rank {
    pub(super) const TWO: Rank = Rank(2);

    /// `None` where it is outside its range.
    pub fn new(columns: u8) -> Option<Self> {
        (1..=64).contains(&columns).then_some(Self(columns))
    }

    /// As a number.
    pub fn columns(self) -> usize {
        usize::from(self.0)
    }
}

/// As a decimal number without zeros at its end.
impl fmt::Display for Fraction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digits = format!("{:06}", self.0);
        write!(f, "0.{}", digits.trim_end_matches('0'))
    }
}

impl fmt::Display for Encoding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Encoding::F32 => f.pad("f32"),
            Encoding::Bf16 => f.pad("bf16"),
            Encoding::F16 => f.pad("f16"),
            Encoding::Int8 => f.pad("int8"),
            Encoding::Sign => f.pad("sign"),
            Encoding::TopK(kept) => f.pad(&format!("top-k:{kept}")),
            Encoding::PowerSgd(rank) => f.pad(&format!("powersgd:{}", rank.0)),
        }
    }
}

/// A text that names no encoding.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParseEncodingError {
    /// There is none of that name.
    #[error("`{0}` is no encoding; write one of {list}", list = NAMES.join(", "))]
    Name(String),
    /// The part after the colon.
    #[error(
        "`{0}`: the fraction of a bucket's values that is sent is above 0 and at most 0.5, with up to six digits behind the point, for example `top-k:0.001`"
    )]
    Fraction(String),
    /// Likewise.
    #[error("`{0}`: the rank is a whole number from 1 to 64, for example `powersgd:2`")]
    Rank(String),
}

const NAMES: &[&str] = &["f32", "bf16", "f16", "int8", "sign", "top-k:F", "powersgd:R"];

impl FromStr for Encoding {
    type Err = ParseEncodingError;

    fn from_str(s: &str) -> Result<Self, Self::Err> {
        let fraction = |text: &str| {
            let number: f64 = text.parse().ok()?;
            let millionths = (number * f64::from(MILLION)).round();
            // As many digits as are kept, or the run's name would not be its number.
            let exact = (millionths / f64::from(MILLION) - number).abs() < 1e-12;
            Fraction::millionths(millionths as u32).filter(|_| exact)
        };
        let rank = |text: &str| Rank::new(text.parse().ok()?);
        let no_fraction = || ParseEncodingError::Fraction(s.to_string());
        match s.split_once(':') {
            Some(("top-k", f)) => fraction(f).map(Encoding::TopK).ok_or_else(no_fraction),
            Some(("powersgd", r)) => {
                rank(r).map(Encoding::PowerSgd).ok_or_else(|| ParseEncodingError::Rank(s.to_string()))
            }
            Some(_) => Err(ParseEncodingError::Name(s.to_string())),
            None => match s {
                "f32" => Ok(Encoding::F32),
                "bf16" => Ok(Encoding::Bf16),
                "f16" => Ok(Encoding::F16),
                "int8" => Ok(Encoding::Int8),
                "sign" => Ok(Encoding::Sign),
                "top-k" => Err(no_fraction()),
                "powersgd" => Err(ParseEncodingError::Rank(s.to_string())),
                _ => Err(ParseEncodingError::Name(s.to_string())),
            },
        }
    }
}

/// As the log has them.
#[derive(Serialize, Deserialize)]
enum Code {
    F32,
    Bf16,
    F16,
    Int8,
    Sign,
    TopK(u32),
    PowerSgd(u8),
}

impl Serialize for Encoding {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        if s.is_human_readable() {
            return s.collect_str(self);
        }
        match *self {
            Encoding::F32 => Code::F32,
            Encoding::Bf16 => Code::Bf16,
            Encoding::F16 => Code::F16,
            Encoding::Int8 => Code::Int8,
            Encoding::Sign => Code::Sign,
            Encoding::TopK(kept) => Code::TopK(kept.0),
            Encoding::PowerSgd(rank) => Code::PowerSgd(rank.0),
        }
        .serialize(s)
    }
}

impl<'de> Deserialize<'de> for Encoding {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        if d.is_human_readable() {
            return String::deserialize(d)?.parse().map_err(|e| match e {
                ParseEncodingError::Name(name) => de::Error::unknown_variant(&name, NAMES),
                e => de::Error::custom(e),
            });
        }
        let fraction =
            |n| Fraction::millionths(n).ok_or_else(|| de::Error::custom("a fraction outside its range"));
        Ok(match Code::deserialize(d)? {
            Code::F32 => Encoding::F32,
            Code::Bf16 => Encoding::Bf16,
            Code::F16 => Encoding::F16,
            Code::Int8 => Encoding::Int8,
            Code::Sign => Encoding::Sign,
            Code::TopK(n) => Encoding::TopK(fraction(n)?),
            Code::PowerSgd(n) => {
                Encoding::PowerSgd(Rank::new(n).ok_or_else(|| de::Error::custom("a rank outside its range"))?)
            }
        })
    }
}

#[cfg(test)]
#[path = "options_tests.rs"]
mod tests;
