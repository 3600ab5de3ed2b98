//! Chunks of the data, for the leased sampler: shard 0 says who trains which.

use crate::{
    Client, ClientError,
    client::{Command, Event},
};
use paraft_common::{ShardId, Step};
use paraft_proto::{Chunk, Take, Taken};
use std::{
    collections::{BTreeMap, BTreeSet},
    time::Instant,
};

/// What to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Train this chunk.
    Train {
        /// Of this epoch, from 0.
        epoch: u64,
        /// From 0.
        chunk: u64,
        /// The worker had to wait and was not waited for: its weights are old. It goes on from this step, once it has
        /// pulled.
        resumed: Option<Step>,
    },
    /// So many epochs are over. Nobody trains before every worker has asked for a chunk of the next.
    Over {
        /// How many.
        epochs: u64,
        /// This worker is to write the checkpoint, if the job makes any.
        write: bool,
        /// The step that all workers go on from. Pull, to see what the others have pushed.
        step: Step,
    },
    /// There is nothing more to train.
    Ended,
    /// The session was lost, and with it the chunk: the worker has joined anew and goes on from this step, once it has
    /// pulled.
    Rejoined(Step),
}

enum Heard {
    Event(Event),
    Rejoined(Step),
}

impl Client {
    /// Says which chunk is trained (`done`), and asks for the next, for a worker that is ready for `epoch` (from 0).
    ///
    /// Waits until the pushes of the chunk are acknowledged, then until there is an answer. While others hold the last
    /// chunks of an epoch the worker rests: it holds nobody up, and gets a chunk that is given back.
    pub fn take_chunk(&mut self, epoch: u64, done: Option<u64>) -> Result<Next, ClientError> {
        let began = Instant::now();
        let next = self.next_chunk(epoch, done);
        self.counters.waited += began.elapsed();
        next
    }

    fn next_chunk(&mut self, epoch: u64, done: Option<u64>) -> Result<Next, ClientError> {
        if done.is_some()
            && let Some(step) = self.flush()?
        {
            return Ok(Next::Rejoined(step));
        }
        self.takes += 1;
        let request = self.takes;
        self.send(ShardId(0), Command::Take(Take { request, epoch, done }));
        let mut rests = false;
        loop {
            let taken = match self.hear()? {
                Heard::Rejoined(step) => return Ok(Next::Rejoined(step)),
                Heard::Event(Event::Taken(taken)) if taken.request == request => taken,
                Heard::Event(_) => continue,
            };
            let Taken { epoch, chunk, write, .. } = taken;
            match taken.kind() {
                Chunk::Wait if rests => {}
                Chunk::Wait => {
                    rests = true;
                    for link in self.links.values() {
                        let _ = link.send(Command::Rest);
                    }
                }
                Chunk::Train if rests => {
                    let next = |step| Next::Train { epoch, chunk, resumed: Some(step) };
                    return Ok(self.resume(false)?.map_or_else(Next::Rejoined, next));
                }
                Chunk::Train => return Ok(Next::Train { epoch, chunk, resumed: None }),
                Chunk::Over => {
                    let next = |step| Next::Over { epochs: epoch, write, step };
                    return Ok(self.resume(true)?.map_or_else(Next::Rejoined, next));
                }
                Chunk::Ended => return Ok(Next::Ended),
                Chunk::Unspecified => {
                    let what = "an answer to Take that says nothing".to_string();
                    return Err(ClientError::Protocol { shard: ShardId(0), what });
                }
            }
        }
    }

    /// Waits until every push is acknowledged; the new step, if the session was lost meanwhile.
    pub(crate) fn flush(&mut self) -> Result<Option<Step>, ClientError> {
        for link in self.links.values() {
            let _ = link.send(Command::Flush);
        }
        let mut waiting: BTreeSet<ShardId> = self.links.keys().copied().collect();
        while !waiting.is_empty() {
            match self.hear()? {
                Heard::Rejoined(step) => return Ok(Some(step)),
                Heard::Event(Event::Flushed(shard)) => {
                    waiting.remove(&shard);
                }
                Heard::Event(_) => {}
            }
        }
        Ok(None)
    }

    /// Goes on on every shard, all from the same step. `Err` in the result: the session was lost, and it goes on from
    /// there.
    fn resume(&mut self, level: bool) -> Result<Result<Step, Step>, ClientError> {
        for link in self.links.values() {
            let _ = link.send(Command::Resume { level });
        }
        let mut clocks = BTreeMap::new();
        while clocks.len() < self.links.len() {
            match self.hear()? {
                Heard::Rejoined(step) => return Ok(Err(step)),
                Heard::Event(Event::Resumed(shard, clock)) => {
                    clocks.insert(shard, clock);
                }
                Heard::Event(_) => {}
            }
        }
        Ok(Ok(self.advance(clocks)))
    }

    /// The next event that is not about every wait alike.
    fn hear(&mut self) -> Result<Heard, ClientError> {
        loop {
            match self.next()? {
                Event::Reported(r) => self.reported(r),
                // A new leader: the link has asked again.
                Event::Opened { new: false, .. } => {}
                Event::Opened { new: true, .. } | Event::SessionLost => {
                    self.reset();
                    return Ok(Heard::Rejoined(self.opened()?));
                }
                Event::Failed(e) => return Err(e),
                event => return Ok(Heard::Event(event)),
            }
        }
    }
}
