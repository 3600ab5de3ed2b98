//! A shard as Raft sees it.

use super::{image::Image, state::Shard};
use crate::raft::{Applied, Change, RawImage, Replicated};

impl Replicated for Shard {
    fn apply(&self, change: &Change) -> Applied {
        match change {
            Change::Shard(proposal) => Applied::Shard(Shard::apply(self, proposal)),
            Change::Control(_) | Change::Check => Applied::None,
        }
    }

    fn apply_run(&self, changes: &[&Change]) -> Vec<Applied> {
        let proposals: Option<Vec<_>> = changes.iter().map(|c| c.proposal()).collect();
        match proposals {
            Some(p) => Shard::apply_run(self, &p).into_iter().map(Applied::Shard).collect(),
            None => changes.iter().map(|c| Replicated::apply(self, c)).collect(),
        }
    }

    fn image(&self) -> RawImage {
        Shard::image(self).to_raw()
    }

    fn install(&self, image: &RawImage) -> Result<(), String> {
        Shard::install(self, &Image::from_raw(image)?)
    }
}
