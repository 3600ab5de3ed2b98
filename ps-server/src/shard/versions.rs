//! Versions of a shard's weights, for readers that do not train.
//!
//! A version is named by a step: version `s` of a shard has its weights at the first place in its log at which no active
//! worker has steps up to `s` left. So every replica finds the same bytes under a name, and nobody has to choose one: no
//! change of leaders can give a name twice. In `bsp` the versions `s` of all shards are the weights after step `s`.
//!
//! A replica keeps a version only for readers that ask for it, and most are asked for before they are reached. Its bytes are
//! copied once, and all its readers share them; so no update waits for a reader.

mod bases;
mod values;

pub use bases::{BASE_TIME, Base};
pub use values::{Encoded, KeptBucket};

use super::Shard;
use bases::Bases;
use paraft_changes::shard::Proposal;
use paraft_common::{Step, TensorKind, need};
use paraft_proto::RefusalKind;
use parking_lot::Mutex;
use std::{
    collections::BTreeMap,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    },
};

/// Versions of a shard that a replica keeps, or will keep, at a time. Each may take as much memory as the weights.
pub const MAX_VERSIONS: usize = 4;

/// What a reader asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// This version.
    Exactly(Step),
    /// The newest one, if it is of this step or a later one; if it is not to be had any more, one to come.
    AtLeast(Step),
}

/// The versions that readers of a replica have or wait for. No replicated state: readers differ between replicas.
#[derive(Debug, Default)]
pub struct Versions {
    by_step: Mutex<BTreeMap<Step, Weak<KeptVersion>>>,
    /// `by_step` has entries.
    any: AtomicBool,
    /// Odd while entries are applied.
    applying: AtomicU64,
    bases: Bases,
}

/// A version, as long as a reader has it.
#[derive(Debug)]
pub struct KeptVersion {
    step: Step,
    state: Mutex<State>,
}

#[derive(Debug)]
enum State {
    Awaited,
    Whole(Vec<Arc<KeptBucket>>),
    /// It was reached while nobody looked, or never.
    Passed,
}

/// A replica has passed a version without keeping it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Passed;

impl KeptVersion {
    /// The step that names it.
    pub fn step(&self) -> Step {
        self.step
    }

    /// Its buckets, ascending, once the replica has reached it.
    ///
    /// # Errors
    /// It is not to be had here.
    pub fn buckets(&self) -> Result<Option<Vec<Arc<KeptBucket>>>, Passed> {
        match &*self.state.lock() {
            State::Awaited => Ok(None),
            State::Whole(buckets) => Ok(Some(buckets.clone())),
            State::Passed => Err(Passed),
        }
    }

    fn is_awaited(&self) -> bool {
        matches!(*self.state.lock(), State::Awaited)
    }
}

/// While entries are applied. A look at the weights from elsewhere would be of no one moment.
pub(super) struct Applying<'a>(&'a AtomicU64);

impl Drop for Applying<'_> {
    fn drop(&mut self) {
        self.0.fetch_add(1, SeqCst);
    }
}

impl Versions {
    /// Until the result is dropped, entries are applied.
    pub(super) fn applying(&self) -> Applying<'_> {
        self.applying.fetch_add(1, SeqCst);
        Applying(&self.applying)
    }

    /// Whether readers have or await a version.
    pub(super) fn any(&self) -> bool {
        self.any.load(SeqCst)
    }
}

/// Entries that [`Shard::apply_run`] may apply together though a version is awaited: pushes of one step. A version is reached
/// behind the last push of its step that counts, so no run has pushes from both sides of that place.
pub(super) fn may_run_together(a: &Proposal, b: &Proposal) -> bool {
    let step = |p: &Proposal| p.command.pushes().and_then(|e| e.contributions.iter().map(|c| c.step).max());
    step(a).is_some() && step(a) == step(b)
}

impl Shard {
    /// The newest version that this replica has reached, and whether the shard has its weights still.
    pub fn reached(&self) -> (Step, bool) {
        self.read(|meta| meta.members.version())
    }

