//! Membership in a group of ranks that act as one worker. The control group assigns the members.

use crate::{
    connect::Transport,
    control::{ControlReply, ask},
    error::ClientError,
    interrupt::Interrupt,
};
use paraft_common::group::Assignment;
use paraft_proto::{GroupHeartbeatRequest, JoinGroupReply, JoinGroupRequest};
use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering::Relaxed},
        mpsc::{self, RecvTimeoutError},
    },
    thread,
    time::{Duration, Instant},
};
use tokio::runtime::Runtime;

/// Options of a process that joins a group.
#[derive(Clone, Debug)]
pub struct MemberOptions {
    /// All servers.
    pub servers: Vec<String>,
    /// How to reach them.
    pub transport: Transport,
    /// The job's name.
    pub job: String,
    /// Settings that must be equal on all ranks, as text that is shown to users where it differs.
    pub settings: String,
    /// The worker that the group acts as.
    pub worker: u32,
    /// Number of ranks of a complete group.
    pub size: u32,
    /// This process's rank, below `size`.
    pub rank: u32,
    /// The address at which other ranks reach this process, `host:port`.
    pub address: String,
    /// How long to wait without an answer, or for ranks that have never arrived.
    pub timeout: Duration,
}

/// The control group's answer to a process that asks for an assignment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JoinOutcome {
    /// The assignment, and this process's place in it.
    Assigned(Assignment, usize),
    /// No assignment: the job is done.
    Over,
    /// The process was told to stop.
    Stopped,
}

/// A process that is, or will be, a member of a group.
#[derive(Debug)]
pub struct Member {
    options: MemberOptions,
    token: u64,
    /// The last assignment.
    last: Assignment,
    runtime: Runtime,
}

const RETRY_DELAY: Duration = Duration::from_millis(50);
const LOG_INTERVAL: Duration = Duration::from_secs(10);
/// The leader's heartbeat interval. A rank that returns waits about half of it to be admitted.
const HEARTBEAT_INTERVAL: Duration = Duration::from_millis(500);

