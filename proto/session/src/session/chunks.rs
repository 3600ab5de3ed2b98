//! Chunks of the data, for the leased sampler: shard 0 assigns them to workers.

use super::{
    Session, Wait,
    events::{Event, Next},
};
use crate::error::SessionError;
use paraft_common::ShardId;
use paraft_proto::{Acquire, Acquired, Chunk};
use std::collections::{BTreeMap, BTreeSet};

/// A wait for a chunk.
pub(super) struct ChunkWait {
    epoch: u64,
    done: Option<u64>,
    state: State,
}

enum State {
    /// Some pushes of the finished chunk are not acknowledged.
    Settling(BTreeSet<ShardId>),
    /// Shard 0 was asked.
    Asked {
        idle: bool,
    },
    /// Every shard is notified that the worker trains again; then the worker does this.
    Resuming {
        taken: Acquired,
        clocks: BTreeMap<ShardId, u64>,
    },
    Answered(Next),
}

impl ChunkWait {
    pub fn settled(&mut self, shard: ShardId) {
        if let State::Settling(waiting) = &mut self.state {
            waiting.remove(&shard);
        }
    }

    pub fn resumed(&mut self, shard: ShardId, clock: u64) {
        if let State::Resuming { clocks, .. } = &mut self.state {
            clocks.insert(shard, clock);
        }
    }
}

impl Session {
    /// Reports the finished chunk (`done`), and asks for the next, for a worker that is ready for `epoch`
    /// (from 0); ends with [`Event::Chunk`].
    ///
    /// Waits until the pushes of the chunk are acknowledged, then for an answer. While others hold the last
    /// chunks of an epoch, the worker is idle: it blocks no other, and gets a chunk that is given back.
    pub fn take_chunk(&mut self, epoch: u64, done: Option<u64>) {
        let waiting = if done.is_some() { self.settling() } else { BTreeSet::new() };
        self.wait = Wait::Chunk(ChunkWait { epoch, done, state: State::Settling(waiting) });
    }

    /// Advances as far as it can; returns the answer, if there is one.
    pub(super) fn chunk(&mut self) -> Option<Event> {
        let Wait::Chunk(chunks) = &mut self.wait else { return None };
        match &mut chunks.state {
            State::Settling(waiting) if waiting.is_empty() => {
                self.requests += 1;
                let take = Acquire { request: self.requests, epoch: chunks.epoch, done: chunks.done };
                chunks.state = State::Asked { idle: false };
                if let Some(link) = self.links.get_mut(&ShardId(0)) {
                    link.take(take, &mut self.out);
                }
                None
            }
            State::Resuming { taken, clocks } if clocks.len() == self.links.len() => {
                let (taken, clocks) = (*taken, std::mem::take(clocks));
                let step = self.advance(clocks);
                self.wait = Wait::Nothing;
                let Acquired { epoch, chunk, write, .. } = taken;
                Some(Event::Chunk(match taken.kind() {
                    Chunk::Over => Next::Over { epochs: epoch, write, step },
                    _ => Next::Train { epoch, chunk, resumed: Some(step) },
                }))
            }
            State::Answered(next) => {
                let next = *next;
                self.wait = Wait::Nothing;
                Some(Event::Chunk(next))
            }
            _ => None,
        }
    }

    pub(super) fn taken(&mut self, taken: &Acquired) -> Result<Option<Event>, SessionError> {
        let Wait::Chunk(chunks) = &mut self.wait else { return Ok(None) };
        let State::Asked { idle } = &mut chunks.state else { return Ok(None) };
        if taken.request != self.requests {
            return Ok(None);
        }
        let (out, links) = (&mut self.out, &mut self.links);
        match taken.kind() {
            Chunk::Wait if *idle => {}
            Chunk::Wait => {
                *idle = true;
                links.values_mut().for_each(|l| l.pause(out));
            }
            Chunk::Train if !*idle => {
                let Acquired { epoch, chunk, .. } = *taken;
                chunks.state = State::Answered(Next::Train { epoch, chunk, resumed: None });
            }
            kind @ (Chunk::Train | Chunk::Over) => {
                links.values_mut().for_each(|l| l.resume(kind == Chunk::Over, out));
                chunks.state = State::Resuming { taken: *taken, clocks: BTreeMap::new() };
            }
            Chunk::Ended => chunks.state = State::Answered(Next::Ended),
            Chunk::Unspecified => {
                let what = "an answer to Acquire that says nothing".to_string();
                return Err(SessionError::Protocol { shard: ShardId(0), what });
            }
        }
        Ok(None)
    }
}
