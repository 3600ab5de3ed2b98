//! Groups of ranks on the wire.

use crate::control::{Agent, Answer, Heartbeat, JoinRequest, Key, Overview, Refused};
use paraft_proto::{GroupHeartbeatReply, GroupHeartbeatRequest, GroupInfo, JoinGroupReply, JoinGroupRequest};
use std::time::{Duration, Instant};

/// A rank that is not assigned within this time asks again, so that it notices when this server no longer
/// leads.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);
/// Interval of checks: ranks come at any moment, and so does the timeout.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Waits for an assignment.
pub async fn join(
    agent: &Agent,
    request: JoinGroupRequest,
    leads: impl Fn() -> bool,
) -> Result<JoinGroupReply, Refused> {
    let (key, asks) = asks_of(request);
    let accepted = JoinGroupReply { accepted: true, ..JoinGroupReply::default() };
    let began = Instant::now();
    loop {
        let now = Instant::now();
        let answer = agent.groups.lock().join(&key, asks.clone(), now)?;
        match answer {
            Answer::Assigned(s) => return Ok(JoinGroupReply { assignment: Some(s.into()), ..accepted }),
            Answer::Over => return Ok(JoinGroupReply { over: true, ..accepted }),
            Answer::Wait { here, why } if now - began >= ANSWER_TIMEOUT || !leads() => {
                return Ok(JoinGroupReply { waiting: here, why: why.unwrap_or_default(), ..accepted });
            }
            Answer::Wait { .. } => tokio::time::sleep(POLL_INTERVAL).await,
        }
    }
}

/// The request of a process that wants to join a group.
pub fn asks_of(request: JoinGroupRequest) -> (Key, JoinRequest) {
    let key = Key { job: request.job, worker: request.worker };
    let asks = JoinRequest {
        size: request.size,
        rank: request.rank,
        token: request.token,
        address: request.address,
        last: request.last.unwrap_or_default().into(),
        lost: request.lost,
        timeout: Duration::from_millis(request.timeout_ms),
        settings: request.settings,
    };
    (key, asks)
}

/// All groups, for people: the tokens of processes are left out.
pub fn to_info(agent: &Agent) -> Vec<GroupInfo> {
    let info = |mut o: Overview| {
        o.assignment.ranks.iter_mut().for_each(|r| r.token = 0);
        GroupInfo {
            job: o.key.job,
            worker: o.key.worker,
            assignment: Some(o.assignment.into()),
            waiting: o.waiting,
            state: o.state.into(),
            step: o.step,
        }
    };
    agent.groups.lock().overview(Instant::now()).into_iter().map(info).collect()
}

/// Takes a heartbeat of a group's leader.
pub fn hold(agent: &Agent, request: GroupHeartbeatRequest) -> Result<GroupHeartbeatReply, String> {
    let (key, holds) = holds_of(request);
    let waiting = agent.groups.lock().hold(&key, holds, Instant::now())?;
    Ok(GroupHeartbeatReply { accepted: true, waiting, ..GroupHeartbeatReply::default() })
}

/// The heartbeat of a group's leader.
pub fn holds_of(request: GroupHeartbeatRequest) -> (Key, Heartbeat) {
    let key = Key { job: request.job, worker: request.worker };
    let holds = Heartbeat {
        assignment: request.assignment.unwrap_or_default().into(),
        settings: request.settings,
        step: request.step,
        over: request.over,
    };
    (key, holds)
}
