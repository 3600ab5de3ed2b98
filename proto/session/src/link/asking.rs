//! A leader that is open, owes an answer and says nothing may hang. Then other servers are asked, one after the other, on a stream
//! beside its own. Only a leader of a later term is taken for it: what is merely slow is not left.

use super::{Fixed, Link, Outlet, State};
use crate::io::Effect;
use paraft_proto::{Advice, from_shard};
use std::time::Duration;

/// A leader that owes an answer is asked about after so long without a word of it. Longer than what a fleet takes that is well,
/// about what followers take to find a silent leader out.
pub(super) const PATIENCE: Duration = Duration::from_millis(500);
/// From the first such ask to the next, and from there on twice as long each time: the election may be under way. Where the answer
/// waits for other workers that is a handful of asks.
const ASK_AGAIN: Duration = Duration::from_millis(100);

/// Others are asked about a silent leader.
#[derive(Default)]
pub(super) struct Asking {
    /// So often.
    times: u32,
    /// The stream on which one is asked, and the place of its server.
    stream: Option<(u64, usize)>,
    /// It was named by one that was asked.
    named: bool,
}

impl Link {
    pub(super) fn owes(&self) -> bool {
        !self.unacked.is_empty() || self.asked.is_some()
    }

    /// The leader owes something, and did not before.
    pub(super) fn owes_from(&mut self, now: Duration, out: &mut Outlet) {
        self.quiet = now;
        // A look that is due finds out. There is one at most each half second, however many pushes there are.
        if self.look.is_none() && matches!(self.state, State::Open(_)) && self.servers.len() > 1 {
            self.changes(out, |link| link.look = Some(now + PATIENCE));
        }
    }

    pub(super) fn looks(&mut self, now: Duration, fixed: &Fixed, out: &mut Outlet) {
        let due = self.quiet + PATIENCE;
        if !self.owes() {
            self.changes(out, |link| link.look = None);
        } else if now < due {
            self.changes(out, |link| link.look = Some(due));
        } else {
            let times = self.asking.as_ref().map_or(0, |a| a.times);
            // All but the one that is silent.
            let others = self.servers.len() - 1;
            let place = times as usize % others;
            let place = if place < self.next { place } else { place + 1 };
            self.asks(
                place,
                Asking { times: times.saturating_add(1), stream: None, named: false },
                fixed,
                out,
            );
            let again = ASK_AGAIN.saturating_mul(1 << times.min(20));
            self.changes(out, |link| link.look = Some(now + again));
        }
    }

    fn asks(&mut self, place: usize, asking: Asking, fixed: &Fixed, out: &mut Outlet) {
        out.dials += 1;
        self.asking = Some(Asking { stream: Some((out.dials, place)), ..asking });
        let (address, open) = (self.servers[place].clone(), self.open(fixed));
        out.effects.push_back(Effect::Ask { shard: self.shard, dial: out.dials, address, open });
    }

    pub(super) fn asks_no_more(&mut self, out: &mut Outlet) {
        if self.asking.take().is_some_and(|a| a.stream.is_some()) {
            out.effects.push_back(Effect::AskNoMore(self.shard));
        }
    }

    /// Whether it is the stream on which another is asked.
    pub fn asks_on(&self, dial: u64) -> bool {
        self.asking.as_ref().and_then(|a| a.stream).is_some_and(|(d, _)| d == dial)
    }

    /// The one that was asked answers; `None`: its stream ended.
    pub fn answered(
        &mut self,
        now: Duration,
        kind: Option<from_shard::Kind>,
        fixed: &Fixed,
        out: &mut Outlet,
    ) {
        let Some(asking) = &mut self.asking else { return };
        let Some((dial, place)) = asking.stream.take() else { return };
        let (times, named) = (asking.times, asking.named);
        match kind {
            // Whatever the silent one does yet, nothing of it counts any more.
            Some(from_shard::Kind::Opened(o)) if o.term > self.term => {
                out.effects.push_back(Effect::HangUp { shard: self.shard, broken: true });
                out.effects.push_back(Effect::Turn(self.shard));
                self.next = place;
                self.turns(State::Dialling(dial), out);
                return self.opened(now, &o, fixed, out);
            }
            Some(from_shard::Kind::Refused(r)) if r.advice() == Advice::Redirect && !r.leader.is_empty() => {
                let leader = self.place_of(r.leader);
                // Names may be old: of each that is asked only one is followed.
                if leader != self.next && leader != place && !named {
                    return self.asks(leader, Asking { times, stream: None, named: true }, fixed, out);
                }
            }
            // It leads an earlier term and does not know, cannot say yet who leads, or is not there.
            _ => {}
        }
        out.effects.push_back(Effect::AskNoMore(self.shard));
    }
}
