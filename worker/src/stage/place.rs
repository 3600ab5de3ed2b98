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
#[path = "place_tests.rs"]
mod tests;
