//! Which stages of a model a rank has, in which replica of it.

use paraft_models::Slice;
use std::ops::Range;

/// Which stages a rank has, which slice of them, and of which replica of the model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// Among those that have stages, of this slice and replica.
    pub at: usize,
    /// How many those are.
    pub of: usize,
    pub stages: Range<usize>,
    pub slice: Slice,
    pub replica: usize,
    /// How many there are; each has samples of its own.
    pub replicas: usize,
}

/// In how many parts a model is cut, and how often it is there.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mesh {
    pub stages: usize,
    pub slices: usize,
    pub replicas: usize,
}

impl Default for Place {
    fn default() -> Self {
        Self { at: 0, of: 0, stages: 0..0, slice: Slice { at: 0, of: 1 }, replica: 0, replicas: 1 }
    }
}

impl Place {
    /// Of a group's ranks: a replica behind the other, in each the slices of a stage are neighbours. The last ranks have none, where there are more. Where there are
    /// fewer, there are as many replicas as are whole; of less than one some ranks have several stages; of less than the slices of one stage there are fewer slices.
    pub fn new((place, size): (usize, usize), Mesh { stages, slices, replicas }: Mesh) -> Self {
        let slices = slices.clamp(1, size.max(1));
        let of = (size / slices).clamp(1, stages);
        let replicas = (size / (of * slices)).clamp(1, replicas);
        let (replica, within) = (place / (of * slices), place % (of * slices));
        let first = |at: usize| stages * at / of;
        let at = within / slices;
        let slice = Slice { at: place % slices, of: slices };
        match replica < replicas {
            true => Self { at, of, stages: first(at)..first(at + 1), slice, replica, replicas },
            false => Self { at: of, of, stages: stages..stages, slice, replica: 0, replicas },
        }
    }

    /// Whether it has what another place has, whoever has the rest.
    pub fn has_what(&self, other: &Self) -> bool {
        let of = |p: &Self| (p.stages.clone(), p.slice, p.replica);
        of(self) == of(other)
    }

    /// Whether others have its stages too, or slices of them.
    pub fn are_several(&self) -> bool {
        self.slice.of > 1 || self.replicas > 1
    }

    pub fn is_last(&self) -> bool {
        self.at + 1 == self.of
    }

    /// The rank with this slice of the stages of another, in its replica.
    pub fn beside(&self, at: usize) -> usize {
        self.in_replica(self.replica, at)
    }

    /// The same in another one.
    pub fn in_replica(&self, replica: usize, at: usize) -> usize {
        replica * self.of_replica() + at * self.slice.of + self.slice.at
    }

    /// The ranks that have its stages, with their slices and whether they are in the first replica; who speaks for them comes first.
    pub fn alike(&self) -> impl Iterator<Item = (usize, usize, bool)> + use<> {
        let (slices, of_replica, at) = (self.slice.of, self.of_replica(), self.at);
        (0..self.replicas).flat_map(move |replica| {
            (0..slices).map(move |slice| (replica * of_replica + at * slices + slice, slice, replica == 0))
        })
    }

    /// The rank that speaks with the servers for all who have its stages.
    pub fn speaker(&self) -> usize {
        self.at * self.slice.of
    }

    /// The ranks that have a replica.
    fn of_replica(&self) -> usize {
        self.of * self.slice.of
    }

    /// The ranks that speak with the servers.
    pub fn speakers(&self) -> impl Iterator<Item = usize> + use<> {
        (0..self.of_replica()).step_by(self.slice.of)
    }

    /// The ranks that have stages.
    pub fn ranks(&self) -> usize {
        self.replicas * self.of_replica()
    }

