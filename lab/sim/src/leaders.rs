//! The real leader of a shard, with the effects that it requests. It handles one input after the other,
//! and all effects of an input happen before the next input.

use crate::{
    servers::{Host, Servers},
    stream::Stream,
};
use paraft_common::{ServerId, ShardId};
use paraft_server::{
    raft::{Leadership, Role},
    shard::{
        command::Outcome,
        leader::{ConnId, DrawSession, Effect, GroupStatus, Input, Leader, Now, Reply},
    },
};
use paraft_trace::Moment;
use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
    time::Instant,
};
use tokio::sync::Notify;

/// The leader of a shard, for a term.
pub(crate) struct Lead {
    pub server: usize,
    pub term: u64,
    leader: Leader,
    /// Its open streams.
    lines: BTreeMap<ConnId, Line>,
    /// Streams with replies to send, in the order of the first reply.
    answered: Vec<ConnId>,
    /// Inputs to handle first.
    next: Vec<Input>,
    /// Inputs to handle afterwards.
    later: VecDeque<Input>,
    /// The deadline that is armed.
    armed: Option<Instant>,
    earlier: Arc<Notify>,
}

/// An open stream of the leader.
struct Line {
    stream: Arc<Stream>,
    /// Sent together, as a stream's task in a server does.
    replies: Vec<Reply>,
    closes: bool,
}

/// It leads, and does not sleep.
struct LeadingStatus;

impl GroupStatus for LeadingStatus {
    fn leads(&self) -> bool {
        true
    }

    fn leader_address(&self) -> Option<String> {
        None
    }

    fn is_asleep(&self) -> bool {
        false
    }

    fn has_slept(&self) -> bool {
        false
    }
}

impl Lead {
    pub fn new(host: &Host, server: usize, term: u64, draw: DrawSession) -> Self {
        Self {
            server,
            term,
            leader: Leader::new(host.state.clone(), host.counters.clone(), 1, draw),
            lines: BTreeMap::new(),
            answered: Vec::new(),
            next: Vec::new(),
            later: VecDeque::new(),
            armed: None,
            earlier: Arc::default(),
        }
    }

    /// Starts the leadership.
    pub fn begins(&mut self, servers: &Arc<Servers>, host: &Host) {
        let leader = Some(ServerId(self.server as u64));
        let now = Leadership { term: self.term, leader, leads: true, role: Role::Leader };
        self.hears(servers, host, Input::Leadership(now));
    }

    /// Opens a worker's stream.
    pub fn opens(&mut self, stream: &Arc<Stream>) {
        let line = Line { stream: stream.clone(), replies: Vec::new(), closes: false };
        self.lines.insert(stream.conn, line);
    }

    /// Its open streams.
    pub fn streams(&self) -> impl Iterator<Item = &Arc<Stream>> {
        self.lines.values().map(|line| &line.stream)
    }

    /// Notified when the deadline moves forward.
    pub fn earlier(&self) -> Arc<Notify> {
        self.earlier.clone()
    }

    /// Its next deadline.
    pub fn deadline(&self) -> Option<Instant> {
        self.leader.deadline()
    }

    /// Handles an input and carries out its effects.
    pub fn hears(&mut self, servers: &Arc<Servers>, host: &Host, input: Input) {
        if let Input::Closed(conn) = input {
            self.closes(conn);
        }
        let mut input = Some(input);
        while let Some(heard) = input {
            let now = Now { at: tokio::time::Instant::now().into_std(), moment: Moment(servers.clock.now()) };
            self.leader.handle(now, &LeadingStatus, heard);
            while let Some(effect) = self.leader.next_effect() {
                self.carry_out(servers, host, effect);
            }
            input = self.next.pop().or_else(|| self.later.pop_front());
        }
        self.answer(servers);
        let deadline = self.leader.deadline();
        if deadline.is_some_and(|at| self.armed.is_none_or(|armed| at < armed)) {
            self.earlier.notify_one();
        }
        self.armed = deadline;
    }

    fn carry_out(&mut self, servers: &Arc<Servers>, host: &Host, effect: Effect) {
        let (this, shard, term) = (servers.clone(), host.id, self.term);
        match effect {
            Effect::Send(conn, reply) => {
                let Some(line) = self.lines.get_mut(&conn).filter(|l| !l.closes) else { return };
                if line.replies.is_empty() {
                    self.answered.push(conn);
                }
                line.replies.push(reply);
            }
            Effect::Close(conn) => self.closes(conn),
            Effect::Propose(number, proposal) => {
                let at = host.log.propose(self.server, number, proposal);
                servers.clock.at(at, move || {
                    let committed = this.hosts.get(&shard).and_then(|host| host.log.commit(term));
                    if let Some((number, outcome)) = committed {
                        this.hears(shard, term, Input::Outcome(number, Ok(outcome)));
                    }
                });
            }
            Effect::Confirm(number) => {
                let at = servers.clock.now().saturating_add(host.log.confirms());
                servers.clock.at(at, move || {
                    this.hears(shard, term, Input::Outcome(number, Ok(Outcome::Done)));
                });
            }
            Effect::Compute(_, work) => self.next.push(Input::Computed(Ok(work()))),
            Effect::SwitchResult(asker, switched) => asker.answer(switched),
            Effect::EditResult(asker, edited) => asker.answer(edited),
            Effect::FetchResult(asker, fetched) => asker.answer(fetched),
            Effect::Sleep | Effect::Wake => self.later.push_back(Input::SleepOrWake),
        }
    }

    fn closes(&mut self, conn: ConnId) {
        let Some(line) = self.lines.get_mut(&conn).filter(|l| !l.closes) else { return };
        line.closes = true;
        if line.replies.is_empty() {
            self.answered.push(conn);
        }
    }

    /// Sends the replies.
    fn answer(&mut self, servers: &Servers) {
        for conn in self.answered.drain(..) {
            let Some(line) = self.lines.get_mut(&conn) else { continue };
            line.replies.drain(..).for_each(|reply| servers.answers(&line.stream, reply));
            if line.closes {
                servers.closed(&line.stream);
                self.lines.remove(&conn);
            }
        }
    }
}

impl Drop for Lead {
    /// The task that waits for the deadline ends.
    fn drop(&mut self) {
        self.earlier.notify_one();
    }
}

/// Delivers the deadlines of a term's leader while it leads.
pub(crate) async fn deadlines(servers: Arc<Servers>, shard: ShardId, term: u64, earlier: Arc<Notify>) {
    while let Some(deadline) = servers.deadline(shard, term) {
        let sleeps = async {
            match deadline {
                Some(at) => tokio::time::sleep_until(at.into()).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            () = earlier.notified() => continue,
            () = sleeps => {}
        }
        let now = tokio::time::Instant::now().into_std();
        if servers.deadline(shard, term).flatten().is_some_and(|at| at <= now) {
            servers.hears(shard, term, Input::Time);
        }
    }
}
