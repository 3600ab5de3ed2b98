//! The open streams of a leader: the worker and session of each. What is sent on them is handled elsewhere.

use super::messages::ConnId;
use paraft_common::{SessionId, WorkerId};
use std::{collections::BTreeMap, sync::Arc};

/// One stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream {
    /// The worker.
    pub worker: WorkerId,
    /// The session that it wants to resume, or has.
    pub session: Option<SessionId>,
}

/// All open streams.
#[derive(Debug, Default)]
pub struct Streams {
    by_conn: BTreeMap<ConnId, Stream>,
    /// Each clone of a worker's mark represents one unsent reply with weights, also on streams that it has left.
    unread: BTreeMap<WorkerId, Arc<()>>,
    /// The current stream of each member.
    by_worker: BTreeMap<WorkerId, ConnId>,
}

impl Streams {
    /// Opens a stream.
    pub fn open(&mut self, conn: ConnId, worker: WorkerId, session: Option<SessionId>) {
        self.by_conn.insert(conn, Stream { worker, session });
    }

    /// Closes a stream. Returns it, and whether it was its member's current one.
    pub fn close(&mut self, conn: ConnId) -> Option<(Stream, bool)> {
        let stream = self.by_conn.remove(&conn)?;
        self.forget_read();
        let own = self.by_worker.get(&stream.worker) == Some(&conn);
        if own {
            self.by_worker.remove(&stream.worker);
        }
        Some((stream, own))
    }

    /// The stream, if it is open.
    pub fn get(&self, conn: ConnId) -> Option<Stream> {
        self.by_conn.get(&conn).copied()
    }

    /// A mark for replies to this worker that hold weights until they are sent, and the number of such replies
    /// before them.
    pub fn unread(&mut self, worker: WorkerId) -> (usize, Arc<()>) {
        let mark = self.unread.entry(worker).or_default();
        (Arc::strong_count(mark) - 1, mark.clone())
    }

    /// Drops the marks of workers that have no unsent reply.
    fn forget_read(&mut self) {
        self.unread.retain(|_, mark| Arc::strong_count(mark) > 1);
    }

    /// Sets a stream's session. Returns false if the stream is closed.
    pub fn set_session(&mut self, conn: ConnId, session: SessionId) -> bool {
        let stream = self.by_conn.get_mut(&conn);
        stream.map(|s| s.session = Some(session)).is_some()
    }

    /// Makes a stream its member's current one. Returns the previous one, which is closed: its worker has
    /// reconnected.
    #[must_use]
    pub fn attach(&mut self, worker: WorkerId, conn: ConnId) -> Option<ConnId> {
        let old = self.by_worker.insert(worker, conn).filter(|old| *old != conn)?;
        self.by_conn.remove(&old);
        self.forget_read();
        Some(old)
    }

    /// The member's current stream.
    pub fn of(&self, worker: WorkerId) -> Option<ConnId> {
        self.by_worker.get(&worker).copied()
    }

    /// The member's current stream, if it is of this session.
    pub fn of_session(&self, worker: WorkerId, session: SessionId) -> Option<ConnId> {
        self.of(worker).filter(|conn| self.get(*conn).is_some_and(|s| s.session == Some(session)))
    }

    /// The worker and session of a stream; `None` if it is not its member's current stream.
    pub fn member(&self, conn: ConnId) -> Option<(WorkerId, SessionId)> {
        let Stream { worker, session } = self.get(conn)?;
        (self.of(worker) == Some(conn)).then_some(())?;
        Some((worker, session?))
    }

    /// The current streams of all members.
    pub fn attached(&self) -> impl Iterator<Item = ConnId> {
        self.by_worker.values().copied()
    }

    /// Whether any member has a stream.
    pub fn any_attached(&self) -> bool {
        !self.by_worker.is_empty()
    }

    /// All open streams, attached or not.
    pub fn all(&self) -> impl Iterator<Item = ConnId> {
        self.by_conn.keys().copied()
    }

    /// The number of open streams.
    pub fn len(&self) -> usize {
        self.by_conn.len()
    }

    /// Whether no stream is open.
    pub fn is_empty(&self) -> bool {
        self.by_conn.is_empty()
    }
}

#[cfg(test)]
#[path = "streams_tests.rs"]
mod tests;
