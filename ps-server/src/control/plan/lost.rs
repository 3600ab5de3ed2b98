//! A shard of which a majority has lost its log.

use super::{directive::Plan, founding::new_founding, health::Health, view::View};
use crate::control::state::{Command, Place};
use paraft_common::JobShard;

/// A majority has lost its log. The shard restarts by itself only if all have lost it for good: a replica
/// that still holds part (`still`), or a quarantined folder, might be the last copy.
pub(super) fn is_lost(
    view: &View,
    shard: JobShard,
    place: &Place,
    all: bool,
    still: &[String],
    plan: &mut Plan,
) -> (Health, String) {
    let asides = view.readable_asides(shard, place.founding);
    if let Some((server, name)) = asides.iter().flatten().next() {
        return (
            Health::Lost,
            format!(
                "a majority of its replicas is gone, and `{name}` of {server} can be read: `paraft data restore` brings it back"
            ),
        );
    }
    if !all || asides.is_none() {
        return (
            Health::Lost,
            format!(
                "a majority of its replicas has lost its log{}. Bring back the servers that are away, with their data; put copies \
                 of damaged files back, and `paraft data restore` them. Where there are none, `paraft data abandon {}` says what \
                 would be given up",
                match still {
                    [] => String::new(),
                    all => format!("; {} still has it", all.join(", ")),
                },
                shard.name()
            ),
        );
    }
    plan.all_lost.insert(shard);
    let seen = view.lost_since.get(&shard).map(|since| view.now.saturating_duration_since(*since));
    if seen.is_some_and(|seen| seen >= view.timeouts.silent) {
        tracing::error!(%shard, "every replica has lost its log: the shard begins anew; resume from a checkpoint");
        let place = new_founding(shard, view.founding);
        plan.commands.push(Command::Place { shard, place });
    }
    (Health::Lost, "every replica has lost its log".into())
}
