//! Ranks that act as one worker: who is in the group now, what its leader says to the others, and gradients and weights among
//! them.
//!
//! ```text
//!  leader    pull ─▶ weights ──────▶ step n ─▶ gradients, summed bucket by bucket ─▶ push
//!  others            weights (hear)  step n    gradients, summed bucket by bucket
//! ```
//!
//! The leader decides what is done next and says so; the others do it. When a rank is lost, everyone asks the control group who
//! is left ([`Ranks::form`]), and the leader begins again what was broken off.

use crate::worker::WorkerError;
use paraft_client::{
    Interrupt, Pull,
    groups::{Heartbeats, JoinOutcome, Member, MemberOptions},
};
use paraft_common::{
    Share, Step,
    group::{Assigned, Assignment},
};
use paraft_compute::collective::{Group, GroupError, Lines, Listener, Peer, Rendezvous, Ring};
use paraft_models::{Model, ModelError, Nccl, UniqueId};
use paraft_tls::Access;
use std::{
    ops::Range,
    sync::{Arc, mpsc},
    thread,
    time::Duration,
};

/// Ranks that were told of each other meet within this time, or not at all.
const RENDEZVOUS: Duration = Duration::from_secs(10);

/// What the leader says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ControlMessage {
    /// These parts of the weights follow.
    Weights(Vec<Range<usize>>),
    /// All weights and the optimizer's state follow, as of this step.
    State(Step),
    /// The minibatch of this step.
    Step(Step),
    /// A group of ranks that hold stages begins, or begins again, at this step.
    Meet(Step),
    /// The weights of its stages, for each rank.
    Pull(Pull),
    /// The final weights of all stages to the leader.
    Gather,
    /// A share of the held-out part, for this epoch.
    Evaluate {
        /// From 1.
        epoch: u64,
        /// The worker's, of the held-out samples.
        share: Share,
    },
    /// The group is formed anew: somebody wants to be taken in.
    Reform,
    /// The job is done.
    Over,
}

const WEIGHTS: u64 = 1;
const STEP: u64 = 2;
const REFORM: u64 = 4;
const OVER: u64 = 5;
const STATE: u64 = 6;
const MEET: u64 = 7;
const PULL: u64 = 8;
const GATHER: u64 = 9;
// 3 had no share.
const EVALUATE: u64 = 10;

/// Of a pull, with its step in one word; no job has so many steps that it doesn't go.
const BARRIER: u64 = 1;
const LAST: u64 = 2;
const CHECKPOINT: u64 = 4;

/// A group that stands.
struct Bound {
    // Before the group: its thread ends with it.
    reducer: Reducer,
    /// What GPUs reduce with.
    nccl: Option<Arc<Nccl>>,
    group: Group,
    assignment: Assignment,
    /// The leader's.
    heartbeats: Option<Heartbeats>,
    /// Where ranks hold stages of the model.
    lines: Lines,
}

/// This process as a rank.
pub(crate) struct Ranks {
    member: Member,
    job: String,
    listener: Listener,
    stop: Arc<dyn Interrupt>,
    /// Values of the longest message from rank to rank, where they hold stages of the model.
    longest: Option<usize>,
    /// Of the last group.
    lost: Vec<u32>,
    bound: Option<Bound>,
}

/// What a call in a group ends with: that it broke is no fault of this rank.
pub(crate) type GroupResult<T = ()> = Result<T, GroupError>;

impl Ranks {
    /// Asks nobody yet.
    pub fn new(
        mut options: MemberOptions,
        stop: Arc<dyn Interrupt>,
        longest: Option<usize>,
    ) -> Result<Self, WorkerError> {
        if matches!(Access::ours(), Access::Closed) {
            let why = Access::no_certificate();
            return Err(WorkerError::Job(format!(
                "the ranks of a group speak to each other over TCP: {why}"
            )));
        }
        let server = options.servers.first().cloned().unwrap_or_default();
        let listener = Listener::towards(&server).map_err(|e| {
            WorkerError::Job(format!("the other ranks of the group cannot reach this one: {server}: {e}"))
        })?;
        options.address = listener.address().to_string();
        let job = options.job.clone();
        Ok(Self {
            member: Member::new(options)?,
            job,
            listener,
            stop,
            longest,
            lost: Vec::new(),
            bound: None,
        })
    }

