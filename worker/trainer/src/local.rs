//! A step of a worker with its own weights ([`paraft_common::local`]): several minibatches, then one push. With
//! streamed fragments ([`paraft_common::local::Fragments`]) each fragment is pushed and pulled in its turn.
//!
//! ```text
//!   ┌─ Local ─▶ gradient at its weights ─▶ they move ─┐ ─▶ Push ─▶ Pull
//!   └──────────────── of a step ◀─────────────────────┘
//!
//!   Local  1   2   3   4   5   6 ...
//!          ──▶ PushFragment 0, Pull, TakeOver
//!                      ──▶ PushFragment 1, Pull, TakeOver ...
//! ```
//!
//! Every fragment has one turn in a step, so each bucket has one push per step. If a step is cut into a checkpoint
//! or evaluated, or ends an epoch, the last fragment arrives with a pull of everything.

use crate::{
    action::Action,
    trainer::{State, Trainer},
};
use paraft_common::{Step, local::Fragments};
use paraft_session::{Pull, Pulled};
use std::ops::Range;

/// A worker's position within a step.
pub(crate) struct Local {
    step: Step,
    /// Minibatches of the job before this step.
    before: u64,
    of: u64,
    /// Trained minibatches of this step.
    trained: u64,
    loss_sum: f64,
    samples: u64,
    at: At,
}

enum At {
    /// The next minibatch.
    Minibatch,
    /// A minibatch is trained; a fragment may be due.
    Trained,
    /// The pull of these pushed buckets.
    Pulling(Range<usize>),
    /// A minibatch and its fragments are done.
    Over,
    /// All minibatches are trained.
    Push,
}

impl Trainer {
    pub(crate) fn begin_local(&mut self, step: Step) {
        let (before, of) = (self.o.steps.minibatches_before(step), self.o.steps.minibatches_of(step));
        let at = At::Minibatch;
        self.state = State::Local(Local { step, before, of, trained: 0, loss_sum: 0.0, samples: 0, at });
    }

    pub(crate) fn trained_local(&mut self, mut local: Local, sum: f64, samples: u64) {
        local.trained += 1;
        local.loss_sum += sum;
        local.samples += samples;
        local.at = At::Trained;
        self.state = State::Local(local);
    }

    /// No minibatch follows: the step consists of the trained ones. (Fragments have their turns within a full step,
    /// so a fragment without a turn stays with this worker.)
    pub(crate) fn cut_short(&mut self, mut local: Local) {
        if local.trained == 0 || self.o.local.fragments().stream() {
            return self.finish();
        }
        local.of = local.trained;
        local.at = At::Trained;
        self.state = State::Local(local);
    }

    /// Continues until there is an action. `pulled`: the answer to the last pull.
    pub(crate) fn local(&mut self, mut local: Local, pulled: Option<Pulled>) {
        let fragments = self.o.local.fragments();
        let Local { step, before, of, trained: i, .. } = local;
        match std::mem::replace(&mut local.at, At::Over) {
            At::Minibatch => {
                let clock = before + i;
                self.queue_action(Action::Local { step, clock }, State::Local(local));
            }
            At::Trained if !fragments.stream() => {
                local.at = if i < of { At::Minibatch } else { At::Push };
                self.state = State::Local(local);
            }
            At::Trained => self.turn(local),
            At::Pulling(buckets) => {
                let Some(pulled) = pulled else { return };
                if pulled.rejoined || pulled.done != step || pulled.stop {
                    return self.stepped(None, pulled);
                }
                self.queue.push_back(Action::TakeOver(buckets));
                self.state = State::Local(local); // with `At::Over`
            }
            At::Over if i < of => {
                local.at = At::Minibatch;
                self.state = State::Local(local);
            }
            At::Over => self.pushed(step, local.loss_sum, local.samples),
            At::Push => {
                let (samples, ask_ahead) = (local.samples as usize, !self.is_due(step));
                self.queue.push_back(Action::Push { step, samples, ask_ahead });
                self.pushed(step, local.loss_sum, local.samples);
            }
        }
    }

    /// Checks whether a fragment is due after the minibatch.
    fn turn(&mut self, mut local: Local) {
        let fragments = self.o.local.fragments();
        let Local { step, of, trained: i, .. } = local;
        let buckets = fragments.due(i, of, &self.o.layout);
        local.at = At::Over;
        if buckets.is_empty() {
            self.state = State::Local(local);
            return;
        }
        // Weigh by the samples of the whole step, including those after this fragment's last turn.
        let samples = of as usize * self.o.batch;
        self.queue.push_back(Action::PushFragment { step, buckets: buckets.clone(), samples });
        if i == of && self.needs_all_after(step) {
            self.rest = Some(buckets);
            self.state = State::Local(local);
            return;
        }
        let pull = Pull { only: Fragments::ids(buckets.clone()), ..Pull::of(step) };
        local.at = At::Pulling(buckets);
        self.queue_action(Action::Pull(pull), State::Local(local));
    }
}
