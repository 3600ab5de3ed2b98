//! Lossless differences between the values of a bucket at two versions.
//!
//! ```text
//!  0x3f80 0x3f80 0x4000 ...     what the reader has, 2 or 4 bytes a value
//!  0x3f80 0x3f81 0x4000 ...     what it wants
//!       0     +1      0 ...     of the values' places in their order: a small step of a weight is a small number
//! ```
//!
//! Floats with the same sign lie in the order of their bits, so a small change of a value is a small difference of its place.
//! Signed differences are folded (0, -1, 1, -2 become 0, 1, 2, 3), split by bytes, and packed by zstd. Which values have
//! changed is said by gaps if they are few, and by a bitmap if they are more.

use zstd::bulk::{Compressor, Decompressor};

/// zstd's level: on bytes without repetitions higher ones take several times the time, and gain little.
const LEVEL: i32 = 1;
/// With fewer changes than one in so many values, gaps take fewer bytes than a bitmap: half at 0.5 %, as many at 20 %, whatever
/// the changes are. A bitmap with the changes is as short as all differences even if all values change.
const FEW: usize = 5;
/// The low bytes of f32 are noise: with more changes than one in so many values, a difference is no shorter.
const MOST_F32: usize = 2;

/// How the values of a bucket travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    /// As they are.
    Whole,
    /// Nothing has changed: no bytes.
    Same,
    /// Gaps between changed values, and their differences.
    Gaps,
    /// A bit for each value, and the differences of those that changed.
    Bitmap,
}

impl Code {
    /// Its number on the wire.
    pub fn number(self) -> u32 {
        self as u32
    }

    /// The code with this number on the wire, if there is one.
    pub fn of(number: u32) -> Option<Self> {
        [Self::Whole, Self::Same, Self::Gaps, Self::Bitmap].into_iter().find(|c| c.number() == number)
    }
}

/// A float of 2 or 4 bytes as a whole number, in the order of the floats.
trait Place: Copy + Eq {
    const BYTES: usize;
    fn of(values: &[u8]) -> Vec<Self>;
    fn bytes(places: &[Self]) -> Vec<u8>;
    /// The difference to another place, small for a near one, by its bytes.
    fn folded(self, old: Self) -> [u8; 4];
    fn unfolded(self, folded: [u8; 4]) -> Self;
}

macro_rules! place {
    ($unsigned:ty, $signed:ty) => {
        impl Place for $unsigned {
            const BYTES: usize = size_of::<Self>();

            fn of(values: &[u8]) -> Vec<Self> {
                let bits = values.as_chunks().0.iter().map(|b| Self::from_le_bytes(*b));
                // Negative floats are in the order against that of their bits.
                bits.map(|b| b ^ (((b as $signed) >> (Self::BITS - 1)) as Self | 1 << (Self::BITS - 1)))
                    .collect()
            }

            fn bytes(places: &[Self]) -> Vec<u8> {
                let is_positive = |place: Self| ((place as $signed) >> (Self::BITS - 1)) as Self;
                let bits = places.iter().map(|p| p ^ (!is_positive(*p) | 1 << (Self::BITS - 1)));
                bits.flat_map(Self::to_le_bytes).collect()
            }

            fn folded(self, old: Self) -> [u8; 4] {
                let difference = self.wrapping_sub(old) as $signed;
                let folded = ((difference << 1) ^ (difference >> (Self::BITS - 1))) as Self;
                u32::from(folded).to_le_bytes()
            }

            fn unfolded(self, folded: [u8; 4]) -> Self {
                let folded = u32::from_le_bytes(folded) as Self;
                self.wrapping_add((folded >> 1) ^ (folded & 1).wrapping_neg())
            }
        }
    };
}

place!(u16, i16);
place!(u32, i32);

/// The difference from `old` to `new`, both of floats of `width` bytes (2 or 4); `None`: the whole is not longer.
pub fn encode(width: usize, old: &[u8], new: &[u8]) -> Option<(Code, Vec<u8>)> {
    if old == new {
        return Some((Code::Same, Vec::new()));
    }
    if old.len() != new.len() || width == 0 || !new.len().is_multiple_of(width) {
        return None;
    }
    match width {
        2 => difference(&u16::of(old), &u16::of(new)),
        4 => difference(&u32::of(old), &u32::of(new)),
        _ => None,
    }
}

