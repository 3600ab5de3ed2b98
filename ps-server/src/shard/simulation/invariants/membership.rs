//! Sessions: a new one is later than all before it, and a worker loses its session only if it was away.

use super::{History, Pushed};
use paraft_common::{SessionId, WorkerId};
use std::collections::BTreeMap;

/// The sessions that workers know.
#[derive(Default)]
pub struct Sessions {
    current: BTreeMap<WorkerId, SessionId>,
    seen: BTreeMap<SessionId, WorkerId>,
}

impl Sessions {
    /// Whether the worker's process is still in this session.
    pub fn is_current(&self, worker: WorkerId, session: SessionId) -> bool {
        self.current.get(&worker) == Some(&session)
    }
}

impl History {
    /// A worker gets its session; `had` is the one that it asked for.
    pub fn opened(&mut self, worker: WorkerId, session: SessionId, had: Option<SessionId>) {
        match had {
            Some(had) => assert_eq!(session, had, "{worker} took up {had}"),
            None => {
                let before = self.sessions.current.insert(worker, session);
                assert!(before.is_none_or(|b| b < session), "{worker} had {before:?}, and then {session}");
            }
        }
        let owner = *self.sessions.seen.entry(session).or_insert(worker);
        assert_eq!(owner, worker, "{session} is of two workers");
    }

    /// A worker is notified that its session is over; then it must be over.
    pub fn session_lost(&mut self, worker: WorkerId, session: Option<SessionId>) {
        let Some(session) = session else { return }; // another process of its name opened a session in between
        let there = self.cluster.0.lock().truth.read(|m| m.members.in_session(worker, session).is_some());
        assert!(!there, "{worker} is told that {session} is over, and it is not");
    }

    /// If a worker comes back between a round's closing and its commit, its predecessor's push counts as its step.
    pub(super) fn was_in_an_earlier_round(&self, push: &Pushed) -> bool {
        let same = |p: &&Pushed| (p.worker, p.step) == (push.worker, push.step);
        self.averages && self.pushed.iter().filter(same).count() > 1
    }
}
