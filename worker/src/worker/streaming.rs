//! A step of a worker whose weights go to the servers and come back in fragments, each in its turn
//! ([`paraft_common::local::Fragments`]).
//!
//! ```text
//!  minibatch  1   2   3   4   5   6 ...
//!             ──▶ push of fragment 0, and the ask for it
//!                     ──▶ it is taken over: `overlap` minibatches later, or ahead of the next push
//!                         ──▶ push of fragment 1 ...
//! ```
//!
//! In a step every fragment has one turn, so each bucket has one push for each step, as ever. One pull is under way at a
//! time. Where a checkpoint is cut behind a step, or an epoch ends, the last fragment comes with a pull of everything.

use super::{Made, Training, WorkerError};
use crate::{engine::Stepped, exchange::PushParts};
use paraft_client::Pulled;
use paraft_common::{BucketId, Step, local::Fragments};
use paraft_data::Prefetcher;
use paraft_models::Batch;
use std::ops::Range;

/// A fragment that was pushed and not taken over.
pub(super) struct Under {
    step: Step,
    buckets: Range<usize>,
    /// After so many minibatches of the job it is taken over.
    at: u64,
}

impl Training<'_> {
    /// The minibatches of `step`, and its pushes. `due`: a checkpoint is cut behind it. `None`: no data is left.
    pub(super) fn streamed_step(
        &mut self,
        step: Step,
        fragments: Fragments,
        batches: &mut Prefetcher<Batch>,
        due: bool,
    ) -> Result<Option<Made>, WorkerError> {
        let (mut loss_sum, mut samples) = (0.0, 0);
        let before = self.plan.minibatches_before(step);
        let of = self.plan.minibatches_of(step);
        for i in 1..=of {
            let Some((sum, n)) = self.local_minibatch(step, before + i - 1, batches)? else {
                return Ok(None);
            };
            loss_sum += sum;
            samples += n;
            let turn = fragments.due(i, of, &self.layout);
            let comes = self.under.as_ref().is_some_and(|u| u.at <= before + i || !turn.is_empty());
            if comes && let Some(elsewhere) = self.take_over()? {
                return Ok(Some(Made::Elsewhere(elsewhere)));
            }
            if turn.is_empty() {
                continue;
            }
            self.push_fragment(step, turn.clone());
            let all = i == of && (due || self.ends_epoch(step));
            if !all {
                self.client.ask_for_buckets(step, &Fragments::ids(turn.clone()));
            }
            self.under = Some(Under { step, buckets: turn, at: before + i + fragments.overlap });
            if fragments.overlap == 0
                && !all
                && let Some(elsewhere) = self.take_over()?
            {
                return Ok(Some(Made::Elsewhere(elsewhere)));
            }
        }
        let loss = (loss_sum / samples.max(1) as f64) as f32;
        Ok(Some(Made::Pushed(Stepped { loss, samples: samples as u64 })))
    }

    fn push_fragment(&mut self, step: Step, buckets: Range<usize>) {
        let Some(local) = &mut self.local else { return };
        // By samples of the step, whichever of them came after this fragment's last turn.
        let samples = self.plan.minibatches_of(step) as usize * self.job.train.batch;
        let mut push = PushParts::new(&mut self.client, step, samples);
        for i in buckets.rev() {
            push.values(i, local.push_fragment(self.layout.buckets()[i].range()));
        }
    }

    /// Waits for the fragment that is under way, and takes it over; gives the pull where training does not go on as it was.
    fn take_over(&mut self) -> Result<Option<Pulled>, WorkerError> {
        let Some(Under { step, buckets, .. }) = self.under.take() else { return Ok(None) };
        let only: Vec<BucketId> = Fragments::ids(buckets.clone());
        let pulled = self.client.pull_buckets(step, &only, self.engine.landing()?)?;
        self.engine.landed(&pulled, &self.layout)?;
        self.note_mode(pulled.done)?;
        if pulled.rejoined || pulled.done != step || pulled.stop {
            return Ok(Some(pulled));
        }
        self.takes_over(buckets);
        Ok(None)
    }

    /// Everything was pulled: what is under way is there.
    pub(super) fn takes_over_rest(&mut self) {
        if let Some(under) = self.under.take() {
            self.takes_over(under.buckets);
        }
    }

    fn takes_over(&mut self, buckets: Range<usize>) {
        let Some(local) = &mut self.local else { return };
        for bucket in &self.layout.buckets()[buckets] {
            local.take_over(self.engine.weights(), bucket.range());
        }
    }
}
