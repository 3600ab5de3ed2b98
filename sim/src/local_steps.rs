//! A step of a worker with weights of its own, as `paraft_worker` makes it, in simulated time: each minibatch takes a step's
//! time, and the push leaves when the last is over.

use crate::{
    SimError,
    clock::nanos,
    training::{Training, WARM_LOOK},
};
use paraft_common::{BucketId, Mode, Step, WorkerId, local::Fragments};
use paraft_session::Pulled;
use paraft_worker::worker::Minibatches;

/// What became of a step.
pub(crate) enum Made {
    /// It was pushed: the samples, and their mean loss.
    Pushed(u64, f32),
    /// It was given up: a pull says that the worker is to end, or goes on from elsewhere.
    Elsewhere(Pulled),
}

impl Training<'_> {
    /// The minibatches of `step`, and its push.
    pub(crate) async fn local_step(
        &mut self,
        step: Step,
        minibatches: &mut Minibatches,
    ) -> Result<Made, SimError> {
        let fragments = self.local.as_ref().map(|l| l.rule().fragments()).filter(Fragments::stream);
        if let Some(fragments) = fragments {
            return self.streamed_step(step, fragments, minibatches).await;
        }
        let (mut loss_sum, mut trained) = (0.0, 0);
        let before = self.world.plan.minibatches_before(step);
        for i in 0..self.world.plan.minibatches_of(step) {
            let samples = minibatches.next();
            loss_sum += self.local_minibatch(step, before + i, &samples).await?;
            trained += samples.len();
        }
        if self.local.as_ref().is_some_and(|r| r.rule().pulls_first()) {
            let done = Step(step.0 - 1);
            let pulled = self.pull(done).await?;
            if pulled.done != done || pulled.stop {
                return Ok(Made::Elsewhere(pulled));
            }
        }
        self.world.gap.lock().goes_on(Step(step.0 - 1));
        self.client.ask_ahead(step);
        self.client.weigh(trained);
        let Some(local) = &mut self.local else { return Ok(Made::Elsewhere(Pulled::default())) };
        let values = local.push(&self.weights);
        for (i, bucket) in self.world.layout.buckets().iter().enumerate().rev() {
            let id = BucketId(i as u32);
            let payload = self.client.encode(id, step, &values[bucket.range()]);
            self.client.push(id, step, payload);
        }
        Ok(Made::Pushed(trained as u64, (loss_sum / trained.max(1) as f64) as f32))
    }

    /// Whether everything is pulled behind `step`: it is an epoch's last, or the job's.
    pub(crate) fn ends_epoch(&self, step: Step) -> bool {
        step.0.is_multiple_of(self.world.plan.per_epoch) || step.0 >= self.world.plan.total
    }

    /// Behind the push of `step`: pulls if it is time, or sees that the next push may go.
    pub(crate) async fn pull_behind(&mut self, step: Step) -> Result<Pulled, SimError> {
        let Some(rule) = self.local.as_ref().map(|r| r.rule()) else { return self.pull(step).await };
        let a_pull = rule.steps_a_pull();
        let without = rule.pulls_first() || rule.fragments().stream();
        let within = (step.0 - 1) % self.world.plan.per_epoch + 1;
        let ends = self.ends_epoch(step);
        if !ends && without {
            return Ok(Pulled { done: step, ..Pulled::default() });
        }
        let free = self.client.mode().1 == Mode::Asp;
        if ends || !free || within.is_multiple_of(a_pull) {
            return self.pull(step).await;
        }
        let asked = self.world.clock.now();
        let settled = self.client.settle().await?;
        self.waited += self.world.clock.now() - asked;
        match settled {
            None => Ok(Pulled { done: step, ..Pulled::default() }),
            Some(done) => Ok(Pulled { rejoined: true, ..self.pull(done).await? }),
        }
    }

    /// Waits for the warm start of the lowest worker; `pulled` is the first pull. Where nothing comes for as long as the
    /// patience is, this worker begins all the same.
    pub(crate) async fn warm_start(&mut self, mut pulled: Pulled) -> Result<Pulled, SimError> {
        let rule = self.local.as_ref().map(|r| (r.rule().warm_start(), r.rule().minibatches()));
        let Some((minibatches, a_push)) = rule.filter(|_| self.worker != WorkerId(0)) else {
            return Ok(pulled);
        };
        let updates = minibatches.div_ceil(a_push).min(self.world.plan.total);
        let (mut seen, mut since) = (self.client.version(), self.world.clock.now());
        while self.client.version().0 < updates && !pulled.stop && self.client.mode().1 == Mode::Asp {
            let now = self.world.clock.now();
            if self.client.version() != seen {
                (seen, since) = (self.client.version(), now);
            } else if now - since > nanos(self.world.patience.as_secs_f64()) {
                break;
            }
            self.world.clock.sleep(WARM_LOOK).await;
            let rejoined = pulled.rejoined;
            pulled = self.client.pull(pulled.done, false, &mut self.weights).await?;
            pulled.rejoined |= rejoined;
        }
        Ok(pulled)
    }
}