impl Member {
    /// Sends no request yet.
    pub fn new(options: MemberOptions) -> Result<Self, ClientError> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|e| ClientError::Options(format!("no I/O runtime: {e}")))?;
        Ok(Self { options, token: rand::random::<u64>().max(1), last: Assignment::default(), runtime })
    }

    /// Waits for an assignment in the next group: until all ranks of the last group are present or `lost`, their
    /// time is up, or `stop` is set.
    pub fn join(&mut self, lost: &[u32], stop: &dyn Interrupt) -> Result<JoinOutcome, ClientError> {
        let o = &self.options;
        let request = JoinGroupRequest {
            job: o.job.clone(),
            worker: o.worker,
            size: o.size,
            rank: o.rank,
            token: self.token,
            address: o.address.clone(),
            last: Some(self.last.clone().into()),
            lost: lost.to_vec(),
            timeout_ms: o.timeout.as_millis() as u64,
            settings: o.settings.clone(),
        };
        let began = Instant::now();
        let (mut answered, mut said) = (began, began);
        let mut in_the_way: Option<Instant> = None;
        while !stop.is_set() {
            let asked = ask(&o.servers, o.transport, |mut client| {
                let request = request.clone();
                async move {
                    let reply = client.join_group(request).await?.into_inner();
                    Ok(match reply.accepted {
                        true => ControlReply::Done(reply),
                        false if reply.give_up || reply.fix => ControlReply::Done(reply),
                        false => ControlReply::Refused { why: reply.why, leader: reply.leader },
                    })
                }
            });
            match self.runtime.block_on(asked) {
                Ok(JoinGroupReply { assignment: Some(assignment), .. }) => {
                    let assignment = Assignment::from(assignment);
                    let place = assignment.place(self.token).ok_or_else(|| ClientError::Control {
                        waited: began.elapsed(),
                        why: "a place in a group without this process".into(),
                    })?;
                    self.last = assignment.clone();
                    return Ok(JoinOutcome::Assigned(assignment, place));
                }
                Ok(reply) if reply.fix => return Err(ClientError::Options(reply.why)),
                Ok(reply) if reply.give_up => {
                    return Err(ClientError::Control { waited: began.elapsed(), why: reply.why });
                }
                Ok(reply) if reply.over => return Ok(JoinOutcome::Over),
                Ok(reply) => {
                    answered = Instant::now();
                    in_the_way = in_the_way.or(Some(answered)).filter(|_| !reply.why.is_empty());
                    if let Some(waited) = in_the_way.map(|s| s.elapsed()).filter(|w| *w >= o.timeout) {
                        return Err(ClientError::Control { waited, why: reply.why });
                    }
                    if said.elapsed() >= LOG_INTERVAL {
                        said = answered;
                        match reply.why.is_empty() {
                            true => tracing::warn!(
                                "{} of {} ranks are here; waiting for the others",
                                reply.waiting,
                                o.size
                            ),
                            false => tracing::warn!("{}", reply.why),
                        }
                    }
                }
                Err(why) if answered.elapsed() >= o.timeout => {
                    return Err(ClientError::Control { waited: answered.elapsed(), why });
                }
                Err(_) => thread::sleep(RETRY_DELAY),
            }
        }
        Ok(JoinOutcome::Stopped)
    }

    fn holds(&self, assignment: &Assignment, step: u64, over: bool) -> GroupHeartbeatRequest {
        GroupHeartbeatRequest {
            job: self.options.job.clone(),
            worker: self.options.worker,
            assignment: Some(assignment.clone().into()),
            settings: self.options.settings.clone(),
            step,
            over,
        }
    }

    /// Sends heartbeats for the group while the returned value exists.
    pub fn send_heartbeats(&self, assignment: &Assignment) -> Result<Heartbeats, ClientError> {
        let mut request = self.holds(assignment, 0, false);
        let o = self.options.clone();
        let (waiting, step) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU64::new(0)));
        let (end, ended) = mpsc::channel();
        let (heard, now) = (waiting.clone(), step.clone());
        let work = move || {
            let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else {
                return;
            };
            loop {
                request.step = now.load(Relaxed);
                match runtime.block_on(say(&o, &request)) {
                    Ok(n) => heard.store(n, Relaxed),
                    Err(why) => tracing::debug!(%why, "a heartbeat did not reach the control group"),
                }
                match ended.recv_timeout(HEARTBEAT_INTERVAL) {
                    Err(RecvTimeoutError::Timeout) => {}
                    _ => return,
                }
            }
        };
        let thread = thread::Builder::new().name("paraft-hold".into()).spawn(work);
        thread.map_err(|e| ClientError::Options(format!("no thread: {e}")))?;
        Ok(Heartbeats { waiting, step, _end: end })
    }

    /// Reports that the job is done after this many steps. Ranks that return receive this answer. One attempt.
    pub fn over(&self, assignment: &Assignment, steps: u64) {
        if let Err(why) = self.runtime.block_on(say(&self.options, &self.holds(assignment, steps, true))) {
            tracing::debug!(%why, "the job's end did not reach the control group");
        }
    }
}

async fn say(o: &MemberOptions, request: &GroupHeartbeatRequest) -> Result<u32, String> {
    ask(&o.servers, o.transport, |mut client| {
        let request = request.clone();
        async move {
            let reply = client.group_heartbeat(request).await?.into_inner();
            Ok(match reply.accepted {
                true => ControlReply::Done(reply.waiting),
                false => ControlReply::Refused { why: reply.why, leader: reply.leader },
            })
        }
    })
    .await
}

/// A leader's heartbeats, until it is dropped.
#[derive(Debug)]
pub struct Heartbeats {
    waiting: Arc<AtomicU32>,
    step: Arc<AtomicU64>,
    _end: mpsc::Sender<()>,
}

impl Heartbeats {
    /// Reports the group's current step.
    pub fn step(&self, step: u64) {
        self.step.store(step, Relaxed);
    }

    /// The step of the last report.
    pub fn last_step(&self) -> u64 {
        self.step.load(Relaxed)
    }

    /// Number of ranks that wait for admission.
    pub fn waiting(&self) -> u32 {
        self.waiting.load(Relaxed)
    }
}
