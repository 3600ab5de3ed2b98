//! Is a fleet whole? Only then may a server be taken away without taking more than a minority of anything.

use paraft_common::{JobId, JobShard, ServerId, ShardId};
use paraft_fleet::{
    ask::{self, ask_all},
    view,
};
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

/// What the servers of a fleet say, in its order; `Err`: why one does not answer.
pub type Replies = Vec<Result<StatusReply, String>>;

/// What the control group of the fleet says that one of these servers belongs to, and each of its servers.
pub fn look(servers: &[String]) -> Result<(DescribeReply, Replies), String> {
    let described = || ask::describe(servers).ok_or("the control group has no leader");
    let addresses: Vec<String> = described()?.servers.iter().map(|s| s.address.clone()).collect();
    let replies = ask_all(&addresses, false);
    // Asked again: what the control group said before may be older than what the servers say.
    Ok((described()?, replies))
}

/// What is missing of a fleet, if anything is, by what its servers say; and then by what its control group knows, which has
/// to receive every server's reports and to see no change of membership in progress: during one, a server that lost its memory still
/// counts among those whose majority is needed.
pub fn whole(fleet: &DescribeReply, replies: &[Result<StatusReply, String>]) -> Result<(), String> {
    if fleet.servers.len() != replies.len() {
        return Err(format!("{} servers were asked, the fleet has {}", replies.len(), fleet.servers.len()));
    }
    let now = view::weigh(fleet, replies);
    if !now.is_whole() {
        return Err(now.says());
    }
    if let Some(s) = fleet.shards.iter().find(|s| s.state != "serving") {
        return Err(format!("{} is {}: {}", s.name(), s.state, s.trouble));
    }
    if let Some(s) = fleet.servers.iter().find(|s| s.state == "silent") {
        return Err(format!("the control group does not hear s{}", s.server));
    }
    // In the middle of an election the membership may be that of a leader that was just deposed.
    fleet.shards.iter().try_for_each(|s| leader_of(s.name(), replies).map(drop))
}

/// The place of a shard's leader among the replies, and its term. All its voters follow it.
fn leader_of(shard: JobShard, replies: &[Result<StatusReply, String>]) -> Result<(usize, u64), String> {
    let there: Vec<(usize, u64, &ShardStatus)> = (0..)
        .zip(replies.iter().flatten())
        .filter_map(|(i, r)| Some((i, r.server, r.shards.iter().find(|s| s.name() == shard)?)))
        .collect();
    let leaders: Vec<_> = there.iter().filter(|(_, _, s)| s.role == "leader").collect();
    let [(leader, id, led)] = leaders.as_slice() else {
        return Err(format!("{shard} has {} leaders", leaders.len()));
    };
    let mut voters = there.iter().filter(|(_, _, s)| led.voters.contains(&s.node));
    match voters.all(|(_, _, s)| s.leader == Some(*id) && s.term == led.term) {
        true => Ok((*leader, led.term)),
        false => Err(format!("{shard}: not all its voters follow server {leader}")),
    }
}

/// Who leads what in a fleet of one job of so many shards, if it is [`whole`] and each shard has one leader whom all its voters
/// follow. Else what is missing.
pub fn view(
    fleet: &DescribeReply,
    replies: &[Result<StatusReply, String>],
    shards: u32,
) -> Result<View, String> {
    whole(fleet, replies)?;
    let ids = replies.iter().flatten().map(|r| ServerId(r.server)).collect();
    let installed =
        replies.iter().flatten().map(|r| r.shards.iter().map(|s| s.snapshots_installed).sum()).collect();
    let mut view = View { ids, installed, ..View::default() };
    for shard in JobShard::all(JobId(0), shards) {
        let (leader, term) = leader_of(shard, replies)?;
        view.leaders.push(leader);
        view.terms.push(term);
    }
    Ok(view)
}

#[cfg(test)]
#[path = "health_tests.rs"]
mod tests;
