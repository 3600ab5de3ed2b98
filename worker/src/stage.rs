//! A rank that holds some stages of its worker's model (`parallel.pipeline`).
//!
//! ```text
//!  place 0   pull ─▶ [lend] ─▶ F0 F1 ... B0 ── B1 ── push as it is complete        (leads; the samples)
//!               activations │  ▲ their gradients
//!  place 1   pull ─▶ [borrow]─▶ F0 B0 F1 B1 ... ── push                             (the loss)
//! ```
//!
//! Each rank has a session of its own with the shards of its stages, under the worker's name: nobody else of the worker speaks with them. The
//! leader says when a step, a pull, an evaluation is; what passes between stages goes over the group's [lines](Lines).
//!
//! There may be fewer ranks than stages, after one has died: they have several, one behind the other. There may be more: the last ones
//! wait.

use crate::{
    engine::Broke,
    exchange::PushParts,
    group::{Ranks, Together},
    streamed::scratch,
    worker::WorkerError,
};
use paraft_client::{Client, Pull};
use paraft_common::{
    Step,
    pipeline::{PipelineSchedule, Work},
};
use paraft_compute::collective::{GroupError, Lines, Tag};
use paraft_host::{Pages, Scratch};
use paraft_models::{
    Batch, CpuDevice, DeviceError, Evaluation, Flat, Forward, Loan, Model, ModelError, NetResult, Pass,
    Stages, Weights,
};
use std::{
    ops::Range,
    path::{Path, PathBuf},
};

/// Kinds of messages between stages.
const ACTIVATION: u32 = 1;
const GRADIENT: u32 = 2;
const LENT: u32 = 3;
const LENT_GRADIENT: u32 = 4;
const FINAL: u32 = 5;

/// Values of a message of final weights.
const PIECE: usize = 1 << 18;

/// What a rank that does not lead does to speak with the shards of these stages: a session, and the step that it goes on from. With `false`
/// it brings no initial weights.
pub(crate) type Join<'a> =
    dyn FnMut(&dyn Model, Range<usize>, bool) -> Result<(Client, Step), WorkerError> + 'a;

/// See the module.
pub(crate) struct Stage<'a> {
    stages: Stages,
    schedule: PipelineSchedule,
    micro_batches: usize,
    /// The values of each bucket.
    buckets: Vec<Range<usize>>,
    /// As long as the model; memory is where this rank's stages are, and what it borrows.
    weights: Pages,
    /// Of the micro-batches so far.
    sum: Pages,
    /// Of one micro-batch, as it becomes ready.
    gradient: Pages,
    here: Place,
    /// Steps and evaluations of this group.
    rounds: u64,
    /// Pulls of this group.
    pulls: u64,
    /// Of a rank that does not lead.
    join: Option<Box<Join<'a>>>,
    client: Option<Client>,
    /// The step that its shards are at, as far as it knows.
    done: Step,
    /// All final weights, where this rank leads.
    whole: Option<Scratch>,
    folder: PathBuf,
}

/// Which stages a rank has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Place {
    /// Among those that have any.
    at: usize,
    /// How many those are.
    of: usize,
    stages: Range<usize>,
}

impl Place {
    /// Of a group's ranks. The last ones have none, where there are more than stages.
    fn new((place, size): (usize, usize), stages: usize) -> Self {
        let of = size.clamp(1, stages);
        let first = |place: usize| stages * place.min(of) / of;
        Self { at: place, of, stages: first(place)..first(place + 1) }
    }

    fn is_last(&self) -> bool {
        self.at + 1 == self.of
    }

    /// The place of a stage.
    fn of_stage(&self, stage: usize, stages: usize) -> usize {
        (0..self.of).find(|p| Self::new((*p, self.of), stages).stages.contains(&stage)).unwrap_or_default()
    }
}

impl<'a> Stage<'a> {
    /// For a model that is cut so, whose flat vector is in these buckets. A rank that doesn't lead speaks with the servers by `join`.
    pub fn new(
        stages: Stages,
        (schedule, micro_batches): (PipelineSchedule, usize),
        buckets: Vec<Range<usize>>,
        join: Option<Box<Join<'a>>>,
        folder: &Path,
    ) -> Result<Self, WorkerError> {
        let len = buckets.last().map_or(0, |b| b.end);
        let pages = || {
            Pages::new(len).map_err(|e| WorkerError::Job(format!("no address space for {len} values: {e}")))
        };
        Ok(Self {
            stages,
            schedule,
            micro_batches,
            buckets,
            weights: pages()?,
            sum: pages()?,
            gradient: pages()?,
            here: Place::default(),
            rounds: 0,
            pulls: 0,
            join,
            client: None,
            done: Step(0),
            whole: None,
            folder: folder.to_path_buf(),
        })
    }

