//! A shard as Raft sees it.

use super::{image::Image, state::Shard};
use crate::raft::{Applied, Change, RawImage, Replicated};
use paraft_common::Payload;

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

    fn install_parts(
        &self,
        head: &[u8],
        parts: &mut dyn Iterator<Item = Result<Payload, String>>,
    ) -> Result<(), String> {
        Shard::install(self, &Image::from_raw(head, parts)?)
    }

    fn bytes(&self) -> u64 {
        self.configured().map_or(0, |c| c.bytes)
    }

    fn outdated(&self, beyond: u64) -> u64 {
        self.configured().map_or(0, |c| c.replaced.bytes(beyond))
    }
}
