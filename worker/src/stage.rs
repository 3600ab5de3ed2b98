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
/// What was sent has been taken: as many may follow.
const TAKEN: u32 = 6;

/// Messages that nobody has taken, in an evaluation and of final weights.
const AHEAD: usize = 8;

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
    /// Samples of the largest one.
    part: usize,
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
    /// Buckets from here on are pushed of this step, in this session.
    pushed: Option<(Step, usize)>,
    /// The group that it was formed for.
    generation: u64,
    /// The step that its shards are at, as far as it knows.
    done: Step,
    /// The last pull, with the step that it came to.
    pulled: Pull,
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
        (schedule, micro_batches, part): (PipelineSchedule, usize, usize),
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
            part,
            buckets,
            weights: pages()?,
            sum: pages()?,
            gradient: pages()?,
            here: Place::default(),
            rounds: 0,
            pulls: 0,
            join,
            client: None,
            pushed: None,
            generation: 0,
            done: Step(0),
            pulled: Pull::default(),
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
        self.formed(ranks);
        (self.rounds, self.pulls) = (0, 0);
        let mut at = step;
        if ranks.leads() {
            self.done = step;
        } else if !self.here.stages.is_empty() {
            if self.client.is_none()
                && let Some(join) = &mut self.join
            {
                // Once a step is made the servers have weights.
                let (client, start) = join(model, self.here.stages.clone(), step == Step(0))?;
                (self.client, self.done, self.pushed) = (Some(client), start, None);
            }
            at = self.done;
        }
        let (least, most) = self.clocks(ranks, at)?;
        tracing::info!(stages = ?self.here.stages, layers = ?self.layers(), "this rank's part of the model");
        // A step that some have pushed is made again by all. More is what a session had to skip that was opened anew.
        Ok(if most.0 - least.0 > 1 { most } else { least })
    }

    /// A group was formed. Where this rank has other stages in it, or was in none meanwhile, its session is another's by now, and nobody
    /// waits for it to end.
    pub fn formed(&mut self, ranks: &Ranks) {
        let (here, generation) = (Place::new(ranks.place(), self.stages.len()), ranks.generation());
        // Who leads has its session with the training loop, which notices if another has been this worker.
        let next = ranks.leads() || self.generation == generation || self.generation + 1 == generation;
        if here.stages != self.here.stages || !next {
            self.weights.release(0..self.weights.len());
            (self.client, self.pushed) = (None, None);
        }
        (self.here, self.generation) = (here, generation);
    }

    /// The least and the most step that anybody with a stage is at.
    fn clocks(&self, ranks: &Ranks, at: Step) -> Result<(Step, Step), Broke> {
        let (place, size) = ranks.place();
        let mut clocks = vec![0.0; size];
        clocks[place] = at.0 as f64;
        ranks.sum(&mut clocks)?;
        let of = &clocks[..self.here.of.min(size)];
        let (least, most) = of.iter().fold((f64::INFINITY, 0.0f64), |(l, m), c| (l.min(*c), m.max(*c)));
        Ok((Step(least.min(most) as u64), Step(most as u64)))
    }

    /// After a pull that has brought this rank to a step: where all are to be instead; `None`: they are at the same, or it was the last.
    pub fn level(&self, ranks: &Ranks, at: Step, pull: &Pull) -> Result<Option<Step>, Broke> {
        if pull.last {
            return Ok(None);
        }
        let (least, most) = self.clocks(ranks, at)?;
        Ok((least != most).then_some(most))
    }

    /// The values of each stage, as a server's job names them.
    pub fn values(&self) -> Vec<usize> {
        self.stages.values()
    }

    /// Whether a rank of this group has the stages that it had.
    pub fn stays(&self, ranks: &Ranks) -> bool {
        self.stages_at(ranks.place()) == self.here.stages
    }

    /// The leader has pulled this.
    pub fn is_at(&mut self, pull: &Pull) {
        (self.done, self.pulled) = (pull.done, pull.clone());
    }

    /// All ranks have made a step.
    pub fn made(&mut self, step: Step) {
        (self.done, self.pushed) = (step, None);
    }

    /// The pull that whoever comes now has to make, to be where the leader is.
    pub fn behind(&self) -> Pull {
        Pull { done: self.done.max(self.pulled.done), ..self.pulled.clone() }
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
        let mut all: Vec<(usize, Loan, usize)> = Vec::new();
        for (i, loan) in self.stages.loans().iter().enumerate().filter(|(_, loan)| is(loan, here)) {
            let to = place(loan);
            // What several stages of a rank use it gets once.
            if !all.iter().any(|(_, known, at)| known.range == loan.range && *at == to) {
                all.push((i, loan.clone(), to));
            }
        }
        all
    }

    /// The leader's pull was said: a rank that doesn't lead pulls its own stages.
    pub fn pull(&mut self, ranks: &mut Ranks, pull: &Pull) -> Result<(), Broke> {
        let mut at = pull.done;
        if let Some(client) = &mut self.client {
            if self.done < pull.done {
                client.advance_to(pull.done);
            }
            if pull.last {
                client.finish();
            }
            at = client.pull_by(pull.clone(), &mut self.weights)?.done;
        }
        while let Some(done) = self.level(ranks, at, pull)? {
            if let Some(client) = self.client.as_mut().filter(|_| at < done) {
                client.advance_to(done);
                at = client.pull_by(Pull { done, ..pull.clone() }, &mut self.weights)?.done;
            }
        }
        self.done = at;
        self.lend(ranks.lines()?)
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
                // Of a step that is made again, what is pushed stays pushed.
                let behind = self.pushed.filter(|(of, _)| *of == step).map_or(usize::MAX, |(_, next)| next);
                let mut push = PushParts::new(client, step, batch.n).behind(behind);
                let stepped = self.compute(model, lines, batch, Some(&mut push));
                self.pushed = Some((step, push.next()));
                stepped
            }
            (None, None) => self.compute(model, lines, batch, None),
        };
        self.client = client;
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
        // No more activations than in a step.
        let micro = batch.n.div_ceil(self.part).max(1);
        let (at, mut sum) = (self.here.at, Evaluation::default());
        for m in 0..micro {
            let part = batch.part(batch.n * m / micro..batch.n * (m + 1) / micro);
            let tag = |kind: u32, m: usize| Tag { kind, number: round << 20 | m as u64 };
            let input = if at == 0 { None } else { Some(lines.receive(at - 1, tag(ACTIVATION, m))?) };
            if at > 0 {
                lines.send(at - 1, tag(TAKEN, m), Vec::new())?;
            }
            let pass = Pass { layers: self.layers(), slot: 0, n: part.n, evaluates: true };
            match model.forward_pass(&mut Here(&self.weights), &pass, &part, input.as_deref())? {
                Forward::Edge(values) => {
                    // Nothing else keeps a stage from being far ahead of the next one here.
                    if let Some(before) = m.checked_sub(AHEAD) {
                        lines.receive(at + 1, tag(TAKEN, before))?;
                    }
                    lines.send(at + 1, tag(ACTIVATION, m), values)?;
                }
                Forward::Evaluated(e) => {
                    sum.loss_sum += e.loss_sum;
                    sum.correct += e.correct;
                    sum.count += e.count;
                }
                Forward::Loss(_) => return Err(ModelError::new("it trains in an evaluation").into()),
            }
        }
        if !self.here.is_last() {
            for m in micro.saturating_sub(AHEAD)..micro {
                lines.receive(at + 1, Tag { kind: TAKEN, number: round << 20 | m as u64 })?;
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
        let tag = |kind: u32, at: usize| Tag { kind, number: at as u64 };
        let own = self.own();
        if self.here.at > 0 {
            // The leader takes one rank's after the other: what it hasn't taken is in its memory.
            let mut sent = Vec::new();
            for piece in own.iter().flat_map(pieces) {
                if let Some(before) = sent.len().checked_sub(AHEAD) {
                    lines.receive(0, tag(TAKEN, sent[before]))?;
                }
                sent.push(piece.start);
                lines.send(0, tag(FINAL, piece.start), self.weights[piece].to_vec())?;
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
                let values = lines.receive(place, tag(FINAL, piece.start))?;
                put(&mut whole, &piece, &values)?;
                lines.send(place, tag(TAKEN, piece.start), Vec::new())?;
            }
        }
        self.whole = Some(whole);
        Ok(())
    }
}

/// The longest message between the ranks of a model that is cut so.
pub(crate) fn longest(stages: &Stages, outputs: impl Iterator<Item = usize>, batch: usize) -> usize {
    let edges = outputs.max().unwrap_or_default().saturating_mul(batch);
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
