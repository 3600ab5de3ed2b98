//! One rank: its micro-batches, pulls, pushes and messages.

use super::{
    cut::{Cut, Part, values},
    shared::{Shared, lost},
};
use crate::{
    client::Client,
    clock::nanos,
    error::SimError,
    lines::{Kind, Message},
    speed::{FORWARD, Speed, TURNS},
    stream::Process,
    world::World,
};
use paraft_common::{
    BucketId, Step,
    pipeline::{Window, Work},
};
use paraft_session::{Pull, Pulled};
use std::{collections::BTreeMap, ops::Range, sync::Arc};

/// Bytes of a value between ranks.
const VALUE_BYTES: usize = 4;

/// The next step's minibatch, with some forward passes done.
struct NextMinibatch {
    step: Step,
    forward: usize,
}

/// A rank.
pub(crate) struct Rank {
    world: Arc<World>,
    cut: Arc<Cut>,
    shared: Arc<Shared>,
    at: usize,
    speed: Arc<Speed>,
    /// The weights of its stage, and their versions.
    weights: Vec<f32>,
    versions: Vec<u64>,
    /// The versions of the current minibatch's weights, if newer weights have arrived.
    stash: Option<Vec<u64>>,
    next_minibatch: Option<NextMinibatch>,
    /// Requested weights that are not needed yet.
    asked: Option<Pull>,
    /// Compute seconds of each step.
    times: BTreeMap<Step, f64>,
    /// The number of messages of each kind so far.
    said: u64,
    sums: u64,
    pulls: u64,
}

impl Rank {
    pub fn new(
        world: &Arc<World>,
        cut: &Arc<Cut>,
        shared: &Arc<Shared>,
        at: usize,
        speed: Arc<Speed>,
    ) -> Self {
        Self {
            world: world.clone(),
            cut: cut.clone(),
            shared: shared.clone(),
            at,
            speed,
            weights: vec![0.0; values(&world.layout, &cut.stages[at].buckets).len()],
            versions: Vec::new(),
            stash: None,
            next_minibatch: None,
            asked: None,
            times: BTreeMap::new(),
            said: 0,
            sums: 0,
            pulls: 0,
        }
    }

    /// Executes its leader's commands until the job is done.
    pub async fn follow(mut self, process: Arc<Process>) -> Result<(), SimError> {
        let (mut client, _) = Client::join(&self.world, &process).await?;
        loop {
            match self.hear().await {
                Message::Pull(pull) => {
                    if pull.last {
                        client.finish();
                    }
                    let pulled = self.pull_own(&mut client, pull).await?;
                    self.level(pulled.done).await?;
                    self.lend().await;
                }
                Message::Step(mut step) => loop {
                    self.step(&mut client, step, None).await?;
                    step = step.next();
                    if !self.has_begun(step) {
                        break;
                    }
                },
                Message::Over => {
                    client.leave();
                    return Ok(());
                }
                Message::Values | Message::Range(..) | Message::Continues(_) => return Err(lost()),
            }
        }
    }

    // ---- all ranks ----

    /// Forwards the leader's command from rank to rank.
    pub fn say(&mut self, message: Message) {
        self.pass(message);
        self.said += 1;
    }

    fn pass(&self, message: Message) {
        if self.at + 1 < self.shared.lines.ranks() {
            self.shared.lines.send((self.at, self.at + 1), Kind::Command, self.said, 0, message);
        }
    }

    async fn hear(&mut self) -> Message {
        let said = self.shared.lines.receive(self.at, (self.at - 1, Kind::Command, self.said)).await;
        self.pass(said.clone());
        self.said += 1;
        said
    }

    /// The minimum and maximum over all ranks: two rounds of the ring.
    async fn range(&mut self, own: f64) -> Result<(f64, f64), SimError> {
        let (lines, at, number) = (&self.shared.lines, self.at, self.sums);
        let (last, next) = (lines.ranks() - 1, (at + 1) % lines.ranks());
        let (mut least, mut most) = (own, own);
        if at > 0 {
            let Message::Range(l, m) = lines.receive(at, (at - 1, Kind::Sum, number)).await else {
                return Err(lost());
            };
            (least, most) = (least.min(l), most.max(m));
        }
        let all = if at == last {
            Message::Range(least, most)
        } else {
            lines.send((at, next), Kind::Sum, number, 0, Message::Range(least, most));
            lines.receive(at, (if at == 0 { last } else { at - 1 }, Kind::All, number)).await
        };
        let before_last = (last + lines.ranks() - 1) % lines.ranks();
        if at != before_last {
            lines.send((at, next), Kind::All, number, 0, all.clone());
        }
        self.sums += 1;
        match all {
            Message::Range(least, most) => Ok((least, most)),
            _ => Err(lost()),
        }
    }

