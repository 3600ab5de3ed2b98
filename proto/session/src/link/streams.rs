//! Streams to the shard's leader: a link dials, finds another server after a break, or fails.

use super::{Link, LinkEvent, LinkSettings, SessionOutput, State};
use crate::{error::SessionError, io::Effect};
use paraft_proto::{Open, PROTOCOL, to_shard::Kind};
use std::time::Duration;

/// What follows a break.
pub(super) enum Break {
    /// Another server: the one at this address, if named.
    Redial(Option<String>),
    /// The same server.
    Again,
    SessionLost,
}

impl Link {
    pub fn dial(&mut self, fixed: &LinkSettings, out: &mut SessionOutput) {
        out.dials += 1;
        self.turns(State::Dialling(out.dials), out);
        let (address, open) = (self.servers[self.next].clone(), self.open(fixed));
        out.effects.push_back(Effect::Dial { shard: self.shard, dial: out.dials, address, open });
    }

    pub(super) fn open(&self, fixed: &LinkSettings) -> Box<Open> {
        Box::new(Open {
            protocol: PROTOCOL,
            shard: self.shard.0,
            worker: fixed.worker,
            session: self.session,
            job: fixed.job.to_string(),
            founding: self.founding,
        })
    }

    pub fn tick(&mut self, now: Duration, fixed: &LinkSettings, out: &mut SessionOutput) {
        if self.deadline().is_none_or(|at| at > now) {
            return;
        }
        match self.state {
            State::Open(_) => self.looks(now, fixed, out),
            _ => self.dial(fixed, out),
        }
    }

    /// Whether `dial` is the link's stream.
    pub fn is_on(&self, dial: u64) -> bool {
        matches!(self.state, State::Dialling(d) | State::Open(d) if d == dial)
    }

    pub fn broken(&mut self, now: Duration, cause: &str, fixed: &LinkSettings, out: &mut SessionOutput) {
        self.note_cause(cause);
        self.breaks(now, Break::Redial(None), fixed, out);
    }

    pub(super) fn breaks(
        &mut self,
        now: Duration,
        how: Break,
        fixed: &LinkSettings,
        out: &mut SessionOutput,
    ) {
        // A redirect of a stream is no evidence against its connection.
        let broken = matches!(how, Break::Redial(None));
        out.effects.push_back(Effect::HangUp { shard: self.shard, broken });
        match how {
            Break::SessionLost => {
                self.drop_unacked(out);
                self.turns(State::Lost, out);
                out.heard.push_back(LinkEvent::SessionLost);
                return;
            }
            Break::Redial(to) => {
                let named = to.map(|address| self.place_of(address));
                self.next = self.search.next(self.next, named, self.servers.len());
            }
            Break::Again => {}
        }
        self.back_off(now, fixed, out);
    }

    fn back_off(&mut self, now: Duration, fixed: &LinkSettings, out: &mut SessionOutput) {
        let (since, attempt) = self.trouble.get_or_insert((now, 0));
        *attempt += 1;
        let waited = now.saturating_sub(*since);
        match fixed.retry.delay(*attempt, waited, (out.draw)()) {
            Some(Duration::ZERO) => self.dial(fixed, out),
            Some(delay) => self.turns(State::Pausing(now + delay), out),
            None => {
                let causes = std::mem::take(&mut self.causes).into_iter().collect();
                self.fails(SessionError::Unreachable { shard: self.shard, waited, causes }, out);
            }
        }
    }

    pub(super) fn fails(&mut self, e: SessionError, out: &mut SessionOutput) {
        self.turns(State::Ended, out);
        out.effects.push_back(Effect::HangUp { shard: self.shard, broken: false });
        out.heard.push_back(LinkEvent::Failed(e));
    }

    /// The index of an address in the list; a new address (of a server that joined later) is added.
    pub(super) fn place_of(&mut self, address: String) -> usize {
        self.servers.iter().position(|s| *s == address).unwrap_or_else(|| {
            self.servers.push(address);
            self.servers.len() - 1
        })
    }

    pub(super) fn note_cause(&mut self, cause: &str) {
        self.causes.insert(self.servers[self.next].clone(), cause.to_string());
    }

    /// Drops the pushes of a lost session: they will not be acknowledged.
    fn drop_unacked(&mut self, out: &mut SessionOutput) {
        out.in_flight -= self.unacked.iter().map(|(p, _)| p.payload.len()).sum::<usize>();
        self.unacked.clear();
    }

    /// Forgets the session, and opens a new one.
    pub fn reset(&mut self, now: Duration, fixed: &LinkSettings, out: &mut SessionOutput) {
        self.session = 0;
        self.drop_unacked(out);
        self.asked = None;
        self.asked_chunk = None;
        self.presence = None;
        self.settling = false;
        // It belongs to the lost session: in the new one it would skip steps that the worker is about to
        // push.
        self.retained.retain(|k| !matches!(k, Kind::Advance(_)));
        match self.state {
            State::Lost => self.dial(fixed, out),
            State::Dialling(_) | State::Open(_) => self.breaks(now, Break::Again, fixed, out),
            State::Pausing(_) | State::Ended => {}
        }
    }
}
