//! The state machine, and the steps of a worker without its own weights.

use crate::{
    action::{Action, Stepped},
    leased::Leased,
    local::Local,
    options::Options,
    steps::CheckpointSteps,
};
use paraft_common::{Share, Step};
use paraft_session::{Next, Pull, Pulled};
use std::{collections::VecDeque, mem, ops::Range};

/// The worker's current activity.
pub(crate) enum State {
    /// Ready to start a step.
    Next,
    First,
    Gradient(Step),
    Local(Local),
    /// A step is pushed completely.
    Pushed {
        step: Step,
        loss: f32,
    },
    /// The pull of its mean gradient.
    PullsMean {
        step: Step,
        loss: f32,
    },
    /// The optimizer runs on the mean.
    Applies {
        step: Step,
        loss: f32,
    },
    /// The pull after it.
    Behind {
        step: Step,
        loss: f32,
    },
    Leased(Leased),
    /// The weights after every worker has trained everything.
    Barrier,
    Final,
    Ended,
}

/// See the [crate](crate).
pub struct Trainer {
    pub(crate) o: Options,
    pub(crate) state: State,
    /// Actions that precede the next decision.
    pub(crate) queue: VecDeque<Action>,
    pub(crate) done: Step,
    /// A pushed fragment that arrives with a pull of everything.
    pub(crate) rest: Option<Range<usize>>,
    pub(crate) stop: bool,
    /// No checkpoint is due but the job's last one.
    pub(crate) rests: bool,
    /// The number of the evaluation that used the final weights, as far as this worker knows.
    pub(crate) evaluated: Option<u64>,
    /// Whether the last action still needs an answer.
    pub(crate) unanswered: bool,
}

impl Trainer {
    /// A worker that has joined at `start`.
    pub fn new(o: Options, start: Step) -> Self {
        let queue = VecDeque::from([Action::Pull(Pull::of(start))]);
        Self {
            o,
            state: State::First,
            queue,
            done: start,
            rest: None,
            stop: false,
            rests: false,
            evaluated: None,
            unanswered: false,
        }
    }

    /// The worker's last step.
    pub fn done(&self) -> Step {
        self.done
    }

    /// Whether the servers have stopped the job.
    pub fn is_stopped(&self) -> bool {
        self.stop
    }

    /// The worker's share of the next evaluation, as far as is known.
    pub fn share(&self) -> Share {
        self.o.share
    }

    /// A pull outside of [`Action::Pull`] has brought this share.
    pub fn take_share(&mut self, share: Share) {
        self.o.share = share;
    }

    /// Whether this worker asks for no checkpoint until the next call, except the job's last one. Call it only after
    /// [`Action::Begin`] or [`Action::Stepped`]: within a step it is decided.
    pub fn rest_checkpoints(&mut self, rests: bool) {
        self.rests = rests;
    }

    /// The next action.
    ///
    /// # Panics
    /// If the last action's answer is missing, or after [`Action::End`].
    pub fn next_action(&mut self) -> Action {
        loop {
            assert!(!self.unanswered, "the last action was not answered");
            if let Some(action) = self.queue.pop_front() {
                self.unanswered = action.has_answer();
                return action;
            }
            match mem::replace(&mut self.state, State::Next) {
                State::Next => self.begin_step(),
                State::Local(local) => self.local(local, None),
                State::Leased(leased) => self.leased(leased),
                State::Pushed { step, loss } if self.takes_means() => self.pull_mean(step, loss),
                State::Pushed { step, loss } => self.pull_behind(step, loss),
                _ => panic!("it is over"),
            }
        }
    }

    pub(crate) fn queue_action(&mut self, action: Action, state: State) {
        self.queue.push_back(action);
        self.state = state;
    }

    fn begin_step(&mut self) {
        match (self.done.0 >= self.o.steps.total, self.stop) {
            (true, false) => return self.finish_together(),
            // Each worker stops where it receives this.
            (_, true) => return self.finish(),
            (false, false) => {}
        }
        let step = self.done.next();
        if self.o.local.is_local() {
            return self.begin_local(step);
        }
        let ask_ahead = !self.is_due(step) && !self.takes_means();
        let continues = ask_ahead && !self.evaluates_after(step) && step.0 < self.o.steps.total;
        self.queue_action(Action::Gradient { step, ask_ahead, continues }, State::Gradient(step));
    }