    /// Makes all ranks pull to the same step.
    pub async fn level(&mut self, done: Step) -> Result<(), SimError> {
        let (least, most) = self.range(done.0 as f64).await?;
        if least == most { Ok(()) } else { Err(lost()) }
    }

    // ---- weights ----

    /// Whether minibatches overlap.
    pub fn overlaps_minibatches(&self) -> bool {
        self.cut.schedule.overlaps_minibatches()
    }

    /// Whether the next step has started.
    pub fn has_begun(&self, step: Step) -> bool {
        self.next_minibatch.as_ref().is_some_and(|g| g.step == step)
    }

    /// Pulls its stage's weights.
    pub async fn pull_own(&mut self, client: &mut Client, pull: Pull) -> Result<Pulled, SimError> {
        let pulled = client.pull(pull, &mut self.weights).await?;
        self.versions = client.versions();
        if self.next_minibatch.is_none() {
            let range = self.own();
            self.shared.whole.lock()[range].copy_from_slice(&self.weights);
        }
        self.shared.note(self.at, client);
        if pulled.rejoined { Err(lost()) } else { Ok(pulled) }
    }

    fn part(&self) -> &Part {
        &self.cut.stages[self.at]
    }

    /// The range of its stage in the flat vector.
    fn own(&self) -> Range<usize> {
        values(&self.world.layout, &self.part().buckets)
    }

    /// Sends weights of two stages from the rank that pulls them to the other one.
    pub async fn lend(&mut self) {
        let (lines, at) = (&self.shared.lines, self.at);
        for (range, user) in &self.part().lends {
            let bytes = VALUE_BYTES * range.len();
            lines.send((at, *user), Kind::Lent, self.pulls, bytes, Message::Values);
        }
        for (_, owner) in &self.part().borrows {
            lines.receive(at, (*owner, Kind::Lent, self.pulls)).await;
        }
        self.pulls += 1;
    }

    /// Receives the requested weights.
    async fn receive_weights(&mut self, client: &mut Client) -> Result<(), SimError> {
        let Some(pull) = self.asked.take() else { return Ok(()) };
        let done = pull.done;
        let pulled = self.pull_own(client, pull).await?;
        if pulled.done != done {
            return Err(lost());
        }
        self.lend().await;
        Ok(())
    }

    // ---- a step ----

    /// This rank's part of a step: forward and backward passes of the micro-batches, and pushes of its
    /// buckets. Returns the mean loss. `next`: whether the next minibatch overlaps, if this is the
    /// leader.
    pub async fn step(
        &mut self,
        client: &mut Client,
        step: Step,
        next: Option<bool>,
    ) -> Result<f32, SimError> {
        let (at, lines, cut) = (self.at, self.shared.lines.clone(), self.cut.clone());
        let of = cut.ranks();
        let next_minibatch = self.next_minibatch.take().filter(|g| g.step == step);
        if next_minibatch.is_none() {
            self.shared.begins(step, self.own(), &self.weights);
            self.stash = None;
        }
        let (n, behind) = self.shared.lens(step);
        client.weigh(n);
        client.computed_at(self.stash.clone());
        if let Some(continues) = next.filter(|_| cut.schedule.overlaps_minibatches()) {
            for place in 1..of {
                lines.send((at, place), Kind::Continues, step.0, 0, Message::Continues(continues));
            }
        }
        let mut next = if cut.schedule.overlaps_minibatches() { next } else { Some(false) };
        let window = Window {
            kept: cut.schedule.kept(at, of, cut.micro_batches),
            ahead: next_minibatch.map_or(0, |g| g.forward),
            micro_batches: cut.micro(n),
            next: if next == Some(false) { 0 } else { cut.micro(behind) },
        };
        for work in window.works() {
            match work {
                Work::Forward(m) => self.forward(step, (n, m)).await,
                Work::Ahead(m) => {
                    if self.hears(&mut next, step).await? {
                        self.receive_weights(client).await?;
                        self.forward(step.next(), (behind, m)).await;
                    }
                }
                Work::Backward(m) => self.backward(client, step, (n, m)).await?,
            }
        }
        for (lent, owner) in &cut.stages[at].borrows {
            let bytes = VALUE_BYTES * lent.len();
            lines.send((at, *owner), Kind::LentGradient, step.0, bytes, Message::Values);
        }
        self.shared.note(at, client);
        self.times.remove(&step);
        let continues = self.hears(&mut next, step).await?;
        // The requested weights arrive before any other action.
        self.receive_weights(client).await?;
        if continues {
            self.begin_next(client, step, window.ahead_forwards());
            // Later than the last stage.
            match at + 1 == of {
                true => (0..at).for_each(|to| lines.send((at, to), Kind::Loss, step.0, 0, Message::Values)),
                false => _ = lines.receive(at, (of - 1, Kind::Loss, step.0)).await,
            }
        } else {
            self.range(0.0).await?;
            if at == 0 {
                self.shared.flushed();
            }
        }
        Ok(self.shared.done(step))
    }

