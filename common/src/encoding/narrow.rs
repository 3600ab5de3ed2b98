//! One value to a narrower form and back. No branches, so that loops over them are vectorised.

/// The largest finite bf16.
const BF16_MAX: u16 = 0x7f7f;
/// The largest finite f16, 65504.
const F16_MAX: u16 = 0x7bff;

/// Rounds to nearest, ties to even. A finite value stays finite.
#[inline(always)]
pub(crate) fn to_bf16(v: f32) -> u16 {
    let bits = v.to_bits();
    let sign = (bits >> 16) as u16 & 0x8000;
    let size = bits & 0x7fff_ffff;
    // Half of what is cut off, or a little less where the last bit that stays is even.
    let rounded = ((size + 0x7fff + (size >> 16 & 1)) >> 16) as u16;
    let finite = if rounded > BF16_MAX { BF16_MAX } else { rounded };
    // A NaN's payload may lie in the lower half alone: the quiet bit keeps it a NaN.
    let special = (size >> 16) as u16 | if size > 0x7f80_0000 { 0x40 } else { 0 };
    sign | if size < 0x7f80_0000 { finite } else { special }
}

/// Exact.
#[inline(always)]
pub(crate) fn from_bf16(half: u16) -> f32 {
    f32::from_bits(u32::from(half) << 16)
}

/// Rounds to nearest, ties to even. A finite value stays finite.
#[inline(always)]
pub(crate) fn to_f16(v: f32) -> u16 {
    let bits = v.to_bits();
    let sign = (bits >> 16) as u16 & 0x8000;
    let size = bits & 0x7fff_ffff;
    // Below the smallest normal f16, 2^-14: added to one half, whose last place is the smallest f16, a value is rounded by
    // the addition itself.
    let small = (f32::from_bits(size) + 0.5).to_bits().wrapping_sub(0.5f32.to_bits()) as u16;
    // Else the exponent gets the other bias, and the significand is rounded as a whole number.
    let normal = (size.wrapping_sub(112 << 23).wrapping_add(0xfff + (size >> 13 & 1)) >> 13) as u16;
    let special = if size > 0x7f80_0000 { 0x7e00 } else { 0x7c00 };
    // 65520, half-way between the largest finite f16 and what would come after it.
    let normal = if size >= 0x477f_f000 { F16_MAX } else { normal };
    let finite = if size < 113 << 23 { small } else { normal };
    sign | if size < 0x7f80_0000 { finite } else { special }
}

/// Exact.
#[inline(always)]
pub(crate) fn from_f16(half: u16) -> f32 {
    let size = u32::from(half & 0x7fff) << 13;
    // The bits mean 2^112 times less in an f32's bias. The product is exact, and of small numbers too.
    let finite = (f32::from_bits(size) * f32::from_bits((127 + 112) << 23)).to_bits();
    let special = size | 0x7f80_0000;
    let bits = if size < 0x0f80_0000 { finite } else { special };
    f32::from_bits(bits | u32::from(half & 0x8000) << 16)
}

/// The nearest of -127 to 127 times `scale`, ties to even; `scale` is above 0.
#[inline(always)]
pub(crate) fn to_int8(v: f32, scale: f32) -> i8 {
    // Added to this, a number below 2^22 in size loses what is behind its point, by the rounding of the addition.
    const WHOLE: f32 = 12_582_912.0; // 1.5 * 2^23
    let v = v / scale;
    let v = if v > 127.0 { 127.0 } else { v };
    let v = if v < -127.0 { -127.0 } else { v };
    // What was added ends in zeros, so the lowest byte is the whole number.
    (v + WHOLE).to_bits() as i8
}

/// One rounding.
#[inline(always)]
pub(crate) fn from_int8(byte: u8, scale: f32) -> f32 {
    f32::from(byte as i8) * scale
}