    pub(crate) fn is_due(&self, step: Step) -> bool {
        let due = |d: CheckpointSteps| d.at(step) && (!self.rests || d.is_last(step));
        self.o.leased.is_none() && self.o.due.is_some_and(due)
    }

    /// Whether an evaluation follows this step.
    pub(crate) fn evaluates_after(&self, step: Step) -> bool {
        self.o.leased.is_none() && self.o.evaluates.at(step, &self.o.steps)
    }

    /// Whether the pull after this step must bring all weights, whatever the rule of local steps.
    pub(crate) fn needs_all_after(&self, step: Step) -> bool {
        self.is_due(step) || self.o.steps.ends_epoch(step) || self.evaluates_after(step)
    }

    /// Everything is trained. Before the worker reports that, it evaluates its share at the final weights, if all
    /// workers reach the same step: then nothing changes the weights any more.
    fn finish_together(&mut self) {
        self.queue.push_back(Action::Trained);
        self.queue_action(Action::Pull(Pull { barrier: true, ..Pull::of(self.done) }), State::Barrier);
    }

    fn at_barrier(&mut self, pulled: Pulled) {
        if pulled.done < self.done {
            let (step, done) = (self.done, pulled.done);
            self.done = done;
            self.queue.push_back(Action::Moved { step, done, rejoined: pulled.rejoined });
            self.queue.push_back(Action::Begin(done));
            return self.state = State::Next;
        }
        let number = self.o.evaluates.number(self.done, &self.o.steps);
        // A reopened session does not know what the other workers have waited for.
        self.evaluated = (!pulled.rejoined).then_some(number);
        self.evaluate(number);
        self.say_finished();
    }

    /// The worker trains no more, whatever the others do.
    pub(crate) fn finish(&mut self) {
        self.queue.push_back(Action::Trained);
        self.say_finished();
    }

    pub(crate) fn evaluate(&mut self, number: u64) {
        self.queue.push_back(Action::Evaluate { number, share: self.o.share });
    }

    fn say_finished(&mut self) {
        self.queue.push_back(Action::Finish(self.done));
        self.queue_action(Action::Pull(Pull { last: true, ..Pull::of(self.done) }), State::Final);
    }

    /// Reports the result of [`Action::Gradient`] or [`Action::Local`]: the sum of the samples' losses, and their
    /// number. `None`: no data is left. The worker then pushes what it has of a step of several minibatches, and
    /// ends.
    pub fn trained(&mut self, trained: Option<(f64, u64)>) {
        self.unanswered = false;
        let state = mem::replace(&mut self.state, State::Next);
        let Some((sum, samples)) = trained else {
            return match state {
                State::Local(local) => self.cut_short(local),
                _ => self.finish(),
            };
        };
        match state {
            State::Gradient(step) => self.pushed(step, sum, samples),
            State::Local(local) => self.trained_local(local, sum, samples),
            State::Leased(leased) => self.trained_leased(leased, sum, samples),
            _ => panic!("nothing was to be trained"),
        }
    }

    /// In place of [`Self::trained`], after [`Action::Gradient`]: a pull during the gradient's computation says
    /// that the session was reopened. The step is dropped.
    pub fn rejoined(&mut self, pulled: Pulled) {
        self.unanswered = false;
        let State::Gradient(step) = mem::replace(&mut self.state, State::Next) else {
            panic!("no gradient was to be computed")
        };
        self.o.share = pulled.share.unwrap_or(self.o.share);
        (self.done, self.stop) = (pulled.done, self.stop || pulled.stop);
        self.queue.push_back(Action::Moved { step, done: self.done, rejoined: true });
        self.queue.push_back(Action::Begin(self.done));
    }

    /// A step is pushed completely.
    pub(crate) fn pushed(&mut self, step: Step, loss_sum: f64, samples: u64) {
        let loss = mean(loss_sum, samples);
        self.queue_action(Action::Pushed { step, loss, samples }, State::Pushed { step, loss });
    }

    /// After a step's push comes a pull, unless it came with the fragments.
    pub(crate) fn pull_behind(&mut self, step: Step, loss: f32) {
        let (checkpoint, streams) = (self.is_due(step), self.o.local.fragments().stream());
        if streams && !self.needs_all_after(step) {
            // The last fragment's pull is done.
            return self.stepped(Some((step, loss)), Pulled { done: step, ..Pulled::default() });
        }
        self.queue_action(Action::Pull(Pull { checkpoint, ..Pull::of(step) }), State::Behind { step, loss });
    }