    fn begin_next(&mut self, client: &mut Client, step: Step, forward: usize) {
        self.shared.begins(step.next(), self.own(), &self.weights);
        self.stash = Some(self.versions.clone());
        // The leader pulls in its training loop.
        if self.at > 0 {
            let pull = Pull::of(step);
            client.ask(pull.clone());
            self.asked = Some(pull);
        }
        self.next_minibatch = Some(NextMinibatch { step: step.next(), forward });
    }

    /// Whether the next minibatch overlaps with that of this step, as the leader decides.
    async fn hears(&self, next: &mut Option<bool>, step: Step) -> Result<bool, SimError> {
        if let Some(next) = *next {
            return Ok(next);
        }
        let Message::Continues(said) = self.shared.lines.receive(self.at, (0, Kind::Continues, step.0)).await
        else {
            return Err(lost());
        };
        *next = Some(said);
        Ok(said)
    }

    async fn forward(&mut self, step: Step, (n, m): (usize, usize)) {
        let (at, lines, cut) = (self.at, self.shared.lines.clone(), self.cut.clone());
        let (number, samples) = (number(step, m), cut.samples(n, m));
        if at > 0 {
            lines.receive(at, (at - 1, Kind::Activation, number)).await;
        }
        self.work(step, FORWARD * samples as f64 / n as f64).await;
        if at + 1 < cut.ranks() {
            let bytes = VALUE_BYTES * samples * cut.stages[at].outputs;
            lines.send((at, at + 1), Kind::Activation, number, bytes, Message::Values);
        }
    }

    async fn backward(
        &mut self,
        client: &mut Client,
        step: Step,
        (n, m): (usize, usize),
    ) -> Result<(), SimError> {
        let (at, lines, cut) = (self.at, self.shared.lines.clone(), self.cut.clone());
        let (number, samples) = (number(step, m), cut.samples(n, m));
        if at + 1 < cut.ranks() {
            lines.receive(at, (at + 1, Kind::Gradient, number)).await;
        }
        let time = (1.0 - FORWARD) * samples as f64 / n as f64;
        match m + 1 == cut.micro(n) {
            true => self.backward_and_push(client, step, time).await?,
            false => self.work(step, time).await,
        }
        if at > 0 {
            let bytes = VALUE_BYTES * samples * cut.stages[at - 1].outputs;
            lines.send((at, at - 1), Kind::Gradient, number, bytes, Message::Values);
        }
        Ok(())
    }

    /// The backward pass of the last micro-batch; complete buckets of the gradient are pushed.
    async fn backward_and_push(
        &mut self,
        client: &mut Client,
        step: Step,
        time: f64,
    ) -> Result<(), SimError> {
        let cut = self.cut.clone();
        let part = &cut.stages[self.at];
        let mut awaits = part.lends.clone();
        let turns = TURNS.min(part.buckets.len()).max(1);
        let mut next = part.buckets.end;
        for turn in 1..=turns {
            self.work(step, time / turns as f64).await;
            let until = part.buckets.end - part.buckets.len() * turn / turns;
            for b in (until..next).rev() {
                let range = self.world.layout.buckets()[b].range();
                while let Some(i) =
                    awaits.iter().position(|(lent, _)| lent.start < range.end && range.start < lent.end)
                {
                    let (_, user) = awaits.swap_remove(i);
                    self.shared.lines.receive(self.at, (user, Kind::LentGradient, step.0)).await;
                }
                let id = BucketId(b as u32);
                let payload =
                    self.shared.gradient(&self.world, &cut, step, |g| client.encode(id, step, &g[range]))?;
                client.push(id, step, payload);
            }
            next = until;
        }
        Ok(())
    }

    /// Computes for a share of the time that the whole model takes for a minibatch.
    async fn work(&mut self, step: Step, share: f64) {
        let (speed, world) = (&self.speed, &self.world);
        let time = *self.times.entry(step).or_insert_with(|| speed.step(world));
        let began = world.clock.now();
        world.cores.work(nanos(time * share * self.cut.stages[self.at].share)).await;
        self.shared.worked(self.at, began..world.clock.now());
    }
}

fn number(step: Step, m: usize) -> u64 {
    step.0 << 20 | m as u64
}
