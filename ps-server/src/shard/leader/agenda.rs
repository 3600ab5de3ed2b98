//! The leader's agenda: tasks, the steps after each input, and the computation in progress.

use super::{
    ConnId, GroupStatus, Leader,
    effects::{Computed, Effect, Work},
    pulls::PullTrigger,
    push::Push,
    rounds,
};
use crate::{
    compute::Panicked,
    shard::{command::Contribution, members::Member},
};
use paraft_trace::{Moment, Stage};

/// One task of the agenda. Tasks that a task adds run before those behind it.
pub(super) enum Task {
    /// Decide on a push.
    Take(Push),
    /// Find the rounds that close.
    Rounds,
    /// Close one round.
    Close(rounds::Key),
    /// Find the pulls that may be answered.
    Pulls(PullTrigger),
    /// Find the chunk requests that have an answer.
    ChunkRequests,
    /// Accept pushes that wait for room, after one was accepted.
    Room,
}

/// The steps after each input, in order. They run for each push, so a step without work returns without the state's
/// lock.
#[derive(Clone, Copy)]
pub(super) enum FollowUp {
    /// Restart the epoch if necessary; continue a switch of the mode. `counts`: whether the input may have changed the
    /// counts for `auto`.
    Epoch { counts: bool },
    /// Accept pushes that wait for room.
    Room,
    /// Propose the commands that waited behind pushes.
    DeferredCommand,
    /// Write a state delta, if one is due.
    Delta,
    /// Propose the pulls that the log must hold.
    Record,
    /// Check whether the group may sleep.
    Quiet,
}

/// What the result of a computation is for.
pub(super) enum Computing {
    /// A push that is applied to a working copy.
    Push(WorkingPush),
    /// The sum of a round.
    Round(rounds::Key),
}

/// A push while it is applied to a working copy.
pub(super) struct WorkingPush {
    pub conn: ConnId,
    pub bucket: usize,
    pub contribution: Contribution,
    /// Bytes of its payload.
    pub bytes: usize,
    /// The worker's replicated record.
    pub replicated: Member,
    pub began: Moment,
}

impl Leader {
    pub(super) fn run_task(&mut self, task: Task) {
        match task {
            Task::Take(push) => self.take_push(push),
            Task::Rounds => self.close_rounds(),
            Task::Close(round) => self.close_round(round),
            Task::Pulls(changed) => self.answer_pulls(changed),
            Task::ChunkRequests => self.answer_asks(),
            Task::Room => self.take_if_room(true),
        }
    }

    pub(super) fn run_follow_up(&mut self, group: &dyn GroupStatus, after: FollowUp) {
        self.after = match after {
            FollowUp::Epoch { .. } => Some(FollowUp::Room),
            FollowUp::Room => Some(FollowUp::DeferredCommand),
            FollowUp::DeferredCommand => Some(FollowUp::Delta),
            FollowUp::Delta => Some(FollowUp::Record),
            FollowUp::Record => Some(FollowUp::Quiet),
            FollowUp::Quiet => None,
        };
        match after {
            FollowUp::Epoch { counts } => self.continue_epoch(group, counts),
            FollowUp::Room => self.take_if_room(false),
            FollowUp::DeferredCommand => self.propose_deferred_commands(),
            FollowUp::Delta => self.begin_delta_if_due(),
            FollowUp::Record => self.record_pulls(),
            FollowUp::Quiet => self.check_idle(),
        }
    }

    /// Runs these tasks next, in this order, before all others.
    pub(super) fn next(&mut self, tasks: impl IntoIterator<Item = Task, IntoIter: DoubleEndedIterator>) {
        tasks.into_iter().rev().for_each(|task| self.agenda.push_front(task));
    }

    pub(super) fn compute(&mut self, bytes: u64, of: Computing, work: Work) {
        self.computing = Some(of);
        self.out.push_back(Effect::Compute(bytes, work));
    }

    pub(super) fn computed(&mut self, result: Result<Computed, Panicked>) {
        match (self.computing.take(), result) {
            (Some(Computing::Push(push)), Ok(Computed::Copy(data))) => {
                self.push_computed(&push, data);
                let (bucket, c) = (push.bucket, push.contribution);
                self.note(Stage::Apply, push.began, (bucket, c.step, Some(c.worker)), push.bytes as u64);
                self.next([Task::Pulls(PullTrigger::Unit(bucket, vec![c.worker]))]);
            }
            (Some(Computing::Round(round)), Ok(Computed::Sum(sum))) => self.summed(round, sum),
            (_, Err(e)) => self.broken(&e),
            (_, Ok(_)) => {}
        }
    }
}
