//! Random numbers by counting: number `i` of a seed is a hash of both, so that who knows the seed knows them all, on any host
//! and in any order.
//!
//! SplitMix64 (Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014): whole numbers, shifts and
//! products that wrap. Not for secrets.

const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// Number `i` of the seed.
#[inline(always)]
pub(super) fn draw(seed: u64, i: u64) -> u64 {
    let z = seed.wrapping_add(i.wrapping_add(1).wrapping_mul(GOLDEN));
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// From -1 to 1.
pub(super) fn between(seed: u64, i: u64) -> f32 {
    // 24 bits are exact in an f32.
    (draw(seed, i) >> 40) as f32 / (1u32 << 23) as f32 - 1.0
}

/// So many of `0..of`, each as likely as any other, in rising order: selection sampling (Knuth, The Art of Computer
/// Programming 2, 3.4.2, algorithm S).
#[derive(Clone, Debug)]
pub(super) struct Chosen {
    seed: u64,
    at: usize,
    of: usize,
    wanted: usize,
}

impl Chosen {
    /// `wanted` is `of` at most, and `of` below 2^32.
    pub fn new(seed: u64, wanted: usize, of: usize) -> Self {
        Self { seed, at: 0, of, wanted }
    }
}

impl Iterator for Chosen {
    type Item = usize;

    fn next(&mut self) -> Option<usize> {
        while self.wanted > 0 && self.at < self.of {
            let (at, left) = (self.at, (self.of - self.at) as u64);
            self.at += 1;
            // A number below `left`. Where all that are left are wanted it is below `wanted` whatever is drawn.
            if ((draw(self.seed, at as u64) >> 32) * left) >> 32 < self.wanted as u64 {
                self.wanted -= 1;
                return Some(at);
            }
        }
        None
    }
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

    #[test]
    fn as_many_are_chosen_as_are_wanted_and_each_as_often_as_any_other() {
        let mut hits = [0u32; 50];
        for seed in 0..20_000 {
            let chosen: Vec<usize> = Chosen::new(seed, 5, 50).collect();
            assert!(chosen.len() == 5 && chosen.windows(2).all(|w| w[0] < w[1]), "{chosen:?}");
            chosen.into_iter().for_each(|i| hits[i] += 1);
        }
        // 2,000 of 20,000 each, with a standard deviation of 42.
        assert!(hits.iter().all(|h| (1790..2210).contains(h)), "{hits:?}");
        assert_eq!(Chosen::new(7, 9, 9).collect::<Vec<_>>(), (0..9).collect::<Vec<_>>());
        assert_eq!(Chosen::new(7, 0, 9).count() + Chosen::new(7, 0, 0).count(), 0);
    }
}
