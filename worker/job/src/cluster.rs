//! `[cluster]`: servers, replicas, the meaning of an acknowledgement, timeouts.

use crate::{
    Job,
    check::{Check, bad},
};
use paraft_common::{AutoConfig, Durability, LeaderWindow, check_address, config::MAX_GRACE_MS, durability};
use serde::{Deserialize, Serialize};

/// `[cluster]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ClusterConfig {
    /// Number of server processes, if `addresses` is empty (the launcher picks ports).
    pub servers: u32,
    /// `host:port` of manually started servers.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<String>,
    /// Raft groups that share the model. Default: one per server.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shards: Option<u32>,
    /// Replicas of each shard: 1 (a lost server loses its state) or 3.
    pub replicas: u32,
    /// How often the launcher restarts each killed process at most.
    pub max_restarts: u32,
    /// Bytes per bucket, 4 to 1048576. Default: such that every shard gets a part, at most 1 MiB.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bucket_bytes: Option<usize>,
    /// A follower without messages for three to four times this long starts an election.
    pub election_ms: u64,
    /// A worker's lease: without a heartbeat for this long it is removed.
    pub grace_ms: u64,
    /// Workers and servers fail after this long without a leader.
    pub timeout_ms: u64,
    /// What an acknowledgement of a push guarantees: `quorum-disk`, `quorum-memory` or `leader`.
    pub durability: Durability,
    /// `auto` (Unix sockets on the same host, otherwise TCP) or `tcp`.
    pub transport: TransportConfig,
    /// The worker's command in place of `paraft worker`, for a binary with its own model.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub worker_command: Vec<String>,
    /// A script and its arguments, started in place of `paraft worker`. It gets no flags: environment variables
    /// identify the worker, so that the script's arguments are its own.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub script: Vec<String>,
}

/// How workers reach servers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TransportConfig {
    /// Unix sockets on the same host, otherwise TCP.
    #[default]
    Auto,
    /// TCP.
    Tcp,
}

impl Default for ClusterConfig {
    fn default() -> Self {
        Self {
            servers: 3,
            addresses: Vec::new(),
            shards: None,
            replicas: 3,
            max_restarts: 0,
            bucket_bytes: None,
            election_ms: 150,
            grace_ms: 1000,
            timeout_ms: 30_000,
            durability: Durability::default(),
            transport: TransportConfig::Auto,
            worker_command: Vec::new(),
            script: Vec::new(),
        }
    }
}

impl ClusterConfig {
    /// Whether its workers are a user's program, which alone knows model and data.
    pub fn own_program(&self) -> bool {
        !self.worker_command.is_empty() || !self.script.is_empty()
    }

    pub(crate) fn check(&self, job: &Job) -> Check {
        self.check_script(job)?;
        if self.grace_ms > MAX_GRACE_MS {
            let remedy = "use at most 86400000: the others wait so long for a worker that is gone";
            return bad("cluster.grace_ms", format!("{} ms is more than a day", self.grace_ms), remedy);
        }
        self.check_servers(job)?;
        let shards = job.shards();
        if shards == 0 || shards > 64 {
            return bad("cluster.shards", format!("{shards} shards"), "use 1 to 64");
        }
        if let Some(b) = self.bucket_bytes
            && (!(4..=1 << 20).contains(&b) || !b.is_multiple_of(4))
        {
            let remedy = "use a multiple of 4 from 4 to 1048576";
            return bad("cluster.bucket_bytes", format!("{b} bytes"), remedy);
        }
        self.check_times()?;
        self.check_durability(job)
    }

    fn check_script(&self, job: &Job) -> Check {
        let Some(program) = self.script.first() else { return Ok(()) };
        if program.is_empty() || self.script.iter().any(|word| word.contains('\0')) {
            let remedy = "write the words of a command: [\"python3\", \"train.py\"]";
            return bad("cluster.script", "it names no program", remedy);
        }
        if !self.worker_command.is_empty() {
            let why = "a worker is either a script or a program that takes the flags of `paraft worker`";
            return bad("cluster.script", why, "take cluster.script or cluster.worker_command out");
        }
        if job.train.group_size > 1 {
            let why = "a script makes groups of its processes itself (torch.distributed)";
            return bad("train.group_size", why, "set train.group_size = 1");
        }
        Ok(())
    }

    fn check_servers(&self, job: &Job) -> Check {
        let servers = job.servers();
        if servers == 0 || servers > 1024 {
            return bad("cluster.servers", format!("{servers} servers"), "use 1 to 1024");
        }
        for (i, a) in self.addresses.iter().enumerate() {
            let remedy = "write distinct \"host:port\", the same list on every host";
            check_address(a).or_else(|why| bad("cluster.addresses", why, remedy))?;
            if self.addresses[..i].contains(a) {
                return bad("cluster.addresses", format!("`{a}` is no address of its own"), remedy);
            }
        }
        let replicas = self.replicas;
        if replicas == 0 || replicas > servers {
            let why = format!("{replicas} replicas on {servers} servers");
            let remedy = "use as many replicas as servers or fewer (cluster.replicas = 1 keeps one copy)";
            return bad("cluster.replicas", why, remedy);
        }
        if replicas.is_multiple_of(2) {
            let why = format!("{replicas} replicas survive no more failures than {}", replicas - 1);
            return bad("cluster.replicas", why, "use an odd number");
        }
        Ok(())
    }

    fn check_times(&self) -> Check {
        if !(50..=60_000).contains(&self.election_ms) {
            return bad("cluster.election_ms", format!("{} ms", self.election_ms), "use 50 to 60000");
        }
        if self.timeout_ms < 2 * self.election_ms {
            let why = format!("{} ms is less than an election", self.timeout_ms);
            return bad("cluster.timeout_ms", why, "use at least twice cluster.election_ms");
        }
        Ok(())
    }

    fn check_durability(&self, job: &Job) -> Check {
        let mode = job.train.mode.first(&AutoConfig::default());
        durability::check(mode, self.durability, LeaderWindow::default())
            .or_else(|e| bad("cluster.durability", e.message, e.remedy))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn a_script_goes_with_no_other_program_and_no_groups() {
        let job = |text: &str| {
            let text = format!("[cluster]\nscript = [\"python3\", \"train.py\"]\n{text}");
            Job::parse(&text, Path::new("job.toml"), &[]).map_err(|e| e.to_string())
        };
        let whole = job("").expect("it needs neither model nor data");
        assert!(whole.cluster.own_program());
        let again = Job::parse(&whole.to_toml(), Path::new("job.toml"), &[]).expect("as it was written");
        assert_eq!(again.cluster.script, ["python3", "train.py"]);
        for (text, words) in [
            ("worker_command = [\"./own\"]", "cluster.worker_command out"),
            ("[train]\ngroup_size = 2", "train.group_size = 1"),
            ("[train]\nworkers = 1\nexchange = \"all-reduce\"", "train.exchange"),
        ] {
            let said = job(text).expect_err(text);
            assert!(said.contains(words) && said.contains("help"), "{said}");
        }
        let none = Job::parse("[cluster]\nscript = [\"\"]", Path::new("job.toml"), &[]);
        assert!(none.expect_err("no program").to_string().contains("names no program"));
    }
}
