//! Watches a running job's servers, for the record: elections, servers that are back or drained, switches of the mode.
//!
//! It asks the servers once a second, on its own thread. After the end of a server's process it asks every
//! 20 ms until each of its shards has a new leader, so that the stall is known to about that.

use crate::{ask, files::wall};
use paraft_common::{ServerId, ShardId};
use paraft_proto::{DescribeReply, ShardStatus, StatusReply};
use paraft_record::{Incident, IncidentKind, SwitchedBy};
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    time::{Duration, Instant},
};

/// The poll interval until all of the job's shards have leaders, for [`FAST_TIMEOUT`] at most: a script may prepare data first.
const FIRST: Duration = Duration::from_millis(100);
/// The poll interval of a healthy fleet.
const SLOW: Duration = Duration::from_secs(1);
/// The poll interval while a server is away.
const MEDIUM: Duration = Duration::from_millis(250);
/// The poll interval while a shard of an ended server has no new leader.
const FAST: Duration = Duration::from_millis(20);
/// After this time without a new leader, or without the server, polls are slow again.
const FAST_TIMEOUT: Duration = Duration::from_secs(10);
/// The timeout of a query; a stopped server does not answer.
const REPLY_TIMEOUT: Duration = Duration::from_millis(500);

/// A job's watched servers, until drop.
pub(crate) struct Observer {
    /// Servers whose process has ended, and when that was noticed.
    ended: Sender<(ServerId, Instant)>,
    seen: Receiver<Incident>,
}

impl Observer {
    /// Watches the servers at these addresses for the job of this name.
    pub(crate) fn start(addresses: Vec<String>, job: String) -> Self {
        let (ended, ends) = channel::<(ServerId, Instant)>();
        let (says, seen) = channel();
        let work = move || {
            let mut view = View::new(job);
            loop {
                let pause = view.pause(Instant::now());
                match ends.recv_timeout(pause) {
                    Ok((server, at)) => view.ended(server, at),
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) => return,
                }
                let replies = ask::ask_within(&addresses, false, REPLY_TIMEOUT);
                let replies: Vec<_> = replies.into_iter().flatten().collect();
                let mut happened = view.see(&replies, Instant::now());
                // A stall is measured without this question, which may take its time.
                if pause == SLOW
                    && let Some(fleet) = ask::describe_within(&addresses, REPLY_TIMEOUT)
                {
                    happened.extend(view.drained(&fleet));
                }
                for what in happened {
                    if says.send(Incident { wall: wall(), what }).is_err() {
                        return;
                    }
                }
            }
        };
        // It ends by itself when this is dropped. Without a thread the record has no elections.
        let _ = std::thread::Builder::new().name("observer".into()).spawn(work);
        Self { ended, seen }
    }

    /// The process of this server has just ended.
    pub(crate) fn ended(&self, server: ServerId) {
        // Without its thread nothing listens.
        let _ = self.ended.send((server, Instant::now()));
    }

    /// Takes what it has seen since the last call.
    pub(crate) fn take(&self) -> Vec<Incident> {
        self.seen.try_iter().collect()
    }
}

/// What is known of a job's servers.
struct View {
    job: String,
    /// The leader of each shard, and its term.
    leaders: BTreeMap<u32, (ServerId, u64)>,
    began: Instant,
    /// When the latest shard got its first leader: the others follow soon.
    newest: Option<Instant>,
    /// Since when a leader has changed whose server does not answer: its process may have ended, which the launcher is
    /// about to notice.
    doubted: Option<Instant>,
    /// Servers that led shards when their process ended, and those shards that have no new leader.
    mourned: BTreeMap<ServerId, (Instant, BTreeSet<u32>)>,
    /// Servers that have not answered since their process ended.
    away: BTreeMap<ServerId, Instant>,
    /// Number, name and rule of the mode; the rule is empty if none is in force.
    mode: Option<(u64, String, String)>,
    /// Servers that are drained.
    drained: BTreeSet<u64>,
}

impl View {
    fn new(job: String) -> Self {
        let (leaders, mourned, away) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        let (began, newest, doubted) = (Instant::now(), None, None);
        let drained = BTreeSet::new();
        Self { job, leaders, began, newest, doubted, mourned, away, mode: None, drained }
    }