    /// The weights that this rank holds, in the whole flat vector, for a pull to write.
    pub fn landing(&mut self) -> &mut [f32] {
        &mut self.weights
    }

    /// All weights, behind [`Self::gather`].
    pub fn whole(&self) -> &[f32] {
        self.whole.as_deref().unwrap_or_default()
    }

    /// The stages of a rank of a group.
    pub fn stages_at(&self, place: (usize, usize)) -> Range<usize> {
        Place::new(place, self.stages.len()).stages
    }

    /// A group was formed. The leader says at which step it is; gives the least that anybody is at. Whoever has other stages than before
    /// speaks with other shards from now on.
    pub fn meet(&mut self, ranks: &Ranks, model: &dyn Model, step: Step) -> Result<Step, Broke> {
        let place = ranks.place();
        let here = Place::new(place, self.stages.len());
        (self.rounds, self.pulls) = (0, 0);
        if here.stages != self.here.stages {
            self.weights.release(0..self.weights.len());
            self.client = None;
        }
        self.here = here;
        let mut at = step;
        if ranks.leads() {
            self.done = step;
        } else if !self.here.stages.is_empty() {
            if self.client.is_none()
                && let Some(join) = &mut self.join
            {
                // Once a step is made the servers have weights.
                let (client, start) = join(model, self.here.stages.clone(), step == Step(0))?;
                (self.client, self.done) = (Some(client), start);
            }
            at = self.done;
        }
        let mut clocks = vec![0.0; place.1];
        clocks[place.0] = at.0 as f64;
        ranks.sum(&mut clocks)?;
        let least = clocks.iter().take(self.here.of).copied().fold(f64::INFINITY, f64::min);
        tracing::info!(stages = ?self.here.stages, layers = ?self.layers(), "this rank's part of the model");
        Ok(Step(least as u64))
    }

    /// The values of each stage, as a server's job names them.
    pub fn values(&self) -> Vec<usize> {
        self.stages.values()
    }

    /// Whether a rank of this group has the stages that it had.
    pub fn stays(&self, ranks: &Ranks) -> bool {
        self.stages_at(ranks.place()) == self.here.stages
    }

    /// The step that the shards of its stages are at.
    pub fn done(&self) -> Step {
        self.done
    }

    /// A pull has brought the leader here.
    pub fn is_at(&mut self, done: Step) {
        self.done = done;
    }

    /// The layers that this rank computes.
    fn layers(&self) -> Range<usize> {
        let of = &self.stages.layers()[self.here.stages.clone()];
        of.first().map_or(0, |l| l.start)..of.last().map_or(0, |l| l.end)
    }

    /// The parameters that it holds for the worker, in the flat vector; none where it waits.
    fn own(&self) -> Option<Range<usize>> {
        let own = &self.stages.own()[self.here.stages.clone()];
        Some(own.first()?.start..own.last()?.end)
    }

    /// What it lends to ranks with other stages, and to which place.
    fn lends(&self) -> Vec<(usize, Loan, usize)> {
        self.between(|loan, here| here.contains(&loan.owner) && !here.contains(&loan.user), |loan| loan.user)
    }

    /// What it borrows, and from which place.
    fn borrows(&self) -> Vec<(usize, Loan, usize)> {
        self.between(|loan, here| here.contains(&loan.user) && !here.contains(&loan.owner), |loan| loan.owner)
    }

    fn between(
        &self,
        is: impl Fn(&Loan, &Range<usize>) -> bool,
        other: impl Fn(&Loan) -> usize,
    ) -> Vec<(usize, Loan, usize)> {
        let place = |loan: &Loan| self.here.of_stage(other(loan), self.stages.len());
        let here = &self.here.stages;
        let all = self.stages.loans().iter().enumerate().filter(|(_, loan)| is(loan, here));
        all.map(|(i, loan)| (i, loan.clone(), place(loan))).collect()
    }

    /// The leader's pull was said: a rank that doesn't lead pulls its own stages.
    pub fn pull(&mut self, lines: &mut Lines, pull: &Pull) -> Result<(), Broke> {
        if let Some(client) = &mut self.client {
            if self.done < pull.done {
                client.advance_to(pull.done);
            }
            if pull.last {
                client.finish();
            }
            client.pull_by(pull.clone(), &mut self.weights)?;
            self.done = pull.done;
        }
        self.lend(lines)
    }

