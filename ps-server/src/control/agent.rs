//! This server's part in the control plane: it forms or joins the fleet, reports its replicas, executes
//! directives and, while it leads the control group, plans.

mod bootstrap;
mod hand_over;
mod idle;
mod jobs;
mod planner;
mod reports;

use super::{
    calls::Calls,
    groups::Groups,
    orders::Order,
    plan::{LastReport, Report, Timeouts},
    reachability::Reach,
    replica::ControlReplica,
    state::{Agreed, Command, Outcome, Refusal, Shape},
};
use crate::{
    raft::ReplicaId,
    replicas::Replicas,
    replicated::{Applied, Change, Group},
};
pub use hand_over::HAND_OVER;
use paraft_common::{JobShard, ServerId};
use paraft_proto::RefusalKind;
use parking_lot::Mutex;
pub(super) use planner::LeaderState;
pub use planner::ReportRefusal;
use std::{
    collections::{BTreeSet, HashMap},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};
use tokio::sync::Notify;

/// A server's identity, kept in its data folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Identity {
    /// Its id.
    pub server: ServerId,
    /// Its replica of the control group.
    pub node: ReplicaId,
    /// Its fleet; 0: none yet.
    pub fleet: u64,
}

/// Options of an agent.
pub struct AgentOptions {
    /// This server's id.
    pub server: ServerId,
    /// Its address, for the other servers.
    pub address: String,
    /// The servers that form the fleet, by id; or those that a new server asks.
    pub servers: Vec<String>,
    /// What a founding fixes. `None`: the fleet's shape, which this server was told in an earlier incarnation
    /// and learns again from the control group's log.
    pub shape: Option<Shape>,
    /// Timing.
    pub election: Duration,
    /// Timing of repairs.
    pub timeouts: Timeouts,
    /// The most memory that a job may need on this server; `None`: the free memory.
    pub job_memory: Option<u64>,
}

/// The agent. One for the process.
pub struct Agent {
    options: AgentOptions,
    /// The control group's replica.
    pub control: Arc<ControlReplica>,
    /// The agreed state.
    pub agreed: Arc<Agreed>,
    replicas: Arc<Replicas>,
    pub(super) fleet: AtomicU64,
    remember: Box<dyn Fn(u64) -> Result<(), String> + Send + Sync>,
    pub(super) leading: Mutex<LeaderState>,
    /// The groups of ranks, for this term of leadership.
    pub groups: Mutex<Groups>,
    /// A report arrived: plan now.
    news: Notify,
    /// A replica was started, founded or removed: report now.
    done: Notify,
    /// The last report, its number, and the server that has it, if any.
    reported: Mutex<Option<(Arc<Report>, u64, String)>>,
    /// The latest generation that this server has received.
    generation: AtomicU64,
    busy: Mutex<BTreeSet<JobShard>>,
    /// Sends requests to the other servers.
    pub(super) calls: Box<dyn Calls>,
    complained: AtomicBool,
    /// This server's fleet is on its disk.
    remembered: AtomicBool,
    /// Since when the leader has reported that this server cannot take part.
    kept_out: Mutex<Option<Instant>>,
    pub(super) reach: Reach,
    /// Addresses that asked to join lately, and when each asked first.
    pub(super) joins: Mutex<HashMap<String, Instant>>,
    pub(super) admitted: super::job_admission::LastAdmission,
}

/// Maximum number of admitted servers that have not reported; the fleet admits no more.
pub(super) const MAX_NEWCOMERS: usize = 16;

/// How often a server reports in a fleet with this election timeout: often enough that a fleet starts at
/// once, and seldom enough to cost nothing.
pub fn report_interval(election: Duration) -> Duration {
    (election / 4).clamp(Duration::from_millis(20), Duration::from_millis(250))
}

/// Without work, checks for work take at most one part in this many of the time.
const IDLE_FACTOR: u32 = 500;

