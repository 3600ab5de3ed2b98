//! One step of a rank's stages: forward and backward passes of micro-batches, and the push of its part of the
//! gradient.
//!
//! ```text
//!  1f1b   pull W2 │ F0 F1 B0 F2 B1 ... B3 push 3 │ pull W3 │ F0 F1 B0 ...
//!
//!  2bw            │ F2 B0 F3 B1 f0 B2 f1 B3 push 3 ──▶ ask for W3
//!         weights │         W2      W2             │ W3, when f of the step behind needs it
//!         stash   │ W1   W1   W1      W1   W1      │ W2
//! ```
//!
//! If minibatches overlap, forward and backward pass of a minibatch use the newest weights at its start. The stash
//! keeps these when newer weights arrive. The push names their versions.

use super::{
    Slots, Stage, StartedMinibatch,
    lookahead::Lookahead,
    messages::{ACTIVATION, GRADIENT, LENT_GRADIENT, LOSS},
    sums::{GradientSum, VersionedWeights, add},
    versioned::Versioned,
};
use crate::{
    engine::StepError,
    exchange::{PushParts, incomplete},
};
use paraft_client::{Client, Pull};
use paraft_common::{
    BucketId, Step, Version,
    pipeline::{Window, Work},
};
use paraft_compute::collective::{Lines, Tag};
use paraft_models::{Batch, Forward, Loan, Model, ModelError, Pass};
use paraft_trace::{Moment, Span, Stage as Trace};
use std::ops::Range;

/// The minibatch of a step, and the one that overlaps it.
pub(crate) type Batches<'b> = (&'b Batch, Option<&'b Batch>);

