//! How the ranks of a group connect: each rank listens, and dials the ranks that it needs. A connection starts with
//! a line that identifies the group, so that a connection of an earlier group, or of a stranger, is rejected.

use super::GroupError;
use paraft_tls::{Access, access::Expected, blocking::Wire};
use std::{
    collections::BTreeMap,
    io::{self, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs},
    time::{Duration, Instant},
};

/// A rank of a group, with its address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Its rank, which never changes.
    pub rank: u32,
    /// `host:port`
    pub address: String,
}

/// A place in a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rendezvous {
    /// The generation of this worker's group, from 1.
    pub generation: u64,
    /// Known only to its ranks.
    pub secret: u64,
    /// The job's name. Under TLS the ranks' certificates must be for it.
    pub job: String,
    /// This process's place among `ranks`; the first leads.
    pub place: usize,
    /// The group's members.
    pub ranks: Vec<Peer>,
}

impl Rendezvous {
    /// This process's rank.
    pub fn rank(&self) -> u32 {
        self.ranks[self.place].rank
    }
}

/// The address at which other ranks reach this process, while it lives.
#[derive(Debug)]
pub struct Listener {
    socket: TcpListener,
    address: SocketAddr,
}

impl Listener {
    /// Listens at the address from which this host reaches `server` (`host:port`), at any port.
    pub fn towards(server: &str) -> io::Result<Self> {
        let to = server
            .to_socket_addrs()?
            .next()
            .ok_or_else(|| io::Error::new(io::ErrorKind::AddrNotAvailable, "it has no address"))?;
        let any: SocketAddr = if to.is_ipv4() { ([0, 0, 0, 0], 0).into() } else { ([0; 16], 0).into() };
        // Sends nothing: the kernel only looks up its route.
        let probe = std::net::UdpSocket::bind(any)?;
        probe.connect(to)?;
        let socket = TcpListener::bind((probe.local_addr()?.ip(), 0))?;
        socket.set_nonblocking(true)?;
        Ok(Self { address: socket.local_addr()?, socket })
    }

    /// `host:port`
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

/// The purpose of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum ConnectionKind {
    Watch,
    Bulk,
    Small,
    Line,
}

/// Connections to this rank's neighbours on the ring.
#[derive(Debug)]
pub(super) struct Neighbours {
    pub next: Wire,
    pub previous: Wire,
}

#[derive(Debug)]
pub(super) struct Connected {
    /// By place.
    pub peers: BTreeMap<usize, Wire>,
    /// `None` in a group of one.
    pub bulk: Option<Neighbours>,
    pub small: Option<Neighbours>,
    /// By place; empty if no lines were requested.
    pub lines: BTreeMap<usize, Wire>,
}

const MAGIC: u64 = u64::from_le_bytes(*b"paraftgr");
const HELLO_BYTES: usize = 8 * 3 + 5;
/// A peer must send its line within this time, or it is a stranger.
const HELLO_TIMEOUT: Duration = Duration::from_secs(1);

fn hello(rendezvous: &Rendezvous, to: ConnectionKind) -> [u8; HELLO_BYTES] {
    let mut line = [0; HELLO_BYTES];
    line[..8].copy_from_slice(&MAGIC.to_le_bytes());
    line[8..16].copy_from_slice(&rendezvous.secret.to_le_bytes());
    line[16..24].copy_from_slice(&rendezvous.generation.to_le_bytes());
    line[24..28].copy_from_slice(&(rendezvous.place as u32).to_le_bytes());
    line[28] = to as u8;
    line
}

/// Place and purpose of the sender of this line; `None` for a stranger.
fn understood(rendezvous: &Rendezvous, line: &[u8; HELLO_BYTES]) -> Option<(usize, ConnectionKind)> {
    let place = u32::from_le_bytes([line[24], line[25], line[26], line[27]]) as usize;
    let to = [ConnectionKind::Watch, ConnectionKind::Bulk, ConnectionKind::Small, ConnectionKind::Line]
        .into_iter()
        .find(|u| *u as u8 == line[28])?;
    let told = Rendezvous { place, ..rendezvous.clone() };
    (place < rendezvous.ranks.len() && place != rendezvous.place && hello(&told, to) == *line)
        .then_some((place, to))
}

