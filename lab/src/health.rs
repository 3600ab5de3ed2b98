//! Is a fleet whole? Only then may a server be taken away without taking more than a minority of anything.

use paraft_common::{ServerId, ShardId};
use paraft_proto::{DescribeReply, ShardStatus, StatusReply};

/// Who leads what, in a fleet that is whole.
#[derive(Clone, Debug, Default)]
pub struct View {
    /// The place of each shard's leader in the list of servers that were asked.
    pub leaders: Vec<usize>,
    /// Each shard's term.
    pub terms: Vec<u64>,
    /// The ids of the servers that were asked.
    pub ids: Vec<ServerId>,
    /// Snapshots that each process has installed.
    pub installed: Vec<u64>,
}

impl View {
    /// The shards that a server leads.
    pub fn led_by(&self, server: usize) -> Vec<ShardId> {
        (0u32..).zip(&self.leaders).filter(|(_, l)| **l == server).map(|(s, _)| ShardId(s)).collect()
    }
}

/// The fleet if it is whole: every server answers, and every shard has one leader and as many voters as it should have,
/// who agree on it. Else what is missing.
pub fn whole(replies: &[Result<StatusReply, String>], shards: u32, replicas: u32) -> Result<View, String> {
    for (place, reply) in replies.iter().enumerate() {
        if let Err(e) = reply {
            return Err(format!("server {place}: {e}"));
        }
    }
    let ids = replies.iter().flatten().map(|r| ServerId(r.server)).collect();
    let installed =
        replies.iter().flatten().map(|r| r.shards.iter().map(|s| s.snapshots_installed).sum()).collect();
    let mut view = View { ids, installed, ..View::default() };
    for shard in 0..shards {
        let there: Vec<(usize, u64, &ShardStatus)> = (0..)
            .zip(replies.iter().flatten())
            .filter_map(|(i, r)| Some((i, r.server, r.shards.iter().find(|s| s.shard == shard)?)))
            .collect();
        let roles = || there.iter().map(|(i, _, s)| format!("{i}: {}", s.role)).collect::<Vec<_>>();
        let votes = |s: &ShardStatus| s.role == "leader" || s.role == "follower";
        let voters: Vec<_> = there.iter().filter(|(_, _, s)| votes(s)).collect();
        let leaders: Vec<_> = voters.iter().filter(|(_, _, s)| s.role == "leader").collect();
        let [(leader, id, led)] = leaders.as_slice() else {
            return Err(format!("shard {shard} has {} leaders {:?}", leaders.len(), roles()));
        };
        let agree = voters.iter().all(|(_, _, s)| s.leader == Some(*id) && s.term == led.term);
        if voters.len() != replicas as usize || !agree {
            return Err(format!("shard {shard} is not whole {:?}", roles()));
        }
        view.leaders.push(*leader);
        view.terms.push(led.term);
    }
    Ok(view)
}

/// Whether the control group hears every server and sees no change of membership under way: in the middle of one, a
/// server that lost its memory still counts among those whose majority is needed. To be asked after [`whole`]: the
/// control group has seen the new replicas by then.
pub fn settled(fleet: &DescribeReply) -> Result<(), String> {
    if let Some(s) = fleet.shards.iter().find(|s| s.state != "serving") {
        return Err(format!("shard {} is {}: {}", s.shard, s.state, s.trouble));
    }
    match fleet.servers.iter().find(|s| s.state == "silent") {
        Some(s) => Err(format!("the control group does not hear s{}", s.server)),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reply(server: u64, role: &str, leader: Option<u64>, term: u64) -> Result<StatusReply, String> {
        let shard = ShardStatus { role: role.into(), leader, term, ..ShardStatus::default() };
        Ok(StatusReply { server, shards: vec![shard], ..StatusReply::default() })
    }

    #[test]
    fn a_fleet_is_whole_when_all_voters_of_every_shard_follow_one_leader() {
        let good = [
            reply(10, "leader", Some(10), 3),
            reply(11, "follower", Some(10), 3),
            reply(12, "follower", Some(10), 3),
        ];
        let view = whole(&good, 1, 3).expect("whole");
        assert_eq!((view.led_by(0), view.led_by(1), view.terms), (vec![ShardId(0)], vec![], vec![3]));
        let with = |place: usize, reply| {
            let mut all = good.to_vec();
            all[place] = reply;
            all
        };
        for (bad, why) in [
            (with(2, Err("dead".into())), "server 2: dead"),
            (with(2, reply(12, "learner", Some(10), 3)), "not whole"),
            (with(2, reply(12, "follower", Some(10), 2)), "not whole"),
            (with(2, reply(12, "follower", None, 3)), "not whole"),
            (with(2, reply(12, "leader", Some(12), 2)), "2 leaders"),
            (with(0, reply(10, "candidate", None, 4)), "0 leaders"),
        ] {
            let said = whole(&bad, 1, 3).expect_err(why);
            assert!(said.contains(why), "{said}");
        }
        assert!(whole(&good, 2, 3).is_err(), "a shard that nobody has");
    }
}
