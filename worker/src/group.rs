//! Ranks that act as one worker: the group's members, the leader's messages, and the exchange of gradients and
//! weights.
//!
//! ```text
//!  leader    pull ─▶ weights ──────▶ step n ─▶ gradients, summed bucket by bucket ─▶ push
//!  others            weights (hear)  step n    gradients, summed bucket by bucket
//! ```
//!
//! The leader decides each next action and sends it; the other ranks follow. When a rank is lost, every rank asks
//! the control group for the remaining members ([`Ranks::form`]), and the leader repeats the interrupted action.

mod messages;
mod reducer;

pub(crate) use messages::ControlMessage;

use crate::worker::WorkerError;
use paraft_client::{
    Interrupt,
    groups::{Heartbeats, JoinOutcome, Member, MemberOptions},
};
use paraft_common::{
    Step,
    group::{Assigned, Assignment},
};
use paraft_compute::collective::{Group, GroupError, Lines, Listener, Peer, Rendezvous};
use paraft_models::{Model, ModelError, Nccl, UniqueId};
use paraft_tls::Access;
use reducer::Reducer;
use std::{sync::Arc, time::Duration};

/// The time within which assigned ranks must connect to each other.
const RENDEZVOUS: Duration = Duration::from_secs(10);

/// A formed group.
struct Bound {
    // Declared before the group, so that its thread ends first.
    reducer: Reducer,
    /// The GPUs' communicator.
    nccl: Option<Arc<Nccl>>,
    group: Group,
    assignment: Assignment,
    /// The leader's heartbeats.
    heartbeats: Option<Heartbeats>,
    /// Connections for ranks with stages of the model.
    lines: Lines,
}

/// This process as a rank.
pub(crate) struct Ranks {
    member: Member,
    job: String,
    listener: Listener,
    stop: Arc<dyn Interrupt>,
    /// Values of the longest message between ranks with stages of the model.
    longest: Option<usize>,
    /// Ranks lost in the last group.
    lost: Vec<u32>,
    bound: Option<Bound>,
}

/// The result of a call in a group. An error means that the group broke, not that this rank failed.
pub(crate) type GroupResult<T = ()> = Result<T, GroupError>;

impl Ranks {
    /// Sends no request yet.
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

    /// Leaves the group, if any, and waits for an assignment in the next one. Returns false if the job is done.
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
                    tracing::warn!(rank, how, "the group is incomplete; asking for its ranks again");
                    self.lost = vec![rank];
                }
                Err(Ok(e)) => tracing::warn!(error = %e, "the group is formed again"),
                Err(Err(e)) => return Err(e),
            }
        }
    }

    /// Leaves the group, before the next is formed or when this rank ends.
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
            // The device waits for pending work.
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

    /// Whether this rank leads the group.
    pub fn leads(&self) -> bool {
        self.bound.as_ref().is_some_and(|b| b.group.leads())
    }

    /// The group's generation, from 1; 0: none.
    pub fn generation(&self) -> u64 {
        self.bound.as_ref().map_or(0, |b| b.group.rendezvous().generation)
    }

    /// This rank's place, and the group's size.
    pub fn place(&self) -> (usize, usize) {
        self.bound.as_ref().map_or((0, 1), |b| (b.group.rendezvous().place, b.group.size()))
    }

    /// The error that broke the group, if any.
    pub fn broken(&self) -> Option<GroupError> {
        self.bound.as_ref().and_then(|b| b.group.watch().broken())
    }

    /// Whether there is no working group now.
    pub fn breaks_now(&self) -> bool {
        self.bound.is_none() || self.broken().is_some()
    }

    /// Whether the group is broken, or found broken within a moment.
    pub fn breaks(&self) -> bool {
        self.bound.as_ref().is_some_and(|b| b.group.watch().breaks())
    }

    /// The error that broke the group, given an error that this rank has `seen`.
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

    /// Whether ranks wait for admission.
    pub fn newcomers(&self) -> bool {
        self.bound.as_ref().and_then(|b| b.heartbeats.as_ref()).is_some_and(|h| h.waiting() > 0)
    }

    /// The leader starts a step; the next heartbeat reports it to the control group.
    pub fn begins(&self, step: Step) {
        if let Some(heartbeats) = self.bound.as_ref().and_then(|b| b.heartbeats.as_ref()) {
            heartbeats.step(step.0);
        }
    }

    /// The leader ends the job for all ranks and for those that would return.
    pub fn over(&mut self, model: &mut dyn Model) {
        if let Err(e) = self.say(&ControlMessage::Over) {
            tracing::debug!(error = %e, "a rank did not receive the end of the job");
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

    /// Connections between ranks with stages of the model.
    pub fn lines(&mut self) -> GroupResult<&mut Lines> {
        self.bound.as_mut().map(|b| &mut b.lines).ok_or_else(|| GroupError::Broken("it was left".into()))
    }

    /// Reduces gradients and broadcasts weights in host memory.
    pub fn reducer(&mut self) -> GroupResult<&mut Reducer> {
        self.bound.as_mut().map(|b| &mut b.reducer).ok_or_else(|| GroupError::Broken("it was left".into()))
    }
}

/// Gives GPUs an NCCL communicator, which is aborted when the group breaks: NCCL itself would wait forever.
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
    // Sent over the group's own connections, not the control group: it matters only to these ranks, and only now.
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
