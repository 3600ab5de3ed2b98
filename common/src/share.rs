//! Who evaluates which of the held-out samples.

/// One worker's part of the held-out samples, or a part of that: every so many. Those with the same `of` and different places
/// have no sample in common, and all of them have every sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// The first sample. From `of` on there is none.
    pub place: u32,
    /// One sample in so many, at least 1.
    pub of: u32,
}

impl Share {
    /// Every sample.
    pub const ALL: Share = Share { place: 0, of: 1 };

    /// Of so many parts that it is cut into, this one, from 0.
    pub fn part(self, place: u32, of: u32) -> Share {
        if self.place >= self.of {
            return self;
        }
        Share {
            place: self.place.saturating_add(place.saturating_mul(self.of)),
            of: self.of.saturating_mul(of.max(1)),
        }
    }

    /// Its samples, of so many.
    pub fn samples(self, len: usize) -> impl Iterator<Item = usize> {
        let end = if self.place < self.of { len } else { 0 };
        (self.place as usize..end.max(self.place as usize)).step_by(self.of.max(1) as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Shares that are cut once more have each sample once.
        #[test]
        fn every_sample_is_in_one(len in 0..200usize, of in 1..7u32, parts in 1..5u32) {
            let mut all: Vec<usize> = (0..of)
                .flat_map(|place| (0..parts).map(move |part| Share { place, of }.part(part, parts)))
                .flat_map(|share| share.samples(len))
                .collect();
            all.sort_unstable();
            prop_assert_eq!(all, (0..len).collect::<Vec<_>>());
        }

        /// A worker without a place has no sample of any part.
        #[test]
        fn without_a_place_there_is_none(len in 0..200usize, of in 1..7u32, over in 0..9u32, part in 0..3u32) {
            let none = Share { place: of + over, of };
            prop_assert_eq!(none.samples(len).count(), 0);
            prop_assert_eq!(none.part(part, 3).samples(len).count(), 0);
        }
    }
}
