//! What should happen next, from the agreed state and the servers' reports. A pure function: the leader of
//! the control group calls it a few times a second, and plans again what was lost in transit.
//!
//! A shard's life:
//!
//! ```text
//! placing ──all hosted──▶ placed ──agreed──▶ begins ──▶ serving ⇄ repairing (learner ▶ caught up ▶ voter)
//!    ▲                                            └──every replica lost its log──▶ lost ─┐
//!    └───────────────────────────── founded again, under another founding ─────────────────┘
//! ```

mod balance;
mod checks;
mod control_group;
mod directive;
mod founding;
mod health;
mod jobs;
mod lost;
mod repair;
mod view;
mod voters;

pub use directive::{Action, ControlChange, Directive, Plan};
pub(super) use founding::new_founding;
pub use health::Health;
pub use view::{AsideReport, JobReport, LastReport, ReplicaReport, Report, Timeouts, View};
#[cfg(test)]
pub(super) use voters::keeps_majority;

#[cfg(test)]
pub use balance::is_worth_it;
use balance::{spread_leaders, uneven};
use control_group::control_change;
use founding::{found, start};
use health::unless_refused;
use jobs::{end_job, note_job, remove};
use paraft_common::JobShard;
use repair::keep;

/// Makes the plan.
pub fn plan(view: &View) -> Plan {
    let mut plan = Plan { control: control_change(view), ..Plan::default() };
    if view.state.fleet == 0 {
        return plan;
    }
    let mv = uneven(view);
    for (id, job) in view.state.jobs.iter().filter(|(_, j)| !j.released) {
        for shard in JobShard::all(id, job.shape.shards) {
            let mv = mv.filter(|m| m.shard == shard);
            let shape = &job.shape;
            let health = match view.state.shards.get(&shard) {
                Some(place) if place.founded => {
                    let health = keep(view, shard, place, shape, mv, &mut plan);
                    unless_refused(view, shard, place, health)
                }
                Some(place) => found(view, shard, place, shape, &mut plan),
                // The job never began, and never will.
                None if job.state.has_ended() => continue,
                None => {
                    start(view, shard, view.founding ^ u64::from(shard.number()), shape.replicas, &mut plan);
                    (Health::Placing, String::new())
                }
            };
            plan.health.insert(shard, health);
        }
        plan.commands.extend(note_job(view, id, job));
        end_job(view, id, job, &mut plan);
    }
    spread_leaders(view, &mut plan);
    remove(view, &mut plan);
    plan
}
