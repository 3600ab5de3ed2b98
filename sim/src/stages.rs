//! A worker whose ranks hold a stage of its model each (`[parallel]`), in simulated time.
//!
//! Each rank has a session of its own with the shards of its stage. In which order it computes micro-batches, when it pulls, at which versions
//! it computes and what it waits for is what `paraft_worker`'s stages do. A step's time is divided among them as their layers cost, and among
//! micro-batches by samples.
//!
//! The gradient is that of the whole model, micro-batch by micro-batch, at the weights that all ranks had as they began with it: it is computed
//! once, when the first bucket of it is to be pushed.

use crate::{
    SimError,
    client::Client,
    clock::{Moment, nanos},
    lines::{Kind, Lines, Message},
    stream::Process,
    training::{FORWARD, Speed, TURNS},
    world::World,
};
use paraft_common::{
    BucketId, Layout, Step, WorkerId,
    pipeline::{PipelineSchedule, Window, Work},
};
use paraft_models::{Layer, Stages};
use paraft_session::{Pull, Pulled};
use paraft_worker::worker::Minibatches;
use parking_lot::Mutex;
use std::{
    collections::{BTreeMap, VecDeque},
    ops::Range,
    sync::Arc,
};

/// A value between ranks.
const VALUE_BYTES: usize = 4;

/// How the model is cut.
pub(crate) struct Cut {
    schedule: PipelineSchedule,
    micro_batches: usize,
    pub stages: Vec<Part>,
}

/// A stage.
pub(crate) struct Part {
    pub layers: Range<usize>,
    pub buckets: Range<usize>,
    /// Of a step's time.
    pub share: f64,
    /// Values of a sample that the next stage takes.
    outputs: usize,
    /// Parameters that another stage uses too, and which that is.
    lends: Vec<(Range<usize>, usize)>,
    /// Those that it uses of another.
    borrows: Vec<(Range<usize>, usize)>,
}

impl Cut {
    pub fn new(
        (schedule, micro_batches): (PipelineSchedule, usize),
        layers: &[Layer],
        stages: &Stages,
        layout: &Layout,
    ) -> Self {
        let cost: f64 = stages.costs().iter().sum();
        let part = |stage: usize| {
            let (own, of) = (stages.own()[stage].clone(), stages.layers()[stage].clone());
            let buckets = layout.buckets();
            let at = |value: usize| buckets.partition_point(|b| b.offset < value);
            // The last one has what is beside the parameters.
            let end = if stage + 1 == stages.len() { buckets.len() } else { at(own.end) };
            let between = |is: fn(&paraft_models::Loan) -> (usize, usize)| {
                let loans = stages.loans().iter().map(|loan| (is(loan), loan.range.clone()));
                loans
                    .filter(|((here, _), _)| *here == stage)
                    .map(|((_, other), range)| (range, other))
                    .collect()
            };
            Part {
                buckets: at(own.start)..end,
                share: if cost > 0.0 { stages.costs()[stage] / cost } else { 1.0 / stages.len() as f64 },
                outputs: layers[of.end - 1].outputs,
                lends: between(|loan| (loan.owner, loan.user)),
                borrows: between(|loan| (loan.user, loan.owner)),
                layers: of,
            }
        };
        Self { schedule, micro_batches, stages: (0..stages.len()).map(part).collect() }
    }

    pub fn ranks(&self) -> usize {
        self.stages.len()
    }

    /// Of a micro-batch, of so many in the minibatch.
    fn samples(&self, n: usize, m: usize) -> usize {
        let micro = self.micro_batches.min(n).max(1);
        n * (m + 1) / micro - n * m / micro
    }
}

/// A minibatch under way.
struct Minibatch {
    samples: Vec<u32>,
    /// So many are in the one behind it.
    behind: usize,
    /// Those that it is computed at.
    weights: Vec<f32>,
    /// Mean loss, and the gradient.
    gradient: Option<(f32, Vec<f32>)>,
    /// Ranks that have not pushed their part of it.
    left: usize,
}

/// How busy ranks are.
#[derive(Default)]
struct Busy {
    /// Since when one of them has been, behind a time when none was.
    began: Option<Moment>,
    ended: Moment,
    /// From beginnings to ends.
    spans: u64,
}

/// What the ranks of a worker share.
pub(crate) struct Shared {
    worker: WorkerId,
    lines: Arc<Lines>,
    /// The newest weights of all stages.
    whole: Mutex<Vec<f32>>,
    minibatches: Mutex<BTreeMap<Step, Minibatch>>,
    busy: Mutex<Busy>,
    ranks: Mutex<Vec<OfRank>>,
}

