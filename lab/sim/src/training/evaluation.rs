//! A worker's evaluations of the held-out samples.

use super::Training;
use crate::{error::SimError, recording::Evaluated};
use paraft_common::{Share, Step};
use paraft_server::shard::command::EvalSums;
use std::borrow::Cow;

impl Training<'_> {
    /// Shard 0 sums the shares.
    pub(super) fn evaluate_share(&mut self, number: u64, share: Share) -> Result<(), SimError> {
        let mut learner = self.world.learner.lock();
        let samples = share.samples(learner.held_out());
        let e = learner.evaluate(&self.whole(), samples)?;
        drop(learner);
        let sums = EvalSums { loss_sum: e.loss_sum, correct: e.correct, count: e.count };
        self.client.report(number, sums);
        Ok(())
    }

    /// The weights of the last pull.
    fn whole(&self) -> Cow<'_, [f32]> {
        match &self.stages {
            Some(leader) => leader.whole().into(),
            None => (&self.weights[..]).into(),
        }
    }

    /// Records the evaluations that are complete.
    pub(super) fn note_evaluations(&mut self) -> Result<(), SimError> {
        for e in self.client.evaluations() {
            let sums = (e.epoch, e.loss_sum, e.correct, e.count);
            if self.world.plan.evaluations(&self.world.file).any() {
                self.write_evaluation(sums, false)?;
            }
            self.reported = Some(sums);
        }
        Ok(())
    }

    fn write_evaluation(
        &self,
        (number, loss_sum, correct, count): (u64, f64, u64, u64),
        is_final: bool,
    ) -> Result<(), SimError> {
        let classifies = self.world.learner.lock().classes() && self.world.file.classifies();
        let plan = &self.world.plan;
        let (epoch, step) = plan.evaluations(&self.world.file).place_of(number, plan);
        let evaluated = Evaluated { number, epoch, step, loss_sum, correct, count, classifies };
        self.world.recording.evaluation(evaluated, self.seconds(), is_final)
    }

    /// Evaluates the final weights, unless the workers' evaluation with the number `evaluated` is complete.
    pub(super) fn final_evaluation(
        &self,
        done: Step,
        evaluated: Option<u64>,
    ) -> Result<paraft_models::Evaluation, SimError> {
        let mut learner = self.world.learner.lock();
        let all = learner.held_out();
        let shared = self.reported.filter(|(number, .., n)| Some(*number) == evaluated && *n == all as u64);
        let (number, loss_sum, correct, count) = match shared {
            Some(sums) => sums,
            None => {
                let (plan, e) = (&self.world.plan, learner.evaluate(&self.whole(), 0..all)?);
                let number = plan.evaluations(&self.world.file).number(done, plan);
                (number, e.loss_sum, e.correct, e.count)
            }
        };
        drop(learner);
        self.write_evaluation((number, loss_sum, correct, count), true)?;
        Ok(paraft_models::Evaluation { loss_sum, correct, count })
    }
}