    /// Leaves the group, if there is one, and waits for an assignment in the next. False: the job is done.
    pub fn form(&mut self, model: &mut dyn Model) -> Result<bool, WorkerError> {
        loop {
            if let Some(GroupError::Lost { rank, .. }) = self.broken() {
                self.lost = vec![rank];
            }
            self.leave(model);
            let (assignment, place) = match self.member.join(&self.lost, &*self.stop)? {
                JoinOutcome::Assigned(assignment, place) => (assignment, place),
                JoinOutcome::Over => {
                    tracing::warn!("the job is done: nothing is left for this rank, and it writes nothing");
                    return Ok(false);
                }
                JoinOutcome::Stopped => return Err(WorkerError::Interrupted),
            };
            self.lost.clear();
            match self.bind(assignment, place, model) {
                Ok(()) => return Ok(true),
                Err(Ok(GroupError::Lost { rank, how })) => {
                    tracing::warn!(rank, how, "the group is not complete; its ranks are asked for again");
                    self.lost = vec![rank];
                }
                Err(Ok(e)) => tracing::warn!(error = %e, "the group is formed again"),
                Err(Err(e)) => return Err(e),
            }
        }
    }

    /// Before the next is formed, or when this rank ends.
    pub fn leave(&mut self, model: &mut dyn Model) {
        model.share_statistics(None);
        if let Some(bound) = self.bound.take()
            && let Some(nccl) = &bound.nccl
        {
            let watch = bound.group.watch();
            if let Err(e) = nccl.leave(&|| watch.broken().is_some()) {
                tracing::debug!(error = %e, "the group's communicator is aborted");
                nccl.abort();
            }
            // The device waits for what was under way.
            if let Some(Err(e)) = model.resident().map(|r| r.join(None)) {
                tracing::debug!(error = %e, "the device has left its group");
            }
        }
    }

    fn bind(
        &mut self,
        assignment: Assignment,
        place: usize,
        model: &mut dyn Model,
    ) -> Result<(), Result<GroupError, WorkerError>> {
        let ranks: Vec<u32> = assignment.ranks.iter().map(|r| r.rank).collect();
        let peer = |r: &Assigned| Peer { rank: r.rank, address: r.address.clone() };
        let rendezvous = Rendezvous {
            generation: assignment.generation,
            secret: assignment.secret(),
            job: self.job.clone(),
            place,
            ranks: assignment.ranks.iter().map(peer).collect(),
        };
        let listener = &mut self.listener;
        let (group, ring, lines) =
            Group::form_with(rendezvous, listener, RENDEZVOUS, self.longest).map_err(Ok)?;
        let on_gpu = f64::from(u8::from(model.resident().is_some()));
        let mut gpus = [on_gpu];
        group.sum(&mut gpus).map_err(Ok)?;
        if gpus[0] != on_gpu * group.size() as f64 {
            return Err(Err(WorkerError::Job(format!(
                "{} of {} ranks of the group compute on a GPU, and they cannot reduce with those on the CPU: give all \
                 the same train.device",
                gpus[0],
                group.size()
            ))));
        }
        model.share_statistics((group.size() > 1 && self.longest.is_none()).then(|| group.sums()));
        let nccl = unite(&group, model)?;
        let reducer = Reducer::start(ring).map_err(|e| Ok(GroupError::Broken(e.to_string())))?;
        let heartbeats = group.leads().then(|| self.member.send_heartbeats(&assignment)).transpose();
        let heartbeats = heartbeats.map_err(|e| Err(e.into()))?;
        let (generation, leader) = (assignment.generation, ranks[0]);
        tracing::info!(generation, ?ranks, leader, "the group stands");
        self.bound = Some(Bound { reducer, nccl, group, assignment, heartbeats, lines });
        Ok(())
    }

