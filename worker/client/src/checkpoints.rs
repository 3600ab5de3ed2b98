//! Which checkpoints a folder holds, told to the control group.

use crate::{
    connect::Transport,
    control::{Said, ask},
};
use paraft_common::checkpoint::KnownCheckpoint;
use paraft_proto::NoteCheckpointsRequest;

/// All checkpoints of a job in a folder.
#[derive(Clone, Debug, PartialEq)]
pub struct Holding {
    /// The job: the founding of shard 0 that it runs in ([`crate::section::Sections::origin`]).
    pub job: u64,
    /// The folder.
    pub folder: String,
    /// At most [`paraft_common::checkpoint::MAX_KNOWN_CHECKPOINTS`]: the newest, and the best.
    pub held: Vec<KnownCheckpoint>,
}

/// Tells the leader of the control group, whichever of `servers` knows it. Tried once; `Err` says why nobody took it.
pub async fn note_checkpoints(
    servers: &[String],
    transport: Transport,
    holding: &Holding,
) -> Result<(), String> {
    ask(servers, transport, |mut client| async move {
        let request = NoteCheckpointsRequest {
            job: holding.job,
            folder: holding.folder.clone(),
            held: holding.held.iter().map(Into::into).collect(),
        };
        let reply = client.note_checkpoints(request).await?.into_inner();
        Ok(match reply.accepted {
            true => Said::Done(()),
            false => Said::Refused { why: reply.why, leader: reply.leader },
        })
    })
    .await
}
