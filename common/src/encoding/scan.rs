//! Questions about all values of a payload, answered without keeping them.

use super::{BadPayload, Encoding, Values};
use crate::{codec::Word, payload::Payload, simd::wide};

/// Whether every value is finite (no NaN, no infinity).
pub fn all_finite(payload: &Payload, encoding: Encoding, count: usize) -> Result<bool, BadPayload> {
    let mut values = Values::new(payload, encoding, count)?;
    let mut all = true;
    // Cannot fail: `new` has checked the length.
    let _ = values.runs(count, |run| {
        all = all
            && wide(
                #[inline(always)]
                || finite(run),
            );
    });
    Ok(all)
}

/// Sum of the squares in `f64`: the same number on every host, however the bytes are cut.
pub fn sum_of_squares(payload: &Payload, encoding: Encoding, count: usize) -> Result<f64, BadPayload> {
    let mut values = Values::new(payload, encoding, count)?;
    let mut squares = Squares::default();
    let _ = values.runs(count, |run| {
        wide(
            #[inline(always)]
            || squares.add(run),
        );
    }); // as above
    Ok(squares.0.iter().sum())
}

/// Without branches per value.
#[inline(always)]
fn finite(run: &[Word]) -> bool {
    const EXPONENT: u32 = 0x7f80_0000;
    const BLOCK: usize = 1024;
    let bad = |block: &[Word]| {
        block.iter().fold(false, |bad, b| bad | (u32::from_le_bytes(*b) & EXPONENT == EXPONENT))
    };
    !run.chunks(BLOCK).any(bad)
}

/// Eight running sums break the dependency chain. The value at place `i` of the vector goes to sum `i % 8`, so their
/// order of addition is fixed by the vector alone; the second number is the next value's sum.
#[derive(Default)]
struct Squares([f64; 8], usize);

impl Squares {
    #[inline(always)]
    fn add(&mut self, run: &[Word]) {
        let (head, rest) = run.split_at(run.len().min((8 - self.1) % 8));
        let (blocks, tail) = rest.as_chunks::<8>();
        head.iter().for_each(|b| self.one(b));
        let mut sums = self.0; // in registers
        for block in blocks {
            for (sum, b) in sums.iter_mut().zip(block) {
                *sum += square(b);
            }
        }
        self.0 = sums;
        tail.iter().for_each(|b| self.one(b));
    }

    #[inline(always)]
    fn one(&mut self, word: &Word) {
        self.0[self.1] += square(word);
        self.1 = (self.1 + 1) % 8;
    }
}

/// Exact: an `f32` squared fits an `f64`.
#[inline(always)]
fn square(word: &Word) -> f64 {
    let v = f64::from(f32::from_le_bytes(*word));
    v * v
}
