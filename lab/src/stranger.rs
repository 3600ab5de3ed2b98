//! A client outside the fleet that sends valid messages of every kind at the wrong time, old and forged
//! ones, invalid bytes, and nothing at all. No server may treat them as messages of a member.

use paraft_common::ServerId;
use paraft_proto::{
    DescribeRequest, HelloRequest, JoinRequest, PeerCall, PeerRequest, ReplicaReport, ReportRequest,
    StatusRequest, WithBulk, control_client::ControlClient, services,
};
use paraft_server::raft::{ReplicaId, stranger};
use paraft_tls::Access;
use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use std::time::{Duration, Instant};
use tokio::{io::AsyncWriteExt, net::TcpStream};
use tonic::transport::Channel;

/// The result of a visit.
#[derive(Debug, Default)]
pub struct VisitCounts {
    /// Sent messages.
    pub sent: u64,
    /// Accepted messages that no outsider may send, as text.
    pub taken: Vec<String>,
}

/// A server that answers at all does so in this time.
const REPLY_TIMEOUT: Duration = Duration::from_millis(500);
/// Connections that never send a byte.
const SILENT_CONNECTIONS: usize = 50;

/// Sends messages to each of these servers for about `lasting`: without TLS, and with a certificate
/// that is valid up to that point.
pub async fn visit(
    addresses: &[String],
    access: &Access,
    rng: &mut ChaCha8Rng,
    lasting: Duration,
) -> VisitCounts {
    let until = Instant::now() + lasting;
    let mut visit = VisitCounts::default();
    let mut held = Vec::new();
    while Instant::now() < until {
        for address in addresses {
            if Instant::now() >= until {
                break;
            }
            if held.len() < SILENT_CONNECTIONS * addresses.len() {
                held.extend(TcpStream::connect(address).await.ok());
            }
            noise(address, rng).await;
            let Ok(channel) = paraft_client::connect::lazy(address, access) else { continue };
            peers(address, &channel, rng, &mut visit).await;
            control(address, &channel, rng, &mut visit).await;
        }
    }
    visit
}

/// Bytes that are not HTTP/2, or only its start.
async fn noise(address: &str, rng: &mut ChaCha8Rng) {
    let mut bytes = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    match rng.random_range(0..3) {
        0 => bytes.truncate(10),
        1 => bytes.extend((0..200).map(|_| rng.random::<u8>())),
        _ => bytes = (0..200).map(|_| rng.random::<u8>()).collect(),
    }
    if let Ok(mut stream) = TcpStream::connect(address).await {
        // The server may close it at once.
        let _ = stream.write_all(&bytes).await;
    }
}

/// Raft messages from an unknown replica to the existing replicas, by their names.
async fn peers(address: &str, channel: &Channel, rng: &mut ChaCha8Rng, visit: &mut VisitCounts) {
    let hello = within(ControlClient::new(channel.clone()).hello(HelloRequest {})).await;
    let mut shards = paraft_client::connect::shards(channel.clone());
    let status = within(shards.status(StatusRequest::default())).await;
    let (Some(hello), Some(status)) = (hello, status) else { return };
    let control = (u32::MAX, hello.node);
    let groups = status.shards.iter().map(|s| (s.shard, s.node)).chain([control]);
    let from = ReplicaId::new_incarnation(ServerId(rng.random_range(0..1000)));
    for (group, to) in groups {
        for term in [u64::MAX, 1 << 62, rng.random_range(1..1000)] {
            for fleet in [0, rng.random(), hello.fleet] {
                for (call, header, bulk) in stranger::forged(term, from) {
                    let message = PeerRequest {
                        group,
                        from: from.0,
                        to,
                        call: call as i32,
                        header,
                        fleet,
                        payloads: Vec::new(),
                    };
                    visit.sent += 1;
                    let request = WithBulk { message, bulk };
                    let answer =
                        tokio::time::timeout(REPLY_TIMEOUT, services::peer_call(channel, request)).await;
                    if let Ok(Ok(_)) = answer {
                        visit.taken.push(format!(
                            "{address} answered {} of term {term} from {from}, who is no member of group {group}",
                            PeerCall::as_str_name(&call)
                        ));
                    }
                }
            }
        }
    }
}

/// Forged reports, and requests to join from servers that do not exist.
async fn control(address: &str, channel: &Channel, rng: &mut ChaCha8Rng, visit: &mut VisitCounts) {
    let mut client = ControlClient::new(channel.clone());
    let Some(known) = within(client.describe(DescribeRequest {})).await else { return };
    let nowhere = format!("127.0.0.1:{}", rng.random_range(1..20));
    visit.sent += 1;
    if within(client.join(JoinRequest { address: nowhere.clone() })).await.is_some_and(|r| r.accepted) {
        visit.taken.push(format!("{address} took in a server at {nowhere}, where there is none"));
    }
    let server = rng.random_range(0..4);
    let lost = ReplicaReport {
        shard: 0,
        node: server << 32 | 7,
        founding: rng.random(),
        ..ReplicaReport::default()
    };
    let report = |fleet, node| ReportRequest {
        fleet,
        server,
        address: nowhere.clone(),
        node,
        replicas: vec![lost.clone()],
        ..ReportRequest::default()
    };
    // From another fleet, and from a replica of another server.
    for report in [report(rng.random(), server << 32 | 7), report(known.fleet, (server + 1) << 32 | 7)] {
        visit.sent += 1;
        if within(client.report(report)).await.is_some_and(|r| r.accepted) {
            visit.taken.push(format!("{address} took a forged report"));
        }
    }
}

async fn within<T>(ask: impl Future<Output = Result<tonic::Response<T>, tonic::Status>>) -> Option<T> {
    tokio::time::timeout(REPLY_TIMEOUT * 4, ask).await.ok()?.ok().map(tonic::Response::into_inner)
}
