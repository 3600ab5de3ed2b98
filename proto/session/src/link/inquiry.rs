//! An open leader that owes an answer and is silent may hang. Then the link asks other servers, one after the
//! other, on a second stream. It changes only to a leader of a later term: it does not leave a leader that is
//! merely slow.

use super::{Link, LinkSettings, SessionOutput, State};
use crate::io::Effect;
use paraft_proto::{Advice, from_shard};
use std::time::Duration;

/// Timeout for a silent leader that owes an answer; then others are asked. Longer than a healthy fleet takes,
/// and about as long as followers take to detect a silent leader.
pub(super) const SILENCE_TIMEOUT: Duration = Duration::from_millis(500);
/// Pause from the first question to the next, doubled each time: an election may be in progress. If the
/// answer waits for other workers, that is a handful of questions.
const ASK_INTERVAL: Duration = Duration::from_millis(100);

/// The questions to other servers about a silent leader.
#[derive(Default)]
pub(super) struct LeaderInquiry {
    /// Number of questions so far.
    times: u32,
    /// The current question's stream, and the index of its server.
    stream: Option<(u64, usize)>,
    /// Another asked server has named it.
    named: bool,
}

impl Link {
    pub(super) fn owes(&self) -> bool {
        !self.unacked.is_empty() || self.asked.is_some()
    }

    /// The leader owes an answer from now on.
    pub(super) fn start_owing(&mut self, now: Duration, out: &mut SessionOutput) {
        self.quiet = now;
        // The next check will notice. There is at most one each half second, however many pushes there are.
        if self.look.is_none() && matches!(self.state, State::Open(_)) && self.servers.len() > 1 {
            self.changes(out, |link| link.look = Some(now + SILENCE_TIMEOUT));
        }
    }

    pub(super) fn looks(&mut self, now: Duration, fixed: &LinkSettings, out: &mut SessionOutput) {
        let due = self.quiet + SILENCE_TIMEOUT;
        if !self.owes() {
            self.changes(out, |link| link.look = None);
        } else if now < due {
            self.changes(out, |link| link.look = Some(due));
        } else {
            let times = self.asking.as_ref().map_or(0, |a| a.times);
            // All servers except the silent one.
            let others = self.servers.len() - 1;
            let place = times as usize % others;
            let place = if place < self.next { place } else { place + 1 };
            self.asks(
                place,
                LeaderInquiry { times: times.saturating_add(1), stream: None, named: false },
                fixed,
                out,
            );
            let again = ASK_INTERVAL.saturating_mul(1 << times.min(20));
            self.changes(out, |link| link.look = Some(now + again));
        }
    }

    fn asks(&mut self, place: usize, asking: LeaderInquiry, fixed: &LinkSettings, out: &mut SessionOutput) {
        out.dials += 1;
        self.asking = Some(LeaderInquiry { stream: Some((out.dials, place)), ..asking });
        let (address, open) = (self.servers[place].clone(), self.open(fixed));
        out.effects.push_back(Effect::Ask { shard: self.shard, dial: out.dials, address, open });
    }

    pub(super) fn asks_no_more(&mut self, out: &mut SessionOutput) {
        if self.asking.take().is_some_and(|a| a.stream.is_some()) {
            out.effects.push_back(Effect::AskNoMore(self.shard));
        }
    }

    /// Whether it is the stream of the current question.
    pub fn is_question_stream(&self, dial: u64) -> bool {
        self.asking.as_ref().and_then(|a| a.stream).is_some_and(|(d, _)| d == dial)
    }

    /// Takes the answer of the asked server; `None`: its stream ended.
    pub fn answered(
        &mut self,
        now: Duration,
        kind: Option<from_shard::Kind>,
        fixed: &LinkSettings,
        out: &mut SessionOutput,
    ) {
        let Some(asking) = &mut self.asking else { return };
        let Some((dial, place)) = asking.stream.take() else { return };
        let (times, named) = (asking.times, asking.named);
        match kind {
            // Whatever the silent leader still does, it no longer counts.
            Some(from_shard::Kind::Opened(o)) if o.term > self.term => {
                out.effects.push_back(Effect::HangUp { shard: self.shard, broken: true });
                out.effects.push_back(Effect::Turn(self.shard));
                self.next = place;
                self.turns(State::Dialling(dial), out);
                return self.opened(now, &o, fixed, out);
            }
            Some(from_shard::Kind::Refused(r)) if r.advice() == Advice::Redirect && !r.leader.is_empty() => {
                let leader = self.place_of(r.leader);
                // Names may be outdated: only one name of each asked server is followed.
                if leader != self.next && leader != place && !named {
                    return self.asks(leader, LeaderInquiry { times, stream: None, named: true }, fixed, out);
                }
            }
            // It leads an earlier term without knowing, does not know the leader yet, or is down.
            _ => {}
        }
        out.effects.push_back(Effect::AskNoMore(self.shard));
    }
}
