//! The state machine, and the steps of a worker that has no weights of its own.

use crate::{
    leased::Leased,
    local::Local,
    steps::{CheckpointSteps, Steps},
};
use paraft_common::{Layout, Share, Step, WorkerId, config::ChunkPlan, local::LocalConfig};
use paraft_session::{Next, Pull, Pulled};
use std::{collections::VecDeque, mem, ops::Range, time::Duration};

/// How a worker trains.
#[derive(Clone, Debug)]
pub struct Options {
    /// Who.
    pub worker: WorkerId,
    /// The job's steps.
    pub steps: Steps,
    /// What it does between two pushes.
    pub local: LocalConfig,
    /// The job's buckets.
    pub layout: Layout,
    /// Samples of a minibatch, where all have the same.
    pub batch: usize,
    /// A share of the held-out data is evaluated at each epoch's end.
    pub evaluates: bool,
    /// This one, where the servers do not say which.
    pub share: Share,
    /// When checkpoints are due, where the job makes any.
    pub due: Option<CheckpointSteps>,
    /// The chunks of the leased sampler.
    pub leased: Option<ChunkPlan>,
    /// Epochs that were done when the job began.
    pub begun: u64,
}

impl Options {
    /// With neither evaluations nor checkpoints, over a static share of the data.
    pub fn new(worker: WorkerId, steps: Steps, local: LocalConfig, layout: Layout) -> Self {
        Self {
            worker,
            steps,
            local,
            layout,
            batch: 1,
            evaluates: false,
            share: Share::ALL,
            due: None,
            leased: None,
            begun: 0,
        }
    }
}

/// A step that is done, to be written down.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Stepped {
    /// The worker's last step.
    pub done: Step,
    /// The epoch that it is in, from 1.
    pub epoch: u64,
    /// Mean loss of its samples.
    pub loss: f32,
    /// An epoch or the job has ended with it.
    pub ends: bool,
}

/// What a worker does next. What has an answer is named with it.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Pull into the weights. Answer: [`Trainer::pulled`].
    Pull(Pull),
    /// Say which chunk of the epoch is trained, and ask for the next. Answer: [`Trainer::chunk`].
    TakeChunk {
        /// The epoch that the worker is ready for, from 0.
        epoch: u64,
        /// The chunk that is trained.
        done: Option<u64>,
    },
    /// Go on with the minibatches after this step; weights of the worker's own are those that were pulled.
    Begin(Step),
    /// One minibatch at the pulled weights; each bucket of its gradient is pushed as soon as it is there. Answer:
    /// [`Trainer::trained`].
    Gradient {
        /// Of this step.
        step: Step,
        /// The weights behind it may be asked for before its pushes.
        ask_ahead: bool,
        /// As far as is known the next step comes behind this one's pull, and nothing else: its minibatch may go in before this one's
        /// gradient is there.
        goes_on: bool,
    },
    /// One minibatch at the worker's own weights, which move. Answer: [`Trainer::trained`].
    Local {
        /// Of this step.
        step: Step,
        /// Minibatches before it.
        clock: u64,
    },
    /// Push what the worker's own weights give, in all buckets.
    Push {
        /// As this step.
        step: Step,
        /// That it comes of.
        samples: usize,
        /// As in [`Action::Gradient`].
        ask_ahead: bool,
    },
    /// Likewise, of these buckets, last first.
    PushFragment {
        /// As this step.
        step: Step,
        /// Which.
        buckets: Range<usize>,
        /// That it comes of.
        samples: usize,
    },
    /// The worker's own weights of these buckets follow what was pulled.
    TakeOver(Range<usize>),
    /// Everything of this step is pushed.
    Pushed {
        /// Which.
        step: Step,
        /// Mean loss of its samples.
        loss: f32,
        /// How many.
        samples: u64,
    },
    /// Write down where the worker is.
    Stepped(Stepped),
    /// Evaluate this share of the held-out data, and report it as this epoch's. The last of a job is of its final weights.
    Evaluate {
        /// From 1.
        epoch: u64,
        /// As shard 0 has cut it for those who are there.
        share: Share,
    },
    /// A checkpoint was due at this pull.
    Checkpoint(Pulled),
    /// Get the minibatches of this chunk ready, of this epoch (from 0). Answer: [`Trainer::prepared`].
    Chunk {
        /// From 0.
        epoch: u64,
        /// From 0.
        chunk: u64,
    },
    /// The rest of the chunk is not for this worker any more.
    DropChunk,
    /// The chunk is trained.
    ChunkDone {
        /// From 0.
        epoch: u64,
        /// From 0.
        chunk: u64,
    },
    /// So many epochs are over at this step, and this worker is to write their checkpoint.
    WriteAfter {
        /// The step.
        step: Step,
        /// Of the job.
        epochs: u64,
        /// It is the job's last, which is always made: nothing of this worker's own may be in its way.
        last: bool,
    },
    /// So many epochs are over at this step.
    EpochOver {
        /// Of the job.
        epochs: u64,
        /// The step.
        done: Step,
    },
    /// The session was lost, or rounds were closed without this worker: it goes on from `done` instead of `step`.
    Moved {
        /// Where it was.
        step: Step,
        /// Where it goes on.
        done: Step,
        /// The session was lost.
        rejoined: bool,
    },
    /// Do nothing for so long.
    Wait(Duration),
    /// Everything is trained: what comes now is no time of training. [`Action::Begin`] may still follow, where the session is
    /// lost.
    Trained,
    /// Say to the servers that everything is trained.
    Finish(Step),
    /// It is over; the weights are the final ones.
    End {
        /// The last step.
        done: Step,
        /// This worker writes the model, and the evaluation of the final weights.
        first: bool,
        /// All workers have evaluated their shares of this epoch at the final weights, so that the sum is theirs, where it is of
        /// all samples. Without, nobody has.
        evaluated: Option<u64>,
    },
}

