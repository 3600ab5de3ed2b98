//! The rule that chooses a job's staleness bound ([`paraft_common::auto`]), in the leader of the control
//! group. Its input is the report of the leader of the job's first shard, its output a switch as a directive
//! to that leader. The directive is planned again with every report until a report shows the switch in force.

use super::plan::{Action, Directive, View};
use paraft_common::{JobId, JobShard, ServerId, auto::Steering};
use std::collections::BTreeMap;

/// State for jobs with an automatic bound; lost with the leadership.
#[derive(Debug, Default)]
pub(super) struct AutoRules(BTreeMap<JobId, RunningRule>);

#[derive(Debug)]
struct RunningRule {
    /// The founding of the job's first shard, which names this run.
    founding: u64,
    steering: Steering,
    /// The number of the last switch that was wanted.
    wanted: u64,
}

impl AutoRules {
    /// The directives to send now, and their servers.
    pub fn steer(&mut self, view: &View) -> Vec<(ServerId, Directive)> {
        self.0.retain(|job, _| view.state.shape_of(*job).is_some());
        let jobs = view.state.jobs.iter().map(|(job, _)| job);
        jobs.filter_map(|job| self.steer_one(view, job)).collect()
    }

    fn steer_one(&mut self, view: &View, job: JobId) -> Option<(ServerId, Directive)> {
        // The shard whose switch is the job's: the workers take it to the others.
        let shard = JobShard::first(job);
        let founding = view.state.shards.get(&shard)?.founding;
        // Without a leader the earlier observations stay valid.
        let (server, leader) = view.leader(shard, founding)?;
        let Some(report) = leader.job.as_ref().and_then(|job| job.auto) else {
            self.0.remove(&job);
            return None;
        };
        let new = || RunningRule { founding, steering: Steering::default(), wanted: 0 };
        let followed = self.0.entry(job).or_insert_with(new);
        if followed.founding != founding {
            *followed = new();
        }
        let (switch, why) = followed.steering.hear(&report)?;
        if followed.wanted != switch.number {
            followed.wanted = switch.number;
            tracing::info!(%job, mode = %switch.mode, number = switch.number, %why, "the staleness bound is changed");
        }
        Some((server, Directive { shard, what: Action::Switch(switch) }))
    }
}
