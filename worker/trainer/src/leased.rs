//! The leased sampler: chunks of the data that shard 0 gives out.
//!
//! ```text
//!   Pull ─▶ ┌─ TakeChunk ─▶ Chunk ─▶ its minibatches: Gradient, Pull ─▶ ChunkDone ─┐
//!           └─────┴─[epoch over: Pull, Checkpoint, Evaluate]◀──────────────────────┘
//! ```
//!
//! A chunk counts as done when every shard has acknowledged its last push. If a worker dies or loses its session
//! before, another worker gets the whole chunk.

use crate::{
    action::{Action, Stepped},
    trainer::{State, Trainer, mean},
};
use paraft_common::{Step, config::ChunkPlan};
use paraft_session::{Next, Pull, Pulled};
use std::time::Duration;

/// How often the last checkpoint waits for an obstacle on a server, such as an image that is being fetched.
const MAX_TRIES: u32 = 100;
const RETRY_DELAY: Duration = Duration::from_millis(50);

/// A worker's state.
pub(crate) struct Leased {
    chunks: ChunkPlan,
    /// Epochs that are over, as far as the worker knows.
    epochs: u64,
    /// The trained chunk that the worker has not reported yet.
    trained: Option<u64>,
    at: At,
}

enum At {
    /// Ready to ask for a chunk.
    Ask,
    Asked,
    /// Pull after a pause, then train this chunk.
    Resumed(u64),
    /// The loop prepares the chunk's minibatches.
    Preparing(u64),
    /// This many minibatches of the chunk are left.
    Chunk {
        chunk: u64,
        left: u64,
    },
    /// The loop computes one of its minibatches.
    Gradient {
        chunk: u64,
        left: u64,
        step: Step,
    },
    /// Its gradient is pushed; the pull follows.
    Behind {
        chunk: u64,
        left: u64,
        loss: f32,
    },
    /// The pull between epochs: how many are over, and how many attempts a due checkpoint has had.
    Over {
        epochs: u64,
        due: bool,
        tries: u32,
    },
    /// The session was lost.
    Rejoined,
}

impl Trainer {
    pub(crate) fn begin_leased(&mut self, chunks: ChunkPlan, pulled: &Pulled) {
        (self.done, self.stop) = (pulled.done, pulled.stop);
        self.queue.push_back(Action::Begin(self.done));
        self.state = State::Leased(Leased { chunks, epochs: self.o.begun, trained: None, at: At::Ask });
    }

    pub(crate) fn leased(&mut self, mut l: Leased) {
        if self.stop {
            return self.finish();
        }
        match l.at {
            At::Ask => {
                let (epoch, done) = (l.epochs, l.trained.take());
                l.at = At::Asked;
                self.queue_action(Action::TakeChunk { epoch, done }, State::Leased(l));
            }
            At::Chunk { chunk, left: 0 } => {
                self.queue.push_back(Action::ChunkDone { epoch: l.epochs, chunk });
                (l.trained, l.at) = (Some(chunk), At::Ask);
                self.state = State::Leased(l);
            }
            At::Chunk { chunk, left } => {
                let step = self.done.next();
                l.at = At::Gradient { chunk, left, step };
                self.queue_action(
                    Action::Gradient { step, ask_ahead: true, continues: false },
                    State::Leased(l),
                );
            }
            _ => panic!("an answer was of another action"),
        }
    }

    pub(crate) fn took_chunk(&mut self, mut l: Leased, next: Next) {
        match next {
            Next::Train { epoch, chunk, resumed } => {
                l.epochs = epoch;
                match resumed {
                    None => {
                        l.at = At::Preparing(chunk);
                        self.queue_action(Action::Chunk { epoch, chunk }, State::Leased(l));
                    }
                    Some(step) => {
                        l.at = At::Resumed(chunk);
                        self.queue_action(Action::Pull(Pull::of(step)), State::Leased(l));
                    }
                }
            }
            Next::Over { epochs, write, step } => {
                // A job that resumes from a checkpoint passes here first, and already has that checkpoint.
                let last = epochs == l.chunks.epochs;
                let may = epochs > self.o.begun && (last || !self.rests);
                let due = write && may && self.o.due.is_some_and(|d| d.after(epochs));
                if due {
                    self.queue.push_back(Action::WriteAfter { step, epochs, last });
                }
                l.at = At::Over { epochs, due, tries: if last { MAX_TRIES } else { 1 } };
                self.queue_action(Action::Pull(Pull { checkpoint: due, ..Pull::of(step) }), State::Leased(l));
            }
            Next::Rejoined(step) => {
                l.at = At::Rejoined;
                self.queue_action(Action::Pull(Pull::of(step)), State::Leased(l));
            }
            Next::Ended => self.finish(),
        }
    }

    pub(crate) fn begin_chunk(&mut self, mut l: Leased, minibatches: u64) {
        if let At::Preparing(chunk) = l.at {
            l.at = At::Chunk { chunk, left: minibatches };
        }
        self.state = State::Leased(l);
    }

    pub(crate) fn trained_leased(&mut self, mut l: Leased, sum: f64, samples: u64) {
        let At::Gradient { chunk, left, step } = l.at else { panic!("nothing was to be trained") };
        let loss = mean(sum, samples);
        l.at = At::Behind { chunk, left, loss };
        self.queue.push_back(Action::Pushed { step, loss, samples });
        self.queue_action(Action::Pull(Pull::of(step)), State::Leased(l));
    }

    pub(crate) fn pulled_leased(&mut self, mut l: Leased, pulled: Pulled) {
        let before = self.done;
        self.done = pulled.done;
        self.stop |= pulled.stop;
        let rejoined = pulled.rejoined || matches!(l.at, At::Rejoined);
        if rejoined {
            l.trained = None;
            self.queue.push_back(Action::Moved { step: before, done: self.done, rejoined });
        }
        let continues = !rejoined && !self.stop;
        let at = std::mem::replace(&mut l.at, At::Ask);
        match at {
            At::Resumed(chunk) if continues => {
                l.at = At::Preparing(chunk);
                return self.queue_action(Action::Chunk { epoch: l.epochs, chunk }, State::Leased(l));
            }
            At::Behind { chunk, left, loss } => {
                let (done, epoch) = (self.done, l.epochs + 1);
                self.queue.push_back(Action::Stepped(Stepped { done, epoch, loss, ends: false }));
                match continues {
                    true => l.at = At::Chunk { chunk, left: left - 1 },
                    false => self.queue.push_back(Action::DropChunk),
                }
            }
            At::Over { epochs, due, tries } if !rejoined => {
                if due && !pulled.checkpoint && tries > 1 {
                    self.queue.push_back(Action::Wait(RETRY_DELAY));
                    l.at = At::Over { epochs, due, tries: tries - 1 };
                    let pull = Pull { checkpoint: true, ..Pull::of(self.done) };
                    return self.queue_action(Action::Pull(pull), State::Leased(l));
                }
                l.epochs = epochs;
                self.queue.push_back(Action::EpochOver { epochs, done: self.done });
                let last = epochs == l.chunks.epochs;
                if self.o.evaluates.epochs || last {
                    self.evaluate(epochs);
                }
                // All pushes are acknowledged, and no worker has anything left to push.
                self.evaluated = last.then_some(epochs);
                if due {
                    self.queue.push_back(Action::Checkpoint(pulled));
                }
            }
            // The worker asks again, and passes here again.
            _ => {}
        }
        self.state = State::Leased(l);
    }
}
