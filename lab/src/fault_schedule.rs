//! The sequence of faults. Pure: the same seed and kinds give the same faults.

use clap::ValueEnum;
use paraft_fleet::faults::Fault;
use rand::{RngExt, SeedableRng, seq::SliceRandom};
use rand_chacha::ChaCha8Rng;
use std::time::Duration;

/// A kind of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum Kind {
    /// SIGKILL and a restart.
    Kill,
    /// SIGSTOP and SIGCONT.
    Pause,
    /// All connections of a server are reset.
    Reset,
    /// One server is cut off from all others, or two servers from each other, for a while.
    Partition,
    /// Data to and from a server is delayed by some milliseconds.
    SlowLink,
    /// The files of a server cannot grow for a while.
    DiskFull,
    /// Every fsync of a server takes longer for a while.
    SlowDisk,
    /// A fourth server joins; servers are drained and filled again.
    Drain,
    /// Servers (one, two or all) cannot open any file or connection for a while.
    Fds,
    /// A server cannot allocate memory for a while; one that aborts is restarted.
    Memory,
    /// The files of all servers cannot grow for a while.
    DiskFullAll,
    /// Reads, or writes and fsyncs, of servers (one, two or all) fail with EIO for a while.
    Eio,
    /// The file systems of servers (one, two or all) are read-only for a while.
    Readonly,
    /// Every fsync of every server takes longer for a while.
    SlowAll,
    /// The clock of a server's host is set forward or back by hours.
    Clock,
    /// Servers (one, two or all) cannot write a vote for a while, though they can write all other
    /// files; meanwhile a leader is killed and restarted.
    Votes,
    /// A client outside the fleet sends every server valid messages of every kind, and invalid bytes.
    Stranger,
    /// Readers request all weights from every server, on more streams than one certificate allows, and
    /// read no reply.
    Readers,
}

impl Kind {
    /// Whether only `paraft verify ledger` injects it, which controls the servers.
    pub fn is_for_verify(self) -> bool {
        self >= Kind::Fds
    }

    /// The lasting fault of a server; `None` for other kinds.
    pub fn lasting(self) -> Option<Fault> {
        match self {
            Self::Partition => Some(Fault::Partition),
            Self::SlowLink => Some(Fault::SlowLink),
            Self::DiskFull => Some(Fault::DiskFull),
            Self::SlowDisk => Some(Fault::SlowDisk),
            Self::Eio => Some(Fault::Eio),
            Self::Readonly => Some(Fault::Readonly),
            _ => None,
        }
    }

    /// The name in `--faults` and in the output.
    pub fn name(self) -> String {
        self.to_possible_value().map(|v| v.get_name().to_string()).unwrap_or_default()
    }
}

/// Draws faults in hands of some kills and one of every other kind, each hand shuffled.
pub struct FaultSchedule {
    rng: ChaCha8Rng,
    kinds: Vec<Kind>,
    hand: Vec<Kind>,
}

/// Kills in a hand.
const KILLS: usize = 4;

impl FaultSchedule {
    pub fn new(seed: u64, kinds: &[Kind]) -> Self {
        let mut kinds = kinds.to_vec();
        kinds.sort_unstable();
        kinds.dedup();
        Self { rng: ChaCha8Rng::seed_from_u64(seed), kinds, hand: Vec::new() }
    }

    /// The next fault.
    pub fn draw(&mut self) -> Kind {
        if self.hand.is_empty() {
            let of = |k: &Kind| if *k == Kind::Kill { KILLS } else { 1 };
            self.hand = self.kinds.iter().flat_map(|k| std::iter::repeat_n(*k, of(k))).collect();
            self.hand.shuffle(&mut self.rng);
        }
        self.hand.pop().unwrap_or(Kind::Kill)
    }

    /// One of `n`, from 0.
    pub fn pick(&mut self, n: usize) -> usize {
        self.rng.random_range(0..n.max(1))
    }

    /// True once in `n` times.
    pub fn one_in(&mut self, n: u32) -> bool {
        self.rng.random_ratio(1, n.max(1))
    }

    /// A random time in milliseconds.
    pub fn millis(&mut self, from: u64, to: u64) -> Duration {
        Duration::from_millis(self.rng.random_range(from..=to))
    }

    /// A random time in microseconds.
    pub fn micros(&mut self, from: u64, to: u64) -> Duration {
        Duration::from_micros(self.rng.random_range(from..=to))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_gives_the_same_faults_and_covers_every_kind() {
        let kinds = Kind::value_variants();
        let draw = |seed| {
            let mut schedule = FaultSchedule::new(seed, kinds);
            (0..2 * (kinds.len() - 1 + KILLS)).map(|_| schedule.draw()).collect::<Vec<_>>()
        };
        assert_eq!(draw(7), draw(7));
        assert_ne!(draw(7), draw(8));
        for hand in draw(3).chunks(kinds.len() - 1 + KILLS) {
            assert!(kinds.iter().all(|k| hand.contains(k)), "{hand:?}");
        }
    }

    #[test]
    fn kills_alone_are_kills() {
        let mut schedule = FaultSchedule::new(1, &[Kind::Kill, Kind::Kill]);
        assert!((0..9).all(|_| schedule.draw() == Kind::Kill));
    }
}
