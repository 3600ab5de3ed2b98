//! Jobs: what their shards say of them, where it is not agreed on yet as it is; and their ends.

use super::{Action, Plan, View};
use crate::control::{
    jobs::{Job, JobFacts, JobState},
    state::Command,
};
use paraft_common::{JobId, JobShard, auto};
use std::collections::BTreeMap;

/// A job, as the leader of a shard knows it.
#[derive(Clone, Debug, PartialEq)]
pub struct JobReport {
    /// What it is.
    pub facts: JobFacts,
    /// Shards that hold buckets of it: the first so many. The others know nothing of it.
    pub shards: u32,
    /// All its workers have been here, and none that is still a member has anything left to do on this shard.
    pub finished: bool,
    /// On the first shard, where the rule chooses the staleness bound: what it goes by.
    pub auto: Option<auto::Report>,
}

/// One command for each change. Only where every shard of the job has a leader that tells the same of it: what is
/// agreed stays while one is elected.
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
            return None; // two jobs that were begun at once; one of them will be refused
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

/// A job that is to stop is told to until it has; one whose weights have been kept for long enough goes.
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

/// What servers still hold of jobs that have no shards any more.
pub(super) fn remove(view: &View, plan: &mut Plan) {
    let there = view.state.servers.keys().filter_map(|s| Some((*s, view.live(*s)?)));
    for (server, report) in there {
        for shard in report.replicas.keys().filter(|s| view.state.jobs.is_gone(s.job())) {
            plan.tell(server, *shard, Action::Remove);
        }
    }
}
