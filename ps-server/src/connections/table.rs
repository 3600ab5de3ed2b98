//! Admits and closes connections. Knows no socket and no clock.
//!
//! - An unknown connection never displaces one with a rank: the oldest unknown one is closed. So a server
//!   that connects while strangers flood this one has until the flood fills all unknown places to identify
//!   itself.
//! - Some places are kept for unknown connections: none has a rank before its first request.
//! - A connection that gets a rank displaces the longest idle one of the lowest rank below. A reader also
//!   displaces a reader, since most of them ask once. A worker or a server never displaces its equals: then
//!   the newest one is closed.

use std::{
    collections::{BTreeSet, HashMap},
    net::IpAddr,
};

/// The observed purpose of a connection; the higher ones stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Rank {
    /// None of its requests was accepted yet.
    Unknown,
    /// It asks for the status, or reads weights from a replica.
    Reader,
    /// A worker's stream is open on it.
    Worker,
    /// A server of the fleet.
    Server,
}

const RANKS: [Rank; 4] = [Rank::Unknown, Rank::Reader, Rank::Worker, Rank::Server];

/// Where a connection comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Origin {
    /// This host, over loopback or the Unix socket: a whole fleet may run on one host, so only the total
    /// bound applies.
    Here,
    /// Another host, or all hosts behind its address. For IPv6 only the network half counts: a host has the
    /// whole other half.
    There(IpAddr),
}

impl std::fmt::Display for Origin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Here => f.write_str("this host"),
            Self::There(ip) => write!(f, "{ip}"),
        }
    }
}

impl Origin {
    /// The origin of an address.
    pub fn of(address: IpAddr) -> Self {
        match address.to_canonical() {
            a if a.is_loopback() => Self::Here,
            IpAddr::V6(a) => {
                let [a, b, c, d, ..] = a.segments();
                Self::There(IpAddr::from([a, b, c, d, 0, 0, 0, 0]))
            }
            a => Self::There(a),
        }
    }
}

/// The bounds on connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// In total.
    pub all: usize,
    /// Places that connections with a rank leave free.
    pub for_unknown: usize,
    /// From one other host.
    pub of_one: usize,
}

impl Bounds {
    /// A quarter of the places, at most 256, for unknown connections. Half of all for one address: a gateway
    /// may hide all workers behind one address, but not all servers.
    pub fn of(all: usize) -> Self {
        Self { all, for_unknown: (all / 4).clamp(1, 256), of_one: (all / 2).max(1) }
    }
}

/// All connections except those that are being closed.
#[derive(Debug, Default)]
pub struct Table {
    entries: HashMap<u64, Entry>,
    /// By rank: the time of last use, and the id. For unknown ones only their age counts: the time is 0.
    by_rank: HashMap<Rank, BTreeSet<(u64, u64)>>,
    from: HashMap<Origin, From>,
    last: u64,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    origin: Origin,
    rank: Rank,
    used: u64,
}

#[derive(Debug, Default)]
struct From {
    count: usize,
    unknown: BTreeSet<u64>,
}

impl Table {
    /// Number of connections.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Number of connections of a rank.
    pub fn count(&self, rank: Rank) -> usize {
        self.by_rank.get(&rank).map_or(0, BTreeSet::len)
    }

    /// A new connection at time `now`: its id, and the connections to close for it. `None`: there is no room.
    pub fn admit(&mut self, origin: Origin, now: u64, bounds: Bounds) -> Option<(u64, Vec<u64>)> {
        let mut shed = Vec::new();
        let crowd = self.from.get(&origin).filter(|f| origin != Origin::Here && f.count >= bounds.of_one);
        if let Some(crowd) = crowd {
            let oldest = *crowd.unknown.first()?;
            self.closed(oldest);
            shed.push(oldest);
        }
        while self.len() >= bounds.all {
            shed.push(self.oldest_unknown()?);
        }
        self.last += 1;
        let id = self.last;
        let entry = Entry { origin, rank: Rank::Unknown, used: now };
        self.insert(id, entry);
        self.from.entry(origin).or_default().count += 1;
        Some((id, shed))
    }

    /// Removes the oldest unknown connection.
    pub fn oldest_unknown(&mut self) -> Option<u64> {
        let (_, id) = *self.by_rank.get(&Rank::Unknown)?.first()?;
        self.closed(id);
        Some(id)
    }

    /// A connection shows a higher rank: returns the connection to close for it, which may be itself.
    pub fn rank(&mut self, id: u64, rank: Rank, bounds: Bounds) -> Option<u64> {
        let mut entry = self.remove(id)?;
        entry.rank = entry.rank.max(rank);
        self.insert(id, entry);
        let ranked = self.len() - self.count(Rank::Unknown);
        if ranked <= bounds.all.saturating_sub(bounds.for_unknown) {
            return None;
        }
        let gives_way = |r: &Rank| *r > Rank::Unknown && (*r < rank || *r == Rank::Reader);
        let of = |r: Rank| self.by_rank.get(&r)?.iter().map(|(_, other)| *other).find(|other| *other != id);
        let shed = RANKS.into_iter().filter(gives_way).find_map(of).unwrap_or(id);
        self.closed(shed);
        Some(shed)
    }

    /// A connection was used at time `now`.
    pub fn used(&mut self, id: u64, now: u64) {
        if let Some(entry) = self.remove(id) {
            self.insert(id, Entry { used: now, ..entry });
        }
    }

    /// A connection is closed, or is being closed.
    pub fn closed(&mut self, id: u64) {
        let Some(entry) = self.remove(id) else { return };
        if let Some(from) = self.from.get_mut(&entry.origin) {
            from.count -= 1;
            if from.count == 0 {
                self.from.remove(&entry.origin);
            }
        }
    }

    fn place(id: u64, entry: Entry) -> (u64, u64) {
        (if entry.rank == Rank::Unknown { 0 } else { entry.used }, id)
    }

    fn insert(&mut self, id: u64, entry: Entry) {
        self.by_rank.entry(entry.rank).or_default().insert(Self::place(id, entry));
        if entry.rank == Rank::Unknown {
            self.from.entry(entry.origin).or_default().unknown.insert(id);
        }
        self.entries.insert(id, entry);
    }

    fn remove(&mut self, id: u64) -> Option<Entry> {
        let entry = self.entries.remove(&id)?;
        if let Some(of_rank) = self.by_rank.get_mut(&entry.rank) {
            of_rank.remove(&Self::place(id, entry));
        }
        if let Some(from) = self.from.get_mut(&entry.origin) {
            from.unknown.remove(&id);
        }
        Some(entry)
    }
}

#[cfg(test)]
#[path = "table_tests.rs"]
mod tests;
