//! Groups of ranks on the wire.

use crate::control::{Agent, Answer, Asks, Key, MAX_RANKS, Overview, Seated, Seating};
use paraft_proto::{
    GroupInfo, GroupRank, HoldGroupReply, HoldGroupRequest, JoinGroupReply, JoinGroupRequest,
};
use std::time::{Duration, Instant};

/// Who is not seated within this time asks again, so that it notices when this server does not lead any more.
const ANSWER: Duration = Duration::from_secs(1);
/// Ranks come at any moment, and so does the end of patience.
const LOOK: Duration = Duration::from_millis(10);

/// Waits for a seat.
pub async fn join(
    agent: &Agent,
    request: JoinGroupRequest,
    leads: impl Fn() -> bool,
) -> Result<JoinGroupReply, String> {
    let r = request;
    if r.lost.len() > MAX_RANKS as usize {
        return Err(format!("{} lost ranks; a group has at most {MAX_RANKS}", r.lost.len()));
    }
    let key = Key { job: r.job, worker: r.worker };
    let asks = Asks {
        size: r.size,
        rank: r.rank,
        token: r.token,
        address: r.address,
        last: (r.generation, r.place),
        lost: r.lost,
        patience: Duration::from_millis(r.patience_ms),
    };
    let began = Instant::now();
    loop {
        let now = Instant::now();
        let answer = {
            let mut groups = agent.groups.lock();
            // Seated by what another has asked.
            match groups.answer(&key, asks.token, now) {
                Answer::Seated(s) if s.generation > asks.last.0 => Answer::Seated(s),
                _ => {
                    groups.ask(&key, asks.clone(), now)?;
                    groups.answer(&key, asks.token, now)
                }
            }
        };
        match answer {
            Answer::Seated(s) => return Ok(seated(s)),
            Answer::Over => {
                return Ok(JoinGroupReply { accepted: true, over: true, ..JoinGroupReply::default() });
            }
            Answer::Wait(waiting) if now - began >= ANSWER || !leads() => {
                let why = agent.groups.lock().in_the_way(&key, asks.token, now).unwrap_or_default();
                return Ok(JoinGroupReply { accepted: true, waiting, why, ..JoinGroupReply::default() });
            }
            Answer::Wait(_) => tokio::time::sleep(LOOK).await,
        }
    }
}

fn seated(s: Seating) -> JoinGroupReply {
    let secret = s.secret();
    let rank = |r: Seated| GroupRank { rank: r.rank, token: r.token, address: r.address };
    JoinGroupReply {
        accepted: true,
        generation: s.generation,
        ranks: s.ranks.into_iter().map(rank).collect(),
        secret,
        ..JoinGroupReply::default()
    }
}

/// All groups, for people: what names a process stays between it and the control group.
pub fn to_info(agent: &Agent) -> Vec<GroupInfo> {
    let rank = |r: Seated| GroupRank { rank: r.rank, token: 0, address: r.address };
    let info = |o: Overview| GroupInfo {
        job: o.key.job.split('/').next().unwrap_or_default().to_string(),
        worker: o.key.worker,
        generation: o.seating.generation,
        ranks: o.seating.ranks.into_iter().map(rank).collect(),
        waiting: o.waiting,
        state: o.state.into(),
    };
    agent.groups.lock().overview(Instant::now()).into_iter().map(info).collect()
}

/// A leader's sign of life.
pub fn hold(agent: &Agent, request: HoldGroupRequest) -> Result<HoldGroupReply, String> {
    let key = Key { job: request.job, worker: request.worker };
    let rank = |r: GroupRank| Seated { rank: r.rank, token: r.token, address: r.address };
    let ranks = request.ranks.into_iter().map(rank).collect();
    let seating = Seating { generation: request.generation, ranks };
    let waiting = agent.groups.lock().hold(&key, seating, request.over, Instant::now())?;
    Ok(HoldGroupReply { accepted: true, waiting, ..HoldGroupReply::default() })
}
