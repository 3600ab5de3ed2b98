//! Clients that request weights from servers and read no reply.

use futures::future::join_all;
use paraft_proto::{FromShard, Incoming, PROTOCOL, ReadRequest, services};
use paraft_tls::Access;
use std::time::Duration;
use tokio::time::timeout;

/// Streams to each server: more than one certificate may have.
const STREAMS: usize = 150;
/// A server that accepts a stream does so in this time.
const REPLY_TIMEOUT: Duration = Duration::from_millis(500);

/// Opens streams of readers to these servers and shards and holds them without reading; returns how
/// many were open.
pub async fn hang(addresses: &[String], access: &Access, shards: u32, lasting: Duration) -> usize {
    let streams = addresses
        .iter()
        .filter_map(|address| paraft_client::connect::lazy(address, access).ok())
        .flat_map(|channel| (0..STREAMS).map(move |i| (channel.clone(), i as u32 % shards.max(1))));
    let opened = streams.map(|(channel, shard)| async move {
        let request = ReadRequest { protocol: PROTOCOL, shard, ..ReadRequest::default() };
        timeout(REPLY_TIMEOUT, services::read(&channel, request)).await.ok()?.ok()
    });
    let open: Vec<Incoming<FromShard>> = join_all(opened).await.into_iter().flatten().collect();
    tokio::time::sleep(lasting).await;
    open.len()
}
