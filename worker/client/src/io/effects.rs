//! Carries out the session's effects.

use super::{Inner, State, moment};
use crate::{acks::Acked, outgoing::OutgoingMessage};
use paraft_session::Effect;
use paraft_trace::{Moment, Span, Stage};
use std::{sync::Arc, time::Instant};

impl Inner {
    pub(super) fn carry_out(self: &Arc<Self>, state: &mut State) {
        while let Some(effect) = state.session.next_effect() {
            match effect {
                Effect::Send(shard, message) => {
                    if let Some(stream) = state.streams.get(&shard) {
                        stream.out.send(message.into());
                    }
                }
                Effect::SendInitial(shard) => {
                    let (stream, initial) = (state.streams.get(&shard), state.initial.get(&shard));
                    if let Some((stream, (initial, buckets))) = stream.zip(initial) {
                        stream.out.send(OutgoingMessage::Initial(initial.clone().messages(buckets.clone())));
                    }
                }
                Effect::InitialKnown(shard) => drop(state.initial.remove(&shard)),
                Effect::HangUp { shard, broken } => {
                    let stream = state.streams.remove(&shard).filter(|_| broken);
                    if let Some((stream, connecting)) =
                        stream.as_ref().and_then(|s| Some((s, s.connection.get()?)))
                    {
                        self.channels.broken(&stream.address, connecting);
                    }
                }
                Effect::Dial { shard, dial, address, open } => {
                    let stream = self.dial((shard, dial), address, *open, false);
                    state.streams.insert(shard, stream);
                }
                Effect::Ask { shard, dial, address, open } => {
                    let stream = self.dial((shard, dial), address, *open, true);
                    state.beside.insert(shard, stream);
                }
                Effect::AskNoMore(shard) => drop(state.beside.remove(&shard)),
                Effect::Turn(shard) => {
                    if let Some(stream) = state.beside.remove(&shard) {
                        let (worker, address) = (self.worker, &stream.address);
                        tracing::info!(%worker, %shard, %address, "the leader is silent; here is its successor");
                        state.said.remove(&shard);
                        state.streams.insert(shard, stream);
                    }
                }
                Effect::Acked(a) => self.acked(state, &a),
            }
        }
        if state.session.deadline() != state.armed {
            self.deadline.notify_one();
        }
    }

    fn acked(&self, state: &State, a: &paraft_session::Acked) {
        self.stages.note(Span {
            stage: Stage::Push,
            begin: moment(a.pushed),
            end: Moment::now(),
            step: a.step,
            shard: a.shard,
            bucket: Some(a.bucket),
            worker: Some(self.worker),
            bytes: a.bytes as u64,
            pass: None,
        });
        if let Some(watcher) = state.watcher.as_ref().filter(|_| !a.dropped) {
            let (epoch, then) = self.epoch;
            let _ = watcher.send(Acked {
                shard: a.shard,
                bucket: a.bucket,
                seq: a.seq,
                leader: a.leader,
                opened: epoch + a.opened.saturating_sub(then),
                at: Instant::now(),
            });
        }
    }
}