/// What a rank has done.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct OfRank {
    /// Nanoseconds of its processor.
    pub worked: u64,
    /// Of those in which its worker was in steps.
    pub idle: f64,
    pub bytes_pushed: u64,
    pub bytes_pulled: u64,
    pub bytes_sent: u64,
}

impl Shared {
    pub fn new(world: &World, worker: WorkerId, ranks: usize) -> Arc<Self> {
        let first = worker.0 as usize * ranks;
        Arc::new(Self {
            worker,
            lines: Lines::new(&world.network, first, ranks),
            whole: Mutex::new(vec![0.0; world.layout.len()]),
            minibatches: Mutex::default(),
            busy: Mutex::default(),
            ranks: Mutex::new(vec![OfRank::default(); ranks]),
        })
    }

    /// What each rank has done.
    fn of_ranks(&self) -> Vec<OfRank> {
        let spans = self.busy.lock().spans.max(1) as f64;
        let with = |(rank, of): (usize, &OfRank)| OfRank {
            idle: 1.0 - of.worked as f64 / spans,
            bytes_sent: self.lines.sent(rank),
            ..*of
        };
        self.ranks.lock().iter().enumerate().map(with).collect()
    }

    fn note(&self, rank: usize, client: &Client) {
        let of = &mut self.ranks.lock()[rank];
        (of.bytes_pushed, of.bytes_pulled) = (client.bytes_pushed, client.bytes_pulled);
    }

    /// The leader has the samples of a step; so many are in the minibatch behind it.
    fn has(&self, step: Step, samples: Vec<u32>, behind: usize) {
        let (weights, left) = (vec![0.0; self.whole.lock().len()], self.lines.ranks());
        let minibatch = Minibatch { samples, behind, weights, gradient: None, left };
        self.minibatches.lock().insert(step, minibatch);
    }

    /// Whether it has them.
    fn knows(&self, step: Step) -> bool {
        self.minibatches.lock().contains_key(&step)
    }

    /// Samples of a step, and of the one behind it.
    fn lens(&self, step: Step) -> (usize, usize) {
        self.minibatches.lock().get(&step).map_or((0, 0), |m| (m.samples.len(), m.behind))
    }

    /// The gradient of a step.
    fn gradient<T>(
        &self,
        world: &World,
        cut: &Cut,
        step: Step,
        read: impl FnOnce(&[f32]) -> T,
    ) -> Result<T, SimError> {
        let mut minibatches = self.minibatches.lock();
        let Some(Minibatch { samples, weights, gradient, .. }) = minibatches.get_mut(&step) else {
            return Err(lost());
        };
        if gradient.is_none() {
            let parts = cut.micro_batches;
            let (loss, sum) = world.learner.lock().in_parts((self.worker, step), weights, samples, parts)?;
            *gradient = Some((loss, sum));
        }
        gradient.as_ref().map(|(_, sum)| read(sum)).ok_or_else(lost)
    }

    /// A rank is done with a step; gives its loss.
    fn done(&self, step: Step) -> f32 {
        let mut minibatches = self.minibatches.lock();
        let Some(minibatch) = minibatches.get_mut(&step) else { return f32::NAN };
        let loss = minibatch.gradient.as_ref().map_or(f32::NAN, |(loss, _)| *loss);
        minibatch.left -= 1;
        if minibatch.left == 0 {
            minibatches.remove(&step);
        }
        loss
    }

    fn worked(&self, rank: usize, time: Range<Moment>) {
        let busy = &mut *self.busy.lock();
        busy.began.get_or_insert(time.start);
        busy.ended = busy.ended.max(time.end);
        self.ranks.lock()[rank].worked += time.end - time.start;
    }

    /// All ranks are done with what they had begun.
    fn flushed(&self) {
        let busy = &mut *self.busy.lock();
        busy.spans += busy.began.take().map_or(0, |began| busy.ended - began);
    }
}

/// The rank that leads the others.
pub(crate) struct Leader {
    cut: Arc<Cut>,
    shared: Arc<Shared>,
    rank: Rank,
    /// The samples of the next steps.
    ahead: VecDeque<Vec<u32>>,
}

impl Leader {
    pub fn new(cut: &Arc<Cut>, shared: &Arc<Shared>, rank: Rank) -> Self {
        Self { cut: cut.clone(), shared: shared.clone(), rank, ahead: VecDeque::new() }
    }

    /// What comes next is from other minibatches.
    pub fn begins(&mut self) {
        self.ahead.clear();
    }