    /// The time until the next query.
    fn pause(&self, now: Instant) -> Duration {
        let waits = |since: &Instant| now.duration_since(*since) < FAST_TIMEOUT;
        let starts = match self.newest {
            Some(at) => now.duration_since(at) < SLOW,
            None => waits(&self.began),
        };
        if self.doubted.is_some() || self.mourned.values().any(|(since, _)| waits(since)) {
            FAST
        } else if starts {
            FIRST
        } else if self.away.values().any(waits) {
            MEDIUM
        } else {
            SLOW
        }
    }

    fn ended(&mut self, server: ServerId, at: Instant) {
        let led = self.leaders.iter().filter(|(_, (leader, _))| *leader == server);
        let led: BTreeSet<u32> = led.map(|(shard, _)| *shard).collect();
        if !led.is_empty() {
            self.mourned.insert(server, (at, led));
        }
        self.away.insert(server, at);
    }

    /// Takes the servers' replies of this moment; returns what has happened since those before.
    fn see(&mut self, replies: &[StatusReply], now: Instant) -> Vec<IncidentKind> {
        let mut happened = Vec::new();
        let mut led = BTreeMap::<u32, (ServerId, &ShardStatus)>::new();
        for reply in replies {
            let server = ServerId(reply.server);
            if let Some(since) = self.away.remove(&server) {
                let seconds = now.duration_since(since).as_secs_f64();
                happened.push(IncidentKind::ServerBack { server, seconds });
            }
            for s in reply.shards.iter().filter(|s| s.leads && s.buckets > 0 && s.job_name == self.job) {
                // A deposed leader that does not know it yet has the lower term.
                if led.get(&s.shard).is_none_or(|(_, known)| known.term < s.term) {
                    led.insert(s.shard, (server, s));
                }
            }
        }
        let answers = |server: ServerId| replies.iter().any(|r| r.server == server.0);
        let mut doubts = false;
        for (shard, (to, s)) in &led {
            let Some((from, term)) = self.leaders.insert(*shard, (*to, s.term)) else {
                // The first leader that is seen is no change.
                self.newest = Some(now);
                continue;
            };
            if s.term <= term {
                self.leaders.insert(*shard, (from, term));
                continue;
            }
            if !answers(from)
                && !self.mourned.contains_key(&from)
                && now.duration_since(*self.doubted.get_or_insert(now)) < SLOW
            {
                self.leaders.insert(*shard, (from, term));
                doubts = true;
                continue;
            }
            let mourned = self.mourned.get_mut(&from).filter(|(_, shards)| shards.contains(shard));
            let stall_seconds = mourned.map(|(since, shards)| {
                shards.remove(shard);
                now.duration_since(*since).as_secs_f64()
            });
            happened.push(IncidentKind::LeaderChanged {
                shard: ShardId(*shard),
                from,
                to: *to,
                term: s.term,
                stall_seconds,
                handed_over: from != *to && stall_seconds.is_none() && answers(from),
            });
        }
        if !doubts {
            self.doubted = None;
        }
        self.mourned.retain(|_, (_, shards)| !shards.is_empty());
        happened.extend(led.get(&0).and_then(|(_, s)| self.switched(s)));
        happened
    }

    /// Servers that are drained, or take part again, since the last reply of the control group's leader.
    fn drained(&mut self, fleet: &DescribeReply) -> Vec<IncidentKind> {
        let mut happened = Vec::new();
        for s in &fleet.servers {
            let changed = match s.state.as_str() {
                "draining" => self.drained.insert(s.server),
                "up" => self.drained.remove(&s.server),
                // A server that doesn't answer may be drained or not.
                _ => false,
            };
            if changed {
                let (server, undo) = (ServerId(s.server), s.state == "up");
                happened.push(IncidentKind::ServerDrained { server, undo });
            }
        }
        happened
    }

    /// A switch of the mode since the last reply of shard 0's leader.
    fn switched(&mut self, s: &ShardStatus) -> Option<IncidentKind> {
        let now = (s.mode_number, s.mode.clone(), s.mode_auto.clone());
        // A deposed leader may answer alone.
        if self.mode.as_ref().is_some_and(|(number, ..)| s.mode_number < *number) {
            return None;
        }
        let (number, from, rule) = self.mode.replace(now)?;
        if s.mode_number <= number {
            return None;
        }
        // A user's switch to a mode ends the rule, and one to `auto` begins it.
        let by = match !rule.is_empty() && !s.mode_auto.is_empty() {
            true => SwitchedBy::Rule,
            false => SwitchedBy::User,
        };
        Some(IncidentKind::ModeSwitched { number: s.mode_number, from, to: s.mode.clone(), by })
    }
}

#[cfg(test)]
#[path = "observe_tests.rs"]
mod tests;
