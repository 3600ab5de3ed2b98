//! Payloads as values, decoded block by block on the way.

use super::{Encoding, INT8_BLOCK, WrongLength, narrow};
use crate::{
    codec::F32_BYTES,
    payload::{Payload, Reader, Short},
    simd::wide,
};

/// A value's little-endian bytes.
pub(crate) type Word = [u8; F32_BYTES];

/// Values that are decoded at a time: they stay in the first-level cache until they are used.
const BLOCK: usize = INT8_BLOCK;

/// Goes once over the values of a payload.
#[derive(Clone, Debug)]
pub struct Values<'a> {
    reader: Reader<'a>,
    encoding: Encoding,
    left: usize,
    /// Of the int8 block that is being read.
    scale: f32,
    left_in_block: usize,
}

impl<'a> Values<'a> {
    /// The `count` values of `payload`, which it must hold exactly.
    pub fn new(payload: &'a Payload, encoding: Encoding, count: usize) -> Result<Self, WrongLength> {
        encoding.check(payload.len(), count)?;
        Ok(Self { reader: payload.reader(), encoding, left: count, scale: 0.0, left_in_block: 0 })
    }

    /// Values not read yet.
    pub fn left(&self) -> usize {
        self.left
    }

    /// Fills `out` with the next values. On an error nothing was read.
    pub fn read(&mut self, out: &mut [f32]) -> Result<(), Short> {
        let mut at = 0;
        self.runs(out.len(), |run| {
            let out = &mut out[at..];
            wide(
                #[inline(always)]
                || out.iter_mut().zip(run).for_each(|(o, b)| *o = f32::from_le_bytes(*b)),
            );
            at += run.len();
        })
    }

    /// Adds the next values to `out`, one to each. On an error nothing was added.
    pub fn add_to(&mut self, out: &mut [f32]) -> Result<(), Short> {
        let mut at = 0;
        self.runs(out.len(), |run| {
            let out = &mut out[at..];
            wide(
                #[inline(always)]
                || out.iter_mut().zip(run).for_each(|(o, b)| *o += f32::from_le_bytes(*b)),
            );
            at += run.len();
        })
    }

    /// Hands the next `count` values to `each`, in order, in runs: f32 where they lie, others decoded. On an error nothing
    /// was handed.
    pub(crate) fn runs(&mut self, count: usize, mut each: impl FnMut(&[Word])) -> Result<(), Short> {
        if count > self.left {
            let [wanted, left] = [count, self.left].map(|n| n * F32_BYTES);
            return Err(Short { wanted, left });
        }
        self.left -= count;
        if self.encoding == Encoding::F32 {
            return self.reader.words(count, each);
        }
        let mut block = [[0; F32_BYTES]; BLOCK];
        let mut left = count;
        while left > 0 {
            let out = &mut block[..left.min(BLOCK)];
            let decoded = self.decode(out)?;
            each(&out[..decoded]);
            left -= decoded;
        }
        Ok(())
    }

    /// Decodes values into `out`: all that it has room for, or up to the end of an int8 block.
    fn decode(&mut self, out: &mut [Word]) -> Result<usize, Short> {
        let mut at = 0;
        match self.encoding {
            Encoding::F32 => self.reader.words(out.len(), |run| {
                out[at..at + run.len()].copy_from_slice(run);
                at += run.len();
            })?,
            Encoding::Bf16 => halves(&mut self.reader, out, narrow::from_bf16)?,
            Encoding::F16 => halves(&mut self.reader, out, narrow::from_f16)?,
            Encoding::Int8 => {
                if self.left_in_block == 0 {
                    let mut scale = [0; F32_BYTES];
                    self.reader.bytes(&mut scale)?;
                    (self.scale, self.left_in_block) = (f32::from_le_bytes(scale), INT8_BLOCK);
                }
                let (scale, count) = (self.scale, self.left_in_block.min(out.len()));
                self.reader.words(count, |run: &[[u8; 1]]| {
                    let out = out[at..].iter_mut().zip(run);
                    wide(
                        #[inline(always)]
                        || out.for_each(|(o, [byte])| *o = narrow::from_int8(*byte, scale).to_le_bytes()),
                    );
                    at += run.len();
                })?;
                self.left_in_block -= count;
                return Ok(count);
            }
        }
        Ok(out.len())
    }
}

fn halves(reader: &mut Reader<'_>, out: &mut [Word], value: impl Fn(u16) -> f32) -> Result<(), Short> {
    let mut at = 0;
    reader.words(out.len(), |run: &[[u8; 2]]| {
        let out = out[at..].iter_mut().zip(run);
        wide(
            #[inline(always)]
            || out.for_each(|(o, b)| *o = value(u16::from_le_bytes(*b)).to_le_bytes()),
        );
        at += run.len();
    })
}