    fn bound(&self) -> GroupResult<&Bound> {
        self.bound.as_ref().ok_or_else(|| GroupError::Broken("it was left".into()))
    }

    /// Whether this rank speaks for the group.
    pub fn leads(&self) -> bool {
        self.bound.as_ref().is_some_and(|b| b.group.leads())
    }

    /// Which group this is, counted from 1; 0: none.
    pub fn generation(&self) -> u64 {
        self.bound.as_ref().map_or(0, |b| b.group.rendezvous().generation)
    }

    /// Place and size.
    pub fn place(&self) -> (usize, usize) {
        self.bound.as_ref().map_or((0, 1), |b| (b.group.rendezvous().place, b.group.size()))
    }

    /// What broke the group, if something has.
    pub fn broken(&self) -> Option<GroupError> {
        self.bound.as_ref().and_then(|b| b.group.watch().broken())
    }

    /// Whether there is none that stands.
    pub fn breaks_now(&self) -> bool {
        self.bound.is_none() || self.broken().is_some()
    }

    /// Whether it is broken, or is found to be within a moment.
    pub fn breaks(&self) -> bool {
        self.bound.as_ref().is_some_and(|b| b.group.watch().breaks())
    }

    /// What has broken it, if what was `seen` says that something has.
    pub fn reason(&self, seen: GroupError) -> GroupError {
        self.bound.as_ref().map_or(seen.clone(), |b| b.group.watch().reason(seen))
    }

    /// Breaks the group, for all ranks.
    pub fn break_up(&self, why: &str) -> GroupError {
        if let Some(bound) = &self.bound {
            bound.group.watch().break_up(why);
        }
        GroupError::Broken(why.into())
    }

    /// Whether ranks wait to be taken in.
    pub fn newcomers(&self) -> bool {
        self.bound.as_ref().and_then(|b| b.heartbeats.as_ref()).is_some_and(|h| h.waiting() > 0)
    }

    /// The leader begins a step: the control group is told with the next heartbeat.
    pub fn begins(&self, step: Step) {
        if let Some(heartbeats) = self.bound.as_ref().and_then(|b| b.heartbeats.as_ref()) {
            heartbeats.step(step.0);
        }
    }

    /// The leader speaks.
    pub fn say(&self, message: &ControlMessage) -> GroupResult {
        let Bound { group, .. } = self.bound()?;
        let mut head = match message {
            ControlMessage::Weights(ranges) => [WEIGHTS, ranges.len() as u64],
            ControlMessage::State(done) => [STATE, done.0],
            ControlMessage::Step(step) => [STEP, step.0],
            ControlMessage::Evaluate { epoch, .. } => [EVALUATE, *epoch],
            ControlMessage::Meet(step) => [MEET, step.0],
            ControlMessage::Pull(pull) => {
                let kinds = [(pull.barrier, BARRIER), (pull.last, LAST), (pull.checkpoint, CHECKPOINT)];
                [PULL, (pull.done.0 << 3) + kinds.map(|(is, kind)| u64::from(is) * kind).iter().sum::<u64>()]
            }
            ControlMessage::Gather => [GATHER, 0],
            ControlMessage::Reform => [REFORM, 0],
            ControlMessage::Over => [OVER, 0],
        };
        group.words(&mut head)?;
        if let ControlMessage::Weights(ranges) = message {
            let mut ends: Vec<u64> = ranges.iter().flat_map(|r| [r.start as u64, r.end as u64]).collect();
            group.words(&mut ends)?;
        }
        if let ControlMessage::Evaluate { share, .. } = message {
            group.words(&mut [share.place.into(), share.of.into()])?;
        }
        Ok(())
    }

