//! Connections to this server: their bound, their priority, and the timeout of silent ones.
//!
//! Every connection, over TCP or the Unix socket, is a [`GuardedSocket`]: it is counted, it must send its first
//! bytes within [`PREFACE`], and the table can close it. It starts as [`Rank::Unknown`] and gets its rank
//! with its first accepted request. At the bound the lowest rank is closed first: a crowd of strangers costs
//! strangers their connections, and costs no server, worker or log its descriptor.
//!
//! - `table`: which connections are admitted and closed, in pure functions.
//! - `door`: identifies the peer.
//! - `refusals`: counts and logs whom it refuses.
//! - `socket`: the stream around the socket. `place`: a connection's place in the table.
//! - `accept`: the listeners, which no error ends.
//! - `lanes`: connections whose first bytes ask for a lane instead of HTTP/2.
//!
//! `rpc::rights` decides what an admitted peer may ask for.

mod accept;
mod answers;
mod door;
mod lanes;
mod place;
mod refusals;
mod socket;
mod table;

pub use accept::{BoundedListener, Listen, incoming};
pub use answers::TAKE_TIMEOUT;
pub(crate) use answers::{WatchedBody, watched};
pub use lanes::Lane;
pub use socket::GuardedSocket;
pub use table::{Bounds, Origin, Rank};

use futures::task::AtomicWaker;
use paraft_tls::{Access, Rights};
use parking_lot::Mutex;
use refusals::Refusals;
use std::{
    collections::HashMap,
    fmt,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant, SystemTime},
};
use table::Table;

/// A connection must send its first 24 bytes (HTTP/2's preface) within this time. A client sends them at
/// once; a network that is slower cannot carry a heartbeat either.
pub const PREFACE: Duration = Duration::from_secs(5);

/// Maximum connections of one server, however many descriptors there are: each idle one takes about 40 KiB of
/// buffers, so these take 640 MiB. A worker has one for each of its shards. A server has three to each other
/// one and, during pushes, one to each follower of a shard that it leads.
pub const MAX_CONNECTIONS: usize = 16_384;
/// Minimum, however few descriptors there are: with less no fleet can form.
const MIN_CONNECTIONS: usize = 16;

/// Descriptors that belong to no connection and no shard: standard streams (3), the runtime (6), listeners
/// (3), log and trace (2), the control group's log and snapshot (8), small files and folders while written
/// (4), and some of libraries (name resolution, /proc).
const OWN_DESCRIPTORS: u64 = 32;
/// Descriptors of each hosted replica: a snapshot being written and one being read, a folder being synced;
/// for a leader, a lane to each of up to four followers; one spare. (The log belongs to the server, and
/// counts there.)
const DESCRIPTORS_PER_REPLICA: u64 = 8;
/// Descriptors to each other server: a channel for bulk, one for votes and heartbeats, one for reports, and
/// one that is made while its predecessor is still closing.
const DESCRIPTORS_PER_SERVER: u64 = 4;
/// Connections that are being closed and whose tasks have not run yet.
const MAX_CLOSING: usize = 16;
/// Pause between two checks of them.
const CLOSING_POLL_INTERVAL: Duration = Duration::from_millis(1);

/// The number of connections for a process with `limit` descriptors, besides `replicas` and its own
/// connections to `servers` other servers: what is left after keeping their descriptors.
pub fn room(limit: u64, replicas: usize, servers: usize) -> usize {
    let kept = OWN_DESCRIPTORS
        + DESCRIPTORS_PER_REPLICA * replicas as u64
        + DESCRIPTORS_PER_SERVER * servers as u64
        + MAX_CLOSING as u64;
    usize::try_from(limit.saturating_sub(kept))
        .unwrap_or(MAX_CONNECTIONS)
        .clamp(MIN_CONNECTIONS, MAX_CONNECTIONS)
}

/// All connections of a server. One for the process.
pub struct Connections {
    room: Box<dyn Fn() -> usize + Send + Sync>,
    access: Access,
    refusals: Refusals,
    answers: answers::Answers,
    preface: Duration,
    state: Mutex<State>,
    began: Instant,
    shed: AtomicU64,
    refused: AtomicU64,
    silent: AtomicU64,
}

