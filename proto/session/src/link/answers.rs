//! Messages of the shard's leader.

use super::{Link, LinkEvent, LinkSettings, SessionOutput, State, inquiry::SILENCE_TIMEOUT, streams::Break};
use crate::{
    error::SessionError,
    io::{Acked, Effect},
};
use paraft_common::{BucketId, Payload, ServerId, Step};
use paraft_proto::{
    Ack, Advice, Chunk, FromShard, Opened, Pull, Refused, Weights, WireKind, WithBulk, from_shard,
    to_shard::Kind,
};
use std::time::Duration;

impl Link {
    pub fn message(
        &mut self,
        now: Duration,
        message: WithBulk<FromShard>,
        fixed: &LinkSettings,
        out: &mut SessionOutput,
    ) {
        let WithBulk { message: FromShard { kind }, bulk } = message;
        self.quiet = now;
        if self.asking.is_some() {
            self.asks_no_more(out);
            self.changes(out, |link| link.look = Some(now + SILENCE_TIMEOUT));
        }
        let shard = self.shard;
        let broken = |what: &str| SessionError::Protocol { shard, what: what.into() };
        match kind {
            None => self.fails(broken("an empty message"), out),
            Some(from_shard::Kind::Opened(o)) => self.opened(now, &o, fixed, out),
            Some(from_shard::Kind::Refused(r)) => self.refused(now, r, fixed, out),
            Some(_) if !matches!(self.state, State::Open(_)) => {
                self.fails(broken("a message before Opened"), out);
            }
            Some(from_shard::Kind::Weights(w)) => {
                self.weights(now, w, bulk.into_iter().next().unwrap_or_default(), out);
            }
            Some(from_shard::Kind::Ack(a)) => self.ack(&a, out),
            Some(from_shard::Kind::RoundNorm(n)) => out.norms.push((shard, n.step, n.sum_of_squares)),
            Some(from_shard::Kind::Reported(r)) => {
                // The evaluation is complete: no leader needs this worker's share again.
                self.retained.retain(|k| !matches!(k, Kind::Report(s) if s.epoch == r.epoch));
                out.reported.push(r);
            }
            Some(from_shard::Kind::Acquired(t)) => {
                // The worker no longer wants an answer to an earlier request.
                if self.asked_chunk.is_some_and(|a| a.request == t.request) {
                    if t.kind() != Chunk::Wait {
                        self.asked_chunk = None;
                    }
                    out.heard.push_back(LinkEvent::Acquired(t));
                }
            }
            Some(from_shard::Kind::Resumed(r)) => {
                if matches!(self.presence, Some(Kind::Resume(_))) {
                    self.presence = None;
                    out.heard.push_back(LinkEvent::Resumed(shard, r.clock));
                }
            }
            Some(from_shard::Kind::Left(_)) => {
                self.turns(State::Ended, out);
                out.effects.push_back(Effect::HangUp { shard, broken: false });
                out.heard.push_back(LinkEvent::Left(shard));
            }
        }
    }

    pub(super) fn opened(
        &mut self,
        now: Duration,
        o: &Opened,
        fixed: &LinkSettings,
        out: &mut SessionOutput,
    ) {
        let State::Dialling(dial) = self.state else { return };
        if o.term < self.term {
            // This leader does not know what the worker did under the later leader.
            self.note_cause("it leads an earlier term than another server: it is deposed");
            let next = (self.next + 1) % self.servers.len();
            let next = self.servers[next].clone();
            return self.breaks(now, Break::Redial(Some(next)), fixed, out);
        }
        self.turns(State::Open(dial), out);
        self.term = o.term;
        self.founding = o.founding;
        self.holds = false;
        self.opened = (now, ServerId(o.server));
        if self.owes() {
            self.start_owing(now, out);
        }
        self.trouble = None;
        self.search.found();
        self.causes.clear();
        let new = self.session != o.session;
        self.session = o.session;
        if !o.initialised && self.has_initial {
            out.effects.push_back(Effect::SendInitial(self.shard));
        }
        if let Some((pull, _)) = &mut self.asked {
            pull.have.clear();
        }
        let kept = self.unacked.iter().map(|(p, _)| Kind::Push(p.clone()));
        let asked = self.asked.iter().map(|(p, _)| Kind::Pull(p.clone()));
        let take = self.asked_chunk.map(Kind::Acquire);
        let all = kept.chain(asked).chain(self.presence.clone()).chain(take);
        for kind in all.chain(self.retained.iter().cloned()) {
            self.send(kind, out);
        }
        let (shard, clock, founding) = (self.shard, o.clock, o.founding);
        out.heard.push_back(LinkEvent::Opened { shard, clock, new, founding });
    }