fn difference<P: Place>(old: &[P], new: &[P]) -> Option<(Code, Vec<u8>)> {
    let changed = old.iter().zip(new).filter(|(a, b)| a != b).count();
    if P::BYTES == 4 && changed > new.len() / MOST_F32 {
        return None;
    }
    let code = if changed < new.len() / FEW { Code::Gaps } else { Code::Bitmap };
    let mut sections = vec![Vec::with_capacity(changed); 1 + P::BYTES];
    let (places, planes) = sections.split_first_mut()?;
    if code == Code::Bitmap {
        places.resize(new.len().div_ceil(8), 0);
    }
    let mut next = 0;
    for (i, (a, b)) in old.iter().zip(new).enumerate().filter(|(_, (a, b))| a != b) {
        match code {
            Code::Bitmap => places[i / 8] |= 1 << (i % 8),
            _ => put_gap((i - next) as u32, places),
        }
        next = i + 1;
        planes.iter_mut().zip(b.folded(*a)).for_each(|(plane, byte)| plane.push(byte));
    }
    let mut packed = (changed as u32).to_le_bytes().to_vec();
    let mut compressor = Compressor::new(LEVEL).ok()?;
    for section in sections {
        let bytes = compressor.compress(&section).ok()?;
        packed.extend_from_slice(&(bytes.len() as u32).to_le_bytes());
        packed.extend_from_slice(&bytes);
    }
    (packed.len() < new.len() * P::BYTES).then_some((code, packed))
}

/// The values that [`encode`] was given as `new`. What it returns is only as good as `old` and `bytes`: compare a digest.
///
/// # Errors
/// `bytes` are not a difference to `old`.
pub fn decode(code: Code, width: usize, old: &[u8], bytes: &[u8]) -> Result<Vec<u8>, &'static str> {
    match (code, width) {
        (Code::Whole, _) => Ok(bytes.to_vec()),
        (Code::Same, _) => Ok(old.to_vec()),
        (_, 2) => change(code, u16::of(old), bytes),
        (_, 4) => change(code, u32::of(old), bytes),
        _ => Err("values have 2 or 4 bytes"),
    }
}

fn change<P: Place>(code: Code, mut values: Vec<P>, mut bytes: &[u8]) -> Result<Vec<u8>, &'static str> {
    let changed = take_u32(&mut bytes)? as usize;
    if changed > values.len() {
        return Err("a difference changes more values than there are");
    }
    let mut decompressor = Decompressor::new().map_err(|_| "no memory to unpack a difference")?;
    let mut section = |most: usize| {
        let len = take_u32(&mut bytes)? as usize;
        let (own, rest) = bytes.split_at_checked(len).ok_or("a difference is cut")?;
        bytes = rest;
        decompressor.decompress(own, most).map_err(|_| "a part of a difference cannot be unpacked")
    };
    let most = if code == Code::Gaps { changed * MAX_GAP_BYTES } else { values.len().div_ceil(8) };
    let places = section(most)?;
    let planes = (0..P::BYTES).map(|_| section(changed)).collect::<Result<Vec<_>, _>>()?;
    if !bytes.is_empty() || planes.iter().any(|plane| plane.len() != changed) {
        return Err("a difference has a wrong length");
    }
    let (mut at, mut left) = (0, &places[..]);
    for i in 0..changed {
        let place = match code {
            Code::Gaps => at + take_gap(&mut left)? as usize,
            _ => next_bit(&places, at).ok_or("a bitmap has too few bits")?,
        };
        let mut folded = [0; 4];
        folded.iter_mut().zip(&planes).for_each(|(byte, plane)| *byte = plane[i]);
        let value = values.get_mut(place).ok_or("a difference is beyond the values")?;
        *value = value.unfolded(folded);
        at = place + 1;
    }
    Ok(P::bytes(&values))
}

fn take_u32(bytes: &mut &[u8]) -> Result<u32, &'static str> {
    let (word, rest) = bytes.split_first_chunk().ok_or("a difference is cut")?;
    *bytes = rest;
    Ok(u32::from_le_bytes(*word))
}

const MAX_GAP_BYTES: usize = 5;

/// Seven bits a byte, the low ones first; the top bit says that more follow.
fn put_gap(mut gap: u32, out: &mut Vec<u8>) {
    while gap >= 0x80 {
        out.push(gap as u8 | 0x80);
        gap >>= 7;
    }
    out.push(gap as u8);
}

fn take_gap(bytes: &mut &[u8]) -> Result<u32, &'static str> {
    let mut gap = 0;
    for i in 0..MAX_GAP_BYTES {
        let (byte, rest) = bytes.split_first().ok_or("gaps are cut")?;
        *bytes = rest;
        gap |= u32::from(byte & 0x7f).checked_shl(7 * i as u32).ok_or("a gap is too large")?;
        if byte & 0x80 == 0 {
            return Ok(gap);
        }
    }
    Err("a gap is too large")
}

/// The first bit that is set, from bit `from` on.
fn next_bit(bits: &[u8], from: usize) -> Option<usize> {
    let first = bits.get(from / 8)? >> (from % 8);
    if first != 0 {
        return Some(from + first.trailing_zeros() as usize);
    }
    let at = from / 8 + 1;
    let found = bits.get(at..)?.iter().position(|byte| *byte != 0)?;
    Some((at + found) * 8 + bits[at + found].trailing_zeros() as usize)
}

#[cfg(test)]
#[path = "difference_tests.rs"]
mod tests;
