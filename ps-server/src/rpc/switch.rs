//! The live switch of the mode, requested from outside.

use super::{
    check_protocol,
    convert::{MAX_SWITCHES, bad_mode},
};
use crate::{
    replicas::Replica,
    shard::leader::{Event, RequestedMode},
};
use paraft_common::{InForce, ModeChoice, ShardId};
use paraft_proto::{RefusalKind, SwitchModeReply, SwitchModeRequest};
use tokio::sync::oneshot;

/// Answers one call; `hosted` is the requested replica, or why there is none here.
pub async fn reply(hosted: Result<Replica, RefusalKind>, request: &SwitchModeRequest) -> SwitchModeReply {
    match switch(hosted, request).await {
        Ok(now) => SwitchModeReply { number: now.number, mode: now.mode.to_string(), refused: None },
        Err(kind) => SwitchModeReply { refused: Some(kind.into()), ..SwitchModeReply::default() },
    }
}

async fn switch(
    hosted: Result<Replica, RefusalKind>,
    request: &SwitchModeRequest,
) -> Result<InForce, RefusalKind> {
    check_protocol(request.protocol)?;
    let Replica { leader, shard, .. } = hosted?;
    let mode: ModeChoice = request.mode.parse().map_err(|_| bad_mode(&request.mode))?;
    if request.number > MAX_SWITCHES {
        let why = format!("a switch of the mode has number {}: they go up to 2^53", request.number);
        return Err(RefusalKind::BadSwitch(why));
    }
    if mode == ModeChoice::Auto && shard.id() != ShardId(0) {
        return Err(RefusalKind::BadSwitch("that the rule chooses the mode is asked of shard 0".into()));
    }
    let running = shard.configured().map(|c| c.job.name.clone());
    match running {
        None => return Err(RefusalKind::Unavailable("no job has begun here yet".into())),
        Some(running) if running != request.job => {
            let (asked, difference) = (request.job.clone(), None);
            return Err(RefusalKind::OtherJob { running, asked, difference });
        }
        Some(_) => {}
    }
    let number = (request.number > 0).then_some(request.number);
    let (tx, rx) = oneshot::channel();
    let stopping = || RefusalKind::Unavailable("the server is shutting down".into());
    let wanted = RequestedMode::Choice(mode);
    leader.send(Event::SwitchMode { number, wanted, tx: Some(tx) }).await.map_err(|_| stopping())?;
    // Without an answer it has stepped down; the switch may have taken effect or not.
    rx.await.unwrap_or_else(|_| {
        Err(RefusalKind::Unavailable("another server leads the shard now; ask again".into()))
    })
}
