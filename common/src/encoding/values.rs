//! Payloads as values, decoded block by block on the way.

use super::{BadPayload, Encoding, INT8_BLOCK, low_rank::Matrices, narrow, sign, sparse::Sparse};
use crate::{
    codec::{F32_BYTES, Word},
    payload::{Payload, Reader, Short},
    simd::wide,
};

/// Values that are decoded at a time: they stay in the first-level cache until they are used.
const BLOCK: usize = INT8_BLOCK;

/// Goes once over the values of a payload.
#[derive(Clone, Debug)]
pub struct Values<'a> {
    reader: Reader<'a>,
    form: Form<'a>,
    /// Values not handed out.
    left: usize,
    /// Values decoded, of so many.
    at: usize,
    count: usize,
}

/// How the values are written, and what is known of those that were read.
#[derive(Clone, Debug)]
enum Form<'a> {
    F32,
    Bf16,
    F16,
    /// With the scale of the block.
    Int8(f32),
    Sign(Box<sign::Block>),
    Sparse(Sparse<'a>),
    LowRank(Matrices),
}

impl<'a> Values<'a> {
    /// The `count` values of `payload`, which it must hold exactly ([`Encoding::check`]).
    pub fn new(payload: &'a Payload, encoding: Encoding, count: usize) -> Result<Self, BadPayload> {
        encoding.check(payload, count)?;
        let mut reader = payload.reader();
        let form = Form::new(&mut reader, encoding, count).map_err(|_| BadPayload::Form {
            encoding,
            values: count,
            why: "it is too short",
        })?;
        Ok(Self { reader, form, left: count, at: 0, count })
    }

    /// Values not read yet.
    pub fn left(&self) -> usize {
        self.left
    }

    /// Fills `out` with the next values. On an error nothing was read.
    pub fn read(&mut self, out: &mut [f32]) -> Result<(), Short> {
        self.each(out, |o, v| *o = v)
    }

    /// Adds the next values to `out`, one to each. On an error nothing was added.
    pub fn add_to(&mut self, out: &mut [f32]) -> Result<(), Short> {
        self.each(out, |o, v| *o += v)
    }

    /// Subtracts the next values from `out`, one from each. On an error nothing was subtracted.
    pub fn subtract_from(&mut self, out: &mut [f32]) -> Result<(), Short> {
        self.each(out, |o, v| *o -= v)
    }

    #[inline(always)]
    fn each(&mut self, out: &mut [f32], change: impl Fn(&mut f32, f32)) -> Result<(), Short> {
        let mut at = 0;
        self.runs(out.len(), |run| {
            let out = &mut out[at..];
            wide(
                #[inline(always)]
                || out.iter_mut().zip(run).for_each(|(o, b)| change(o, f32::from_le_bytes(*b))),
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
        if matches!(self.form, Form::F32) {
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

    /// Decodes values into `out`: all that it has room for, or up to the end of a block.
    fn decode(&mut self, out: &mut [Word]) -> Result<usize, Short> {
        let in_block = self.at % INT8_BLOCK;
        let decoded = match self.form {
            Form::Int8(_) | Form::Sign(_) => out.len().min(INT8_BLOCK - in_block),
            _ => out.len(),
        };
        let out = &mut out[..decoded];
        let reader = &mut self.reader;
        match &mut self.form {
            Form::F32 => {
                let mut at = 0;
                reader.words(out.len(), |run| {
                    out[at..at + run.len()].copy_from_slice(run);
                    at += run.len();
                })?;
            }
            Form::Bf16 => halves(reader, out, narrow::from_bf16)?,
            Form::F16 => halves(reader, out, narrow::from_f16)?,
            Form::Int8(scale) => {
                if in_block == 0 {
                    let mut word = [0; F32_BYTES];
                    reader.bytes(&mut word)?;
                    *scale = f32::from_le_bytes(word);
                }
                let (scale, mut at) = (*scale, 0);
                reader.words(out.len(), |run: &[[u8; 1]]| {
                    let out = out[at..].iter_mut().zip(run);
                    wide(
                        #[inline(always)]
                        || out.for_each(|(o, [byte])| *o = narrow::from_int8(*byte, scale).to_le_bytes()),
                    );
                    at += run.len();
                })?;
            }
            Form::Sign(block) => {
                if in_block == 0 {
                    block.load(reader, INT8_BLOCK.min(self.count - self.at))?;
                }
                block.decode(in_block, out);
            }
            Form::Sparse(sparse) => sparse.decode(reader, out)?,
            Form::LowRank(matrices) => matrices.decode(reader, out)?,
        }
        self.at += decoded;
        Ok(decoded)
    }
}

impl<'a> Form<'a> {
    fn new(reader: &mut Reader<'a>, encoding: Encoding, count: usize) -> Result<Self, Short> {
        Ok(match encoding {
            Encoding::F32 => Form::F32,
            Encoding::Bf16 => Form::Bf16,
            Encoding::F16 => Form::F16,
            Encoding::Int8 => Form::Int8(0.0),
            Encoding::Sign => Form::Sign(Box::new(sign::Block::NONE)),
            Encoding::TopK(kept) => Form::Sparse(Sparse::new(reader, kept.of(count))?),
            Encoding::PowerSgd(rank) => Form::LowRank(Matrices::new(rank)),
        })
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
