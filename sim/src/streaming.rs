//! A step of a worker whose weights stream in fragments, as `paraft_worker` makes it, in simulated time.

use crate::{SimError, clock::nanos, local_steps::Made, training::Training};
use paraft_common::{BucketId, Step, local::Fragments};
use paraft_session::Pulled;
use paraft_worker::worker::Minibatches;
use std::ops::Range;

/// A fragment that was pushed and not taken over.
pub(crate) struct Under {
    step: Step,
    buckets: Range<usize>,
    /// After so many minibatches of the job it is taken over.
    at: u64,
}

impl Training<'_> {
    /// The minibatches of `step`, and its pushes.
    pub(crate) async fn streamed_step(
        &mut self,
        step: Step,
        fragments: Fragments,
        minibatches: &mut Minibatches,
    ) -> Result<Made, SimError> {
        let (mut loss_sum, mut trained) = (0.0, 0);
        let (before, of) = (self.world.plan.minibatches_before(step), self.world.plan.minibatches_of(step));
        for i in 1..=of {
            let samples = minibatches.next();
            loss_sum += self.local_minibatch(step, before + i - 1, &samples).await?;
            trained += samples.len();
            let turn = fragments.due(i, of, &self.world.layout);
            let comes = self.under.as_ref().is_some_and(|u| u.at <= before + i || !turn.is_empty());
            if comes && let Some(elsewhere) = self.take_over().await? {
                return Ok(Made::Elsewhere(elsewhere));
            }
            if turn.is_empty() {
                continue;
            }
            if turn.end == self.world.layout.buckets().len() {
                self.world.gap.lock().goes_on(Step(step.0 - 1));
            }
            self.client.weigh(of as usize * self.world.file.train.batch);
            for b in turn.clone().rev() {
                let (id, range) = (BucketId(b as u32), self.world.layout.buckets()[b].range());
                let Some(local) = &mut self.local else { return Ok(Made::Elsewhere(Pulled::default())) };
                let payload = self.client.encode(id, step, local.push_fragment(range));
                self.client.push(id, step, payload);
            }
            let all = i == of && self.ends_epoch(step);
            if !all {
                self.client.ask_for_buckets(step, &Fragments::ids(turn.clone()));
            }
            self.under = Some(Under { step, buckets: turn, at: before + i + fragments.overlap });
            if fragments.overlap == 0
                && !all
                && let Some(elsewhere) = self.take_over().await?
            {
                return Ok(Made::Elsewhere(elsewhere));
            }
        }
        Ok(Made::Pushed(trained as u64, (loss_sum / trained.max(1) as f64) as f32))
    }

    /// Waits for the fragment that is under way, and takes it over; gives the pull where training does not go on as it was.
    async fn take_over(&mut self) -> Result<Option<Pulled>, SimError> {
        let Some(Under { step, buckets, .. }) = self.under.take() else { return Ok(None) };
        let asked = self.world.clock.now();
        let pulled =
            self.client.pull_buckets(step, &Fragments::ids(buckets.clone()), &mut self.weights).await?;
        self.waited += self.world.clock.now() - asked;
        self.note_mode(pulled.done)?;
        if pulled.rejoined || pulled.done != step || pulled.stop {
            return Ok(Some(pulled));
        }
        self.takes_over(buckets);
        Ok(None)
    }

    /// Everything was pulled: what is under way is there.
    pub(crate) fn takes_over_rest(&mut self) {
        if let Some(under) = self.under.take() {
            self.takes_over(under.buckets);
        }
    }

    fn takes_over(&mut self, buckets: Range<usize>) {
        let Some(local) = &mut self.local else { return };
        for bucket in &self.world.layout.buckets()[buckets] {
            local.take_over(&self.weights, bucket.range());
        }
    }

    /// A minibatch at the worker's own weights; `clock`: how many it had trained before. Gives its loss times its samples.
    pub(crate) async fn local_minibatch(
        &mut self,
        step: Step,
        clock: u64,
        samples: &[u32],
    ) -> Result<f64, SimError> {
        let mut sum = 0.0;
        if let Some(local) = &mut self.local {
            let mut learner = self.world.learner.lock();
            let (loss, gradient) = learner.gradient((self.worker, step), local.weights(), samples)?;
            let not_finite = |_| SimError::NotFinite { loss, step, worker: self.worker };
            local.step(clock, gradient).map_err(not_finite)?;
            sum = f64::from(loss) * samples.len() as f64;
        }
        let time = self.speed.step(self.world);
        self.worked += time;
        self.world.cores.work(nanos(time)).await;
        Ok(sum)
    }
}
