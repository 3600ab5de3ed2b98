//! Reads from a replica that need not lead: a stream of its own beside a link's.

use crate::connect::Channels;
use futures::StreamExt;
use paraft_common::{Payload, PullFrom};
use paraft_host::is_local;
use paraft_proto::{OpenReads, Pull, ToShard, Weights, WithBulk, from_shard, services, to_shard};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::sync::mpsc;
use tokio_stream::wrappers::UnboundedReceiverStream;

/// A replica that has not answered for so long may be cut off from the leader, which is asked as well.
const HEDGE_AFTER: Duration = Duration::from_secs(2);
/// Pulls go to the leader for so long after a replica has failed this worker; twice as long after each failure.
const REST: Duration = Duration::from_secs(5);
const LONGEST_REST: Duration = Duration::from_secs(120);

/// Buckets that wait for the link.
const QUEUE: usize = 4;

/// What came of a reader.
pub(crate) enum Answer {
    Weights(Weights, Payload),
    /// It is over; why.
    Gone(String),
}

/// Which replica a link reads from, and when it had better ask the leader.
pub(crate) struct Readers {
    policy: PullFrom,
    worker: u32,
    channels: Arc<Channels>,
    /// The servers with a replica, in the order in which they are tried.
    candidates: Vec<String>,
    leader: String,
    open: Option<Open>,
    /// What the next stream begins with.
    hello: OpenReads,
    failures: u32,
    rest: Option<Instant>,
}

struct Open {
    asks: mpsc::UnboundedSender<ToShard>,
    answers: mpsc::Receiver<Answer>,
    /// Since when the latest pull has waited.
    owes: Option<Instant>,
    /// The leader was asked as well.
    hedged: bool,
}

impl Readers {
    pub fn new(policy: PullFrom, worker: u32, channels: Arc<Channels>) -> Self {
        let (candidates, leader, hello) = (Vec::new(), String::new(), OpenReads::default());
        Self { policy, worker, channels, candidates, leader, open: None, hello, failures: 0, rest: None }
    }

    /// The link has found its leader, which has said where the shard's replicas are.
    pub fn found(&mut self, leader: &str, replicas: &[String], hello: OpenReads) {
        self.open = None;
        self.leader = leader.to_string();
        self.hello = hello;
        if self.policy == PullFrom::Leader {
            return;
        }
        self.candidates = replicas.to_vec();
        if let Some(by) = (self.worker as usize).checked_rem(replicas.len()) {
            self.candidates.rotate_left(by);
        }
        // A stable sort: those on this host first, each part spread over the workers.
        self.candidates.sort_by_key(|a| !is_local(a));
    }

    /// The replica that is to be asked next, and whether it is the one that answered last; `None`: the leader.
    pub fn turn(&mut self) -> Option<bool> {
        if self.open.as_ref().is_some_and(|o| o.owes.is_some()) {
            self.failed("the leader has answered before it"); // it was asked as well
        }
        if self.open.is_some() {
            return Some(true);
        }
        if self.rest.is_some_and(|until| Instant::now() < until) {
            return None;
        }
        let address = self.candidates.first().filter(|a| **a != self.leader)?.clone();
        self.open = Some(self.dial(address));
        Some(false)
    }

    /// Sends a pull to the replica whose turn it is.
    pub fn ask(&mut self, pull: Pull) {
        if let Some(open) = &mut self.open {
            (open.owes, open.hedged) = (Some(Instant::now()), false);
            let _ = open.asks.send(ToShard { kind: Some(to_shard::Kind::Pull(pull)) });
        }
    }

    /// The latest pull is answered in full.
    pub fn answered(&mut self) {
        if let Some(open) = &mut self.open {
            open.owes = None;
            (self.failures, self.rest) = (0, None);
        }
    }

    /// The replica is let go; pulls go to the leader for a while, then to the next one.
    pub fn failed(&mut self, why: &str) {
        if self.open.take().is_some() {
            let rest = REST.saturating_mul(1 << self.failures.min(6)).min(LONGEST_REST);
            tracing::debug!(replica = self.candidates[0], why, "no more reads from it for {rest:?}");
            self.rest = Some(Instant::now() + rest);
            self.failures += 1;
            self.candidates.rotate_left(1);
        }
    }

    /// Waits for what the replica says, or, with `None`, until it is time to ask the leader too.
    pub async fn next(&mut self) -> Option<Answer> {
        let Some(open) = &mut self.open else { return std::future::pending().await };
        let hedge = open.owes.filter(|_| !open.hedged).map(|since| since + HEDGE_AFTER);
        tokio::select! {
            answer = open.answers.recv() => Some(answer.unwrap_or_else(|| Answer::Gone("it ended".into()))),
            () = tokio::time::sleep_until(hedge.unwrap_or_else(Instant::now).into()), if hedge.is_some() => {
                open.hedged = true;
                None
            }
        }
    }

    fn dial(&self, address: String) -> Open {
        let (asks, rx) = mpsc::unbounded_channel();
        let (tx, answers) = mpsc::channel(QUEUE);
        let _ = asks.send(ToShard { kind: Some(to_shard::Kind::OpenReads(self.hello)) });
        let channels = self.channels.clone();
        tokio::spawn(async move {
            let gone = tokio::select! {
                gone = read(&channels, &address, rx, &tx) => gone,
                () = tx.closed() => return, // the link has let it go
            };
            let _ = tx.send(Answer::Gone(format!("{address}: {gone}"))).await;
        });
        Open { asks, answers, owes: None, hedged: false }
    }
}

/// Reads until something is wrong, and says what.
async fn read(
    channels: &Channels,
    address: &str,
    asks: mpsc::UnboundedReceiver<ToShard>,
    tx: &mpsc::Sender<Answer>,
) -> String {
    let (channel, shared) = match channels.get(address).await {
        Ok(c) => c,
        Err(cause) => return cause,
    };
    let asks = UnboundedReceiverStream::new(asks).map(WithBulk::from);
    let mut inbound = match services::read(&channel, asks).await {
        Ok(inbound) => inbound,
        Err(status) => {
            channels.broken(address, &shared);
            return status.message().to_string();
        }
    };
    loop {
        match inbound.next().await {
            Some(Ok(WithBulk { message, bulk })) => match message.kind {
                Some(from_shard::Kind::Weights(w)) => {
                    let payload = bulk.into_iter().next().unwrap_or_default();
                    if tx.send(Answer::Weights(w, payload)).await.is_err() {
                        return String::new(); // nobody hears it
                    }
                }
                Some(from_shard::Kind::Refused(r)) => return r.message,
                _ => return "a message out of place".into(),
            },
            Some(Err(status)) => {
                channels.broken(address, &shared);
                return status.message().to_string();
            }
            None => return "the server closed the stream".into(),
        }
    }
}
