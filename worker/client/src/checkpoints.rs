//! Which checkpoints a folder holds, told to the control group.

use crate::connect::{Transport, channel};
use paraft_common::checkpoint::KnownCheckpoint;
use paraft_proto::{NoteCheckpointsRequest, control_client::ControlClient};
use std::{collections::BTreeSet, time::Duration};

/// Servers that are asked because another one named them.
const MOST_REDIRECTS: usize = 16;
/// A server that hangs must not keep the others from being asked.
const ANSWER_PATIENCE: Duration = Duration::from_secs(2);

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
    let mut known = servers.to_vec();
    let mut asked = BTreeSet::new();
    let mut next = 0;
    let mut why = "no server was given".to_string();
    while let Some(address) = known.get(next).cloned() {
        next += 1;
        if !asked.insert(address.clone()) || asked.len() > servers.len() + MOST_REDIRECTS {
            continue;
        }
        match tokio::time::timeout(ANSWER_PATIENCE, tell(&address, transport, holding)).await {
            Ok(Ok(())) => return Ok(()),
            Ok(Err((cause, leader))) => {
                why = format!("{address}: {cause}");
                if !leader.is_empty() {
                    known.insert(next, leader); // who leads is asked before who may know
                }
            }
            Err(_) => why = format!("{address}: no answer within {ANSWER_PATIENCE:?}"),
        }
    }
    Err(why)
}

/// `Err` says why not, and who leads where that is another.
async fn tell(address: &str, transport: Transport, holding: &Holding) -> Result<(), (String, String)> {
    let request = NoteCheckpointsRequest {
        job: holding.job,
        folder: holding.folder.clone(),
        held: holding.held.iter().map(Into::into).collect(),
    };
    let nobody = |cause: String| (cause, String::new());
    let channel = channel(address, transport).await.map_err(nobody)?;
    let reply = ControlClient::new(channel).note_checkpoints(request).await;
    let reply = reply.map_err(|s| nobody(s.message().to_string()))?.into_inner();
    if reply.accepted { Ok(()) } else { Err((reply.why, reply.leader)) }
}
