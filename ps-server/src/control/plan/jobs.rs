//! Jobs: reports of their shards that differ from the agreed state, and the ends of jobs.

use super::{
    directive::{Action, Plan},
    view::View,
};
use crate::control::{
    jobs::{Job, JobState},
    state::Command,
};
use paraft_common::{JobId, JobShard};
use std::collections::BTreeMap;

/// One command for each change, only if every shard of the job has a leader and all report the same: the
/// agreed state stays during an election.
pub(super) fn note_job(view: &View, id: JobId, job: &Job) -> Option<Command> {
    let told = |shard: JobShard| {
        let founding = view.state.shards.get(&shard)?.founding;
        let (_, leader) = view.leader(shard, founding)?;
        Some((founding, leader.job.as_ref()?))
    };
    let (_, first) = told(JobShard::first(id))?;
    let (mut foundings, mut finished) = (BTreeMap::new(), true);
    for shard in JobShard::all(id, job.shape.shards.min(first.shards)) {
        let (founding, job) = told(shard)?;
        if job.facts != first.facts {
            return None; // two jobs that began at once; one of them will be refused
        }
        foundings.insert(shard, founding);
        finished &= job.finished;
    }
    let known =
        job.foundings.iter().map(|(s, f)| (*s, *f)).eq(foundings.iter().map(|(s, f)| (s.shard(), *f)));
    let ended = job.state.has_ended() && job.state != JobState::Lost;
    if known && job.facts.as_ref() == Some(&first.facts) && (finished == ended) {
        return None;
    }
    let state = if finished { JobState::Finished } else { JobState::Running };
    Some(Command::Job { shards: foundings, facts: first.facts.clone(), state, seen_ms: view.unix_ms })
}

/// A job that should stop gets the directive until it has; one whose weights were kept for long enough is
/// released.
pub(super) fn end_job(view: &View, id: JobId, job: &Job, plan: &mut Plan) {
    if job.is_over(view.unix_ms) {
        plan.commands.push(Command::Release { job: id });
    }
    if job.stopping && job.state == JobState::Running {
        let first = JobShard::first(id);
        let leader = view.state.shards.get(&first).and_then(|place| view.leader(first, place.founding));
        if let Some((server, report)) = leader
            && report.job.as_ref().is_some_and(|j| !j.finished)
        {
            plan.tell(server, first, Action::Stop);
        }
    }
}

/// Removes what servers still hold of jobs without shards.
pub(super) fn remove(view: &View, plan: &mut Plan) {
    for (server, report) in view.all_live() {
        for shard in report.replicas.keys().filter(|s| view.state.jobs.is_gone(s.job())) {
            plan.tell(server, *shard, Action::Remove);
        }
    }
}
