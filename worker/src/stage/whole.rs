//! Work on the whole model: an evaluation by all ranks, and the final weights.

use super::{
    Stage,
    messages::{ACTIVATION, FINAL, MAX_UNREAD, RECEIVED},
    slices::{scatter, values_of},
    sums::VersionedWeights,
};
use crate::{engine::StepError, streamed::scratch};
use paraft_compute::collective::{Lines, Tag};
use paraft_models::{Batch, Evaluation, Forward, Model, ModelError, Pass, Run};

/// Numbers evaluations apart from steps.
const EVALUATION: u64 = 1 << 40;

impl Stage<'_> {
    /// This rank's part of an evaluation of some samples, which all ranks of its mesh receive. The last stage has
    /// the sums.
    pub fn evaluate(
        &mut self,
        model: &mut dyn Model,
        lines: &mut Lines,
        batch: &Batch,
    ) -> Result<Evaluation, StepError> {
        // A mesh may have other sample parts than another, so evaluations have their own count.
        self.evaluations += 1;
        let round = EVALUATION | self.evaluations;
        if self.here.stages.is_empty() {
            return Ok(Evaluation::default());
        }
        self.computing(model, |this, model| this.evaluate_own(model, lines, (batch, round)))
    }

    fn evaluate_own(
        &mut self,
        model: &mut dyn Model,
        lines: &mut Lines,
        (batch, round): (&Batch, u64),
    ) -> Result<Evaluation, StepError> {
        let (here, last) = (self.here.clone(), self.here.is_last());
        let beside = |at: usize| here.beside(at);
        // No more activations than in a step.
        let micro = batch.n.div_ceil(self.part).max(1);
        let (at, mut sum) = (self.here.at, Evaluation::default());
        for m in 0..micro {
            let part = batch.part(batch.n * m / micro..batch.n * (m + 1) / micro);
            let tag = |kind: u32, m: usize| Tag { kind, number: round << 20 | m as u64 };
            let input = if at == 0 { None } else { Some(lines.receive(beside(at - 1), tag(ACTIVATION, m))?) };
            if at > 0 {
                lines.send(beside(at - 1), tag(RECEIVED, m), Vec::new())?;
            }
            let pass = Pass { layers: self.layers(), slot: 0, n: part.n, evaluates: true };
            match model.forward_pass(
                &mut VersionedWeights(&self.weights, self.weights.edition),
                &pass,
                &part,
                input.as_deref(),
            )? {
                Forward::Edge(values) => {
                    // Only this limits how far a stage gets ahead of the next one.
                    if let Some(before) = m.checked_sub(MAX_UNREAD) {
                        lines.receive(beside(at + 1), tag(RECEIVED, before))?;
                    }
                    lines.send(beside(at + 1), tag(ACTIVATION, m), values)?;
                }
                Forward::Evaluated(e) => sum += e,
                Forward::Loss(_) => return Err(ModelError::new("it trains in an evaluation").into()),
            }
        }
        if !last {
            for m in micro.saturating_sub(MAX_UNREAD)..micro {
                lines.receive(beside(at + 1), Tag { kind: RECEIVED, number: round << 20 | m as u64 })?;
            }
        }
        // The results of all ranks are summed.
        Ok(if here.slice.is_first() { sum } else { Evaluation::default() })
    }

    /// Collects the final weights of all stages in a file on the leader.
    pub fn gather(&mut self, lines: &mut Lines) -> Result<(), StepError> {
        let here = &self.here;
        let tag = |kind: u32, bucket: usize| Tag { kind, number: bucket as u64 };
        // A slice's part of a bucket that no other slice sends.
        let runs = |slice: usize, bucket: usize| match &self.alike {
            Some(alike) => alike.sent(slice, bucket),
            None => vec![Run::whole(self.buckets[bucket].clone())],
        };
        if here.stages.is_empty() || here.mesh > 0 {
            return Ok(());
        }
        let (own, slice) = (self.own_buckets(), here.slice.at);
        if here.beside(here.at) > 0 {
            // The leader reads one rank after another. Unread messages wait in its memory.
            let mut sent = Vec::new();
            for bucket in own {
                let runs = runs(slice, bucket);
                if runs.is_empty() {
                    continue;
                }
                if let Some(before) = sent.len().checked_sub(MAX_UNREAD) {
                    lines.receive(0, tag(RECEIVED, sent[before]))?;
                }
                sent.push(bucket);
                lines.send(0, tag(FINAL, bucket), values_of(&runs, &self.weights))?;
            }
            return Ok(());
        }
        let mut whole = scratch(&self.folder, self.buckets.last().map_or(0, |b| b.end))?;
        for (to, from) in own.flat_map(|bucket| runs(0, bucket)).flat_map(|run| run.each()) {
            whole[to].copy_from_slice(&self.weights[from]);
        }
        for place in 1..here.of * here.slice.of {
            let there = self.place((place, here.ranks()));
            for bucket in self.buckets_of(&there) {
                let runs = runs(there.slice.at, bucket);
                if !runs.is_empty() {
                    let values = lines.receive(place, tag(FINAL, bucket))?;
                    scatter(&runs, &values, &mut whole, |run| run.0, <[f32]>::copy_from_slice)?;
                    lines.send(place, tag(RECEIVED, bucket), Vec::new())?;
                }
            }
        }
        self.whole = Some(whole);
        Ok(())
    }
}
