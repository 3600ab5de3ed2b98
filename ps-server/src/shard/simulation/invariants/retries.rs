//! A leader knows what is proposed, by itself and by those before it: while it gets its answers, a push that is sent
//! again makes no second entry of the log. (Where an answer is lost it may; the replicated state recognises it then.)

use super::History;
use crate::shard::Shard;

impl History {
    pub(super) fn retries_are_recognised(&self, truth: &Shard) {
        let duplicates = truth.read(|m| m.duplicates);
        assert!(self.doubt || duplicates == 0, "{duplicates} entries hold a push that was in already");
    }
}