    /// Weights that two stages have go from who pulls them to who uses them too.
    pub fn lend(&mut self, lines: &mut Lines) -> Result<(), Broke> {
        let number = |i: usize, pulls: u64| pulls << 10 | i as u64;
        for (i, loan, to) in self.lends() {
            let tag = Tag { kind: LENT, number: number(i, self.pulls) };
            lines.send(to, tag, self.weights[loan.range].to_vec())?;
        }
        for (i, loan, from) in self.borrows() {
            let values = lines.receive(from, Tag { kind: LENT, number: number(i, self.pulls) })?;
            put(&mut self.weights, &loan.range, &values)?;
        }
        self.pulls += 1;
        Ok(())
    }

    /// One step of the worker: this rank's stages, micro-batch by micro-batch, and its part of the gradient pushed. Gives the mean loss, where
    /// that is this rank's to compute. `push`: the leader's; others make their own.
    pub fn step(
        &mut self,
        model: &mut dyn Model,
        lines: &mut Lines,
        step: Step,
        batch: &Batch,
        push: Option<&mut PushParts<'_>>,
    ) -> Result<f64, Broke> {
        let mut client = self.client.take();
        let stepped = match (push, &mut client) {
            (Some(push), _) => self.compute(model, lines, batch, Some(push)),
            (None, Some(client)) => {
                let mut push = PushParts::new(client, step, batch.n);
                self.compute(model, lines, batch, Some(&mut push))
            }
            (None, None) => self.compute(model, lines, batch, None),
        };
        self.client = client;
        if stepped.is_ok() {
            self.done = step;
        }
        stepped
    }

    fn compute(
        &mut self,
        model: &mut dyn Model,
        lines: &mut Lines,
        batch: &Batch,
        mut push: Option<&mut PushParts<'_>>,
    ) -> Result<f64, Broke> {
        let (round, micro) = (self.next_round(), self.micro_batches.min(batch.n).max(1));
        let Some(own) = self.own() else { return Ok(0.0) };
        let (at, of) = (self.here.at, self.here.of);
        let kept = self.schedule.kept(at, of, micro);
        let part = |m: usize| batch.part(batch.n * m / micro..batch.n * (m + 1) / micro);
        let (lends, borrows, layers) = (self.lends(), self.borrows(), self.layers());
        let tag = |kind: u32, m: usize| Tag { kind, number: round << 20 | m as u64 };
        let pass = |m: usize, n: usize| Pass { layers: layers.clone(), slot: m % kept, n, evaluates: false };
        let mut loss = 0.0;
        for work in self.schedule.works(at, of, micro) {
            match work {
                Work::Forward(m) => {
                    let part = part(m);
                    let input = if at == 0 { None } else { Some(lines.receive(at - 1, tag(ACTIVATION, m))?) };
                    let mut weights = Here(&self.weights);
                    match model.forward_pass(&mut weights, &pass(m, part.n), &part, input.as_deref())? {
                        Forward::Edge(values) => lines.send(at + 1, tag(ACTIVATION, m), values)?,
                        Forward::Loss(of_part) => loss += f64::from(of_part) * part.n as f64 / batch.n as f64,
                        Forward::Evaluated(_) => return Err(ModelError::new("it evaluates in a step").into()),
                    }
                }
                Work::Backward(m) => {
                    let n = batch.n * (m + 1) / micro - batch.n * m / micro;
                    let given = if self.here.is_last() {
                        None
                    } else {
                        Some(lines.receive(at + 1, tag(GRADIENT, m))?)
                    };
                    let pass = pass(m, n);
                    for (_, loan, _) in &lends {
                        self.gradient[loan.range.clone()].fill(0.0);
                    }
                    let last = m + 1 == micro;
                    let mut flat = Adding {
                        weights: &self.weights,
                        gradient: &mut self.gradient,
                        sum: &mut self.sum,
                        share: n as f32 / batch.n as f32,
                        first: m == 0,
                        own: own.clone(),
                        from: own.end,
                        buckets: &self.buckets,
                        next: self.buckets.len(),
                        push: push.as_deref_mut().filter(|_| last),
                        awaits: if last { lends.clone() } else { Vec::new() },
                        lines: &mut *lines,
                        tag: tag(LENT_GRADIENT, 0),
                        broken: None,
                    };
                    let back = model.backward_pass(&mut flat, &pass, given.as_deref());
                    let (broken, left) = (flat.broken.take(), flat.from > own.start);
                    if let Some(broken) = broken {
                        return Err(broken);
                    }
                    let back = back?;
                    if left {
                        return Err(crate::engine::incomplete().into());
                    }
                    for (_, loan, _) in &borrows {
                        add(
                            &mut self.sum,
                            &self.gradient,
                            loan.range.clone(),
                            n as f32 / batch.n as f32,
                            m == 0,
                        );
                        self.gradient.release(loan.range.clone());
                    }
                    match back {
                        Some(values) if at > 0 => lines.send(at - 1, tag(GRADIENT, m), values)?,
                        None if at == 0 => {}
                        _ => {
                            return Err(
                                ModelError::new("its way back doesn't end where its layers do").into()
                            );
                        }
                    }
                }
            }
        }
        for (i, loan, to) in &borrows {
            let tag = Tag { kind: LENT_GRADIENT, number: tag(0, *i).number };
            lines.send(*to, tag, self.sum[loan.range.clone()].to_vec())?;
            self.sum.release(loan.range.clone());
        }
        Ok(loss)
    }

