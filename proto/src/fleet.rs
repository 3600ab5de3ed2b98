//! Conclusions from the control group's description of a fleet.

use crate::{DescribeReply, JobInfo, ServerInfo, ShardInfo, ShardStatus, StoppedReplica};
use paraft_common::{JobId, JobShard, ShardId};

/// A group's voters by server, and those that do not answer.
struct Voters<'a> {
    all: &'a [u64],
    silent: &'a [u64],
}

impl Voters<'_> {
    /// Whether the answering voters are a majority even if the servers `without` stop.
    fn have_majority(&self, without: &[u64]) -> bool {
        let answers = |s: &&u64| !self.silent.contains(s) && !without.contains(s);
        self.all.iter().filter(answers).count() * 2 > self.all.len()
    }
}

impl DescribeReply {
    /// Keeps these jobs of the fleet, and drops what belongs to others. Ids of servers stay: they reveal
    /// nothing of a job.
    pub fn keep_jobs(&mut self, seen: impl Fn(&str) -> bool) {
        self.jobs.retain(|j| seen(&j.name));
        self.groups.retain(|g| seen(&g.job));
        let kept: Vec<u32> = self.jobs.iter().map(|j| j.job).collect();
        self.shards.retain(|s| kept.contains(&s.job));
        for server in &mut self.servers {
            (server.asides, server.trouble) = (Vec::new(), String::new());
        }
    }

    fn control(&self) -> Voters<'_> {
        Voters { all: &self.control_voters, silent: &self.control_silent }
    }

    /// Whether the control group has a majority: a leader that has lost it may not know yet.
    pub fn can_agree(&self) -> bool {
        self.control().have_majority(&[])
    }

    /// Marks a server as silent, whatever it last reported: the fleet notices a crash only after a while.
    pub fn note_silent(&mut self, server: u64) {
        self.servers.iter_mut().filter(|s| s.server == server).for_each(|s| s.state = "silent".into());
        let control = (&self.control_voters, &mut self.control_silent);
        for (voters, silent) in
            [control].into_iter().chain(self.shards.iter_mut().map(|s| (&s.voters, &mut s.silent)))
        {
            if voters.contains(&server) && !silent.contains(&server) {
                silent.push(server);
            }
        }
    }

    /// Silent servers, by rising id.
    pub fn silent(&self) -> impl Iterator<Item = &ServerInfo> {
        self.servers.iter().filter(|s| s.state == "silent")
    }

    /// Drained servers that answer, by rising id: they will be stopped.
    pub fn draining(&self) -> impl Iterator<Item = &ServerInfo> {
        self.servers.iter().filter(|s| s.state == "draining")
    }

    /// The groups that must not lose this server if the servers `with` stop, too: it votes there, and no
    /// majority would be left. A shard with unknown voters is among them.
    pub fn depend_on(&self, server: u64, with: &[u64]) -> Vec<String> {
        let mut groups = Vec::new();
        let without = [&[server], with].concat();
        if self.control_voters.contains(&server) && !self.control().have_majority(&without) {
            groups.push("the control group".to_string());
        }
        for shard in &self.shards {
            let voters = Voters { all: &shard.voters, silent: &shard.silent };
            let votes = shard.voters.contains(&server) && !voters.have_majority(&without);
            if votes || shard.voters.is_empty() {
                groups.push(shard.name().to_string());
            }
        }
        groups
    }
}

/// Whether no worker trains the job of this name any more: it has trained everything, or a person has ended
/// it.
pub fn is_trained(jobs: &[JobInfo], name: &str) -> bool {
    let latest = jobs.iter().rfind(|j| j.name == name);
    latest.is_some_and(|j| ["finished", "stopped"].contains(&&*j.state))
}

/// The name in the fleet of a message's subject.
macro_rules! named {
    ($($message:ty),*) => {$(
        impl $message {
            /// The shard's name in the fleet.
            pub fn name(&self) -> JobShard {
                JobShard::new(JobId(self.job), ShardId(self.shard)).unwrap_or_default()
            }
        }
    )*};
}

named!(ShardInfo, ShardStatus, StoppedReplica);

/// Why a fleet cannot agree on anything, from its servers' answers: which servers do not answer, and what to
/// do.
pub fn no_leader(answers: &[(String, Result<DescribeReply, String>)]) -> String {
    let silent = || answers.iter().filter_map(|(a, r)| Some((a, r.as_ref().err()?)));
    if silent().count() == answers.len() {
        // The errors are all the evidence: the cause may be our address, or our certificate.
        let each: String = silent().map(|(a, why)| format!("\n  {a}: {why}")).collect();
        return format!("no server answered{each}");
    }
    let known = || answers.iter().filter_map(|(a, r)| Some((a, r.as_ref().ok().filter(|r| r.fleet != 0)?)));
    if let Some((address, _)) = known().find(|(_, fleet)| fleet.can_agree()) {
        return format!("{address} leads the control group, but could not take the order");
    }
    let leader = known().next();
    let (head, mut missing) = match leader {
        Some((address, fleet)) => {
            let gone = fleet.silent().map(|s| format!("s{} at {}", s.server, s.address)).collect();
            (format!("{address} leads the control group, but has no majority of it behind it"), gone)
        }
        None => ("the control group has no leader".to_string(), Vec::new()),
    };
    let there: Vec<&str> = answers.iter().filter(|(_, r)| r.is_ok()).map(|(a, _)| a.as_str()).collect();
    if leader.is_none() {
        missing.extend(silent().map(|(a, why)| format!("{a} ({why})")));
    }
    let there = there.join(", ");
    if missing.is_empty() {
        // So it is while a fleet starts.
        return format!(
            "{head}; all servers that were asked answer: {there}. They elect one as soon as a majority of it answers: try again"
        );
    }
    format!(
        "{head}; servers that answer: {there}; that do not: {}. Servers and placement cannot change until a majority runs: \
         start the missing servers again, each with its own --data",
        missing.join(", ")
    )
}

#[cfg(test)]
#[path = "fleet_tests.rs"]
mod tests;