    /// Waits for what the leader says next. `len` is that of the weights.
    pub fn hear(&self, len: usize) -> GroupResult<ControlMessage> {
        let group = &self.bound()?.group;
        let mut head = [0; 2];
        group.words(&mut head)?;
        let nonsense = || GroupError::Broken(format!("its leader says {head:?}"));
        Ok(match head {
            [WEIGHTS, n] if n <= len as u64 => {
                let mut ends = vec![0; 2 * n as usize];
                group.words(&mut ends)?;
                let ranges = ends.chunks_exact(2).map(|e| e[0] as usize..e[1] as usize).collect::<Vec<_>>();
                if ranges.iter().any(|r| r.start > r.end || r.end > len) {
                    return Err(nonsense());
                }
                ControlMessage::Weights(ranges)
            }
            [STATE, done] => ControlMessage::State(Step(done)),
            [STEP, step] => ControlMessage::Step(Step(step)),
            [EVALUATE, epoch] => {
                let mut words = [0; 2];
                group.words(&mut words)?;
                let [Ok(place), Ok(of)] = words.map(u32::try_from) else { return Err(nonsense()) };
                ControlMessage::Evaluate { epoch, share: Share { place, of } }
            }
            [MEET, step] => ControlMessage::Meet(Step(step)),
            [PULL, word] => {
                let is = |kind: u64| word & kind != 0;
                let (barrier, last, checkpoint) = (is(BARRIER), is(LAST), is(CHECKPOINT));
                ControlMessage::Pull(Pull {
                    done: Step(word >> 3),
                    barrier,
                    last,
                    checkpoint,
                    ..Pull::default()
                })
            }
            [GATHER, _] => ControlMessage::Gather,
            [REFORM, _] => ControlMessage::Reform,
            [OVER, _] => ControlMessage::Over,
            _ => return Err(nonsense()),
        })
    }

    /// The leader ends the job, for all ranks and for those who would come back.
    pub fn over(&mut self, model: &mut dyn Model) {
        if let Err(e) = self.say(&ControlMessage::Over) {
            tracing::debug!(error = %e, "a rank did not hear that the job is done");
        }
        if let Some(bound) = &mut self.bound {
            let steps = bound.heartbeats.take().map_or(0, |h| h.last_step());
            self.member.over(&bound.assignment, steps);
        }
        self.leave(model);
    }

    /// Sums over the ranks.
    pub fn sum(&self, values: &mut [f64]) -> GroupResult {
        self.bound()?.group.sum(values)
    }

    /// From rank to rank, where they hold stages of the model.
    pub fn lines(&mut self) -> GroupResult<&mut Lines> {
        self.bound.as_mut().map(|b| &mut b.lines).ok_or_else(|| GroupError::Broken("it was left".into()))
    }

    /// For gradients and weights in the host's memory.
    pub fn reducer(&mut self) -> GroupResult<&mut Reducer> {
        self.bound.as_mut().map(|b| &mut b.reducer).ok_or_else(|| GroupError::Broken("it was left".into()))
    }
}

/// GPUs get a communicator of NCCL's, which is aborted when the group breaks: NCCL itself would wait for ever.
fn unite(group: &Group, model: &mut dyn Model) -> Result<Option<Arc<Nccl>>, Result<GroupError, WorkerError>> {
    let Some(resident) = model.resident() else { return Ok(None) };
    let watch = group.watch();
    let sort = |e: ModelError| match (e.is_group(), watch.broken()) {
        (_, Some(broken)) => Ok(broken),
        (true, None) => Ok(GroupError::Broken(e.to_string())),
        (false, None) => Err(e.into()),
    };
    let mut words = [0; 16];
    if group.leads() {
        let UniqueId(id) = UniqueId::new().map_err(|e| sort(e.into()))?;
        for (word, bytes) in words.iter_mut().zip(id.chunks_exact(8)) {
            *word = bytes.iter().rev().fold(0, |w, b| w << 8 | u64::from(*b));
        }
    }
    // Over the group's own connections, not by the control group: it is of use to these ranks only, and only now.
    group.words(&mut words).map_err(Ok)?;
    let mut id = UniqueId([0; 128]);
    for (bytes, word) in id.0.chunks_exact_mut(8).zip(words) {
        bytes.copy_from_slice(&word.to_le_bytes());
    }
    let give_up = || watch.broken().is_some();
    let nccl = resident.form_group(&id, group.rendezvous().place, group.size(), &give_up).map_err(sort)?;
    let ended = nccl.clone();
    watch.when_broken(move || ended.abort());
    Ok(Some(nccl))
}