    /// All ranks pull; behind a step that another one is behind, each by itself.
    pub async fn pull(&mut self, client: &mut Client, pull: Pull) -> Result<Pulled, SimError> {
        let together = !self.rank.goes_on_with(pull.done.next());
        if together {
            self.rank.say(Message::Pull(pull.clone()));
        }
        let pulled = self.rank.pull_own(client, pull).await?;
        if together {
            self.rank.level(pulled.done).await?;
        }
        self.rank.lend(&self.cut).await;
        Ok(pulled)
    }

    /// All ranks make a step; gives its loss, and how many samples it has. `goes_on`: nothing is to be done before the next.
    pub async fn step(
        &mut self,
        client: &mut Client,
        (step, goes_on): (Step, bool),
        minibatches: &mut Minibatches,
    ) -> Result<(f32, usize), SimError> {
        let goes_on = goes_on && self.cut.schedule.goes_on();
        self.know(step, minibatches);
        if goes_on {
            self.know(step.next(), minibatches);
        }
        if !self.rank.goes_on_with(step) {
            self.rank.say(Message::Step(step.0));
        }
        let samples = self.shared.lens(step).0;
        let loss = self.rank.step(client, &self.cut, step, Some(goes_on)).await?;
        Ok((loss, samples))
    }

    fn know(&mut self, step: Step, minibatches: &mut Minibatches) {
        if self.shared.knows(step) {
            return;
        }
        while self.ahead.len() < 2 {
            self.ahead.push_back(minibatches.next());
        }
        let samples = self.ahead.pop_front().unwrap_or_default();
        self.shared.has(step, samples, self.ahead.front().map_or(0, Vec::len));
    }

    /// The newest weights of all stages, where nothing is under way.
    pub fn whole(&self) -> Vec<f32> {
        self.shared.whole.lock().clone()
    }

    /// The job is done. Gives what each rank has done.
    pub fn over(&mut self) -> Vec<OfRank> {
        self.rank.say(Message::Over);
        self.shared.of_ranks()
    }
}

/// The next step's minibatch, of which some has been forward.
struct Going {
    step: Step,
    forward: usize,
}

/// A rank.
pub(crate) struct Rank {
    world: Arc<World>,
    shared: Arc<Shared>,
    at: usize,
    speed: Arc<Speed>,
    /// Of its stage, and their versions.
    weights: Vec<f32>,
    versions: Vec<u64>,
    /// The versions that the minibatch under way is computed at, where newer weights have come.
    stash: Option<Vec<u64>>,
    going: Option<Going>,
    /// Weights that come, and are not needed yet.
    asked: Option<Pull>,
    /// Seconds of a step's computation.
    times: BTreeMap<Step, f64>,
    /// So many messages of each kind so far.
    said: u64,
    sums: u64,
    pulls: u64,
}

impl Rank {
    pub fn new(world: &Arc<World>, shared: &Arc<Shared>, cut: &Cut, at: usize, speed: Arc<Speed>) -> Self {
        Self {
            world: world.clone(),
            shared: shared.clone(),
            at,
            speed,
            weights: vec![0.0; values(&world.layout, &cut.stages[at].buckets).len()],
            versions: Vec::new(),
            stash: None,
            going: None,
            asked: None,
            times: BTreeMap::new(),
            said: 0,
            sums: 0,
            pulls: 0,
        }
    }

    /// Does what its leader says, until the job is done.
    pub async fn follow(mut self, process: Arc<Process>, cut: &Cut) -> Result<(), SimError> {
        let (mut client, _) = Client::join(&self.world, &process).await?;
        loop {
            match self.hear().await {
                Message::Pull(pull) => {
                    if pull.last {
                        client.finish();
                    }
                    let pulled = self.pull_own(&mut client, pull).await?;
                    self.level(pulled.done).await?;
                    self.lend(cut).await;
                }
                Message::Step(step) => {
                    let mut step = Step(step);
                    loop {
                        self.step(&mut client, cut, step, None).await?;
                        step = step.next();
                        if !self.goes_on_with(step) {
                            break;
                        }
                    }
                }
                Message::Over => {
                    client.leave();
                    return Ok(());
                }
                Message::Values | Message::Range(..) | Message::GoesOn(_) => return Err(lost()),
            }
        }
    }

    // ---- all ranks together ----

    /// The leader's word, which goes from rank to rank.
    pub fn say(&mut self, message: Message) {
        self.pass(message);
        self.said += 1;
    }

    fn pass(&self, message: Message) {
        if self.at + 1 < self.shared.lines.ranks() {
            self.shared.lines.send((self.at, self.at + 1), Kind::Said, self.said, 0, message);
        }
    }

