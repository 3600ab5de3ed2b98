//! The trait of the state that a group's log changes.

use super::{apply_error::ApplyError, image::RawImage};
use paraft_changes::{Applied, Change};
use paraft_common::Payload;

/// The replicated state of a group. It changes only in `apply`, deterministically. Few methods have a default: a state
/// that wraps another must not forget to pass one on.
pub trait Replicated: Send + Sync + 'static {
    /// The change of the state.
    type Change;
    /// The outcome of a change.
    type Outcome;

    /// Applies one committed change. The outcome is the same on every replica. If this host cannot apply it, the
    /// replica stops, and its state must not be used any more.
    fn apply(&self, change: &Self::Change) -> Result<Self::Outcome, ApplyError>;
    /// Applies consecutive changes, as [`Self::apply`] one by one; it may use several cores.
    fn apply_run(&self, changes: &[&Self::Change]) -> Result<Vec<Self::Outcome>, ApplyError> {
        changes.iter().map(|c| self.apply(c)).collect()
    }
    /// Approximate bytes that applying this change reads or writes; they decide on which thread it is applied.
    fn touched(&self, change: &Self::Change) -> u64;
    /// The scheduling share of its work: groups with the same number share the time of one number.
    fn share(&self) -> u32;
    /// Announces the term of what is applied or installed from now on: this term, or an earlier one.
    fn in_term(&self, term: u64);
    /// The whole state; the bulk is shared until it changes.
    fn image(&self) -> RawImage;
    /// Replaces the whole state by an image's head and parts; on an error nothing has changed. Each part is
    /// released before the next is requested, so that the bulk is not in memory twice.
    fn install_parts(
        &self,
        head: &[u8],
        parts: &mut dyn Iterator<Item = Result<Payload, String>>,
    ) -> Result<(), ApplyError>;
    /// Whether there is room for the image with this head. Called before its bulk is received or written.
    fn room_for(&self, head: &[u8]) -> Result<(), ApplyError>;
    /// As [`Self::install_parts`], from an image that is kept.
    fn install(&self, image: &RawImage) -> Result<(), ApplyError> {
        self.install_parts(&image.head, &mut image.parts.iter().map(|part| Ok(part.read())))
    }
    /// Bytes of the bulk.
    fn bytes(&self) -> u64;
    /// The parts of a current image, those that will probably change first at the front.
    fn order(&self) -> Vec<u32>;
    /// Replaced state that readers still hold; exact if it may exceed `beyond`.
    fn outdated(&self, beyond: u64) -> OutdatedMemory;
}

/// A state that the changes of a log change.
pub type GroupState = dyn Replicated<Change = Change, Outcome = Applied>;

/// Bulk that is in memory only for its readers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OutdatedMemory {
    /// Bytes of it.
    pub bytes: u64,
    /// Grows as readers release parts, outdated or not.
    pub read: u64,
}
