//! A step of a worker with weights of its own ([`paraft_common::local`]): some minibatches, then one push; or, where its weights
//! go to the servers and come back in fragments ([`paraft_common::local::Fragments`]), a push for each of them in its turn.
//!
//! ```text
//!   ┌─ Local ─▶ gradient at its weights ─▶ they move ─┐ ─▶ [Pull] ─▶ Push ─▶ Pull
//!   └──────────────── of a step ◀─────────────────────┘
//!
//!   Local  1   2   3   4   5   6 ...
//!          ──▶ PushFragment 0, Pull, TakeOver
//!                      ──▶ PushFragment 1, Pull, TakeOver ...
//! ```
//!
//! In a step every fragment has one turn, so each bucket has one push for each step. Where a checkpoint is cut behind a step, or
//! an epoch ends, the last fragment comes with a pull of everything.

use crate::trainer::{Action, State, Trainer};
use paraft_common::{Step, local::Fragments};
use paraft_session::{Pull, Pulled};
use std::ops::Range;

/// Where a worker is in a step.
pub(crate) struct Local {
    step: Step,
    /// Minibatches of the job before the step.
    before: u64,
    of: u64,
    /// Minibatches of the step that are trained.
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
    /// These buckets, which were pushed, are pulled.
    Pulling(Range<usize>),
    /// A minibatch and what comes behind it are over.
    Over,
    /// All minibatches are trained, and a pull comes ahead of the push.
    PullFirst,
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

    /// No minibatch follows: those of the step that are trained are all of it. (Fragments have their turns at minibatches of a whole
    /// step: what has had none stays this worker's.)
    pub(crate) fn cut_short(&mut self, mut local: Local) {
        if local.trained == 0 || self.o.local.rule().fragments().stream() {
            return self.finish();
        }
        local.of = local.trained;
        local.at = At::Trained;
        self.state = State::Local(local);
    }

    /// Goes on until there is something to do; `pulled`: what was asked for.
    pub(crate) fn local(&mut self, mut local: Local, pulled: Option<Pulled>) {
        let fragments = self.o.local.rule().fragments();
        let Local { step, before, of, trained: i, .. } = local;
        match std::mem::replace(&mut local.at, At::Over) {
            At::Minibatch => {
                let clock = before + i;
                self.does(Action::Local { step, clock }, State::Local(local));
            }
            At::Trained if !fragments.stream() => {
                local.at = match (i < of, self.o.local.rule().pulls_first()) {
                    (true, _) => At::Minibatch,
                    (false, false) => At::Push,
                    (false, true) => At::PullFirst,
                };
                if matches!(local.at, At::PullFirst) {
                    return self.does(Action::Pull(Pull::of(Step(step.0 - 1))), State::Local(local));
                }
                self.state = State::Local(local);
            }
            At::Trained => self.turn(local),
            At::Pulling(buckets) => {
                let Some(pulled) = pulled else { return };
                if pulled.rejoined || pulled.done != step || pulled.stop {
                    return self.stepped(None, pulled);
                }
                self.queue.push_back(Action::TakeOver(buckets));
                self.state = State::Local(local); // at `Over`
            }
            At::Over if i < of => {
                local.at = At::Minibatch;
                self.state = State::Local(local);
            }
            At::Over => self.pushed(step, local.loss_sum, local.samples),
            At::PullFirst => {
                let Some(pulled) = pulled else { return };
                if pulled.done != Step(step.0 - 1) || pulled.stop {
                    return self.stepped(None, pulled);
                }
                local.at = At::Push;
                self.state = State::Local(local);
            }
            At::Push => {
                let (samples, ask_ahead) = (local.samples as usize, !self.is_due(step));
                self.queue.push_back(Action::Push { step, samples, ask_ahead });
                self.pushed(step, local.loss_sum, local.samples);
            }
        }
    }

    /// A fragment may be due behind the minibatch.
    fn turn(&mut self, mut local: Local) {
        let fragments = self.o.local.rule().fragments();
        let Local { step, of, trained: i, .. } = local;
        let buckets = fragments.due(i, of, &self.o.layout);
        local.at = At::Over;
        if buckets.is_empty() {
            self.state = State::Local(local);
            return;
        }
        // By samples of the step, whichever of them came after this fragment's last turn.
        let samples = of as usize * self.o.batch;
        self.queue.push_back(Action::PushFragment { step, buckets: buckets.clone(), samples });
        if i == of && (self.is_due(step) || self.o.steps.ends_epoch(step)) {
            self.rest = Some(buckets);
            self.state = State::Local(local);
            return;
        }
        let pull = Pull { only: Fragments::ids(buckets.clone()), ..Pull::of(step) };
        local.at = At::Pulling(buckets);
        self.does(Action::Pull(pull), State::Local(local));
    }
}
