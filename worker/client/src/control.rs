//! Calls to the leader of the control group, found through any server.

use crate::connect::{Transport, channel, words};
use paraft_proto::control_client::ControlClient;
use std::{collections::BTreeSet, time::Duration};
use tonic::{Status, transport::Channel};

/// At most this many servers are added because another server named them.
const MAX_REDIRECTS: usize = 16;
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
    let mut known = servers.to_vec();
    let mut asked = BTreeSet::new();
    let mut next = 0;
    let mut why = "no server was given".to_string();
    while let Some(address) = known.get(next).cloned() {
        next += 1;
        if !asked.insert(address.clone()) || asked.len() > servers.len() + MAX_REDIRECTS {
            continue;
        }
        let one = async {
            let channel = channel(&address, transport).await?;
            call(ControlClient::new(channel)).await.map_err(|s| words(&address, &s))
        };
        match tokio::time::timeout(ANSWER_TIMEOUT, one).await {
            Ok(Ok(ControlReply::Done(done))) => return Ok(done),
            Ok(Ok(ControlReply::Refused { why: cause, leader })) => {
                why = format!("{address}: {cause}");
                if !leader.is_empty() {
                    known.insert(next, leader); // ask the named leader before servers that may know it
                }
            }
            Ok(Err(cause)) => why = format!("{address}: {cause}"),
            Err(_) => why = format!("{address}: no answer within {ANSWER_TIMEOUT:?}"),
        }
    }
    Err(why)
}