    async fn hear(&mut self) -> Message {
        let said = self.shared.lines.receive(self.at, (self.at - 1, Kind::Said, self.said)).await;
        self.pass(said.clone());
        self.said += 1;
        said
    }

    /// The least and the most of what all ranks have: twice round the ring.
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

    /// All have pulled to the same step.
    pub async fn level(&mut self, done: Step) -> Result<(), SimError> {
        let (least, most) = self.range(done.0 as f64).await?;
        if least == most { Ok(()) } else { Err(lost()) }
    }

    // ---- weights ----

    /// Whether the next step is under way.
    pub fn goes_on_with(&self, step: Step) -> bool {
        self.going.as_ref().is_some_and(|g| g.step == step)
    }

    /// Its stage's weights.
    pub async fn pull_own(&mut self, client: &mut Client, pull: Pull) -> Result<Pulled, SimError> {
        let pulled = client.pull(pull, &mut self.weights).await?;
        self.versions = client.versions();
        if self.going.is_none() {
            let range = values(&self.world.layout, &self.own());
            self.shared.whole.lock()[range].copy_from_slice(&self.weights);
        }
        self.shared.note(self.at, client);
        if pulled.rejoined { Err(lost()) } else { Ok(pulled) }
    }

    fn own(&self) -> Range<usize> {
        self.world.cut.as_ref().map_or(0..0, |cut| cut.stages[self.at].buckets.clone())
    }

    /// Weights that two stages have go from who pulls them to who uses them too.
    pub async fn lend(&mut self, cut: &Cut) {
        let (lines, at) = (&self.shared.lines, self.at);
        for (range, user) in &cut.stages[at].lends {
            let bytes = VALUE_BYTES * range.len();
            lines.send((at, *user), Kind::Lent, self.pulls, bytes, Message::Values);
        }
        for (_, owner) in &cut.stages[at].borrows {
            lines.receive(at, (*owner, Kind::Lent, self.pulls)).await;
        }
        self.pulls += 1;
    }

    /// Takes the weights that were asked for.
    async fn arrive(&mut self, client: &mut Client, cut: &Cut) -> Result<(), SimError> {
        let Some(pull) = self.asked.take() else { return Ok(()) };
        let done = pull.done;
        let pulled = self.pull_own(client, pull).await?;
        if pulled.done != done {
            return Err(lost());
        }
        self.lend(cut).await;
        Ok(())
    }

    /// A minibatch is computed at the newest weights.
    fn begin(&self, step: Step) {
        if let Some(minibatch) = self.shared.minibatches.lock().get_mut(&step) {
            let range = values(&self.world.layout, &self.own());
            minibatch.weights[range].copy_from_slice(&self.weights);
        }
    }

    // ---- a step ----

