//! The agreed state as a replica of the control group has it.

use super::{Command, Outcome, State};
use crate::{
    control::format,
    raft::{ApplyError, OutdatedMemory, RawImage, Replicated},
};
use paraft_common::Payload;
use parking_lot::RwLock;
use std::sync::Arc;
use tokio::sync::watch;

/// The replicated state, shared by the task that applies and the tasks that read.
#[derive(Debug, Default)]
pub struct Agreed {
    inner: RwLock<Inner>,
    /// Publishes the generation when it has changed.
    moved: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct Inner {
    /// The state from the log since the replica was started.
    now: Arc<State>,
    /// The state when the replica was last stopped, until the log has caught up. While the replica's storage
    /// fails, its server works with this.
    before: Option<Arc<State>>,
}

impl Inner {
    fn known(&self) -> &Arc<State> {
        self.before.as_ref().unwrap_or(&self.now)
    }

    fn caught_up(&mut self) {
        self.before.take_if(|before| before.generation <= self.now.generation);
    }
}

impl Agreed {
    /// The current state, as far as this server knows it.
    pub fn get(&self) -> Arc<State> {
        self.inner.read().known().clone()
    }

    /// The generation, as it changes.
    pub fn generations(&self) -> watch::Receiver<u64> {
        self.moved.subscribe()
    }

    /// The replica starts again: it rebuilds the state from the snapshot and the log. Until then the earlier
    /// state stays readable.
    pub(in crate::control) fn learn_again(&self) {
        let mut inner = self.inner.write();
        let known = inner.known().clone();
        *inner = Inner { now: Arc::default(), before: (known.fleet != 0).then_some(known) };
    }

    /// The replica has applied everything that is agreed on: the earlier state is dropped.
    pub(in crate::control) fn is_current(&self) {
        self.inner.write().before = None;
    }

    /// Reads the state; `f` must be quick.
    pub fn read<T>(&self, f: impl FnOnce(&State) -> T) -> T {
        f(self.inner.read().known())
    }

    fn tell(&self, generation: u64) {
        self.moved.send_if_modified(|now| std::mem::replace(now, generation) != generation);
    }
}

impl Replicated for Agreed {
    type Change = Command;
    type Outcome = Outcome;

    fn apply(&self, command: &Command) -> Result<Outcome, ApplyError> {
        let (outcome, generation) = {
            let mut inner = self.inner.write();
            let state = Arc::make_mut(&mut inner.now);
            let applied = (state.apply(command), state.generation);
            inner.caught_up();
            applied
        };
        self.tell(generation);
        Ok(outcome)
    }

    fn touched(&self, _: &Command) -> u64 {
        0
    }

    fn image(&self) -> RawImage {
        let now = self.inner.read().now.clone();
        RawImage { head: format::write(&now).unwrap_or_default().into(), parts: Vec::new() }
    }

    fn install_parts(
        &self,
        head: &[u8],
        _parts: &mut dyn Iterator<Item = Result<Payload, String>>,
    ) -> Result<(), ApplyError> {
        let state = format::read(head)?;
        let generation = state.generation;
        let mut inner = self.inner.write();
        inner.now = Arc::new(state);
        inner.caught_up();
        drop(inner);
        self.tell(generation);
        Ok(())
    }

    fn bytes(&self) -> u64 {
        0 // no bulk
    }

    /// A share of its own: jobs do not wait for each other's updates, and the fleet's state for none.
    fn share(&self) -> u32 {
        u32::MAX
    }

    fn in_term(&self, _: u64) {}

    fn room_for(&self, _: &[u8]) -> Result<(), ApplyError> {
        Ok(())
    }

    fn order(&self) -> Vec<u32> {
        Vec::new()
    }

    fn outdated(&self, _: u64) -> OutdatedMemory {
        OutdatedMemory::default()
    }
}

#[cfg(test)]
#[path = "agreed_tests.rs"]
mod tests;