    /// A version for a reader, which has it as long as it holds the result.
    ///
    /// # Errors
    /// It was passed; too many are in use; there is no memory for it; or the shard has no weights yet.
    pub fn version_for_reader(&self, wanted: Wanted) -> Result<Arc<KeptVersion>, RefusalKind> {
        let conf = self.configured().filter(|conf| conf.is_initialised());
        conf.ok_or(RefusalKind::NotInitialised)?;
        let mut by_step = self.versions.by_step.lock();
        by_step.retain(|_, kept| kept.strong_count() > 0);
        let (reached, unchanged) = self.reached();
        let step = match wanted {
            Wanted::Exactly(step) => step,
            Wanted::AtLeast(least) => {
                let whole = |kept: &Weak<KeptVersion>| kept.upgrade().is_some_and(|kept| !kept.is_awaited());
                let here = unchanged || by_step.get(&reached).is_some_and(whole);
                let to_come = least.max(reached.next());
                // One that follows soon serves both. Where there is no room for another, any one does.
                let soon = if by_step.len() < MAX_VERSIONS { to_come.next() } else { Step(u64::MAX) };
                let awaited = by_step.range(to_come..=soon).next().map(|(step, _)| *step);
                match reached >= least && here {
                    true => reached,
                    false => awaited.unwrap_or(to_come),
                }
            }
        };
        if let Some(kept) = by_step.get(&step).and_then(Weak::upgrade) {
            return match *kept.state.lock() {
                State::Passed => Err(self.passed(step, reached)),
                _ => Ok(kept.clone()),
            };
        }
        if step < reached || step == reached && !unchanged {
            return Err(self.passed(step, reached));
        }
        if by_step.len() >= MAX_VERSIONS {
            let steps: Vec<_> = by_step.keys().map(|step| step.0.to_string()).collect();
            return Err(RefusalKind::Overloaded(format!(
                "{} has {MAX_VERSIONS} versions for readers here, of steps {}, and no more at a time",
                self.id(),
                steps.join(", ")
            )));
        }
        let bytes = self.version_bytes();
        self.room.take(bytes).map_err(|e| {
            let bytes = need::Bytes(bytes);
            RefusalKind::Overloaded(format!("a version of {} takes {bytes} for its readers: {e}", self.id()))
        })?;
        let kept = Arc::new(KeptVersion { step, state: Mutex::new(State::Awaited) });
        by_step.insert(step, Arc::downgrade(&kept));
        self.versions.any.store(true, SeqCst);
        Ok(kept)
    }

    /// Bytes of a version in f32.
    fn version_bytes(&self) -> u64 {
        let conf = self.configured();
        let buckets = conf.iter().flat_map(|conf| &conf.buckets).filter(|b| b.spec.kind != TensorKind::Rows);
        buckets.map(|b| 4 * b.spec.len as u64).sum()
    }

    fn passed(&self, step: Step, reached: Step) -> RefusalKind {
        RefusalKind::NoVersion { shard: self.id(), step, reached }
    }

    /// Takes a version that was reached already and whose weights are still there. A reader that waits asks for this, since
    /// nothing may be applied any more.
    pub fn take_if_unchanged(&self, kept: &KeptVersion) {
        let before = self.versions.applying.load(SeqCst);
        let (reached, unchanged) = self.reached();
        if before % 2 == 1 || reached < kept.step || !kept.is_awaited() {
            return;
        }
        let buckets = (reached == kept.step && unchanged).then(|| self.kept_buckets());
        let mut state = kept.state.lock();
        // Nothing was applied between the two looks, so the weights are of one moment.
        if self.versions.applying.load(SeqCst) == before && matches!(*state, State::Awaited) {
            *state = buckets.map_or(State::Passed, State::Whole);
        }
    }

    /// Called between entries, by the task that applies them. `before`: the newest version before the entries since the last
    /// call, which were applied as [`may_run_together`] asks. A version that was reached by them has the weights that are here.
    pub(super) fn keep_versions(&self, before: Option<Step>) {
        let mut by_step = self.versions.by_step.lock();
        by_step.retain(|_, kept| kept.strong_count() > 0);
        self.versions.any.store(!by_step.is_empty(), SeqCst);
        if by_step.is_empty() {
            return;
        }
        let reached = self.version_step();
        // One that was reached earlier may have come into the list since, and the weights may have changed. This looks at every
        // member, and is seldom needed.
        let unchanged = before.is_some_and(|before| before < reached) || self.reached().1;
        for kept in by_step.range(..=reached).filter_map(|(_, kept)| kept.upgrade()) {
            let mut state = kept.state.lock();
            if matches!(*state, State::Awaited) {
                let here = kept.step == reached && unchanged;
                *state = if here { State::Whole(self.kept_buckets()) } else { State::Passed };
            }
        }
    }

    pub(super) fn version_step(&self) -> Step {
        self.read(|meta| meta.members.version_step())
    }

    fn kept_buckets(&self) -> Vec<Arc<KeptBucket>> {
        let conf = self.configured();
        let buckets = conf.iter().flat_map(|conf| &conf.buckets).filter(|b| b.spec.kind != TensorKind::Rows);
        buckets.map(|b| b.peek(|data| KeptBucket::new(b.id, data.version, data.weights.clone()))).collect()
    }
}

#[cfg(test)]
#[path = "versions_tests.rs"]
mod tests;
