//! What a person asks of a fleet: orders to the leader of the control group.
//!
//! `Err` says why an order was not taken, and where the leader is, if who was asked knows another.

use crate::connect::{Transport, channel, words};
use paraft_common::{JobId, JobShard, ServerId};
use paraft_proto::{
    AbandonRequest, DrainRequest, EndJobRequest, ForgetRequest, SubmitRequest, control_client::ControlClient,
};
use std::time::Duration;
use tonic::{Response, Status, transport::Channel};

/// A server will not come back.
pub async fn forget(address: &str, server: ServerId, within: Duration) -> Result<(), (String, String)> {
    let request = ForgetRequest { server: server.0 };
    order(address, within, async |mut c| {
        let r = c.forget(request).await.map(Response::into_inner)?;
        Ok(taken(r.accepted, (), r.why, r.leader))
    })
    .await
}

/// What a shard held is given up; gives what that was. Without `accept_loss` nothing is done, and the error says it.
pub async fn abandon(
    address: &str,
    shard: JobShard,
    accept_loss: bool,
    within: Duration,
) -> Result<String, (String, String)> {
    let request = AbandonRequest { shard: shard.number(), accept_loss };
    order(address, within, async |mut c| {
        let r = c.abandon(request).await.map(Response::into_inner)?;
        Ok(taken(r.accepted, r.why.clone(), r.why, r.leader))
    })
    .await
}

/// A server is to be emptied, or filled again.
pub async fn drain(
    address: &str,
    server: ServerId,
    undo: bool,
    within: Duration,
) -> Result<(), (String, String)> {
    let request = DrainRequest { server: server.0, undo };
    order(address, within, async |mut c| {
        let r = c.drain(request).await.map(Response::into_inner)?;
        Ok(taken(r.accepted, (), r.why, r.leader))
    })
    .await
}

/// A job is to have shards; gives its number.
pub async fn submit(
    address: &str,
    request: SubmitRequest,
    within: Duration,
) -> Result<JobId, (String, String)> {
    order(address, within, async |mut c| {
        let r = c.submit(request).await.map(Response::into_inner)?;
        Ok(taken(r.accepted, JobId(r.job), r.why, r.leader))
    })
    .await
}

/// A job is to stop where it is, or to go with all that the servers have of it; gives the word for what it was.
pub async fn end_job(
    address: &str,
    job: &str,
    delete: bool,
    within: Duration,
) -> Result<String, (String, String)> {
    let request = EndJobRequest { job: job.into(), delete };
    order(address, within, async |mut c| {
        let r = c.end_job(request).await.map(Response::into_inner)?;
        Ok(taken(r.accepted, r.state, r.why, r.leader))
    })
    .await
}

fn taken<T>(accepted: bool, gives: T, why: String, leader: String) -> Result<T, (String, String)> {
    if accepted { Ok(gives) } else { Err((why, leader)) }
}

async fn order<T>(
    address: &str,
    within: Duration,
    ask: impl AsyncFnOnce(ControlClient<Channel>) -> Result<Result<T, (String, String)>, Status>,
) -> Result<T, (String, String)> {
    let asking = async {
        let channel = channel(address, Transport::Auto).await.map_err(|e| (e, String::new()))?;
        ask(ControlClient::new(channel)).await.map_err(|s| (words(address, &s), String::new()))?
    };
    let late = |_| Err((format!("no answer within {within:?}"), String::new()));
    tokio::time::timeout(within, asking).await.unwrap_or_else(late)
}