    fn next_round(&mut self) -> u64 {
        self.rounds += 1;
        self.rounds
    }

    /// This rank's part of the evaluation of some samples, which all ranks are given: the last one has the sums.
    pub fn evaluate(
        &mut self,
        model: &mut dyn Model,
        lines: &mut Lines,
        batch: &Batch,
    ) -> Result<Evaluation, Broke> {
        let round = self.next_round();
        if self.here.stages.is_empty() {
            return Ok(Evaluation::default());
        }
        let micro = batch.n.div_ceil(EVALUATED).max(1);
        let (at, mut sum) = (self.here.at, Evaluation::default());
        for m in 0..micro {
            let part = batch.part(batch.n * m / micro..batch.n * (m + 1) / micro);
            let tag = Tag { kind: ACTIVATION, number: round << 20 | m as u64 };
            let input = if at == 0 { None } else { Some(lines.receive(at - 1, tag)?) };
            let pass = Pass { layers: self.layers(), slot: 0, n: part.n, evaluates: true };
            match model.forward_pass(&mut Here(&self.weights), &pass, &part, input.as_deref())? {
                Forward::Edge(values) => lines.send(at + 1, tag, values)?,
                Forward::Evaluated(e) => {
                    sum.loss_sum += e.loss_sum;
                    sum.correct += e.correct;
                    sum.count += e.count;
                }
                Forward::Loss(_) => return Err(ModelError::new("it trains in an evaluation").into()),
            }
        }
        Ok(sum)
    }

    /// The final weights of all stages come to the leader, into a file.
    pub fn gather(&mut self, lines: &mut Lines) -> Result<(), Broke> {
        let pieces = |range: &Range<usize>| {
            let end = range.end;
            range.clone().step_by(PIECE).map(move |at| at..(at + PIECE).min(end))
        };
        let tag = |at: usize| Tag { kind: FINAL, number: at as u64 };
        let own = self.own();
        if self.here.at > 0 {
            for piece in own.iter().flat_map(pieces) {
                lines.send(0, tag(piece.start), self.weights[piece].to_vec())?;
            }
            return Ok(());
        }
        let mut whole = scratch(&self.folder, self.weights.len())?;
        for piece in own.iter().flat_map(pieces) {
            whole[piece.clone()].copy_from_slice(&self.weights[piece]);
        }
        for place in 1..self.here.of {
            let stages = Place::new((place, self.here.of), self.stages.len()).stages;
            let theirs = &self.stages.own()[stages];
            let all = theirs.first().map_or(0, |r| r.start)..theirs.last().map_or(0, |r| r.end);
            for piece in pieces(&all) {
                let values = lines.receive(place, tag(piece.start))?;
                put(&mut whole, &piece, &values)?;
            }
        }
        self.whole = Some(whole);
        Ok(())
    }
}

/// Samples of a part of an evaluation.
const EVALUATED: usize = 32;

/// The longest message between the ranks of a model that is cut so.
pub(crate) fn longest(stages: &Stages, outputs: impl Iterator<Item = usize>, batch: usize) -> usize {
    let edges = outputs.max().unwrap_or_default().saturating_mul(batch.max(EVALUATED));
    let loans = stages.loans().iter().map(|l| l.range.len()).max().unwrap_or_default();
    edges.max(loans).max(PIECE)
}

/// What another rank has sent, where it belongs.
fn put(to: &mut [f32], range: &Range<usize>, values: &[f32]) -> Together {
    let to = &mut to[range.clone()];
    if to.len() != values.len() {
        let why = format!("a rank has sent {} values for {range:?}", values.len());
        return Err(GroupError::Broken(why));
    }
    to.copy_from_slice(values);
    Ok(())
}

