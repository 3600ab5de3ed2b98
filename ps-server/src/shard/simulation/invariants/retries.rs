//! A leader knows what is proposed, by itself and by those before it: a push that is sent again makes no second entry of
//! the log. (The replicated state would recognise one; nothing may have to rely on that.)

use super::History;
use crate::shard::Shard;

impl History {
    pub(super) fn retries_are_recognised(&self, truth: &Shard) {
        let duplicates = truth.read(|m| m.duplicates);
        assert_eq!(duplicates, 0, "entries that hold a push that was in already");
    }
}
