//! A step of workers that run the optimizer themselves, each on the mean gradient: they pull the mean, all compute the
//! same result, and each writes a share of it.
//!
//! ```text
//!   Gradient ─▶ (its pushes) ─▶ Pushed ─▶ Pull of the mean ─▶ Apply ─▶ WriteResults ─▶ Pull ─▶ Stepped
//! ```
//!
//! The last pull waits until every result is written. It brings only what the worker does not have.

use crate::{
    action::Action,
    trainer::{State, Trainer},
};
use paraft_common::{Step, local::Fragments};
use paraft_session::{Pull, Pulled};

impl Trainer {
    /// Whether the workers run the optimizer on the mean.
    pub(crate) fn takes_means(&self) -> bool {
        !self.o.layout.results().is_empty()
    }

    /// The step's gradient is pushed.
    pub(crate) fn pull_mean(&mut self, step: Step, loss: f32) {
        let means = 0..self.o.layout.results().start;
        let pull = Pull { only: Fragments::ids(means), ..Pull::of(step) };
        self.queue_action(Action::Pull(pull), State::PullsMean { step, loss });
    }

    pub(crate) fn pulled_mean(&mut self, step: Step, loss: f32, pulled: Pulled) {
        self.stop |= pulled.stop;
        if pulled.rejoined || pulled.done != step {
            // It has everything as the servers have it, also if that is the result of this very step.
            let (done, rejoined) = (pulled.done, pulled.rejoined);
            (self.done, self.o.share) = (done, pulled.share.unwrap_or(self.o.share));
            self.queue.push_back(Action::Moved { step, done, rejoined });
            self.queue.push_back(Action::Begin(done));
            return self.state = State::Next;
        }
        self.queue_action(Action::Apply(step), State::Applies { step, loss });
    }

    /// Reports that [`Action::Apply`] is done.
    pub fn applied(&mut self) {
        self.unanswered = false;
        let State::Applies { step, loss } = std::mem::replace(&mut self.state, State::Next) else {
            panic!("nothing was to be applied");
        };
        self.queue.push_back(Action::WriteResults { step, share: self.o.share });
        self.pull_behind(step, loss);
    }
}
