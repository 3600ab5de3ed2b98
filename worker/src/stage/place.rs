//! A rank's stages of a model, and its mesh.

use paraft_models::Slice;
use std::ops::Range;

/// A rank's stages, its slice of them, and its mesh.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// This rank's index among the ranks with stages of its slice and mesh.
    pub at: usize,
    /// The number of those ranks.
    pub of: usize,
    pub stages: Range<usize>,
    pub slice: Slice,
    pub mesh: usize,
    /// Number of meshes. Each has its own samples.
    pub meshes: usize,
}

/// Into how many parts a model is split, and how many replicas there are.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ModelSplit {
    pub stages: usize,
    pub slices: usize,
    pub meshes: usize,
}

impl Default for Place {
    fn default() -> Self {
        Self { at: 0, of: 0, stages: 0..0, slice: Slice { at: 0, of: 1 }, mesh: 0, meshes: 1 }
    }
}

impl Place {
    /// Assigns a group's ranks: one mesh after another, and within a mesh the slices of one stage are neighbours.
    /// With fewer ranks than that needs, there are as many complete meshes as possible, and the last ranks have no
    /// stages. With fewer ranks than one mesh needs, some ranks have several stages. With fewer ranks than slices
    /// per stage, there are fewer slices.
    pub fn new((place, size): (usize, usize), ModelSplit { stages, slices, meshes }: ModelSplit) -> Self {
        let slices = slices.clamp(1, size.max(1));
        let of = (size / slices).clamp(1, stages);
        let meshes = (size / (of * slices)).clamp(1, meshes);
        let (mesh, within) = (place / (of * slices), place % (of * slices));
        let first = |at: usize| stages * at / of;
        let at = within / slices;
        let slice = Slice { at: place % slices, of: slices };
        match mesh < meshes {
            true => Self { at, of, stages: first(at)..first(at + 1), slice, mesh, meshes },
            false => Self { at: of, of, stages: stages..stages, slice, mesh: 0, meshes },
        }
    }

    /// Whether both places hold the same part of the model.
    pub fn has_what(&self, other: &Self) -> bool {
        let of = |p: &Self| (p.stages.clone(), p.slice, p.mesh);
        of(self) == of(other)
    }

    /// Whether other ranks have the same stages, or slices of them.
    pub fn are_several(&self) -> bool {
        self.slice.of > 1 || self.meshes > 1
    }

    pub fn is_last(&self) -> bool {
        self.at + 1 == self.of
    }

    /// The rank with this slice at another index of the mesh.
    pub fn beside(&self, at: usize) -> usize {
        self.in_mesh(self.mesh, at)
    }

    /// The same in another mesh.
    pub fn in_mesh(&self, mesh: usize, at: usize) -> usize {
        mesh * self.of_mesh() + at * self.slice.of + self.slice.at
    }

    /// The ranks with the same stages, each with its slice and whether it is in the first mesh; the speaker comes
    /// first.
    pub fn alike(&self) -> impl Iterator<Item = (usize, usize, bool)> + use<> {
        let (slices, of_mesh, at) = (self.slice.of, self.of_mesh(), self.at);
        (0..self.meshes).flat_map(move |mesh| {
            (0..slices).map(move |slice| (mesh * of_mesh + at * slices + slice, slice, mesh == 0))
        })
    }

    /// The rank that speaks with the servers for all ranks with the same stages.
    pub fn speaker(&self) -> usize {
        self.at * self.slice.of
    }

    /// The number of ranks of a mesh.
    fn of_mesh(&self) -> usize {
        self.of * self.slice.of
    }

    /// The ranks that speak with the servers.
    pub fn speakers(&self) -> impl Iterator<Item = usize> + use<> {
        (0..self.of_mesh()).step_by(self.slice.of)
    }

    /// The ranks that have stages.
    pub fn ranks(&self) -> usize {
        self.meshes * self.of_mesh()
    }

    /// Whether it speaks with the servers for all ranks with its stages.
    pub fn speaks(&self) -> bool {
        !self.stages.is_empty() && self.slice.is_first() && self.mesh == 0
    }

    /// The index ([`Self::at`]) of the rank that has a stage.
    pub fn of_stage(&self, stage: usize, stages: usize) -> usize {
        (0..self.of)
            .find(|at| (stages * at / self.of..stages * (at + 1) / self.of).contains(&stage))
            .unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places(size: usize, (stages, slices, meshes): (usize, usize, usize)) -> Vec<Place> {
        (0..size).map(|p| Place::new((p, size), ModelSplit { stages, slices, meshes })).collect()
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
        for size in 1..5 {
            for (place, here) in places(size, (4, 1, 1)).iter().enumerate() {
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
    fn meshes_stand_behind_each_other_and_are_whole_or_not_there() {
        let of = |size: usize| -> Vec<(usize, Range<usize>, usize)> {
            places(size, (2, 2, 2)).into_iter().map(|p| (p.mesh, p.stages, p.slice.at)).collect()
        };
        let one = [(0, 0..1, 0), (0, 0..1, 1), (0, 1..2, 0), (0, 1..2, 1)];
        let two = [(1, 0..1, 0), (1, 0..1, 1), (1, 1..2, 0), (1, 1..2, 1)];
        assert_eq!(of(8), [&one[..], &two].concat());
        assert_eq!(of(7), [&one[..], &[(0, 2..2, 0), (0, 2..2, 1), (0, 2..2, 0)]].concat(), "three wait");
        assert_eq!(of(4), one);
        // With too few ranks for one mesh there is one.
        assert_eq!(of(3), [(0, 0..2, 0), (0, 0..2, 1), (0, 2..2, 0)]);
        let all = places(8, (2, 2, 2));
        let speak: Vec<usize> = (0..8).filter(|p| all[*p].speaks()).collect();
        assert_eq!((speak, all[5].speakers().collect()), (vec![0, 2], vec![0, 2]));
        assert_eq!((all[5].beside(1), all[5].in_mesh(0, 1), all[5].ranks()), (7, 3, 8));
        let alike: Vec<_> = all[7].alike().collect();
        assert_eq!(alike, [(2, 0, true), (3, 1, true), (6, 0, false), (7, 1, false)]);
        assert!(places(5, (2, 1, 3)).iter().skip(4).all(|p| p.stages.is_empty() && p.meshes == 2));
    }
}
