//! Failures and orders in a run, as its launcher or `paraft chaos` saw them.

use paraft_common::{ServerId, ShardId, WorkerId};
use serde::{Deserialize, Serialize};

/// Something happened to the fleet of a run. Ended workers, checkpoints and the workers' view of mode
/// switches have events of their own.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Incident {
    /// Unix time, seconds.
    pub wall: f64,
    /// What happened.
    #[serde(flatten)]
    pub what: IncidentKind,
}

/// What happened to a fleet.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "what", rename_all = "snake_case")]
pub enum IncidentKind {
    /// The process of a server has ended during the run.
    ServerEnded {
        /// The server.
        server: ServerId,
        /// How, for people: `was ended by SIGKILL`.
        how: String,
        /// Its exit code; `None` after a signal.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        code: Option<i32>,
        /// The number of the signal that ended it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        signal: Option<i32>,
        /// The launcher starts it again.
        restarts: bool,
    },
    /// A server answers again after its process had ended.
    ServerBack {
        /// The server.
        server: ServerId,
        /// Seconds between its end and its first answer, as the launcher noticed them.
        seconds: f64,
    },
    /// A shard has a new leader. A server that leads again in a later term is one too.
    LeaderChanged {
        /// The shard.
        shard: ShardId,
        /// The leader before.
        from: ServerId,
        /// The leader now.
        to: ServerId,
        /// The term of the new leader.
        term: u64,
        /// Seconds from the end of the old leader's process until the new leader served workers, as the
        /// launcher noticed them (to about 0.05 s). `None`: that process has not ended.
        #[serde(default)]
        stall_seconds: Option<f64>,
        /// The leader before still answers: it has handed the shard over.
        #[serde(default)]
        handed_over: bool,
    },
    /// A server is drained, or takes part again: `paraft drain`, or a server that ends or starts.
    ServerDrained {
        /// The server.
        server: ServerId,
        /// It takes part again.
        undo: bool,
    },
    /// A worker that had ended or left was started again.
    WorkerBack {
        /// The worker.
        worker: WorkerId,
        /// The rank of the worker's group that was started; `None` for jobs without groups.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        rank: Option<u32>,
    },
    /// A user has asked for another number of workers.
    WorkersWanted {
        /// The number.
        workers: u32,
    },
    /// The mode of the job was switched, as the servers say. The launcher asks once a second: of several
    /// switches in between it sees the last.
    ModeSwitched {
        /// The number of the switch in the job.
        number: u64,
        /// The mode before.
        from: String,
        /// The mode now.
        to: String,
        /// Who switched it.
        by: SwitchedBy,
    },
    /// `paraft chaos` has injected a fault.
    Fault {
        /// Its name on the command line: `kill`, `partition`.
        fault: String,
        /// Where, and for how long, for people.
        target: String,
    },
    /// A kind that this version does not know.
    #[serde(other)]
    Other,
}

/// Who switched a mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SwitchedBy {
    /// A person, or a program of theirs.
    User,
    /// The rule of mode `auto`.
    Rule,
}
