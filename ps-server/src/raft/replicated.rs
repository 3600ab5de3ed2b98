//! What a group replicates: its state, the changes that its log holds, and what applying them gives.

use super::{image::RawImage, unable::Unable};
use crate::{
    control,
    shard::{Outcome, Proposal},
};
use paraft_common::Payload;
use serde::{Deserialize, Serialize};
use std::{fmt, sync::Arc};

/// The replicated state of a group. It changes only in `apply`, deterministically.
pub trait Replicated: Send + Sync + 'static {
    /// Applies one committed change. What it gives is the same on every replica; where this host cannot carry it out, it
    /// says so, and the replica stops: its state must not be used any more.
    fn apply(&self, change: &Change) -> Result<Applied, Unable>;
    /// Applies changes that follow each other, as [`Self::apply`] one by one; it may use several cores.
    fn apply_run(&self, changes: &[&Change]) -> Result<Vec<Applied>, Unable> {
        changes.iter().map(|c| self.apply(c)).collect()
    }
    /// Bytes that applying these changes reads or writes, about: it decides on which thread that is done.
    fn touched(&self, changes: &[Change]) -> u64 {
        changes.iter().map(|c| c.payload().len() as u64).sum()
    }
    /// What is applied or installed from now on was proposed in this term, or earlier.
    fn in_term(&self, term: u64) {
        let _ = term;
    }
    /// The whole state; the bulk is shared until it changes.
    fn image(&self) -> RawImage;
    /// Replaces the whole state by the one that an image's head and parts are; on an error nothing has changed. A part
    /// is let go before the next is asked for, so that the bulk is not in memory twice.
    fn install_parts(
        &self,
        head: &[u8],
        parts: &mut dyn Iterator<Item = Result<Payload, String>>,
    ) -> Result<(), Unable>;
    /// Whether there is room for the image with this head, before its bulk is received or written.
    fn room_for(&self, head: &[u8]) -> Result<(), Unable> {
        let _ = head;
        Ok(())
    }
    /// As [`Self::install_parts`], from an image that stays.
    fn install(&self, image: &RawImage) -> Result<(), Unable> {
        self.install_parts(&image.head, &mut image.parts.iter().cloned().map(Ok))
    }
    /// Bytes of the bulk.
    fn bytes(&self) -> u64;
    /// Parts of an image of now, those first that will change first, as far as that can be told.
    fn order(&self) -> Vec<u32> {
        Vec::new()
    }
    /// What changes have replaced while somebody still reads it as it was; exact where it may be more than `beyond`.
    fn outdated(&self, beyond: u64) -> Outdated {
        let _ = beyond;
        Outdated::default()
    }
}

/// An entry of a log.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub enum Change {
    Shard(Proposal),
    Control(control::Command),
    /// Changes nothing: every replica hashes its state here.
    Check,
}

/// Bulk that is in memory only because somebody reads it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outdated {
    /// How much.
    pub bytes: u64,
    /// Grows as readers let parts go, outdated or not.
    pub read: u64,
}

impl Change {
    /// The bulk, which travels and is stored beside the rest.
    pub fn payload(&self) -> &Payload {
        static NONE: Payload = Payload::EMPTY;
        match self {
            Change::Shard(p) => &p.payload,
            Change::Control(_) | Change::Check => &NONE,
        }
    }

    /// The proposal, if it is a shard's.
    pub fn proposal(&self) -> Option<&Proposal> {
        match self {
            Change::Shard(p) => Some(p),
            Change::Control(_) | Change::Check => None,
        }
    }

    /// Puts the bulk back where serde skipped it.
    pub fn attach(&mut self, payload: Payload) {
        if let Change::Shard(p) = self {
            p.payload = payload;
        }
    }
}

impl fmt::Debug for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Change::Shard(p) => p.fmt(f),
            Change::Control(c) => c.fmt(f),
            Change::Check => f.write_str("Check"),
        }
    }
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// What applying a change gave; only the leader that proposed it reads this.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub enum Applied {
    /// A blank or membership entry, or an entry of another kind of group.
    None,
    Shard(Outcome),
    Control(control::Outcome),
}

impl fmt::Display for Applied {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// A snapshot shares its bulk with the live state until that changes.
pub type SnapshotData = Arc<RawImage>;
