//! A scripted stream of a worker.

use crate::wait::DEADLINE;
use anyhow::{Context, Result, bail};
use futures::StreamExt;
use paraft_common::config::ServerJob;
use paraft_proto::{
    FromShard, Heartbeat, Incoming, Init, Open, Opened, PROTOCOL, Pull, Push, Refused, ToShard, Weights,
    WithBulk, from_shard, services, to_shard,
};
use tokio::{runtime::Runtime, sync::mpsc, time::timeout};
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::transport::Endpoint;

/// A stream to one shard: sends the given messages, reads replies, keeps no state.
pub struct Stream {
    runtime: Runtime,
    out: mpsc::UnboundedSender<ToShard>,
    inbound: Incoming<FromShard>,
}

impl Stream {
    /// Connects; sends nothing.
    pub fn connect(address: &str) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        let (out, rx) = mpsc::unbounded_channel();
        let inbound = runtime.block_on(async {
            let channel = Endpoint::from_shared(format!("http://{address}"))?.connect().await?;
            let messages = UnboundedReceiverStream::new(rx).map(WithBulk::from);
            anyhow::Ok(services::exchange(&channel, messages).await?)
        })?;
        Ok(Self { runtime, out, inbound })
    }

    /// Sends heartbeats from now on, as a worker's client does.
    fn live(&self) {
        let out = self.out.downgrade();
        self.runtime.spawn(async move {
            while let Some(out) = out.upgrade() {
                let _ = out.send(ToShard { kind: Some(to_shard::Kind::Heartbeat(Heartbeat::default())) });
                drop(out);
                tokio::time::sleep(HEARTBEAT).await;
            }
        });
    }

    /// As [`Self::open`], but silent afterwards, with its connection open.
    pub fn open_and_hang(
        address: &str,
        job: &ServerJob,
        worker: u32,
        buckets: &[(u32, usize)],
    ) -> Result<(Self, Opened)> {
        Self::open_quietly(address, job, worker, buckets)
    }

    /// Connects and opens a session, once the server leads; sends initial weights (zeros) if the shard has
    /// none. `buckets` are the lengths of the shard's buckets, by id.
    pub fn open(
        address: &str,
        job: &ServerJob,
        worker: u32,
        buckets: &[(u32, usize)],
    ) -> Result<(Self, Opened)> {
        let (stream, opened) = Self::open_quietly(address, job, worker, buckets)?;
        stream.live();
        Ok((stream, opened))
    }

    fn open_quietly(
        address: &str,
        job: &ServerJob,
        worker: u32,
        buckets: &[(u32, usize)],
    ) -> Result<(Self, Opened)> {
        let mut tries = 0;
        let (stream, opened) = loop {
            let mut stream = Self::connect(address)?;
            stream.send(to_shard::Kind::Open(open(job, worker)?));
            match stream.receive()? {
                Some(from_shard::Kind::Opened(o)) => break (stream, o),
                // Right after its start a server has no leader yet.
                Some(from_shard::Kind::Refused(_)) if tries < 200 => {
                    tries += 1;
                    std::thread::sleep(std::time::Duration::from_millis(20));
                }
                other => bail!("Open was answered by {other:?}"),
            }
        };
        if !opened.initialised {
            for (bucket, len) in buckets {
                stream.send(to_shard::Kind::Init(Init {
                    bucket: *bucket,
                    payload: vec![0; len * 4].into(),
                    ..Init::default()
                }));
            }
        }
        Ok((stream, opened))
    }

    /// Sends one message.
    pub fn send(&self, kind: to_shard::Kind) {
        self.send_raw(ToShard { kind: Some(kind) });
    }

    /// Sends one message, even an empty one.
    pub fn send_raw(&self, message: ToShard) {
        let _ = self.out.send(message); // a closed stream shows at the next read
    }

    /// The next message, or `None` if the server ended the stream. Fails after the deadline.
    pub fn receive(&mut self) -> Result<Option<from_shard::Kind>> {
        let next = async { timeout(DEADLINE, self.inbound.message()).await };
        let message = self.runtime.block_on(next).context("no answer")??;
        let Some(WithBulk { message, bulk }) = message else { return Ok(None) };
        let mut kind = message.kind.context("an empty message")?;
        if let from_shard::Kind::Weights(w) = &mut kind {
            w.payload = bulk.first().context("no weights")?.to_bytes();
        }
        Ok(Some(kind))
    }

    /// The next message, which must be a refusal.
    pub fn refused(&mut self) -> Result<Refused> {
        match self.receive()? {
            Some(from_shard::Kind::Refused(r)) => Ok(r),
            other => bail!("a refusal was expected, not {other:?}"),
        }
    }

    /// The next message, which must be an ack: its seq and version.
    pub fn ack(&mut self) -> Result<(u64, u64)> {
        match self.receive()? {
            Some(from_shard::Kind::Ack(a)) => Ok((a.seq, a.version)),
            other => bail!("an ack was expected, not {other:?}"),
        }
    }

    /// Pulls; returns the buckets in their order of arrival.
    pub fn pull(&mut self, done: u64) -> Result<Vec<Weights>> {
        self.send(to_shard::Kind::Pull(Pull { done, ..Pull::default() }));
        let mut all = Vec::new();
        loop {
            match self.receive()? {
                Some(from_shard::Kind::Weights(w)) => {
                    let last = w.last;
                    all.push(w);
                    if last {
                        return Ok(all);
                    }
                }
                other => bail!("weights were expected, not {other:?}"),
            }
        }
    }
}

/// More often than any lease needs.
const HEARTBEAT: std::time::Duration = std::time::Duration::from_millis(100);

/// A valid Open.
pub fn open(job: &ServerJob, worker: u32) -> Result<Open> {
    Ok(Open { protocol: PROTOCOL, shard: 0, worker, session: 0, job: job.to_toml()?, founding: 0 })
}

/// A push of the same value everywhere.
pub fn push(seq: u64, step: u64, bucket: u32, value: f32, len: usize) -> Push {
    let payload: Vec<u8> = std::iter::repeat_n(value.to_le_bytes(), len).flatten().collect();
    Push { seq, step, bucket, payload: payload.into(), samples: 1, ..Push::default() }
}