enum Order {
    Reduce(usize, Vec<f32>),
    Broadcast(Vec<f32>, Vec<Range<usize>>),
}

enum Done {
    Reduced(usize, Vec<f32>),
    Broadcast(Vec<f32>, GroupResult),
    Failed(GroupError),
}

/// Gradients and weights on the ring, on a thread of its own: buckets are summed while the backward pass goes on.
pub(crate) struct Reducer {
    orders: mpsc::Sender<Order>,
    done: mpsc::Receiver<Done>,
    pending: usize,
    /// Buffers that were used before.
    spare: Vec<Vec<f32>>,
}

fn ended() -> GroupError {
    GroupError::Broken("its ring has ended".into())
}

impl Reducer {
    fn start(mut ring: Ring) -> std::io::Result<Self> {
        let (orders, received) = mpsc::channel();
        let (say, done) = mpsc::channel();
        let work = move || {
            let share = 1.0 / ring.size() as f32;
            while let Ok(order) = received.recv() {
                let done = match order {
                    Order::Reduce(i, mut values) => match ring.all_reduce(&mut values) {
                        Ok(()) => {
                            values.iter_mut().for_each(|v| *v *= share);
                            Done::Reduced(i, values)
                        }
                        Err(e) => Done::Failed(e),
                    },
                    Order::Broadcast(mut weights, ranges) => {
                        let all = ranges.into_iter().try_for_each(|r| ring.broadcast(&mut weights[r]));
                        Done::Broadcast(weights, all)
                    }
                };
                if say.send(done).is_err() {
                    return;
                }
            }
        };
        thread::Builder::new().name("paraft-ring".into()).spawn(work)?;
        Ok(Self { orders, done, pending: 0, spare: Vec::new() })
    }

    /// Begins to average bucket `i` over the ranks. Copied: the model's next step writes over the gradient.
    pub fn reduce(&mut self, i: usize, gradients: &[f32]) {
        let mut values = self.spare.pop().unwrap_or_default();
        values.clear();
        values.extend_from_slice(gradients);
        self.pending += 1;
        // Where the thread has ended, `take` says so.
        let _ = self.orders.send(Order::Reduce(i, values));
    }

    /// The next bucket, in the order in which they were begun: if one is ready, or, when told to `wait`, as soon as one is.
    pub fn take(&mut self, wait: bool, with: impl FnOnce(usize, &[f32])) -> GroupResult<bool> {
        if self.pending == 0 {
            return Ok(false);
        }
        let done = match wait {
            true => self.done.recv().map_err(|_| ended())?,
            false => match self.done.try_recv() {
                Ok(done) => done,
                Err(mpsc::TryRecvError::Empty) => return Ok(false),
                Err(mpsc::TryRecvError::Disconnected) => return Err(ended()),
            },
        };
        self.pending -= 1;
        match done {
            Done::Reduced(i, values) => {
                with(i, &values);
                self.spare.push(values);
                Ok(true)
            }
            Done::Failed(e) => Err(e),
            Done::Broadcast(..) => Err(ended()),
        }
    }

    /// These parts of the leader's weights, on all ranks.
    pub fn broadcast(&mut self, weights: &mut Vec<f32>, ranges: &[Range<usize>]) -> GroupResult {
        let len = weights.len();
        let order = Order::Broadcast(std::mem::take(weights), ranges.to_vec());
        if let Err(mpsc::SendError(Order::Broadcast(back, _))) = self.orders.send(order) {
            *weights = back;
            return Err(ended());
        }
        while let Ok(done) = self.done.recv() {
            if let Done::Broadcast(back, all) = done {
                *weights = back;
                return all;
            }
        }
        // Its thread has died with them; they come again with the next group's first.
        weights.resize(len, 0.0);
        Err(ended())
    }
}
