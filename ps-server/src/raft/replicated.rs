//! What a group replicates: what its log holds, and the state that this changes. Nothing here knows what it is.

use super::{image::RawImage, unable::Unable};
use paraft_common::Payload;
use serde::{Serialize, de::DeserializeOwned};
use std::fmt;

/// What the log of a group holds: changes of its state, and checks.
pub trait Logged:
    Clone + fmt::Debug + fmt::Display + Serialize + DeserializeOwned + Send + Sync + 'static
{
    /// What applying one gives; only the leader that proposed it reads this. The default is said of an entry that changes
    /// nothing.
    type Outcome: Default + Serialize + DeserializeOwned + Send + Sync + 'static;

    /// The bulk, which travels and is stored beside the rest: serde leaves it out.
    fn payload(&self) -> &Payload;

    /// Puts the bulk back.
    fn attach(&mut self, payload: Payload);

    /// Changes nothing: every replica hashes its state here.
    fn check() -> Self;

    /// Whether it is one.
    fn is_check(&self) -> bool;
}

/// The replicated state of a group. It changes only in `apply`, deterministically.
pub trait Replicated: Send + Sync + 'static {
    /// What changes it.
    type Change;
    /// What a change gives.
    type Outcome;

    /// Applies one committed change. What it gives is the same on every replica; where this host cannot carry it out, it
    /// says so, and the replica stops: its state must not be used any more.
    fn apply(&self, change: &Self::Change) -> Result<Self::Outcome, Unable>;
    /// Applies changes that follow each other, as [`Self::apply`] one by one; it may use several cores.
    fn apply_run(&self, changes: &[&Self::Change]) -> Result<Vec<Self::Outcome>, Unable> {
        changes.iter().map(|c| self.apply(c)).collect()
    }
    /// Bytes that applying this change reads or writes, about: it decides on which thread that is done.
    fn touched(&self, change: &Self::Change) -> u64;
    /// With whom its work takes turns: groups with the same number get together what one of another number gets.
    fn share(&self) -> u32 {
        u32::MAX
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

/// A state that is changed by what a log holds.
pub type StateOf<C> = dyn Replicated<Change = C, Outcome = <C as Logged>::Outcome>;

/// Bulk that is in memory only because somebody reads it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outdated {
    /// How much.
    pub bytes: u64,
    /// Grows as readers let parts go, outdated or not.
    pub read: u64,
}
