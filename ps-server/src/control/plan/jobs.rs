//! The job that the shards train, where it is not agreed on yet as it is.

use super::View;
use crate::control::{
    jobs::{JobFacts, JobState},
    state::Command,
};
use paraft_common::{ShardId, auto};
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
    /// On shard 0, where the rule chooses the staleness bound: what it goes by.
    pub auto: Option<auto::Report>,
}

/// One command for each change. Only where every shard of the job has a leader that tells the same of it: what is
/// agreed stays while one is elected.
pub(super) fn note_job(view: &View) -> Option<Command> {
    let told = |shard: ShardId| {
        let founding = view.state.shards.get(&shard)?.founding;
        let (_, leader) = view.leader(shard, founding)?;
        Some((founding, leader.job.as_ref()?))
    };
    let (founding, first) = told(ShardId(0))?;
    let shards = view.state.shape?.shards.min(first.shards);
    let mut foundings = BTreeMap::from([(ShardId(0), founding)]);
    let mut finished = first.finished;
    for shard in (1..shards).map(ShardId) {
        let (founding, job) = told(shard)?;
        if job.facts != first.facts {
            return None; // two jobs that were begun at once; one of them will be refused
        }
        foundings.insert(shard, founding);
        finished &= job.finished;
    }
    let state = if finished { JobState::Finished } else { JobState::Running };
    let known = view.state.jobs.get(founding);
    if known.is_some_and(|j| j.shards == foundings && j.facts == first.facts && j.state == state) {
        return None;
    }
    Some(Command::Job { shards: foundings, facts: first.facts.clone(), state, seen_ms: view.unix_ms })
}
