//! Which stages of a model a rank has.

use std::ops::Range;

/// Which stages a rank has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Place {
    /// Among those that have any.
    pub at: usize,
    /// How many those are.
    pub of: usize,
    pub stages: Range<usize>,
}

impl Place {
    /// Of a group's ranks. The last ones have none, where there are more than stages.
    pub fn new((place, size): (usize, usize), stages: usize) -> Self {
        let of = size.clamp(1, stages);
        let first = |place: usize| stages * place.min(of) / of;
        Self { at: place, of, stages: first(place)..first(place + 1) }
    }

    pub fn is_last(&self) -> bool {
        self.at + 1 == self.of
    }

    /// The place of a stage.
    pub fn of_stage(&self, stage: usize, stages: usize) -> usize {
        (0..self.of).find(|p| Self::new((*p, self.of), stages).stages.contains(&stage)).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_go_round_the_ranks_that_there_are() {
        let of = |size: usize| -> Vec<Range<usize>> {
            (0..size).map(|p| Place::new((p, size), 4).stages).collect()
        };
        assert_eq!(of(4), [0..1, 1..2, 2..3, 3..4]);
        assert_eq!(of(3), [0..1, 1..2, 2..4]);
        assert_eq!(of(2), [0..2, 2..4]);
        assert_eq!(of(1), vec![Range { start: 0, end: 4 }]);
        assert_eq!(of(6), [0..1, 1..2, 2..3, 3..4, 4..4, 4..4], "two wait");
        for size in 1..6 {
            for place in 0..size.min(4) {
                let here = Place::new((place, size), 4);
                assert!(here.stages.clone().all(|s| here.of_stage(s, 4) == place), "{here:?}");
                assert_eq!(here.is_last(), here.stages.end == 4);
            }
        }
    }
}