/// The outcome of a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReportOutcome {
    /// The leader had not applied yet what this server has: its answer says nothing about that.
    Early,
    /// The report or the answer had something new, or no server has answered.
    News,
    /// Nothing has changed.
    Nothing,
}

/// For this long after a replica starts here, the server reports every [`FAST_REPORT_INTERVAL`]
/// while the replica is in no group.
const FAST_REPORT_PERIOD: Duration = Duration::from_secs(1);
const FAST_REPORT_INTERVAL: Duration = Duration::from_millis(10);

impl Agent {
    /// `fleet`: the fleet that this server already belongs to, or 0. `remember` keeps it on disk.
    pub fn new(
        options: AgentOptions,
        control: Arc<ControlReplica>,
        agreed: Arc<Agreed>,
        replicas: Arc<Replicas>,
        calls: Box<dyn Calls>,
        fleet: u64,
        remember: Box<dyn Fn(u64) -> Result<(), String> + Send + Sync>,
    ) -> Self {
        Self {
            options,
            control,
            agreed,
            replicas,
            fleet: AtomicU64::new(fleet),
            remember,
            leading: Mutex::default(),
            groups: Mutex::default(),
            news: Notify::new(),
            done: Notify::new(),
            reported: Mutex::default(),
            generation: AtomicU64::new(0),
            busy: Mutex::default(),
            calls,
            complained: AtomicBool::new(false),
            remembered: AtomicBool::new(fleet != 0),
            kept_out: Mutex::default(),
            reach: Reach::default(),
            joins: Mutex::default(),
            admitted: Default::default(),
        }
    }

    /// The servers of its start options.
    pub(super) fn listed(&self) -> &[String] {
        &self.options.servers
    }

    pub(super) fn timeouts(&self) -> Timeouts {
        self.options.timeouts
    }

    /// The addresses of servers that report and are not agreed on, or not at this address.
    pub(super) fn asking(&self) -> Vec<String> {
        let leading = self.leading.lock();
        self.agreed.read(|s| {
            let known = |id: &ServerId, h: &LastReport| {
                s.servers.get(id).is_some_and(|m| m.address == h.report.address)
            };
            let asking = leading.heard.iter().filter(|(id, h)| !known(id, h));
            asking.map(|(_, h)| h.report.address.clone()).take(MAX_NEWCOMERS).collect()
        })
    }

    /// The fleet, or 0.
    pub fn fleet(&self) -> u64 {
        self.fleet.load(Relaxed)
    }

    /// The control group's replica, as it runs or ran last.
    pub fn group(&self) -> Group {
        self.control.get()
    }

    /// This server.
    pub fn server(&self) -> ServerId {
        self.options.server
    }

    /// The shards' replicas here.
    pub(super) fn replicas(&self) -> &Replicas {
        &self.replicas
    }

    /// The number of servers in its start options.
    pub fn listed_count(&self) -> usize {
        self.options.servers.len()
    }

    /// Its address.
    pub fn address(&self) -> &str {
        &self.options.address
    }

    /// The agreed shape, or that of the start options. `None`: not known yet; the caller must wait.
    pub fn shape(&self) -> Option<Shape> {
        self.agreed.read(|s| s.shape).or(self.options.shape)
    }

