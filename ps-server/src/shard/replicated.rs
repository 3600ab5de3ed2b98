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

    fn image(&self) -> RawImage {
        Shard::image(self).to_raw()
    }

    fn install(&self, image: &RawImage) -> Result<(), String> {
        Shard::install(self, &Image::from_raw(image)?)
    }
}
