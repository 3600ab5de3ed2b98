//! The streams that are open at a leader: whose they are, and in which session. What is sent on them is not its business.

use super::messages::ConnId;
use paraft_common::{SessionId, WorkerId};
use std::{collections::BTreeMap, sync::Arc};

/// One stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream {
    /// Who.
    pub worker: WorkerId,
    /// The session that it wants to take up again, or has.
    pub session: Option<SessionId>,
}

/// All of them.
#[derive(Debug, Default)]
pub struct Streams {
    by_conn: BTreeMap<ConnId, Stream>,
    /// One count of each stream's mark stands for an answer with weights that it has not sent yet.
    unread: BTreeMap<ConnId, Arc<()>>,
    /// The stream that each member has now.
    by_worker: BTreeMap<WorkerId, ConnId>,
}

impl Streams {
    /// A stream has said what it wants.
    pub fn open(&mut self, conn: ConnId, worker: WorkerId, session: Option<SessionId>) {
        self.by_conn.insert(conn, Stream { worker, session });
    }

    /// It is closed. Gives whose it was, and whether it was its member's.
    pub fn close(&mut self, conn: ConnId) -> Option<(Stream, bool)> {
        let stream = self.by_conn.remove(&conn)?;
        self.unread.remove(&conn);
        let own = self.by_worker.get(&stream.worker) == Some(&conn);
        if own {
            self.by_worker.remove(&stream.worker);
        }
        Some((stream, own))
    }

    /// A stream, if it is open.
    pub fn get(&self, conn: ConnId) -> Option<Stream> {
        self.by_conn.get(&conn).copied()
    }

    /// A mark for an answer that holds weights until the stream has sent it, and how many there are already.
    pub fn unread(&mut self, conn: ConnId) -> (usize, Arc<()>) {
        if !self.by_conn.contains_key(&conn) {
            return (0, Arc::default());
        }
        let mark = self.unread.entry(conn).or_default();
        (Arc::strong_count(mark) - 1, mark.clone())
    }

    /// A stream gets its session. False where it is closed.
    pub fn begins(&mut self, conn: ConnId, session: SessionId) -> bool {
        let stream = self.by_conn.get_mut(&conn);
        stream.map(|s| s.session = Some(session)).is_some()
    }

    /// It is its member's from now on. Gives the one that was, which is closed: its worker has come back by another.
    #[must_use]
    pub fn attach(&mut self, worker: WorkerId, conn: ConnId) -> Option<ConnId> {
        let old = self.by_worker.insert(worker, conn).filter(|old| *old != conn)?;
        self.by_conn.remove(&old);
        self.unread.remove(&old);
        Some(old)
    }

    /// The stream that the member has now.
    pub fn of(&self, worker: WorkerId) -> Option<ConnId> {
        self.by_worker.get(&worker).copied()
    }

    /// That, where it is of this session.
    pub fn of_session(&self, worker: WorkerId, session: SessionId) -> Option<ConnId> {
        self.of(worker).filter(|conn| self.get(*conn).is_some_and(|s| s.session == Some(session)))
    }

    /// Who sends on it, and in which session; `None` where it is not its member's.
    pub fn member(&self, conn: ConnId) -> Option<(WorkerId, SessionId)> {
        let Stream { worker, session } = self.get(conn)?;
        (self.of(worker) == Some(conn)).then_some(())?;
        Some((worker, session?))
    }

    /// Those of all members.
    pub fn attached(&self) -> impl Iterator<Item = ConnId> {
        self.by_worker.values().copied()
    }

    /// Whether any member has one.
    pub fn any_attached(&self) -> bool {
        !self.by_worker.is_empty()
    }

    /// All, whosever they are.
    pub fn all(&self) -> impl Iterator<Item = ConnId> {
        self.by_conn.keys().copied()
    }

    /// How many are open.
    pub fn len(&self) -> usize {
        self.by_conn.len()
    }

    /// Whether none is.
    pub fn is_empty(&self) -> bool {
        self.by_conn.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// A member has one stream, the last that was attached and is not closed; and only on that it is heard.
        #[test]
        fn a_member_has_the_last_of_its_streams(ops in prop::collection::vec((0u8..3, 0u64..6, 0u32..2), 1..80)) {
            let mut streams = Streams::default();
            let mut attached: BTreeMap<WorkerId, ConnId> = BTreeMap::new();
            for (op, conn, worker) in ops {
                let worker = WorkerId(worker);
                match op {
                    0 if streams.get(conn).is_none() => streams.open(conn, worker, Some(SessionId(1))),
                    1 => {
                        let closed = streams.close(conn);
                        let own = closed.is_some_and(|(s, _)| attached.get(&s.worker) == Some(&conn));
                        prop_assert_eq!(closed.map(|c| c.1), closed.map(|_| own));
                        attached.retain(|_, c| *c != conn);
                    }
                    2 if streams.get(conn).is_some_and(|s| s.worker == worker) => {
                        let old = attached.insert(worker, conn).filter(|old| *old != conn);
                        prop_assert_eq!(streams.attach(worker, conn), old);
                        prop_assert!(old.is_none_or(|old| streams.get(old).is_none()));
                    }
                    _ => {}
                }
                for w in (0..2).map(WorkerId) {
                    prop_assert_eq!(streams.of(w), attached.get(&w).copied());
                    prop_assert_eq!(streams.of_session(w, SessionId(2)), None);
                }
                for conn in 0..6 {
                    let member = streams.get(conn).filter(|s| attached.get(&s.worker) == Some(&conn));
                    prop_assert_eq!(streams.member(conn), member.map(|s| (s.worker, SessionId(1))));
                }
            }
        }
    }
}