/// Connects to all ranks; with `lines`, also for messages between each two.
pub(super) fn connect(
    rendezvous: &Rendezvous,
    listener: &mut Listener,
    within: Duration,
    lines: bool,
) -> Result<Connected, GroupError> {
    let (n, me) = (rendezvous.ranks.len(), rendezvous.place);
    if n <= 1 {
        return Ok(Connected { peers: BTreeMap::new(), bulk: None, small: None, lines: BTreeMap::new() });
    }
    let deadline = Instant::now() + within;
    let (next, previous) = ((me + 1) % n, (me + n - 1) % n);
    let with_each: &[ConnectionKind] =
        if lines { &[ConnectionKind::Watch, ConnectionKind::Line] } else { &[ConnectionKind::Watch] };
    let to_all = |places: std::ops::Range<usize>| {
        places.flat_map(|place| with_each.iter().map(move |to| (place, *to)))
    };
    let to_dial: Vec<(usize, ConnectionKind)> =
        to_all(0..me).chain([(next, ConnectionKind::Bulk), (next, ConnectionKind::Small)]).collect();
    let mut expected: Vec<(usize, ConnectionKind)> = to_all(me + 1..n).collect();
    expected.extend([(previous, ConnectionKind::Bulk), (previous, ConnectionKind::Small)]);
    // Dial all at once, while others dial here: under TLS a dialling rank waits for an answer, and both sides may
    // do so.
    let (mut dialled, accepted) = std::thread::scope(|scope| {
        let dials: Vec<_> = (to_dial.iter())
            .map(|(place, to)| scope.spawn(move || dial(rendezvous, *place, *to, deadline)))
            .collect();
        let accepted = accept_all(rendezvous, listener, &expected, deadline, within);
        let gone = || GroupError::Broken("a thread that dialled has ended".into());
        let dialled: Result<BTreeMap<_, _>, GroupError> = (to_dial.iter().zip(dials))
            .map(|(key, dial)| Ok((*key, dial.join().map_err(|_| gone())??)))
            .collect();
        Ok::<_, GroupError>((dialled?, accepted?))
    })?;
    let mut accepted = accepted;
    let mut pair = |to| {
        Some(Neighbours { next: dialled.remove(&(next, to))?, previous: accepted.remove(&(previous, to))? })
    };
    let (bulk, small) = (pair(ConnectionKind::Bulk), pair(ConnectionKind::Small));
    let (mut peers, mut lines) = (BTreeMap::new(), BTreeMap::new());
    for ((place, to), wire) in dialled.into_iter().chain(accepted) {
        let of = if to == ConnectionKind::Line { &mut lines } else { &mut peers };
        of.insert(place, wire);
    }
    Ok(Connected { peers, bulk, small, lines })
}

/// Waits for the ranks that dial here.
fn accept_all(
    rendezvous: &Rendezvous,
    listener: &mut Listener,
    expected: &[(usize, ConnectionKind)],
    deadline: Instant,
    within: Duration,
) -> Result<BTreeMap<(usize, ConnectionKind), Wire>, GroupError> {
    let mut accepted = BTreeMap::new();
    while accepted.len() < expected.len() {
        match accept(rendezvous, listener) {
            Some((key, stream)) if expected.contains(&key) => {
                accepted.insert(key, stream);
            }
            Some(_) => {}
            None if Instant::now() > deadline => {
                let missing = expected.iter().find(|k| !accepted.contains_key(k)).map_or(0, |k| k.0);
                let how = format!("it did not come within {within:?}");
                return Err(GroupError::Lost { rank: rendezvous.ranks[missing].rank, how });
            }
            None => std::thread::sleep(Duration::from_millis(1)),
        }
    }
    Ok(accepted)
}

fn dial(
    rendezvous: &Rendezvous,
    place: usize,
    to: ConnectionKind,
    deadline: Instant,
) -> Result<Wire, GroupError> {
    let Peer { rank, address } = &rendezvous.ranks[place];
    let dial = || {
        let at = address
            .to_socket_addrs()?
            .next()
            .ok_or_else(|| io::Error::new(io::ErrorKind::AddrNotAvailable, "it has no address"))?;
        let timeout = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        let socket = TcpStream::connect_timeout(&at, timeout)?;
        socket.set_nodelay(true)?;
        socket.set_read_timeout(Some(timeout))?;
        let mut wire = Wire::dial(socket, &Access::ours(), &Expected::worker_of(&rendezvous.job))?;
        wire.socket().set_read_timeout(None)?;
        wire.write_all(&hello(rendezvous, to))?;
        wire.flush()?;
        Ok::<_, io::Error>(wire)
    };
    dial()
        .map_err(|e| GroupError::Lost { rank: *rank, how: format!("it cannot be reached at {address}: {e}") })
}

/// The next connection, if it is of this group.
fn accept(rendezvous: &Rendezvous, listener: &mut Listener) -> Option<((usize, ConnectionKind), Wire)> {
    let (socket, from) = listener.socket.accept().ok()?;
    let hear = || {
        socket.set_nonblocking(false)?;
        socket.set_nodelay(true)?;
        socket.set_read_timeout(Some(HELLO_TIMEOUT))?;
        let mut wire = Wire::accept(socket, &Access::ours(), &Expected::worker_of(&rendezvous.job))?;
        let mut line = [0; HELLO_BYTES];
        wire.read_exact(&mut line)?;
        wire.socket().set_read_timeout(None)?;
        Ok::<_, io::Error>((wire, line))
    };
    match hear() {
        Ok((wire, line)) => understood(rendezvous, &line).map(|key| (key, wire)),
        Err(error) => {
            // The peer may be of an earlier group.
            tracing::debug!(%from, %error, "rejected a connection from outside this group");
            None
        }
    }
}
