//! Which stages of a model a rank has.

use paraft_models::Slice;
use std::ops::Range;

/// Which stages a rank has, and which slice of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// Among those that have stages, of this slice.
    pub at: usize,
    /// How many those are.
    pub of: usize,
    pub stages: Range<usize>,
    pub slice: Slice,
}

impl Default for Place {
    fn default() -> Self {
        Self { at: 0, of: 0, stages: 0..0, slice: Slice { at: 0, of: 1 } }
    }
}

impl Place {
    /// Of a group's ranks: the slices of a stage are neighbours. The last ones have none, where there are more than stages. Where there are fewer, some
    /// have several; of less than the slices of one stage there are fewer slices.
    pub fn new((place, size): (usize, usize), (stages, slices): (usize, usize)) -> Self {
        let slices = slices.clamp(1, size.max(1));
        let of = (size / slices).clamp(1, stages);
        let at = place / slices;
        let first = |at: usize| stages * at.min(of) / of;
        Self { at, of, stages: first(at)..first(at + 1), slice: Slice { at: place % slices, of: slices } }
    }

    pub fn is_last(&self) -> bool {
        self.at + 1 == self.of
    }

    /// The rank with this slice of the stages of another.
    pub fn beside(&self, at: usize) -> usize {
        at * self.slice.of + self.slice.at
    }

    /// The ranks that have stages.
    pub fn ranks(&self) -> usize {
        self.of * self.slice.of
    }

    /// Whether it speaks with the servers for all slices of its stages.
    pub fn speaks(&self) -> bool {
        !self.stages.is_empty() && self.slice.is_first()
    }

    /// Who has a stage, by [`Self::at`].
    pub fn of_stage(&self, stage: usize, stages: usize) -> usize {
        (0..self.of)
            .find(|at| (stages * at / self.of..stages * (at + 1) / self.of).contains(&stage))
            .unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_go_round_the_ranks_that_there_are() {
        let of = |size: usize| -> Vec<Range<usize>> {
            (0..size).map(|p| Place::new((p, size), (4, 1)).stages).collect()
        };
        assert_eq!(of(4), [0..1, 1..2, 2..3, 3..4]);
        assert_eq!(of(3), [0..1, 1..2, 2..4]);
        assert_eq!(of(2), [0..2, 2..4]);
        assert_eq!(of(1), vec![Range { start: 0, end: 4 }]);
        assert_eq!(of(6), [0..1, 1..2, 2..3, 3..4, 4..4, 4..4], "two wait");
        for size in 1..6 {
            for place in 0..size.min(4) {
                let here = Place::new((place, size), (4, 1));
                assert!(here.stages.clone().all(|s| here.of_stage(s, 4) == place), "{here:?}");
                assert_eq!(here.is_last(), here.stages.end == 4);
            }
        }
    }

    #[test]
    fn slices_of_a_stage_are_neighbours_and_fewer_where_ranks_are() {
        let of = |size: usize| -> Vec<(Range<usize>, usize, usize)> {
            let place = |p: usize| Place::new((p, size), (2, 2));
            (0..size).map(place).map(|p| (p.stages, p.slice.at, p.slice.of)).collect()
        };
        assert_eq!(of(4), [(0..1, 0, 2), (0..1, 1, 2), (1..2, 0, 2), (1..2, 1, 2)]);
        assert_eq!(of(3), [(0..2, 0, 2), (0..2, 1, 2), (2..2, 0, 2)], "one waits");
        assert_eq!(of(2), [(0..2, 0, 2), (0..2, 1, 2)]);
        assert_eq!(of(1), [(0..2, 0, 1)]);
        let here = Place::new((3, 4), (2, 2));
        assert_eq!((here.beside(0), here.is_last(), here.speaks(), here.ranks()), (1, true, false, 4));
    }
}
