//! Sums without rounding, and a worker's part of a metric as bytes.

use super::{BINS, ClassMetrics, NumberMetrics};
use crate::DataError;

/// Bins of [`ExactSum`].
const SUM_BINS: usize = 64;
/// What a part may count at most. Sums of parts then stay below what their types hold.
const MAX_SAMPLES: u64 = 1 << 40;

/// A sum of numbers of 0 and more without any rounding, up to 2^43 of them: a whole number for every 32 powers of two.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct ExactSum {
    /// Bin k counts units of 2^(32 k - 1074).
    bins: [u128; SUM_BINS],
    /// How many numbers were not finite.
    pub not_finite: u64,
}

impl Default for ExactSum {
    fn default() -> Self {
        Self { bins: [0; SUM_BINS], not_finite: 0 }
    }
}

impl ExactSum {
    pub fn add(&mut self, number: f64) {
        if !number.is_finite() {
            self.not_finite += 1;
            return;
        }
        let (exponent, mantissa) = (number.to_bits() >> 52 & 0x7ff, number.to_bits() & ((1 << 52) - 1));
        let (shift, mantissa) =
            if exponent == 0 { (0, mantissa) } else { (exponent - 1, mantissa | 1 << 52) };
        self.bins[shift as usize / 32] += u128::from(mantissa) << (shift % 32);
    }

    pub fn merge(&mut self, other: &Self) {
        self.bins.iter_mut().zip(&other.bins).for_each(|(to, from)| *to = to.saturating_add(*from));
        self.not_finite = self.not_finite.saturating_add(other.not_finite);
    }

    /// Rounded, from the bins alone: however the sum came about, it is the same number.
    pub fn value(&self) -> f64 {
        if self.not_finite > 0 {
            return f64::NAN;
        }
        let unit = |k: usize| match 32 * k as u64 {
            power @ 0..52 => f64::from_bits(1 << power),
            power => f64::from_bits((power - 51) << 52),
        };
        self.bins.iter().enumerate().rev().fold(0.0, |sum, (k, n)| sum + *n as f64 * unit(k))
    }

    fn write(&self, out: &mut Vec<u8>) {
        let filled = || self.bins.iter().enumerate().filter(|(_, n)| **n > 0);
        out.extend(self.not_finite.to_le_bytes());
        out.push(filled().count() as u8);
        for (k, n) in filled() {
            out.push(k as u8);
            out.extend(n.to_le_bytes());
        }
    }

    /// The last of `bytes`.
    fn read(bytes: &mut Bytes<'_>) -> Option<Self> {
        let mut sum = Self { not_finite: bytes.count()?, ..Self::default() };
        let ([filled], mut next) = (bytes.take()?, 0);
        for _ in 0..filled {
            let ([k], n) = (bytes.take()?, u128::from_le_bytes(bytes.take()?));
            // Mantissas have 53 bits, shifted by 31 at most.
            let fits = usize::from(k) >= next && n > 0 && n < u128::from(MAX_SAMPLES) << 84;
            *sum.bins.get_mut(usize::from(k)).filter(|_| fits)? = n;
            next = usize::from(k) + 1;
        }
        bytes.0.is_empty().then_some(sum)
    }
}

/// Bytes from another worker, taken from the front.
struct Bytes<'a>(&'a [u8]);

impl Bytes<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (first, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*first)
    }

    fn count(&mut self) -> Option<u64> {
        Some(u64::from_le_bytes(self.take()?)).filter(|n| *n <= MAX_SAMPLES)
    }
}

fn malformed(what: &str) -> DataError {
    DataError::Mismatch(format!(
        "a worker's part of {what} is malformed; give all workers the same version of Paraft"
    ))
}

impl ClassMetrics {
    /// These metrics as bytes, at most 1.2 MB; 18 for each bin of scores that has a sample.
    pub fn to_bytes(&self) -> Vec<u8> {
        let filled = || self.bins.iter().enumerate().filter(|(_, bin)| **bin != [0; 2]);
        let mut out = (filled().count() as u32).to_le_bytes().to_vec();
        for (at, [zeros, ones]) in filled() {
            out.extend((at as u16).to_le_bytes());
            out.extend(zeros.to_le_bytes());
            out.extend(ones.to_le_bytes());
        }
        self.loss.write(&mut out);
        out
    }

    /// Those that [`Self::to_bytes`] wrote, perhaps elsewhere.
    ///
    /// # Errors
    /// [`DataError::Mismatch`] for any other bytes.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, DataError> {
        Self::read(&mut Bytes(bytes)).ok_or_else(|| malformed("AUC and log loss"))
    }

    fn read(bytes: &mut Bytes<'_>) -> Option<Self> {
        let mut metrics = Self::default();
        let (filled, mut next) = (u32::from_le_bytes(bytes.take()?), 0);
        for _ in 0..filled {
            let at = usize::from(u16::from_le_bytes(bytes.take()?));
            let bin = [bytes.count()?, bytes.count()?];
            if at < next || bin == [0; 2] {
                return None;
            }
            metrics.bins[at] = bin;
            next = at + 1;
        }
        metrics.loss = ExactSum::read(bytes)?;
        Some(metrics)
    }
}

impl NumberMetrics {
    /// These metrics as bytes, at most 1.1 kB.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = self.samples.to_le_bytes().to_vec();
        self.squares.write(&mut out);
        out
    }

    /// Those that [`Self::to_bytes`] wrote, perhaps elsewhere.
    ///
    /// # Errors
    /// [`DataError::Mismatch`] for any other bytes.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, DataError> {
        let mut bytes = Bytes(bytes);
        let samples = bytes.count();
        let squares = ExactSum::read(&mut bytes);
        let read = samples.zip(squares).map(|(samples, squares)| Self { samples, squares });
        read.ok_or_else(|| malformed("RMSE"))
    }
}

// Bins are written as two bytes.
const _: () = assert!(BINS == 1 << 16);
