//! Reports to the control group which checkpoints a folder holds.

use crate::{
    connect::Transport,
    control::{ControlReply, ask},
};
use paraft_common::checkpoint::KnownCheckpoint;
use paraft_proto::NoteCheckpointsRequest;

/// All checkpoints of a job in a folder.
#[derive(Clone, Debug, PartialEq)]
pub struct FolderContents {
    /// The job, identified by the founding number of its shard 0
    /// ([`crate::checkpoint_parts::CheckpointParts::founding`]).
    pub job: u64,
    /// The folder.
    pub folder: String,
    /// At most [`paraft_common::checkpoint::MAX_KNOWN_CHECKPOINTS`]: the newest, and the best.
    pub held: Vec<KnownCheckpoint>,
}

/// Sends the report to the leader of the control group, found through `servers`. One attempt; `Err` says why it
/// failed.
pub async fn note_checkpoints(
    servers: &[String],
    transport: Transport,
    contents: &FolderContents,
) -> Result<(), String> {
    ask(servers, transport, |mut client| async move {
        let request = NoteCheckpointsRequest {
            job: contents.job,
            folder: contents.folder.clone(),
            held: contents.held.iter().map(Into::into).collect(),
        };
        let reply = client.note_checkpoints(request).await?.into_inner();
        Ok(match reply.accepted {
            true => ControlReply::Done(()),
            false => ControlReply::Refused { why: reply.why, leader: reply.leader },
        })
    })
    .await
}