    /// Whether it speaks with the servers for all who have its stages.
    pub fn speaks(&self) -> bool {
        !self.stages.is_empty() && self.slice.is_first() && self.replica == 0
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

    fn places(size: usize, (stages, slices, replicas): (usize, usize, usize)) -> Vec<Place> {
        (0..size).map(|p| Place::new((p, size), Mesh { stages, slices, replicas })).collect()
    }

    #[test]
    fn stages_go_round_the_ranks_that_there_are() {
        let of = |size: usize| -> Vec<Range<usize>> {
            places(size, (4, 1, 1)).into_iter().map(|p| p.stages).collect()
        };
        assert_eq!(of(4), [0..1, 1..2, 2..3, 3..4]);
        assert_eq!(of(3), [0..1, 1..2, 2..4]);
        assert_eq!(of(2), [0..2, 2..4]);
        assert_eq!(of(1), vec![Range { start: 0, end: 4 }]);
        assert_eq!(of(6), [0..1, 1..2, 2..3, 3..4, 4..4, 4..4], "two wait");
        for size in 1..6 {
            for (place, here) in places(size, (4, 1, 1)).iter().enumerate().take(4) {
                assert!(here.stages.clone().all(|s| here.of_stage(s, 4) == place), "{here:?}");
                assert_eq!(here.is_last(), here.stages.end == 4);
            }
        }
    }

    #[test]
    fn slices_of_a_stage_are_neighbours_and_fewer_where_ranks_are() {
        let of = |size: usize| -> Vec<(Range<usize>, usize, usize)> {
            places(size, (2, 2, 1)).into_iter().map(|p| (p.stages, p.slice.at, p.slice.of)).collect()
        };
        assert_eq!(of(4), [(0..1, 0, 2), (0..1, 1, 2), (1..2, 0, 2), (1..2, 1, 2)]);
        assert_eq!(of(3), [(0..2, 0, 2), (0..2, 1, 2), (2..2, 0, 2)], "one waits");
        assert_eq!(of(2), [(0..2, 0, 2), (0..2, 1, 2)]);
        assert_eq!(of(1), [(0..2, 0, 1)]);
        let here = &places(4, (2, 2, 1))[3];
        assert_eq!((here.beside(0), here.is_last(), here.speaks(), here.ranks()), (1, true, false, 4));
    }

    #[test]
    fn replicas_stand_behind_each_other_and_are_whole_or_not_there() {
        let of = |size: usize| -> Vec<(usize, Range<usize>, usize)> {
            places(size, (2, 2, 2)).into_iter().map(|p| (p.replica, p.stages, p.slice.at)).collect()
        };
        let one = [(0, 0..1, 0), (0, 0..1, 1), (0, 1..2, 0), (0, 1..2, 1)];
        let two = [(1, 0..1, 0), (1, 0..1, 1), (1, 1..2, 0), (1, 1..2, 1)];
        assert_eq!(of(8), [&one[..], &two].concat());
        assert_eq!(of(9), [&one[..], &two, &[(0, 2..2, 0)]].concat(), "one waits");
        assert_eq!(of(7), [&one[..], &[(0, 2..2, 0), (0, 2..2, 1), (0, 2..2, 0)]].concat(), "three wait");
        assert_eq!(of(4), one);
        // Of less than one there is one.
        assert_eq!(of(3), [(0, 0..2, 0), (0, 0..2, 1), (0, 2..2, 0)]);
        let all = places(8, (2, 2, 2));
        let speak: Vec<usize> = (0..8).filter(|p| all[*p].speaks()).collect();
        assert_eq!((speak, all[5].speakers().collect()), (vec![0, 2], vec![0, 2]));
        assert_eq!((all[5].beside(1), all[5].in_replica(0, 1), all[5].ranks()), (7, 3, 8));
        let alike: Vec<_> = all[7].alike().collect();
        assert_eq!(alike, [(2, 0, true), (3, 1, true), (6, 0, false), (7, 1, false)]);
        assert!(places(6, (2, 1, 2)).iter().skip(4).all(|p| p.stages.is_empty() && p.replicas == 2));
    }
}