#[derive(Default)]
struct State {
    table: Table,
    /// By id, until the socket is closed: including those that the table has released.
    open: HashMap<u64, Arc<ConnectionState>>,
}

/// State shared by a connection's socket, its requests and the table.
struct ConnectionState {
    id: u64,
    /// The connection is shed: its next read or write fails.
    shed: AtomicBool,
    waker: AtomicWaker,
    /// Time of its last message, in seconds since the process accepts connections.
    used: AtomicU64,
    rank: Mutex<Rank>,
    /// Where it comes from.
    origin: Origin,
    /// What its peer may do; empty until that is known.
    rights: OnceLock<Arc<Rights>>,
    /// Called when it is closed.
    tells: Mutex<Option<CloseCallback>>,
}

type CloseCallback = Box<dyn FnOnce() + Send>;

/// Numbers of open and of closed connections.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Without a request yet.
    pub unknown: usize,
    /// For status, description, or reads.
    pub readers: usize,
    /// With a worker's stream.
    pub workers: usize,
    /// Of other servers.
    pub servers: usize,
    /// The current maximum.
    pub most: usize,
    /// Closed to make room for others, since the process began.
    pub shed: u64,
    /// Closed on arrival: there was no room for one more.
    pub refused: u64,
    /// Closed because they sent nothing in time.
    pub silent: u64,
    /// Closed because their clients read nothing of an answer.
    pub stalled: u64,
    /// Refused at the door, or for a request without the right.
    pub denied: u64,
}

/// The connection that a request came on.
#[derive(Clone)]
pub struct Visitor {
    held: Arc<ConnectionState>,
    connections: Arc<Connections>,
}

impl fmt::Debug for Visitor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "connection {} ({:?})", self.held.id, *self.held.rank.lock())
    }
}

impl Connections {
    /// No connections yet. `room` gives the maximum, for each new one; `access`: which peers may connect over
    /// TCP.
    pub fn new(room: impl Fn() -> usize + Send + Sync + 'static, access: Access) -> Arc<Self> {
        Self::with_preface(room, access, PREFACE)
    }

    /// As [`Self::new`], with another timeout for the first bytes.
    pub fn with_preface(
        room: impl Fn() -> usize + Send + Sync + 'static,
        access: Access,
        preface: Duration,
    ) -> Arc<Self> {
        Arc::new(Self {
            room: Box::new(room),
            access,
            refusals: Refusals::default(),
            answers: answers::Answers::default(),
            preface,
            state: Mutex::default(),
            began: Instant::now(),
            shed: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            silent: AtomicU64::new(0),
        })
    }

    /// The current counts.
    pub fn counts(&self) -> Counts {
        let most = (self.room)();
        let state = self.state.lock();
        let of = |rank| state.table.count(rank);
        Counts {
            unknown: of(Rank::Unknown),
            readers: of(Rank::Reader),
            workers: of(Rank::Worker),
            servers: of(Rank::Server),
            most,
            shed: self.shed.load(Relaxed),
            refused: self.refused.load(Relaxed),
            silent: self.silent.load(Relaxed),
            stalled: self.answers.stalled(),
            denied: self.refusals.count(),
        }
    }

    /// Closes the connections whose certificates have expired. If trust was withdrawn from an authority,
    /// closes all that showed a certificate; they must connect again.
    pub fn expire(&self, withdrawn: bool) {
        let now = SystemTime::now();
        let over = |held: &Arc<ConnectionState>| {
            let rights = held.rights.get();
            rights.is_some_and(|r| r.have_ended(now) || (withdrawn && r.ends().is_some()))
        };
        let all: Vec<Arc<ConnectionState>> =
            self.state.lock().open.values().filter(|held| over(held)).cloned().collect();
        for held in all {
            if !held.shed.swap(true, Relaxed) {
                tracing::info!(from = %held.origin, rights = ?held.rights.get().map(|r| r.to_string()), "closed: its certificate is no longer valid");
            }
            held.waker.wake();
        }
    }