    /// This rank's part of a step: micro-batches forward and back, and its buckets pushed. Gives the mean loss. `next`: as the leader knows,
    /// whether the next minibatch goes in behind.
    pub async fn step(
        &mut self,
        client: &mut Client,
        cut: &Cut,
        step: Step,
        next: Option<bool>,
    ) -> Result<f32, SimError> {
        let (at, of, lines) = (self.at, cut.ranks(), self.shared.lines.clone());
        let going = self.going.take().filter(|g| g.step == step);
        if going.is_none() {
            self.begin(step);
            self.stash = None;
        }
        let (n, behind) = self.shared.lens(step);
        let micro = |n: usize| cut.micro_batches.min(n).max(1);
        client.weigh(n);
        client.computed_at(self.stash.clone());
        if let Some(goes_on) = next.filter(|_| cut.schedule.goes_on()) {
            for place in 1..of {
                lines.send((at, place), Kind::GoesOn, step.0, 0, Message::GoesOn(goes_on));
            }
        }
        let mut next = if cut.schedule.goes_on() { next } else { Some(false) };
        let window = Window {
            kept: cut.schedule.kept(at, of, cut.micro_batches),
            ahead: going.map_or(0, |g| g.forward),
            micro_batches: micro(n),
            next: if next == Some(false) { 0 } else { micro(behind) },
        };
        for work in window.works() {
            match work {
                Work::Forward(m) => self.forward(cut, step, (n, m)).await,
                Work::Ahead(m) => {
                    if self.hears(&mut next, step).await? {
                        self.arrive(client, cut).await?;
                        self.forward(cut, step.next(), (behind, m)).await;
                    }
                }
                Work::Backward(m) => self.backward(client, cut, step, (n, m)).await?,
            }
        }
        for (lent, owner) in &cut.stages[at].borrows {
            let bytes = VALUE_BYTES * lent.len();
            lines.send((at, *owner), Kind::LentGradient, step.0, bytes, Message::Values);
        }
        self.shared.note(at, client);
        self.times.remove(&step);
        let goes_on = self.hears(&mut next, step).await?;
        // What was asked for comes before anything else does.
        self.arrive(client, cut).await?;
        if goes_on {
            self.go_on(client, step, window.goes_ahead());
            // The others come to it later than the last stage.
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

    fn go_on(&mut self, client: &mut Client, step: Step, forward: usize) {
        self.begin(step.next());
        self.stash = Some(self.versions.clone());
        // Who leads pulls as its training loop says.
        if self.at > 0 {
            let pull = Pull::of(step);
            client.ask(pull.clone());
            self.asked = Some(pull);
        }
        self.going = Some(Going { step: step.next(), forward });
    }

    /// Whether the next minibatch goes in behind that of this step, as the leader says.
    async fn hears(&self, next: &mut Option<bool>, step: Step) -> Result<bool, SimError> {
        if let Some(next) = *next {
            return Ok(next);
        }
        let Message::GoesOn(said) = self.shared.lines.receive(self.at, (0, Kind::GoesOn, step.0)).await
        else {
            return Err(lost());
        };
        *next = Some(said);
        Ok(said)
    }

    async fn forward(&mut self, cut: &Cut, step: Step, (n, m): (usize, usize)) {
        let (at, lines) = (self.at, self.shared.lines.clone());
        let (number, samples) = (number(step, m), cut.samples(n, m));
        if at > 0 {
            lines.receive(at, (at - 1, Kind::Activation, number)).await;
        }
        self.work(cut, step, FORWARD * samples as f64 / n as f64).await;
        if at + 1 < cut.ranks() {
            let bytes = VALUE_BYTES * samples * cut.stages[at].outputs;
            lines.send((at, at + 1), Kind::Activation, number, bytes, Message::Values);
        }
    }

    async fn backward(
        &mut self,
        client: &mut Client,
        cut: &Cut,
        step: Step,
        (n, m): (usize, usize),
    ) -> Result<(), SimError> {
        let (at, lines) = (self.at, self.shared.lines.clone());
        let (number, samples) = (number(step, m), cut.samples(n, m));
        if at + 1 < cut.ranks() {
            lines.receive(at, (at + 1, Kind::Gradient, number)).await;
        }
        let time = (1.0 - FORWARD) * samples as f64 / n as f64;
        match m + 1 == cut.micro_batches.min(n).max(1) {
            true => self.backward_and_push(client, cut, step, time).await?,
            false => self.work(cut, step, time).await,
        }
        if at > 0 {
            let bytes = VALUE_BYTES * samples * cut.stages[at - 1].outputs;
            lines.send((at, at - 1), Kind::Gradient, number, bytes, Message::Values);
        }
        Ok(())
    }

    /// The last micro-batch: what is complete of the gradient leaves.
    async fn backward_and_push(
        &mut self,
        client: &mut Client,
        cut: &Cut,
        step: Step,
        time: f64,
    ) -> Result<(), SimError> {
        let part = &cut.stages[self.at];
        let mut awaits = part.lends.clone();
        let turns = TURNS.min(part.buckets.len()).max(1);
        let mut next = part.buckets.end;
        for turn in 1..=turns {
            self.work(cut, step, time / turns as f64).await;
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
                    self.shared.gradient(&self.world, cut, step, |g| client.encode(id, step, &g[range]))?;
                client.push(id, step, payload);
            }
            next = until;
        }
        Ok(())
    }

    /// A share of what the whole model takes for a minibatch.
    async fn work(&mut self, cut: &Cut, step: Step, share: f64) {
        let (speed, world) = (&self.speed, &self.world);
        let time = *self.times.entry(step).or_insert_with(|| speed.step(world));
        let began = world.clock.now();
        world.cores.work(nanos(time * share * cut.stages[self.at].share)).await;
        self.shared.worked(self.at, began..world.clock.now());
    }
}

fn number(step: Step, m: usize) -> u64 {
    step.0 << 20 | m as u64
}

/// The values of buckets that follow each other.
pub(crate) fn values(layout: &Layout, buckets: &Range<usize>) -> Range<usize> {
    let of = layout.buckets().get(buckets.clone()).unwrap_or_default();
    of.first().map_or(0, |b| b.offset)..of.last().map_or(0, |b| b.range().end)
}

/// Nothing that the simulator has takes a rank's session from it.
fn lost() -> SimError {
    SimError::Runtime("a rank of a worker's stages is not where the others are".into())
}