    fn weights(&mut self, now: Duration, weights: Weights, payload: Payload, out: &mut SessionOutput) {
        // The worker no longer wants an answer to an earlier pull, from before the session was opened again.
        let wanted =
            |p: &Pull| p.done == weights.done && (p.only.is_empty() || p.only.contains(&weights.bucket));
        let Some((pull, asked)) = self.asked.as_ref().filter(|(p, _)| wanted(p)) else { return };
        let (asked, part) = (*asked, !pull.only.is_empty());
        if weights.last {
            self.asked = None;
            // Of the other buckets the worker keeps its weights, from this stream or an earlier one.
            self.holds |= !part;
            if std::mem::take(&mut self.has_initial) {
                out.effects.push_back(Effect::InitialKnown(self.shard));
            }
        }
        out.untaken += payload.len();
        out.heard.push_back(LinkEvent::Weights { shard: self.shard, weights, payload, asked, at: now });
    }

    fn ack(&mut self, a: &Ack, out: &mut SessionOutput) {
        // An ack for a push that was acknowledged before, and then sent again, changes nothing.
        let place = self.unacked.binary_search_by_key(&a.seq, |(push, _)| push.seq);
        if let Some((push, pushed)) = place.ok().and_then(|place| self.unacked.remove(place)) {
            out.in_flight -= push.payload.len();
            let (opened, leader) = self.opened;
            out.effects.push_back(Effect::Acked(Acked {
                shard: self.shard,
                bucket: BucketId(push.bucket),
                step: Step(push.step),
                seq: push.seq,
                bytes: push.payload.len(),
                pushed,
                leader,
                opened,
                dropped: a.dropped,
            }));
            if a.dropped {
                out.heard.push_back(LinkEvent::Dropped(1));
            }
        }
        self.settled(out);
    }

    /// The stream stays open, and the worker may skip the step.
    fn is_not_finite(&mut self, r: Refused, out: &mut SessionOutput) {
        let place = self.unacked.binary_search_by_key(&r.seq, |(push, _)| push.seq);
        let Some((push, _)) = place.ok().and_then(|place| self.unacked.remove(place)) else { return };
        out.in_flight -= push.payload.len();
        let (shard, kind) = (self.shard, r.kind());
        let error = SessionError::Refused { shard, kind, message: r.message };
        out.heard.push_back(LinkEvent::NotFinite { bucket: push.bucket, step: push.step, error });
    }

    fn refused(&mut self, now: Duration, r: Refused, fixed: &LinkSettings, out: &mut SessionOutput) {
        if r.seq > 0 && r.kind() == WireKind::NotFinite {
            return self.is_not_finite(r, out);
        }
        self.note_cause(&r.message);
        // Right after a break the server may still hold the old stream.
        let recent = self.trouble.is_none_or(|(since, _)| now.saturating_sub(since) < fixed.handover);
        let how = match r.advice() {
            Advice::Redirect => Break::Redial((!r.leader.is_empty()).then_some(r.leader)),
            Advice::Retry => Break::Again,
            Advice::Stop => Break::SessionLost,
            Advice::Lost => return self.fails(SessionError::StateLost { shard: self.shard }, out),
            Advice::Fix if r.kind() == WireKind::RankTaken && recent => Break::Again,
            Advice::Fix | Advice::Unspecified => {
                let (shard, kind) = (self.shard, r.kind());
                return self.fails(SessionError::Refused { shard, kind, message: r.message }, out);
            }
        };
        self.breaks(now, how, fixed, out);
    }
}
