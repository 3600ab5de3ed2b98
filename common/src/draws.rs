//! Random numbers by counting: number `i` of a seed is a hash of both, so that the seed gives them all, on any host and in
//! any order.
//!
//! SplitMix64 (Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014): whole numbers, shifts and
//! products that wrap. Not for secrets.

const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// Number `i` of the seed.
#[inline(always)]
pub fn draw(seed: u64, i: u64) -> u64 {
    let z = seed.wrapping_add(i.wrapping_add(1).wrapping_mul(GOLDEN));
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// From 0, below 1.
pub fn unit(seed: u64, i: u64) -> f64 {
    // 53 bits are exact in an f64.
    (draw(seed, i) >> 11) as f64 / (1u64 << 53) as f64
}

/// From -1, below 1.
pub fn between(seed: u64, i: u64) -> f32 {
    // 24 bits are exact in an f32.
    (draw(seed, i) >> 40) as f32 / (1u32 << 23) as f32 - 1.0
}

#[cfg(test)]
mod tests {
    use super::*;

    /// From the reference implementation (prng.di.unimi.it/splitmix64.c) with the seed 1234567.
    #[test]
    fn the_numbers_are_those_of_splitmix64() {
        let published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431];
        assert_eq!([0, 1, 2, 3].map(|i| draw(1_234_567, i)), published);
    }
}
