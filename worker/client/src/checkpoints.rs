//! Which checkpoints a folder holds, told to the control group.

use crate::connect::{Transport, channel};
use paraft_common::WorkerId;
use paraft_proto::{CheckpointInfo, NoteCheckpointsRequest, control_client::ControlClient};
use std::{collections::BTreeSet, time::Duration};

/// The control group keeps so many checkpoints of a job.
pub const MOST: usize = 64;
/// Servers that are asked because another one named them.
const MOST_REDIRECTS: usize = 16;
/// A server that hangs must not keep the others from being asked.
const ANSWER_PATIENCE: Duration = Duration::from_secs(2);

/// One checkpoint.
#[derive(Clone, Debug, PartialEq)]
pub struct Held {
    /// Its folder.
    pub path: String,
    /// The step that it was cut at.
    pub step: u64,
    /// The lowest and the highest version of a bucket in it.
    pub versions: (u64, u64),
    /// Bytes of its files.
    pub bytes: u64,
    /// The held-out loss there, where it is known.
    pub loss: Option<f64>,
    /// When it was written, in ms of unix time.
    pub written_ms: u64,
    /// Who wrote it, where that is known.
    pub worker: Option<WorkerId>,
    /// It is the best in its folder.
    pub best: bool,
}

/// All checkpoints of a job in a folder.
#[derive(Clone, Debug, PartialEq)]
pub struct Holding {
    /// The job: the founding of shard 0 that it runs in ([`crate::section::Sections::origin`]).
    pub job: u64,
    /// The folder.
    pub folder: String,
    /// At most [`MOST`]: the newest, and the best.
    pub held: Vec<Held>,
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
    let info = |h: &Held| CheckpointInfo {
        path: h.path.clone(),
        step: h.step,
        lowest_version: h.versions.0,
        highest_version: h.versions.1,
        bytes: h.bytes,
        loss: h.loss,
        written_ms: h.written_ms,
        worker: h.worker.map(|w| w.0),
        best: h.best,
    };
    let request = NoteCheckpointsRequest {
        job: holding.job,
        folder: holding.folder.clone(),
        held: holding.held.iter().map(info).collect(),
    };
    let nobody = |cause: String| (cause, String::new());
    let channel = channel(address, transport).await.map_err(nobody)?;
    let reply = ControlClient::new(channel).note_checkpoints(request).await;
    let reply = reply.map_err(|s| nobody(s.message().to_string()))?.into_inner();
    if reply.accepted { Ok(()) } else { Err((reply.why, reply.leader)) }
}
