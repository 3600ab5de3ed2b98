//! The network between workers and servers: a link of each process with a bandwidth in each direction,
//! and a latency between them.
//!
//! ```text
//!  worker's link ──latency──▶ server's link ──▶ shard's leader       (and back)
//! ```
//!
//! A link carries one message after the other. Messages of a stream arrive in the order of sending. If
//! a process dies, its messages in flight arrive, and its unsent messages are lost.

use crate::{
    chance::{Chance, Draws},
    clock::{Clock, Moment, SimEvent, nanos},
    setup::Setup,
    stream::{Process, Stream},
};
use parking_lot::Mutex;
use std::sync::{Arc, atomic::Ordering::Relaxed};

/// Bytes of a message besides its payload, on the wire.
pub(crate) const HEADER_BYTES: u64 = 64;

/// One direction of a process's link.
struct Link {
    free: Moment,
    nanos_per_byte: f64,
}

impl Link {
    fn new(gbit: f64) -> Self {
        Self { free: 0, nanos_per_byte: if gbit > 0.0 { 8.0 / gbit } else { 0.0 } }
    }

    /// When `bytes` bytes that arrive at `at` have passed.
    fn pass(&mut self, at: Moment, bytes: u64) -> Moment {
        self.free = self.free.max(at).saturating_add((bytes as f64 * self.nanos_per_byte) as u64);
        self.free
    }
}

struct Ends {
    sends: Link,
    receives: Link,
}

impl Ends {
    fn new(gbit: f64) -> Mutex<Self> {
        Mutex::new(Self { sends: Link::new(gbit), receives: Link::new(gbit) })
    }
}

/// All links.
pub(crate) struct Network {
    clock: Clock,
    latency: f64,
    jitter: f64,
    /// A link without a limit takes no time.
    bounded: bool,
    workers: Vec<Mutex<Ends>>,
    servers: Vec<Mutex<Ends>>,
    up: Vec<Mutex<Chance>>,
    down: Vec<Mutex<Chance>>,
}

impl Network {
    /// For this many training processes and servers.
    pub fn new(clock: Clock, setup: &Setup, workers: u32, servers: u32) -> Self {
        let chances = |draws: fn(u32) -> Draws| {
            (0..workers).map(|w| Mutex::new(Chance::new(setup.seed, draws(w)))).collect()
        };
        Self {
            clock,
            latency: setup.latency_ms / 1e3,
            jitter: setup.jitter,
            bounded: setup.worker_gbit > 0.0 || setup.server_gbit > 0.0,
            workers: (0..workers).map(|_| Ends::new(setup.worker_gbit)).collect(),
            servers: (0..servers).map(|_| Ends::new(setup.server_gbit)).collect(),
            up: chances(Draws::Sends),
            down: chances(Draws::Receives),
        }
    }

    /// The latency of one message, drawn by `chance`.
    pub fn latency(&self, chance: &mut Chance) -> u64 {
        nanos(chance.log_normal(self.latency, self.jitter))
    }

    /// Sends a worker's message; `arrives` runs when it reaches the server of the stream's shard.
    pub fn up(self: &Arc<Self>, stream: &Arc<Stream>, bytes: u64, arrives: impl FnOnce() + Send + 'static) {
        let worker = stream.process.place;
        let bytes = bytes + HEADER_BYTES;
        let sent = self.workers[worker].lock().sends.pass(self.clock.now(), bytes);
        let latency = self.latency(&mut self.up[worker].lock());
        let at = sent.saturating_add(latency).max(stream.up.load(Relaxed));
        stream.up.store(at, Relaxed);
        let (process, server) = (stream.process.clone(), stream.server);
        let arrives = move || {
            if sent <= process.ended() {
                arrives();
            }
        };
        self.through(at, arrives, bytes, End::Server(server));
    }

    /// Sends a server's message; `arrives` runs when it reaches the worker.
    pub fn down(self: &Arc<Self>, stream: &Arc<Stream>, bytes: u64, arrives: impl FnOnce() + Send + 'static) {
        let worker = stream.process.place;
        let bytes = bytes + HEADER_BYTES;
        let sent = self.servers[stream.server].lock().sends.pass(self.clock.now(), bytes);
        let latency = self.latency(&mut self.down[worker].lock());
        let at = sent.saturating_add(latency).max(stream.down.load(Relaxed));
        stream.down.store(at, Relaxed);
        self.through(at, arrives, bytes, End::Worker(worker));
    }

    /// Sends from one worker's process to another, to arrive no earlier than a given moment.
    pub fn between(
        self: &Arc<Self>,
        (from, to): (usize, usize),
        bytes: u64,
        after: Moment,
        arrives: impl FnOnce() + Send + 'static,
    ) -> Moment {
        let bytes = bytes + HEADER_BYTES;
        let sent = self.workers[from].lock().sends.pass(self.clock.now(), bytes);
        let latency = self.latency(&mut self.up[from].lock());
        let at = sent.saturating_add(latency).max(after);
        self.through(at, arrives, bytes, End::Worker(to));
        at
    }

    /// When a server's link has sent a message to its followers.
    pub fn replicates(&self, server: usize, bytes: u64) -> Moment {
        self.servers[server].lock().sends.pass(self.clock.now(), bytes)
    }

    /// Stops the process's sending; `hears` runs when the other side sees the end of its streams.
    pub fn breaks(self: &Arc<Self>, process: &Process, hears: impl FnOnce() + Send + 'static) {
        let latency = self.latency(&mut self.up[process.place].lock());
        self.clock.at(self.clock.now().saturating_add(latency), hears);
    }

    /// Passes the receiver's link from the moment of arrival on.
    fn through(self: &Arc<Self>, at: Moment, arrives: impl FnOnce() + Send + 'static, bytes: u64, to: End) {
        if !self.bounded {
            return self.clock.at(at, arrives);
        }
        self.clock.at(at, Passage { network: self.clone(), to, came: Some(at), bytes, arrives });
    }
}

/// The owner of a link.
#[derive(Clone, Copy)]
enum End {
    Worker(usize),
    Server(usize),
}

/// A message at its receiver's link.
struct Passage<A> {
    network: Arc<Network>,
    to: End,
    /// When it reached the link; `None` once it is on it.
    came: Option<Moment>,
    bytes: u64,
    arrives: A,
}

impl<A: FnOnce() + Send + 'static> SimEvent for Passage<A> {
    fn happens(mut self: Box<Self>) -> Option<(Moment, Box<dyn SimEvent>)> {
        if let Some(at) = self.came.take() {
            let ends = match self.to {
                End::Worker(worker) => &self.network.workers[worker],
                End::Server(server) => &self.network.servers[server],
            };
            let through = ends.lock().receives.pass(at, self.bytes);
            if through > at {
                return Some((through, self));
            }
        }
        (self.arrives)();
        None
    }
}
