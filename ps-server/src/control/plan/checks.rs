//! Which replicas have diverged.

use super::{
    directive::{Action, Plan},
    view::View,
};
use crate::raft::{Digest, Membership, ReplicaId};
use paraft_common::JobShard;
use std::collections::BTreeMap;

/// Compares the replicas' digests of the same index. A replica that differs from a majority of the voters is
/// stopped, even the leader. Without a majority it is unknown which is right: that is reported, and no
/// replica is stopped.
pub(super) fn compare(
    view: &View,
    shard: JobShard,
    founding: u64,
    now: &Membership,
    plan: &mut Plan,
) -> Option<String> {
    let working = now.members.keys().filter_map(|n| view.working(shard, *n));
    let reports = working.filter(|r| r.founding == founding);
    let mut by_index = BTreeMap::<u64, Vec<(ReplicaId, u64)>>::new();
    for (node, d) in reports.flat_map(|r| r.digests.iter().map(|d| (r.node, *d))) {
        by_index.entry(d.index).or_default().push((node, d.digest));
    }
    let mut divided = None;
    for (index, digests) in by_index {
        if digests.iter().all(|(_, d)| *d == digests[0].1) {
            continue;
        }
        let of_voters =
            |digest: u64| digests.iter().filter(|(n, d)| *d == digest && now.voters.contains(n)).count();
        match digests.iter().find(|(_, d)| of_voters(*d) * 2 > now.voters.len()) {
            Some(&(_, majority)) => {
                for &(node, digest) in digests.iter().filter(|(_, d)| *d != majority) {
                    plan.tell(
                        node.server(),
                        shard,
                        Action::Diverged { node, at: Digest { index, digest }, majority },
                    );
                }
            }
            None => {
                divided = Some(format!(
                    "its replicas hold different states at log index {index}, and no majority agrees"
                ))
            }
        }
    }
    divided
}