    /// Closes the connections whose clients have read nothing of an answer for this long; returns when to look again.
    pub fn close_stalled(&self, timeout: Duration) -> Duration {
        self.answers.close_stalled(timeout)
    }

    /// Admits a connection, and closes others for it; `None`: there is no room.
    fn admit(self: &Arc<Self>, from: Origin) -> Option<Visitor> {
        let bounds = Bounds::of((self.room)());
        let now = self.now();
        let mut state = self.state.lock();
        let Some((id, shed)) = state.table.admit(from, now, bounds) else {
            self.refused.fetch_add(1, Relaxed);
            return None;
        };
        let held = Arc::new(ConnectionState {
            id,
            shed: AtomicBool::new(false),
            waker: AtomicWaker::new(),
            used: AtomicU64::new(now),
            rank: Mutex::new(Rank::Unknown),
            origin: from,
            rights: OnceLock::new(),
            tells: Mutex::default(),
        });
        state.open.insert(id, held.clone());
        self.let_go(&state, &shed);
        Some(Visitor { held, connections: self.clone() })
    }

    /// A descriptor is needed elsewhere: closes the oldest unknown connection. `false`: there is none.
    fn close_oldest_unknown(&self) -> bool {
        let mut state = self.state.lock();
        let shed = state.table.oldest_unknown();
        self.let_go(&state, shed.as_slice());
        shed.is_some()
    }

    fn let_go(&self, state: &State, ids: &[u64]) {
        for held in ids.iter().filter_map(|id| state.open.get(id)) {
            self.shed.fetch_add(1, Relaxed);
            held.shed.store(true, Relaxed);
            held.waker.wake();
        }
    }

    fn closed(&self, id: u64) {
        let mut state = self.state.lock();
        let held = state.open.remove(&id);
        state.table.closed(id);
        drop(state);
        if let Some(tell) = held.and_then(|held| held.tells.lock().take()) {
            tell();
        }
    }

    /// Returns when few enough connections are closing for their descriptors to fit into the reserve.
    async fn wait_until_few_closing(&self) {
        loop {
            let going = {
                let state = self.state.lock();
                state.open.len() - state.table.len()
            };
            if going < MAX_CLOSING {
                return;
            }
            tokio::time::sleep(CLOSING_POLL_INTERVAL).await;
        }
    }

    fn now(&self) -> u64 {
        self.began.elapsed().as_secs()
    }
}

impl Visitor {
    /// A request of this kind was accepted. A connection keeps its highest rank.
    pub fn is(&self, rank: Rank) {
        self.speaks();
        let mut now = self.held.rank.lock();
        if *now >= rank {
            return;
        }
        *now = rank;
        let bounds = Bounds::of((self.connections.room)());
        let mut state = self.connections.state.lock();
        let shed = state.table.rank(self.held.id, rank, bounds);
        self.connections.let_go(&state, shed.as_slice());
    }

    /// Calls `tell` when the connection closes, unless another call is registered already.
    pub fn when_closed(&self, tell: impl FnOnce() + Send + 'static) {
        self.held.tells.lock().get_or_insert_with(|| Box::new(tell));
    }

    /// A message arrived: the connection is not idle.
    pub fn speaks(&self) {
        let now = self.connections.now();
        if self.held.used.swap(now, Relaxed) != now {
            self.connections.state.lock().table.used(self.held.id, now);
        }
    }

    /// Closes it. `false` if it was closing already.
    fn close(&self) -> bool {
        let first = !self.held.shed.swap(true, Relaxed);
        self.held.waker.wake();
        first
    }

    fn is_shed(&self) -> bool {
        self.held.shed.load(Relaxed)
    }
}

/// The connection of a request with these extensions; `None` if its server has no table of connections.
pub fn of(extensions: &http::Extensions) -> Option<Visitor> {
    extensions.get::<Visitor>().cloned()
}

/// A request with these extensions was accepted: its connection gets this rank.
pub fn mark(extensions: &http::Extensions, rank: Rank) {
    if let Some(visitor) = extensions.get::<Visitor>() {
        visitor.is(rank);
    }
}

#[cfg(test)]
mod tests;
