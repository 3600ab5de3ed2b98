//! Calls to the leader of the control group, whichever of the servers knows it.

use crate::connect::{Transport, channel, words};
use paraft_proto::control_client::ControlClient;
use std::{collections::BTreeSet, time::Duration};
use tonic::{Status, transport::Channel};

/// Servers that are asked because another one named them.
const MAX_REDIRECTS: usize = 16;
/// A server that hangs must not keep the others from being asked.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// What a server says that was asked.
pub(crate) enum ControlReply<T> {
    /// It leads.
    Done(T),
    /// It does not take that.
    Refused {
        /// Its words.
        why: String,
        /// Who leads, where it knows that and it is another.
        leader: String,
    },
}

/// Asks until one takes it; each is asked once. `Err` says why nobody did.
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
                    known.insert(next, leader); // who leads is asked before who may know
                }
            }
            Ok(Err(cause)) => why = format!("{address}: {cause}"),
            Err(_) => why = format!("{address}: no answer within {ANSWER_TIMEOUT:?}"),
        }
    }
    Err(why)
}
