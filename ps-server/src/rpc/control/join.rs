//! How a new server asks a fleet for admission.

use crate::raft::channel;
use paraft_proto::{DescribeRequest, JoinReply, JoinRequest, control_client::ControlClient, no_leader};
use paraft_tls::Access;
use parking_lot::Mutex;
use std::time::Duration;

/// Asks a fleet for an id: at the first address that leads, or knows the leader. Meanwhile logs what it waits
/// for.
pub async fn ask_to_join(
    at: &[String],
    address: &str,
    access: &Access,
    within: Duration,
) -> Result<JoinReply, String> {
    let refused = Mutex::default();
    let tell = async {
        let mut pause = FIRST_LOG_DELAY;
        loop {
            tokio::time::sleep(pause).await;
            let why = no_leader_reasons(at, access, &refused).await;
            tracing::warn!("no fleet has taken this server in yet: {why}. It keeps asking");
            pause = LOG_INTERVAL;
        }
    };
    let outcome = tokio::select! {
        outcome = tokio::time::timeout(within, ask(at, address, access, &refused)) => outcome,
        never = tell => never,
    };
    match outcome {
        Ok(outcome) => outcome,
        Err(_) => Err(no_leader_reasons(at, access, &refused).await),
    }
}

/// A healthy fleet admits a new server within this time. After it, and then at this interval, the server logs
/// what it waits for.
const FIRST_LOG_DELAY: Duration = Duration::from_secs(2);
const LOG_INTERVAL: Duration = Duration::from_secs(10);
const DESCRIBE: Duration = Duration::from_secs(1);
/// Pause after a leader's refusal, or if the leader could not take the order.
const RETRY_DELAY: Duration = Duration::from_secs(1);

/// Asks until a leader admits it. Keeps a leader's refusal.
async fn ask(
    at: &[String],
    address: &str,
    access: &Access,
    refused: &Mutex<String>,
) -> Result<JoinReply, String> {
    let mut next: Vec<String> = Vec::new();
    loop {
        if next.is_empty() {
            next.extend(at.iter().cloned());
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        let Some(to) = next.pop() else { return Err("no address was given".into()) };
        let join = async {
            let mut client = ControlClient::new(channel(&to, access)?);
            let reply = client.join(JoinRequest { address: address.into() }).await;
            reply.map(|r| r.into_inner()).map_err(|s| s.message().to_string())
        };
        match tokio::time::timeout(Duration::from_secs(6), join).await {
            Ok(Ok(reply)) if reply.accepted => return Ok(reply),
            Ok(Ok(reply)) => {
                if !reply.not_leader {
                    *refused.lock() = format!("{to}: {}", reply.why);
                }
                if !reply.not_leader || reply.leader == to {
                    tokio::time::sleep(RETRY_DELAY).await;
                }
                next.extend(Some(reply.leader).filter(|l| !l.is_empty() && *l != to));
            }
            Ok(Err(error)) => tracing::debug!(%to, error, "no answer to the request to join"),
            Err(_) => tracing::debug!(%to, "no answer to the request to join"),
        }
    }
}

/// What these servers report of the control group.
async fn no_leader_reasons(at: &[String], access: &Access, refused: &Mutex<String>) -> String {
    let describe = |to: String| async move {
        let ask = async {
            let mut client = ControlClient::new(channel(&to, access)?);
            let reply = client.describe(DescribeRequest {}).await;
            reply.map(|r| r.into_inner()).map_err(|s| s.message().to_string())
        };
        let timed = tokio::time::timeout(DESCRIBE, ask).await;
        let reply = timed.unwrap_or_else(|_| Err(format!("no answer within {DESCRIBE:?}")));
        (to, reply)
    };
    let answers = futures::future::join_all(at.iter().cloned().map(describe)).await;
    let refused = refused.lock().clone();
    let led = answers.iter().any(|(_, a)| a.as_ref().is_ok_and(|d| !d.leader.is_empty()));
    match (refused.is_empty(), led) {
        (false, true) => refused,
        (false, false) => format!("{refused}; {}", no_leader(&answers)),
        (true, _) => no_leader(&answers),
    }
}