impl Action {
    /// Whether the trainer goes on only once it is told what came of it.
    pub fn has_answer(&self) -> bool {
        matches!(
            self,
            Self::Pull(_)
                | Self::TakeChunk { .. }
                | Self::Chunk { .. }
                | Self::Gradient { .. }
                | Self::Local { .. }
        )
    }
}

/// What the worker is in the middle of.
pub(crate) enum State {
    /// Nothing: a step is begun.
    Next,
    First,
    Gradient(Step),
    Local(Local),
    /// Everything of a step is pushed.
    Pushed {
        step: Step,
        loss: f32,
    },
    /// It is pulled behind it.
    Behind {
        step: Step,
        loss: f32,
    },
    Leased(Leased),
    /// The weights once every worker has trained everything.
    Barrier,
    Final,
    Ended,
}

/// See the [crate](crate).
pub struct Trainer {
    pub(crate) o: Options,
    pub(crate) state: State,
    /// What is to be done before anything is decided anew.
    pub(crate) queue: VecDeque<Action>,
    pub(crate) done: Step,
    /// A fragment that was pushed, and comes with a pull of everything.
    pub(crate) rest: Option<Range<usize>>,
    pub(crate) stop: bool,
    /// The epoch whose evaluation is that of the final weights, as far as this worker knows.
    pub(crate) evaluated: Option<u64>,
    /// The last action has an answer that was not given.
    unanswered: bool,
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
            evaluated: None,
            unanswered: false,
        }
    }

    /// The worker's last step.
    pub fn done(&self) -> Step {
        self.done
    }

    /// What to do next.
    ///
    /// # Panics
    /// Where the last action has an answer that was not given, or after [`Action::End`].
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
                State::Pushed { step, loss } => self.pull_behind(step, loss),
                _ => panic!("it is over"),
            }
        }
    }

    pub(crate) fn does(&mut self, action: Action, state: State) {
        self.queue.push_back(action);
        self.state = state;
    }

    fn begin_step(&mut self) {
        match (self.done.0 >= self.o.steps.total, self.stop) {
            (true, false) => return self.finish_together(),
            // Each worker stops where it hears of it.
            (_, true) => return self.finish(),
            (false, false) => {}
        }
        let step = self.done.next();
        if self.o.local.is_local() {
            return self.begin_local(step);
        }
        let ask_ahead = !self.is_due(step);
        let evaluates = self.o.evaluates && self.o.steps.ends_epoch(step);
        let goes_on = ask_ahead && !evaluates && step.0 < self.o.steps.total;
        self.does(Action::Gradient { step, ask_ahead, goes_on }, State::Gradient(step));
    }

    pub(crate) fn is_due(&self, step: Step) -> bool {
        self.o.leased.is_none() && self.o.due.is_some_and(|d| d.at(step))
    }

    /// Everything is trained. Before the worker says so its share of the final weights is evaluated, where all workers come to
    /// the same step: once they are there, nothing changes the weights any more.
    fn finish_together(&mut self) {
        self.queue.push_back(Action::Trained);
        self.does(Action::Pull(Pull { barrier: true, ..Pull::of(self.done) }), State::Barrier);
    }

    fn at_barrier(&mut self, pulled: Pulled) {
        if pulled.done < self.done {
            let (step, done) = (self.done, pulled.done);
            self.done = done;
            self.queue.push_back(Action::Moved { step, done, rejoined: pulled.rejoined });
            self.queue.push_back(Action::Begin(done));
            return self.state = State::Next;
        }
        let epoch = self.o.steps.epoch_of(self.done);
        // A session that was opened anew knows nothing of what the others have waited for.
        self.evaluated = (!pulled.rejoined).then_some(epoch);
        self.evaluate(epoch);
        self.say_finished();
    }

    /// The worker trains nothing more, whatever the others do.
    pub(crate) fn finish(&mut self) {
        self.queue.push_back(Action::Trained);
        self.say_finished();
    }

    pub(crate) fn evaluate(&mut self, epoch: u64) {
        self.queue.push_back(Action::Evaluate { epoch, share: self.o.share });
    }

    fn say_finished(&mut self) {
        self.queue.push_back(Action::Finish(self.done));
        self.does(Action::Pull(Pull { last: true, ..Pull::of(self.done) }), State::Final);
    }

    /// What came of [`Action::Gradient`] or [`Action::Local`]: the sum of the losses of its samples, and how many those are;
    /// `None`: no data is left, and the worker ends; what it has of a step of several minibatches is pushed before.
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

    /// Instead of [`Self::trained`], of [`Action::Gradient`]: what was pulled while the gradient was computed says that the session was opened
    /// anew. Nothing comes of the step.
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

    /// Everything of a step is pushed.
    pub(crate) fn pushed(&mut self, step: Step, loss_sum: f64, samples: u64) {
        let loss = mean(loss_sum, samples);
        self.does(Action::Pushed { step, loss, samples }, State::Pushed { step, loss });
    }

    /// Behind the push of a step: a pull, but where one comes ahead of the next push or came with the fragments.
    fn pull_behind(&mut self, step: Step, loss: f32) {
        let (checkpoint, rule) = (self.is_due(step), self.o.local.rule());
        let pulled_elsewhere = rule.pulls_first() || rule.fragments().stream();
        if pulled_elsewhere && !checkpoint && !self.o.steps.ends_epoch(step) {
            // The next pull is of this step too, and waits for its push; or the last fragment's is over.
            return self.stepped(Some((step, loss)), Pulled { done: step, ..Pulled::default() });
        }
        self.does(Action::Pull(Pull { checkpoint, ..Pull::of(step) }), State::Behind { step, loss });
    }

    /// What came of [`Action::Pull`].
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
            State::Barrier => self.at_barrier(pulled),
            State::Final => {
                let first = pulled.finishers.first() == Some(&self.o.worker);
                let same = pulled.changed.is_empty() && !pulled.rejoined;
                let evaluated = self.evaluated.filter(|_| same);
                self.does(Action::End { done: self.done, first, evaluated }, State::Ended);
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
        // The epoch that has just ended is evaluated after the step is cut into a checkpoint: who goes on from there does it
        // now. Where it was done already, the servers know.
        let (done, per_epoch) = (self.done.0, self.o.steps.per_epoch);
        if done > 0 && done < self.o.steps.total && done.is_multiple_of(per_epoch) && self.o.evaluates {
            self.evaluate(done / per_epoch);
        }
        self.state = State::Next;
    }

    /// A step is over, be it that it was given up (`pushed` is `None`): the worker is where the pull says.
    pub(crate) fn stepped(&mut self, pushed: Option<(Step, f32)>, pulled: Pulled) {
        let step = pushed.map_or(self.done.next(), |(step, _)| step);
        self.done = pulled.done;
        self.stop |= pulled.stop;
        let moved = pulled.done != step;
        let ends = self.o.steps.ends_epoch(self.done) || self.stop;
        let epoch = self.o.steps.epoch_of(self.done);
        if let Some((_, loss)) = pushed {
            self.queue.push_back(Action::Stepped(Stepped { done: self.done, epoch, loss, ends }));
        }
        if ends && self.o.evaluates && !self.stop && self.done.0 < self.o.steps.total {
            self.evaluate(epoch);
        }
        let (stop, done, rejoined) = (self.stop, self.done, pulled.rejoined);
        // Also rounds that were closed without this worker may have brought it just here: then nothing was cut for it.
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

    /// What came of [`Action::TakeChunk`].
    pub fn chunk(&mut self, next: Next) {
        self.unanswered = false;
        let State::Leased(leased) = mem::replace(&mut self.state, State::Next) else {
            panic!("no chunk was to be taken");
        };
        self.took_chunk(leased, next);
    }

    /// What came of [`Action::Chunk`]: so many minibatches.
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
