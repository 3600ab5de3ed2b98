//! A checkpoint of the current step, requested from outside.

use super::check_protocol;
use crate::{replicas::Replica, shard::leader::lowest};
use paraft_common::{WorkerId, config::ServerJob};
use paraft_proto::{RefusalKind, SaveReply, SaveRequest};
use std::sync::atomic::Ordering::Relaxed;

/// Answers one call; `hosted` is the requested replica, or why there is none here.
pub fn reply(hosted: Result<Replica, RefusalKind>, request: &SaveRequest) -> SaveReply {
    match hosted.and_then(|hosted| save(&hosted, request)) {
        Ok(worker) => SaveReply { worker: worker.0, refused: None },
        Err(kind) => SaveReply { refused: Some(kind.into()), ..SaveReply::default() },
    }
}

/// Asks a worker for a checkpoint of the current step; returns that worker.
fn save(hosted: &Replica, request: &SaveRequest) -> Result<WorkerId, RefusalKind> {
    check_protocol(request.protocol)?;
    let shard = hosted.shard.id();
    if !hosted.group.leadership().borrow().leads {
        let leader = hosted.group.leader_address();
        return Err(RefusalKind::NotLeader { shard, leader, stopped: None });
    }
    let none = |why: &str| RefusalKind::Unavailable(why.into());
    let conf = hosted.shard.configured().ok_or_else(|| none("no job has begun here yet"))?;
    if let Some(why) = cannot_save(&conf.job) {
        return Err(RefusalKind::BadJob(why.into()));
    }
    if hosted.shard.is_over() {
        return Err(RefusalKind::BadOrder(format!(
            "job `{}` has ended: no worker is left to write a checkpoint",
            conf.job.name
        )));
    }
    let writer = lowest(&hosted.shard).ok_or_else(|| none("no worker trains"))?;
    hosted.counters.save.store(true, Relaxed);
    Ok(writer)
}

/// Why no worker can write a checkpoint between any two steps.
fn cannot_save(job: &ServerJob) -> Option<&'static str> {
    match () {
        () if job.chunks.is_some() => {
            Some("with leased samples checkpoints are cut between epochs: set checkpoint.every_epochs")
        }
        () if !job.stages.is_empty() => {
            Some("a job with stages has checkpoints at steps that were set before: checkpoint.every_steps")
        }
        () => None,
    }
}
