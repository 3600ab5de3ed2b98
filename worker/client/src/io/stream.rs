//! A stream to a shard's leader, over a lane or HTTP/2, and the task that reads it.

use super::Inner;
use crate::{connect, outgoing::Outgoing};
use futures::{FutureExt, Stream, StreamExt, TryStreamExt, stream};
use paraft_common::ShardId;
use paraft_lanes::{LaneError, Receiver, Sender};
use paraft_proto::{
    Advice, FromShard, Heartbeat, Incoming, Refused, ToShard, WireKind, WithBulk, from_shard, limits,
    services, to_shard::Kind,
};
use paraft_session::Input;
use std::{
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};
use tokio::{task::AbortHandle, time::MissedTickBehavior};
use tokio_stream::wrappers::UnboundedReceiverStream;

/// A server answers a new stream at once, whatever it sends later.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// A shard without a leader is logged after this delay, then at this interval. Elections take less, also on a busy host.
const NO_LEADER_WARNING_DELAY: Duration = Duration::from_secs(10);
const NO_LEADER_WARNING_INTERVAL: Duration = Duration::from_secs(10);

/// A stream that is open or connecting.
pub(super) struct OpenStream {
    pub out: Arc<Outgoing>,
    task: AbortHandle,
    /// Its server's address.
    pub address: String,
    /// The stream's connection, if other streams share it.
    pub connection: Arc<OnceLock<connect::Connecting>>,
}

impl Drop for OpenStream {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Inner {
    /// Opens a stream. `beside`: an additional stream of the shard, for a question.
    pub(super) fn dial(
        self: &Arc<Self>,
        (shard, dial): (ShardId, u64),
        address: String,
        open: paraft_proto::Open,
        beside: bool,
    ) -> OpenStream {
        let out = Outgoing::new(ToShard { kind: Some(Kind::Open(open)) }.into());
        let connection = Arc::new(OnceLock::new());
        let reader =
            Reader { io: self.clone(), shard, dial, address: address.clone(), beside, out: out.clone() };
        let task = self.runtime.spawn(reader.run(connection.clone())).abort_handle();
        OpenStream { out, task, address, connection }
    }
}

/// The reader of a stream.
struct Reader {
    io: Arc<Inner>,
    shard: ShardId,
    dial: u64,
    address: String,
    /// Whether it runs beside another stream of its shard.
    beside: bool,
    /// The stream's sender, for heartbeats.
    out: Arc<Outgoing>,
}

impl Reader {
    async fn run(self, connection: Arc<OnceLock<connect::Connecting>>) {
        let cause = match self.io.channels.lane(&self.address).await {
            Ok((read, write, shared)) => {
                self.log_connected(if shared.is_some() {
                    "a Unix socket, bulk in shared memory"
                } else {
                    "TCP"
                });
                if let Some((shared, memory)) = shared.as_ref().zip(self.io.memory.as_ref()) {
                    shared.offer(memory);
                }
                let inbound =
                    Receiver::<FromShard>::new(read, limits::MAX_MESSAGE_BYTES, self.io.pool.clone());
                let read = self.read(inbound.map_err(|e| e.to_string()));
                let sender = Arc::new(Sender::new(write, shared));
                self.out.lane(sender.clone());
                tokio::select! {
                    cause = read => cause,
                    Err(e) = sender.run() => e.to_string(),
                }
            }
            Err(LaneError::NoLanes) => {
                match self.dial(&connection).await.inspect(|_| self.log_connected("HTTP/2")) {
                    Ok(inbound) => self.read(inbound.map_err(|s| s.message().to_string())).await,
                    Err(cause) => cause,
                }
            }
            // If this worker was admitted before, its certificate may be about to be renewed.
            Err(LaneError::Refused(why)) if !self.io.lock().said.contains_key(&self.shard) => {
                let message = format!("{}: {why}", self.address);
                let (advice, kind) = (Advice::Fix as i32, WireKind::Denied as i32);
                let refused = Refused { advice, kind, message, ..Refused::default() };
                let message = FromShard { kind: Some(from_shard::Kind::Refused(refused)) }.into();
                self.io.handle(Input::Message { shard: self.shard, dial: self.dial, message });
                why
            }
            Err(e) => e.to_string(),
        };
        if !self.beside {
            self.log_no_leader(&cause);
        }
        self.io.handle(Input::Broken { shard: self.shard, dial: self.dial, cause });
    }

