//! Requests to other servers, over gRPC.

use super::{
    super::{memory, shape::shape_of},
    convert::{from_directive, to_report},
};
use crate::{
    admission::Answer,
    control::{Calls, Hello, ReportAnswer, SentReport},
    raft::{ReplicaId, channel},
};
use futures::{FutureExt, future::BoxFuture};
use paraft_common::ServerId;
use paraft_proto::{HelloRequest, RoomRequest, control_client::ControlClient};
use paraft_tls::Access;
use parking_lot::Mutex;
use std::{collections::HashMap, future::Future, time::Duration};
use tonic::{Response, Status, transport::Channel};

/// Timeout for another server's answer.
const TIMEOUT: Duration = Duration::from_secs(1);
/// Maximum number of kept connections: beyond it they are made again.
const MAX_CHANNELS: usize = 1024;

/// One connection to each server, made on the first request.
pub struct GrpcCalls {
    access: Access,
    channels: Mutex<HashMap<String, ControlClient<Channel>>>,
}

impl GrpcCalls {
    /// No connections yet. `access`: how to make them.
    pub fn new(access: Access) -> Self {
        Self { access, channels: Mutex::default() }
    }

    fn client(&self, address: &str) -> Result<ControlClient<Channel>, String> {
        let mut channels = self.channels.lock();
        if let Some(c) = channels.get(address) {
            return Ok(c.clone());
        }
        let client = ControlClient::new(channel(address, &self.access)?);
        if channels.len() >= MAX_CHANNELS {
            channels.clear();
        }
        channels.insert(address.to_string(), client.clone());
        Ok(client)
    }
}

async fn answer<T>(call: impl Future<Output = Result<Response<T>, Status>>) -> Result<T, String> {
    match tokio::time::timeout(TIMEOUT, call).await {
        Ok(Ok(r)) => Ok(r.into_inner()),
        Ok(Err(s)) => Err(s.message().to_string()),
        Err(_) => Err(format!("no answer within {TIMEOUT:?}")),
    }
}

impl Calls for GrpcCalls {
    fn hello<'a>(&'a self, address: &'a str) -> BoxFuture<'a, Result<Hello, String>> {
        async move {
            let r = answer(self.client(address)?.hello(HelloRequest {})).await?;
            Ok(Hello {
                server: ServerId(r.server),
                node: ReplicaId(r.node),
                fleet: r.fleet,
                shape: shape_of(r.shape.as_ref()),
                members: r.members.into_iter().map(ReplicaId).collect(),
            })
        }
        .boxed()
    }

    fn report<'a>(
        &'a self,
        address: &'a str,
        fleet: u64,
        told: &'a SentReport,
    ) -> BoxFuture<'a, Result<ReportAnswer, String>> {
        async move {
            let r = answer(self.client(address)?.report(to_report(fleet, told))).await?;
            Ok(ReportAnswer {
                accepted: r.accepted,
                leader: Some(r.leader).filter(|l| !l.is_empty()),
                whole: r.whole,
                number: r.number,
                why: r.why,
                generation: r.generation,
                directives: r.directives.iter().filter_map(from_directive).collect(),
            })
        }
        .boxed()
    }

    fn room<'a>(
        &'a self,
        address: &'a str,
        server: ServerId,
        job: &'a str,
    ) -> BoxFuture<'a, Result<Answer, String>> {
        async move {
            let r = answer(self.client(address)?.room(RoomRequest { job: job.into() })).await?;
            match r.why.as_str() {
                "" => Ok(memory::from_reply(server, r)),
                why => Err(why.into()),
            }
        }
        .boxed()
    }
}