/// A micro-batch's part of the gradient's sum.
fn add(sum: &mut [f32], gradient: &[f32], range: Range<usize>, share: f32, first: bool) {
    let both = sum[range.clone()].iter_mut().zip(&gradient[range]);
    match first {
        true => both.for_each(|(s, g)| *s = share * g),
        false => both.for_each(|(s, g)| *s += share * g),
    }
}

/// Weights that are there.
struct Here<'a>(&'a [f32]);

impl Weights<CpuDevice> for Here<'_> {
    fn params(&mut self, _: usize) -> NetResult<&[f32]> {
        Ok(self.0)
    }
}

/// A micro-batch's way back: what is ready of its gradient is added up, and what is complete of the sum leaves.
struct Adding<'s, 'p, 'c> {
    weights: &'s [f32],
    gradient: &'s mut Pages,
    sum: &'s mut Pages,
    /// Of this micro-batch in the minibatch's mean.
    share: f32,
    first: bool,
    own: Range<usize>,
    /// From here on it is added up.
    from: usize,
    buckets: &'s [Range<usize>],
    /// Buckets from here on are pushed.
    next: usize,
    /// In the last micro-batch.
    push: Option<&'s mut PushParts<'c>>,
    /// What was lent, whose gradient has not come.
    awaits: Vec<(usize, Loan, usize)>,
    lines: &'p mut Lines,
    /// Of the gradient of the first loan.
    tag: Tag,
    broken: Option<Broke>,
}

impl Weights<CpuDevice> for Adding<'_, '_, '_> {
    fn params(&mut self, _: usize) -> NetResult<&[f32]> {
        Ok(self.weights)
    }
}

impl Flat<CpuDevice> for Adding<'_, '_, '_> {
    fn layer(&mut self, _: usize) -> NetResult<(&[f32], &mut [f32])> {
        Ok((self.weights, self.gradient))
    }

    fn ready(&mut self, offset: usize) -> NetResult {
        let offset = offset.max(self.own.start);
        if offset >= self.from {
            return Ok(());
        }
        let ready = offset..std::mem::replace(&mut self.from, offset);
        add(self.sum, self.gradient, ready.clone(), self.share, self.first);
        self.gradient.release(ready);
        // Once, where what was lent is complete.
        while let Some(i) = self.awaits.iter().position(|(_, loan, _)| loan.range.start >= offset) {
            let (loan, lent, from) = self.awaits.swap_remove(i);
            let tag = Tag { number: self.tag.number | loan as u64, ..self.tag };
            match self.lines.receive(from, tag) {
                Ok(theirs) if theirs.len() == lent.range.len() => {
                    self.sum[lent.range].iter_mut().zip(&theirs).for_each(|(s, g)| *s += g);
                }
                Ok(_) => {
                    return self
                        .breaks(GroupError::Broken("a gradient of what was lent is not as long".into()));
                }
                Err(e) => return self.breaks(e),
            }
        }
        let lent: Vec<Range<usize>> = self.awaits.iter().map(|(_, loan, _)| loan.range.clone()).collect();
        let Some(push) = &mut self.push else { return Ok(()) };
        while let Some(bucket) = self.next.checked_sub(1).map(|i| self.buckets[i].clone()) {
            let waits = lent.iter().any(|l| l.start < bucket.end && bucket.start < l.end);
            if bucket.start < offset || waits {
                break;
            }
            self.next -= 1;
            if bucket.start < self.own.end {
                push.values(self.next, &self.sum[bucket.clone()]);
                self.sum.release(bucket);
            }
        }
        Ok(())
    }
}

impl Adding<'_, '_, '_> {
    fn breaks(&mut self, e: GroupError) -> NetResult {
        let text = e.to_string();
        self.broken = Some(e.into());
        Err(DeviceError::Group(text))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_go_round_the_ranks_that_there_are() {
        let of = |size: usize| -> Vec<Range<usize>> {
            (0..size).map(|p| Place::new((p, size), 4).stages).collect()
        };
        assert_eq!(of(4), [0..1, 1..2, 2..3, 3..4]);
        assert_eq!(of(3), [0..1, 1..2, 2..4]);
        assert_eq!(of(2), [0..2, 2..4]);
        assert_eq!(of(1), vec![Range { start: 0, end: 4 }]);
        assert_eq!(of(6), [0..1, 1..2, 2..3, 3..4, 4..4, 4..4], "two wait");
        for size in 1..6 {
            for place in 0..size.min(4) {
                let here = Place::new((place, size), 4);
                assert!(here.stages.clone().all(|s| here.of_stage(s, 4) == place), "{here:?}");
                assert_eq!(here.is_last(), here.stages.end == 4);
            }
        }
    }
}