    /// Logs that the shard has no stream, after a delay.
    fn log_no_leader(&self, cause: &str) {
        let now = Instant::now();
        let mut state = self.io.lock();
        let (since, said) = state.down.entry(self.shard).or_insert((now, None));
        let seconds = (now - *since).as_secs();
        if now - *since >= NO_LEADER_WARNING_DELAY
            && said.is_none_or(|at| now - at >= NO_LEADER_WARNING_INTERVAL)
        {
            *said = Some(now);
            let (worker, shard, address) = (self.io.worker, self.shard, &self.address);
            tracing::warn!(%worker, %shard, %address, seconds, cause, "no leader of this shard is reachable");
        }
    }

    /// Logs the connection kind of a shard; once, even if the client asks a server repeatedly whether it leads.
    fn log_connected(&self, over: &str) {
        if self.beside {
            return; // not known yet to work
        }
        let (worker, shard, address) = (self.io.worker, self.shard, &self.address);
        let way = format!("{address} {over}");
        if self.io.lock().said.insert(shard, way.clone()) != Some(way) {
            tracing::info!(%worker, %shard, %address, over, "connected");
        }
    }

    async fn dial(&self, connection: &OnceLock<connect::Connecting>) -> Result<Incoming<FromShard>, String> {
        let (channel, connecting) = self.io.channels.get(&self.address).await?;
        let _ = connection.set(connecting);
        // The kernel accepts connections for a process that hangs, so only an answer shows that it runs.
        let sent = UnboundedReceiverStream::new(self.out.http()).flat_map(stream::iter);
        let exchange = services::exchange(&channel, sent);
        let stream = tokio::time::timeout(ANSWER_TIMEOUT, exchange).await;
        let stream = stream.map_err(|_| format!("no answer within {ANSWER_TIMEOUT:?}"))?;
        stream.map_err(|s| s.message().to_string())
    }

    /// A heartbeat. For shard 0 it has the worker's new log lines; `said`: how many lines the shard has.
    fn heartbeat(&self, said: &mut Option<u64>) -> Heartbeat {
        let new = paraft_host::logs::recent(*said).filter(|_| self.shard == ShardId(0));
        let Some((number, lines)) = new else { return Heartbeat::default() };
        *said = Some(number);
        Heartbeat { host: self.io.host.clone(), device: self.io.device.clone(), said: lines }
    }

    /// Reads until the stream ends; returns the cause.
    async fn read(
        &self,
        mut inbound: impl Stream<Item = Result<WithBulk<FromShard>, String>> + Unpin,
    ) -> String {
        let (mut open, mut said) = (false, None);
        let mut heartbeat = tokio::time::interval(self.io.heartbeat);
        heartbeat.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                biased;
                // First: a busy stream of weights must not delay heartbeats.
                _ = heartbeat.tick(), if open => {
                    let heartbeat = self.heartbeat(&mut said);
                    self.out.send(ToShard { kind: Some(Kind::Heartbeat(heartbeat)) }.into());
                }
                message = self.io.room().then(|()| inbound.next()) => match message {
                    Some(Ok(message)) => {
                        // The first message is Opened, or a refusal that ends the stream.
                        if !open && matches!(message.message.kind, Some(from_shard::Kind::Opened(_))) {
                            self.io.lock().down.remove(&self.shard);
                        }
                        open = true;
                        self.io.handle(Input::Message { shard: self.shard, dial: self.dial, message });
                    }
                    Some(Err(cause)) => return cause,
                    None => return "the server closed the stream".into(),
                },
            }
        }
    }
}
