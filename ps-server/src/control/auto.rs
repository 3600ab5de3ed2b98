//! The rule that chooses a job's staleness bound ([`paraft_common::auto`]), as the leader of the control group follows it: what the
//! leader of shard 0 reports goes in, and the switch that the rule wants comes out, as something for that leader to do. It is
//! planned again with every report until the report says that it is in force.

use super::plan::{Action, Directive, View};
use paraft_common::{ServerId, ShardId, auto::Steering};

/// The shard whose switch is the job's: the workers take it to the others.
const SHARD: ShardId = ShardId(0);

/// What is remembered of the job whose bound is chosen; lost with the leadership.
#[derive(Debug, Default)]
pub(super) struct Follows(Option<Followed>);

#[derive(Debug)]
struct Followed {
    /// Names the job: the founding of shard 0 that it runs in.
    founding: u64,
    steering: Steering,
    /// The number of the last switch that was wanted.
    wanted: u64,
}

impl Follows {
    /// What has to be done now, and by whom.
    pub fn steer(&mut self, view: &View) -> Option<(ServerId, Directive)> {
        let founding = view.state.shards.get(&SHARD)?.founding;
        // Where it has no leader, what was seen is as good as before.
        let (server, leader) = view.leader(SHARD, founding)?;
        let Some(report) = leader.job.as_ref().and_then(|job| job.auto) else {
            self.0 = None;
            return None;
        };
        let known = self.0.take().filter(|f| f.founding == founding);
        let new = || Followed { founding, steering: Steering::default(), wanted: 0 };
        let followed = self.0.insert(known.unwrap_or_else(new));
        let (switch, why) = followed.steering.hear(&report)?;
        if followed.wanted != switch.number {
            followed.wanted = switch.number;
            tracing::info!(mode = %switch.mode, number = switch.number, %why, "the staleness bound is changed");
        }
        Some((server, Directive { shard: SHARD, what: Action::Switch(switch) }))
    }
}
