//! Groups of ranks on the wire.

use crate::control::{Agent, Answer, Asks, Key, MAX_RANKS, Overview, Refused, Seated, Seating};
use paraft_proto::{
    GroupInfo, GroupRank, HoldGroupReply, HoldGroupRequest, JoinGroupReply, JoinGroupRequest,
};
use std::time::{Duration, Instant};

/// Who is not seated within this time asks again, so that it notices when this server does not lead any more.
const ANSWER: Duration = Duration::from_secs(1);
/// Bytes of a text about settings at most.
const MAX_SETTINGS: usize = 4096;
/// Ranks come at any moment, and so does the end of patience.
const LOOK: Duration = Duration::from_millis(10);

/// Waits for a seat.
pub async fn join(
    agent: &Agent,
    request: JoinGroupRequest,
    leads: impl Fn() -> bool,
) -> Result<JoinGroupReply, Refused> {
    let r = request;
    if r.lost.len().max(r.last_ranks.len()) > MAX_RANKS as usize || r.settings.len() > MAX_SETTINGS {
        let why = format!("{} lost ranks; a group has at most {MAX_RANKS}", r.lost.len());
        return Err(Refused { why, for_good: true });
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
        last_ranks: r.last_ranks.into_iter().map(from_rank).collect(),
        settings: r.settings,
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
                let mut groups = agent.groups.lock();
                if let Some(why) = groups.incomplete(&key, asks.token, now) {
                    return Err(Refused { why, for_good: true });
                }
                let why = groups.in_the_way(&key, asks.token, now).unwrap_or_default();
                return Ok(JoinGroupReply { accepted: true, waiting, why, ..JoinGroupReply::default() });
            }
            Answer::Wait(_) => tokio::time::sleep(LOOK).await,
        }
    }
}

fn from_rank(r: GroupRank) -> Seated {
    Seated { rank: r.rank, token: r.token, address: r.address }
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
        job: o.key.job,
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
    let ranks = request.ranks.into_iter().map(from_rank).collect();
    let seating = Seating { generation: request.generation, ranks };
    let waiting = agent.groups.lock().hold(&key, seating, request.over, Instant::now())?;
    Ok(HoldGroupReply { accepted: true, waiting, ..HoldGroupReply::default() })
}
