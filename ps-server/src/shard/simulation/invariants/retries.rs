//! A leader knows its own proposals and those of its predecessors: a resent push makes no second entry in the log.
//! (The replicated state would recognise a duplicate; nothing may have to rely on that.)

use super::History;
use crate::shard::Shard;

impl History {
    pub(super) fn retries_are_recognised(&self, truth: &Shard) {
        let duplicates = truth.read(|m| m.duplicates);
        assert_eq!(duplicates, 0, "entries that hold a push that was in already");
    }
}