    /// Runs until the control replica shuts down.
    ///
    /// # Errors
    /// The differences, if its settings differ from those of its fleet.
    pub async fn run(self: Arc<Self>) -> Result<(), String> {
        let mut ended = self.control.starts();
        tokio::spawn(self.control.clone().supervise());
        tokio::spawn(self.replicas.clone().supervise());
        let leader = tokio::spawn(self.clone().lead());
        if let Err(differs) = self.form().await {
            leader.abort();
            return Err(differs);
        }
        let mut pause = self.interval();
        // A replica here is complete when the others have started theirs. No server notifies this one of
        // that, so it asks.
        let mut soon = Instant::now();
        let mut early = None;
        let mut moved = self.agreed.generations();
        loop {
            let due = async {
                tokio::select! {
                    () = tokio::time::sleep(pause) => {}
                    // There may be a directive, and the leader waits for its result.
                    _ = moved.changed() => {}
                    () = self.done.notified() => soon = Instant::now() + FAST_REPORT_PERIOD,
                }
            };
            tokio::select! {
                () = due => {
                    self.ask_servers();
                    self.transfer_unservable_shards().await;
                    let began = Instant::now();
                    let heard = match self.report().await {
                        Ok(heard) => heard,
                        Err(differs) => {
                            leader.abort();
                            return Err(differs);
                        }
                    };
                    early = (heard == ReportOutcome::Early).then(|| early.unwrap_or(began));
                    pause = match heard {
                        // A leader that never applies it is not asked for ever.
                        ReportOutcome::Early if early.is_some_and(|since| since.elapsed() < FAST_REPORT_PERIOD) => {
                            FAST_REPORT_INTERVAL.max(10 * began.elapsed())
                        }
                        ReportOutcome::Early | ReportOutcome::News => self.interval(),
                        ReportOutcome::Nothing => self.idle_interval(began.elapsed()),
                    };
                    if Instant::now() < soon && self.replicas.all().iter().any(|(_, r)| r.group.membership().members.is_empty()) {
                        pause = pause.min(FAST_REPORT_INTERVAL);
                    }
                }
                () = async { drop(ended.wait_for(Option::is_none).await) } => break,
            }
        }
        leader.abort();
        Ok(())
    }

    /// The interval after a report without changes or directives. It grows with the time that the report
    /// took, so that a server with many idle groups costs little more than one with few.
    pub(super) fn idle_interval(&self, took: Duration) -> Duration {
        let silent = self.options.timeouts.silent;
        (silent / 4).max(took * IDLE_FACTOR).min(silent / 2).max(self.interval())
    }

    fn interval(&self) -> Duration {
        report_interval(self.options.election)
    }

    /// Commits a command.
    pub async fn propose(&self, command: Command) -> Result<Outcome, String> {
        let waits = self.group().propose(Change::Control(command)).await.map_err(|e| e.to_string())?;
        match tokio::time::timeout(Duration::from_secs(5), waits).await {
            Ok(Ok(Applied::Control(outcome))) => Ok(outcome),
            Ok(Ok(_)) => Err("an answer of another kind".into()),
            Ok(Err(e)) => Err(e.to_string()),
            Err(_) => Err("no majority of the servers answered within 5 s".into()),
        }
    }

    /// Executes a person's order; once for each token, however often it is sent.
    ///
    /// # Errors
    /// It is refused, or it is unknown whether it will be agreed on.
    pub async fn order(&self, token: u64, order: Order) -> Result<Outcome, RefusalKind> {
        match self.propose(Command::Order { token, order }).await {
            Ok(Outcome::Refused(Refusal::NameTaken { job, name, state })) => {
                Err(RefusalKind::NameTaken { job, name, state: state.name() })
            }
            Ok(Outcome::Refused(Refusal::NoServer(server))) => Err(RefusalKind::NoSuchServer(server)),
            // Something agreed on meanwhile has changed it: check again.
            Ok(Outcome::Refused(why @ Refusal::NoJob(_))) => Err(RefusalKind::NotAgreed(why.to_string())),
            Ok(Outcome::Refused(Refusal::Other(why))) => Err(RefusalKind::BadOrder(why)),
            Ok(done) => Ok(done),
            Err(why) => Err(RefusalKind::NotAgreed(why)),
        }
    }

    /// The most memory that a job may need on this server, if configured.
    pub fn job_memory(&self) -> Option<u64> {
        self.options.job_memory
    }
}

#[cfg(test)]
#[path = "agent_tests.rs"]
pub(super) mod tests;
