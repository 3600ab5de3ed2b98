//! Calls to the leader of the control group, found through any server.

use crate::connect::{Transport, channel, words};
use paraft_proto::{Candidates, control_client::ControlClient};
use std::time::Duration;
use tonic::{Status, transport::Channel};

/// A server that hangs must not keep the client from asking the others.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// A server's answer to a control call.
pub(crate) enum ControlReply<T> {
    /// The server leads and has done it.
    Done(T),
    /// The server refuses.
    Refused {
        /// The server's reason.
        why: String,
        /// The leader's address, if another server leads and this one knows it.
        leader: String,
    },
}

/// Asks the servers one after another, each once, until one accepts. `Err` says why none did.
pub(crate) async fn ask<T, F>(
    servers: &[String],
    transport: Transport,
    call: impl Fn(ControlClient<Channel>) -> F,
) -> Result<T, String>
where
    F: Future<Output = Result<ControlReply<T>, Status>>,
{
    let mut candidates = Candidates::of(servers.to_vec());
    while let Some(address) = candidates.next() {
        let one = async {
            let channel = channel(&address, transport).await?;
            call(ControlClient::new(channel)).await.map_err(|s| words(&address, &s))
        };
        match tokio::time::timeout(ANSWER_TIMEOUT, one).await {
            Ok(Ok(ControlReply::Done(done))) => return Ok(done),
            Ok(Ok(ControlReply::Refused { why, leader })) => candidates.failed(&address, why, &leader),
            Ok(Err(why)) => candidates.failed(&address, why, ""),
            Err(_) => candidates.failed(&address, format!("no answer within {ANSWER_TIMEOUT:?}"), ""),
        }
    }
    let last = candidates.causes().last();
    Err(last.map_or_else(|| "no server was given".into(), |(address, why)| format!("{address}: {why}")))
}