    /// Reports the result of [`Action::Pull`].
    pub fn pulled(&mut self, pulled: Pulled) {
        self.unanswered = false;
        self.o.share = pulled.share.unwrap_or(self.o.share);
        match mem::replace(&mut self.state, State::Next) {
            State::First => self.first_pull(pulled),
            State::Local(local) => self.local(local, Some(pulled)),
            State::Behind { step, loss } => {
                if let Some(buckets) = self.rest.take() {
                    self.queue.push_back(Action::TakeOver(buckets));
                }
                self.stepped(Some((step, loss)), pulled);
            }
            State::Leased(leased) => self.pulled_leased(leased, pulled),
            State::PullsMean { step, loss } => self.pulled_mean(step, loss, pulled),
            State::Barrier => self.at_barrier(pulled),
            State::Final => {
                let first = pulled.finishers.first() == Some(&self.o.worker);
                let same = pulled.changed.is_empty() && !pulled.rejoined;
                let evaluated = self.evaluated.filter(|_| same);
                self.queue_action(Action::End { done: self.done, first, evaluated }, State::Ended);
            }
            _ => panic!("nothing was to be pulled"),
        }
    }

    fn first_pull(&mut self, pulled: Pulled) {
        if let Some(chunks) = self.o.leased {
            return self.begin_leased(chunks, &pulled);
        }
        (self.done, self.stop) = (pulled.done, pulled.stop);
        self.queue.push_back(Action::Begin(self.done));
        // A step is evaluated after its checkpoint is cut. A worker that resumes from that checkpoint evaluates it
        // now. If it was evaluated before, the servers know.
        if self.done.0 < self.o.steps.total && self.evaluates_after(self.done) {
            self.evaluate(self.o.evaluates.number(self.done, &self.o.steps));
        }
        self.state = State::Next;
    }

    /// A step is over, or given up if `pushed` is `None`. The worker continues where the pull says.
    pub(crate) fn stepped(&mut self, pushed: Option<(Step, f32)>, pulled: Pulled) {
        let step = pushed.map_or(self.done.next(), |(step, _)| step);
        self.done = pulled.done;
        self.stop |= pulled.stop;
        let moved = pulled.done != step;
        let evaluates = self.evaluates_after(self.done);
        let ends = self.o.steps.ends_epoch(self.done) || evaluates || self.stop;
        if let Some((_, loss)) = pushed {
            let epoch = self.o.steps.epoch_of(self.done);
            self.queue.push_back(Action::Stepped(Stepped { done: self.done, epoch, loss, ends }));
        }
        if evaluates && !self.stop && self.done.0 < self.o.steps.total {
            self.evaluate(self.o.evaluates.number(self.done, &self.o.steps));
        }
        let (stop, done, rejoined) = (self.stop, self.done, pulled.rejoined);
        // Rounds closed without this worker may also have moved it to this step; then no checkpoint was cut for it.
        if pushed.is_some() && !moved && self.is_due(step) {
            self.queue.push_back(Action::Checkpoint(pulled));
        }
        if moved && !stop {
            self.rest = None;
            self.queue.push_back(Action::Moved { step, done, rejoined });
            self.queue.push_back(Action::Begin(done));
        }
        self.state = State::Next;
    }

    /// Reports the result of [`Action::TakeChunk`].
    pub fn chunk(&mut self, next: Next) {
        self.unanswered = false;
        let State::Leased(leased) = mem::replace(&mut self.state, State::Next) else {
            panic!("no chunk was to be taken");
        };
        self.took_chunk(leased, next);
    }

    /// Reports the result of [`Action::Chunk`]: the number of minibatches.
    pub fn prepared(&mut self, minibatches: u64) {
        self.unanswered = false;
        let State::Leased(leased) = mem::replace(&mut self.state, State::Next) else {
            panic!("no chunk was to be prepared");
        };
        self.begin_chunk(leased, minibatches);
    }
}

pub(crate) fn mean(sum: f64, samples: u64) -> f32 {
    (sum / samples.max(1) as f64) as f32
}