impl Stage<'_> {
    /// One step of the worker on this rank's stages: micro-batch by micro-batch, then the push of its part of the
    /// gradient. Returns the mean loss if this rank computes it, or if the next step [is in
    /// progress](Self::has_begun_next). `push`: the leader's; other ranks make their own.
    pub fn step(
        &mut self,
        model: &mut dyn Model,
        lines: &mut Lines,
        step: Step,
        batches: Batches<'_>,
        push: Option<&mut PushParts<'_>>,
    ) -> Result<f64, StepError> {
        let mut client = self.client.take();
        self.moved = false;
        let stepped = self.computing(model, |this, model| match (push, &mut client) {
            (Some(push), _) => this.window(model, lines, step, batches, Some(push)),
            (None, Some(client)) => {
                // When a step is repeated, its pushed buckets stay pushed.
                let behind = this.pushed.filter(|(of, _)| *of == step).map_or(usize::MAX, |(_, next)| next);
                let samples = batches.0.n * this.here.meshes;
                let mut push = PushParts::new(client, step, samples).behind(behind);
                let stepped = this.window(model, lines, step, batches, Some(&mut push));
                let next = push.next();
                // Another session has no push of this step.
                this.pushed = (!this.moved).then(|| (step, if stepped.is_ok() { 0 } else { next }));
                stepped
            }
            (None, None) => this.window(model, lines, step, batches, None),
        });
        self.client = client;
        stepped
    }

    /// Whether minibatches overlap.
    pub fn overlaps_minibatches(&self) -> bool {
        self.schedule.overlaps_minibatches()
    }

    /// Whether a next step is in progress.
    pub fn has_begun_next(&self) -> bool {
        self.next_minibatch.is_some()
    }

    /// Whether this step is in progress.
    pub fn has_begun(&self, step: Step) -> bool {
        self.next_minibatch.as_ref().is_some_and(|g| g.step == step)
    }

    fn window(
        &mut self,
        model: &mut dyn Model,
        lines: &mut Lines,
        step: Step,
        (batch, next): Batches<'_>,
        mut push: Option<&mut PushParts<'_>>,
    ) -> Result<f64, StepError> {
        self.rounds += 1;
        let round = self.rounds;
        let Some(own) = self.own() else { return Ok(0.0) };
        let (at, of, here) = (self.here.at, self.here.of, self.here.clone());
        let beside = |at: usize| here.beside(at);
        let next_minibatch = self.next_minibatch.take().filter(|g| g.step == step);
        let stashed = next_minibatch.is_some();
        if !stashed {
            self.slots = Slots::default();
        }
        let most = self.micro_batches;
        let micro = |batch: &Batch| most.min(batch.n).max(1);
        let micro_batches = micro(batch);
        // The same in all steps, even if a minibatch is smaller.
        let kept = self.schedule.kept(at, of, self.micro_batches);
        let ahead = next_minibatch.as_ref().map_or(0, |g| g.forward);
        let window = Window { kept, ahead, micro_batches, next: next.map_or(0, micro) };
        if let Some(push) = &mut push {
            self.weights.versions = push.client().versions();
            push.client().computed_at(stashed.then(|| self.stash.versions.clone()));
        }
        let (lends, borrows, layers) = (self.lends(), self.borrows(), self.layers());
        let tag = |kind: u32, round: u64, m: usize| Tag { kind, number: round << 20 | m as u64 };
        // The leader's decision reaches the later stages before they need it.
        let mut next = match here.beside(at) {
            0 => Lookahead::Known(self.announce_next(lines, round, next)?),
            _ => Lookahead::Maybe(next),
        };
        // The mean over the meshes is the mean of their means.
        let meshes = here.meshes as f32;
        let mut loss = 0.0;
        for work in window.works() {
            if matches!(work, Work::Ahead(_)) && next.decide(self, lines, round)?.is_none() {
                continue;
            }
            let (batch, m, round) = match (work, next.known()) {
                (Work::Ahead(m), Some(next)) => (next, m, round + 1),
                (Work::Forward(m) | Work::Backward(m) | Work::Ahead(m), _) => (batch, m, round),
            };
            let range = |m: usize| batch.n * m / micro(batch)..batch.n * (m + 1) / micro(batch);
            let n = range(m).len();
            let pass = |slot: usize| Pass { layers: layers.clone(), slot: slot % kept, n, evaluates: false };
            match work {
                Work::Forward(_) | Work::Ahead(_) => {
                    let newest = matches!(work, Work::Ahead(_));
                    if newest {
                        self.receive_weights(push.as_mut().map(|p| p.client()), lines)?;
                    }
                    let weights = if stashed && !newest { &self.stash } else { &self.weights };
                    let version = self.version(weights);
                    let input = match at {
                        0 => None,
                        _ => Some(lines.receive(beside(at - 1), tag(ACTIVATION, round, m))?),
                    };
                    let pass = pass(self.slots.forward);
                    self.slots.forward += 1;
                    let begin = Moment::now();
                    let made = model.forward_pass(
                        &mut VersionedWeights(weights, weights.edition),
                        &pass,
                        &batch.part(range(m)),
                        input.as_deref(),
                    )?;
                    if let Some(push) = &mut push {
                        let step = if newest { step.next() } else { step };
                        self.note(push.client(), Trace::Forward, begin, (step, m, version));
                    }
                    match made {
                        Forward::Edge(values) => {
                            lines.send(beside(at + 1), tag(ACTIVATION, round, m), values)?;
                        }
                        Forward::Loss(of_part) => {
                            loss += f64::from(of_part) * n as f64 / batch.n as f64 / f64::from(meshes);
                        }
                        Forward::Evaluated(_) => return Err(ModelError::new("it evaluates in a step").into()),
                    }
                }
                Work::Backward(_) => {
                    // The last pass pushes. Weights that arrived behind this step's push could contain it.
                    if stashed && m + 1 == micro_batches {
                        self.receive_weights(push.as_mut().map(|p| p.client()), lines)?;
                    }
                    let given = match self.here.is_last() {
                        true => None,
                        false => Some(lines.receive(beside(at + 1), tag(GRADIENT, round, m))?),
                    };
                    let pass = pass(self.slots.back);
                    self.slots.back += 1;
                    for (_, loan, _) in &lends {
                        self.gradient[loan.range.clone()].fill(0.0);
                    }
                    let (last, joins) = (m + 1 == micro_batches, self.alike.is_some());
                    let share = n as f32 / batch.n as f32 / meshes;
                    let weights = if stashed { &self.stash } else { &self.weights };
                    let (version, begin) = (self.version(weights), Moment::now());
                    let mut flat = GradientSum {
                        weights,
                        edition: weights.edition,
                        gradient: &mut self.gradient,
                        sum: &mut self.sum,
                        share,
                        first: m == 0,
                        own: own.clone(),
                        from: own.end,
                        buckets: &self.buckets,
                        next: self.buckets.len(),
                        push: push.as_deref_mut().filter(|_| last && !joins),
                        awaits: if last { lends.clone() } else { Vec::new() },
                        lines: &mut *lines,
                        tag: tag(LENT_GRADIENT, round, 0),
                        broken: None,
                    };
                    let back = model.backward_pass(&mut flat, &pass, given.as_deref());
                    let (broken, left) = (flat.broken.take(), flat.from > own.start);
                    if let Some(broken) = broken {
                        return Err(broken);
                    }
                    let back = back?;
                    if left {
                        return Err(incomplete().into());
                    }
                    if let Some(push) = &mut push {
                        self.note(push.client(), Trace::Backward, begin, (step, m, version));
                    }
                    for (_, loan, _) in &borrows {
                        add(&mut self.sum, &self.gradient, loan.range.clone(), share, m == 0);
                        self.gradient.release(loan.range.clone());
                    }
                    match back {
                        Some(values) if at > 0 => {
                            lines.send(beside(at - 1), tag(GRADIENT, round, m), values)?
                        }
                        None if at == 0 => {}
                        _ => {
                            let why = "its way back doesn't end where its layers do";
                            return Err(ModelError::new(why).into());
                        }
                    }
                }
            }
        }
        for (i, loan, to) in &borrows {
            let tag = tag(LENT_GRADIENT, round, *i);
            lines.send(*to, tag, self.sum[loan.range.clone()].to_vec())?;
            self.sum.release(loan.range.clone());
        }
        self.join(round, push.as_deref_mut())?;
        if let Some(push) = &mut push {
            self.share_squares(lines, step, push.client())?;
        }
        if next.decide(self, lines, round)?.is_none() {
            // First receive the pull that is in progress.
            self.receive_weights(push.map(|p| p.client()), lines)?;
            // The losses of all ranks are summed.
            return Ok(if here.slice.is_first() { loss } else { 0.0 });
        }
        let client = push.map(|p| p.client());
        self.begin_next(client, lines, step, window.ahead_forwards(), (&own, &borrows))?;
        self.sum_losses(lines, tag(LOSS, round, 0), loss)
    }

    /// The sum of all meshes' losses, which their last stages know. The other ranks need it later than these send it, so no rank
    /// waits.
    fn sum_losses(&self, lines: &mut Lines, tag: Tag, mut loss: f64) -> Result<f64, StepError> {
        let (here, last) = (&self.here, self.here.is_last());
        if last {
            for (mesh, at) in (0..here.meshes).flat_map(|r| (0..here.of).map(move |at| (r, at))) {
                if (mesh, at) != (here.mesh, here.at) {
                    lines.send(here.in_mesh(mesh, at), tag, vec![loss as f32])?;
                }
            }
        }
        for mesh in (0..here.meshes).filter(|r| !last || *r != here.mesh) {
            let of_mesh = lines.receive(here.in_mesh(mesh, here.of - 1), tag)?;
            loss += of_mesh.first().copied().map_or(f64::NAN, f64::from);
        }
        Ok(loss)
    }

    /// Number of updates that all of this rank's own weights contain.
    fn version(&self, weights: &Versioned) -> Version {
        let own = self.own_of_model().unwrap_or_default();
        let of = self.buckets.iter().zip(&weights.versions).filter(|(bucket, _)| own.contains(&bucket.start));
        Version(of.map(|(_, version)| *version).min().unwrap_or(0))
    }

    fn note(&self, client: &Client, stage: Trace, begin: Moment, (step, m, version): (Step, usize, Version)) {
        let first =
            self.own_of_model().and_then(|own| self.buckets.iter().position(|b| own.contains(&b.start)));
        client.stages().note(Span {
            stage,
            begin,
            end: Moment::now(),
            step,
            shard: client.shard_of(BucketId(first.unwrap_or(0) as u32)),
            bucket: None,
            worker: Some(client.worker()),
            bytes: 0,
            pass: Some(paraft_trace::Pass { micro_batch: m as u32, version }),
        });
    }

    /// Begins the next minibatch: copies the newest weights to the stash, from which it computes, and asks for the weights after this
    /// step.
    fn begin_next(
        &mut self,
        mut client: Option<&mut Client>,
        lines: &mut Lines,
        step: Step,
        forward: usize,
        (own, borrows): (&Range<usize>, &[(usize, Loan, usize)]),
    ) -> Result<(), StepError> {
        self.receive_weights(client.as_deref_mut(), lines)?;
        for range in borrows.iter().map(|(_, loan, _)| &loan.range).chain([own]) {
            self.stash[range.clone()].copy_from_slice(&self.weights[range.clone()]);
        }
        self.stash.versions.clone_from(&self.weights.versions);
        self.stash.edition = self.weights.edition;
        // The leader pulls when its training loop says so.
        if self.here.beside(self.here.at) > 0 {
            let pull = Pull::of(step);
            if let Some(client) = client {
                client.ask(pull.clone());
            }
            self.asked = Some(pull);
        }
        self.next_minibatch = Some(StartedMinibatch { step: step.next(), forward });
        Ok(())
    }

    /// Waits for the weights that [`Self::begin_next`] has asked for, if it has, and takes them.
    fn receive_weights(&mut self, client: Option<&mut Client>, lines: &mut Lines) -> Result<(), StepError> {
        let Some(pull) = self.asked.take() else { return Ok(()) };
        if let Some(client) = client {
            let pulled = self.pull_by(client, pull.clone())?;
            if self.has_moved(&pulled) || pulled.done != pull.done {
                self.done = pulled.done;
                let why = "a rank's session was lost";
                return Err(lines.break_up(why).into());
            }
            self.weights.versions = client.versions();
        }
        self.landed(lines)
    }

    /// Computes with this rank's slice of the model, if it has one.
    pub(super) fn computing<T>(
        &mut self,
        model: &mut dyn Model,
        compute: impl FnOnce(&mut Self, &mut dyn Model) -> T,
    ) -> T {
        let mut own = self.alike.as_mut().and_then(|alike| alike.model.take());
        let computed = match &mut own {
            Some(own) => compute(self, &mut **own),
            None => compute(self, model),
        };
        if let Some(alike) = &mut self.alike {
            alike.model = own;
        }
        computed
    }

    /// Sends this rank's gradient to the rank that speaks for its stages, which pushes the sum.
    fn join(&mut self, round: u64, mut push: Option<&mut PushParts<'_>>) -> Result<(), StepError> {
        let (Some(alike), Some(own)) = (&self.alike, self.own()) else { return Ok(()) };
        let buckets = self.own_buckets();
        match self.here.speaks() {
            false => alike.send(buckets, (&self.sum, round))?,
            true => {
                let mut bucket = Vec::new();
                for i in buckets.rev() {
                    let sum = (&*self.sum, round);
                    alike.join((i, &self.buckets[i]), sum, &mut bucket)?;
                    if let Some(push) = &mut push {
                        push.values(i, &bucket);
                    }
                }
            }
        }
        self.sum.release(own);
        Ok(())
    }
}
