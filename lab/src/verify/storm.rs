//! The effect of one fault on the fleet under the ledger, and its end.

use super::{clients::Clients, ledger::Storm};
use crate::{fault_schedule::Kind, health::View, limits, stalled_readers, stranger};
use paraft_fleet::{failure::Failure, faults::Faults};
use paraft_worker::exit;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

impl Storm<'_> {
    pub fn inject(&mut self, fault: Kind, view: &View, clients: &Clients) -> Result<(), Failure> {
        let n = self.cluster.len();
        let place = self.schedule.pick(n);
        match fault {
            Kind::Kill => {
                let shard = self.schedule.pick(view.leaders.len());
                let victim = if self.schedule.one_in(6) { place } else { view.leaders[shard] };
                let led = view.led_by(victim);
                clients.next_round();
                std::thread::sleep(self.schedule.micros(0, 3000));
                clients.leader_dies(view.ids[victim], &led);
                self.cluster.kill(victim);
                self.counts.kills += 1;
                self.counts.leader_kills += u64::from(!led.is_empty());
                std::thread::sleep(self.schedule.millis(0, 250));
                self.cluster.restart(victim)?;
            }
            Kind::Pause => {
                self.cluster.pause(place);
                std::thread::sleep(self.schedule.millis(50, 1000));
                self.cluster.resume();
            }
            Kind::Reset => {
                let mut faults = self.cluster.faults();
                *faults.resets.entry(place as u32).or_default() += 1;
                self.cluster.put(faults)?;
            }
            Kind::Partition => {
                let mut faults = self.cluster.faults();
                let other = (place + 1 + self.schedule.pick(n - 1)) % n;
                match self.schedule.one_in(2) {
                    true => _ = faults.isolated.insert(place as u32),
                    false => _ = faults.cut.insert((place as u32, other as u32)),
                }
                self.cluster.put(faults)?;
                std::thread::sleep(self.schedule.millis(100, 1500));
                let healed =
                    Faults { isolated: Default::default(), cut: Default::default(), ..self.cluster.faults() };
                self.cluster.put(healed)?;
            }
            Kind::SlowLink => {
                let mut faults = self.cluster.faults();
                faults.slow_link_ms.insert(place as u32, self.schedule.millis(1, 20).as_millis() as u64);
                self.cluster.put(faults)?;
                self.fading.push((Instant::now() + self.schedule.millis(500, 3000), fault));
            }
            Kind::SlowDisk => {
                let mut faults = self.cluster.faults();
                faults.slow_disk_ms.insert(place as u32, self.schedule.millis(1, 20).as_millis() as u64);
                self.cluster.put(faults)?;
                self.fading.push((Instant::now() + self.schedule.millis(500, 3000), fault));
            }
            Kind::DiskFull => self.disk_full(place, view, clients)?,
            Kind::Drain => self.membership(place)?,
            Kind::Votes => self.no_votes(place, view, clients)?,
            scarcity => self.run_short(scarcity, place)?,
        }
        *self.counts.faults.entry(fault).or_default() += 1;
        Ok(())
    }

    /// The disk fills up, the server is killed, and the disk has space again at its restart.
    fn disk_full(&mut self, place: usize, view: &View, clients: &Clients) -> Result<(), Failure> {
        let mut faults = self.cluster.faults();
        faults.full_disk.insert(place as u32);
        self.cluster.put(faults)?;
        std::thread::sleep(self.schedule.millis(100, 1000));
        // It may still lead, if no file had to grow.
        clients.leader_dies(view.ids[place], &view.led_by(place));
        self.cluster.kill(place);
        let mut faults = self.cluster.faults();
        faults.full_disk.remove(&(place as u32));
        self.cluster.put(faults)?;
        self.counts.kills += 1;
        self.cluster.restart(place)
    }

    /// One, two or all servers have no space for a vote, while a leader is killed and restarted.
    fn no_votes(&mut self, place: usize, view: &View, clients: &Clients) -> Result<(), Failure> {
        let before = self.cluster.faults();
        let full_votes = self.some_of_all(place);
        self.cluster.put(Faults { full_votes, ..before.clone() })?;
        let victim = view.leaders[self.schedule.pick(view.leaders.len())];
        clients.leader_dies(view.ids[victim], &view.led_by(victim));
        self.cluster.kill(victim);
        self.counts.kills += 1;
        std::thread::sleep(self.schedule.millis(100, 1500));
        self.cluster.restart(victim)?;
        std::thread::sleep(self.schedule.millis(100, 3000));
        self.cluster.put(before)
    }

    /// Usually one server, sometimes two, or all.
    fn some_of_all(&mut self, place: usize) -> BTreeSet<u32> {
        let n = self.args.servers as usize;
        let count = [1, 1, 2, n][self.schedule.pick(4)];
        (0..count).map(|i| ((place + i) % n) as u32).collect()
    }

    /// First one more server joins; then servers are drained and filled again in turn.
    fn membership(&mut self, place: usize) -> Result<(), Failure> {
        if self.cluster.len() == self.args.servers as usize {
            return self.cluster.join();
        }
        let (server, undo) = match self.drained {
            Some(drained) => (drained, true),
            None => (place, false),
        };
        let Some(id) = self.cluster.id(server) else { return Ok(()) };
        // The control group may have no leader for a moment: then skip this change.
        if self.cluster.drain(id, undo).is_ok() {
            self.drained = (!undo).then_some(server);
        }
        Ok(())
    }

    /// A resource runs out on one, two or all servers, and recovers; only ended processes are
    /// restarted.
    fn run_short(&mut self, kind: Kind, place: usize) -> Result<(), Failure> {
        let n = self.args.servers as usize;
        let places = self.some_of_all(place);
        let lasting = self.schedule.millis(100, 1500);
        let refused = |e: std::io::Error| Failure::new(exit::IO, format!("a limit cannot be changed: {e}"));
        match kind {
            Kind::Fds => {
                let taken: Result<Vec<_>, _> =
                    places.iter().map(|p| limits::descriptors(self.cluster.pid(*p as usize))).collect();
                let taken = taken.map_err(refused)?;
                std::thread::sleep(lasting);
                drop(taken);
            }
            Kind::Memory => return self.no_memory(place % n, lasting),
            Kind::Clock => {
                let mut faults = self.cluster.faults();
                let hours = [-24, -1, 1, 24 * 365][self.schedule.pick(4)];
                faults.clock_s.insert((place % n) as u32, hours * 3600);
                self.cluster.put(faults)?;
                std::thread::sleep(lasting);
                self.cluster.put(Faults { clock_s: Default::default(), ..self.cluster.faults() })?;
            }
            Kind::Readers => {
                let (addresses, access) = (self.cluster.direct(), self.cluster.as_server()?);
                let shards = self.cluster.at().shards;
                self.cluster.ask(stalled_readers::hang(&addresses, &access, shards, lasting));
            }
            Kind::Stranger => {
                let mut rng = ChaCha8Rng::seed_from_u64(self.schedule.pick(usize::MAX) as u64);
                let addresses = self.cluster.direct();
                let access = self.cluster.as_server()?;
                let visit = self.cluster.ask(stranger::visit(&addresses, &access, &mut rng, lasting));
                if let Some(taken) = visit.taken.first() {
                    return Err(Failure::new(exit::FAILED, format!("BROKEN: a stranger was heard: {taken}")));
                }
            }
            _ => {
                let before = self.cluster.faults();
                let mut faults = before.clone();
                match kind {
                    Kind::DiskFullAll => faults.full_disk = (0..n as u32).collect(),
                    Kind::SlowAll => {
                        let ms = self.schedule.millis(1, 50).as_millis() as u64;
                        faults.slow_disk_ms = (0..n as u32).map(|p| (p, ms)).collect();
                    }
                    Kind::Readonly => faults.read_only = places,
                    _ if self.schedule.one_in(2) => faults.failing_reads = places,
                    _ => faults.failing_writes = places,
                }
                self.cluster.put(faults)?;
                std::thread::sleep(lasting);
                self.cluster.put(before)?;
            }
        }
        Ok(())
    }

    /// A server's address space is exhausted. It may abort, as if the kernel had killed it; then it is
    /// restarted.
    fn no_memory(&mut self, place: usize, lasting: Duration) -> Result<(), Failure> {
        let more = self.schedule.pick(16) as u64 * (1 << 20);
        let taken = limits::memory(self.cluster.pid(place), more);
        let taken = taken.map_err(|e| Failure::new(exit::IO, format!("a limit cannot be changed: {e}")))?;
        let until = Instant::now() + lasting;
        while Instant::now() < until && !self.cluster.has_ended(place) {
            std::thread::sleep(Duration::from_millis(5));
        }
        drop(taken);
        if self.cluster.has_ended(place) {
            self.counts.ended_for_memory += 1;
            self.cluster.kill(place); // reap it
            self.cluster.restart(place)?;
        }
        Ok(())
    }

    pub fn fade(&mut self) -> Result<(), Failure> {
        let now = Instant::now();
        for kind in [Kind::SlowLink, Kind::SlowDisk] {
            let over = |(until, k): &(Instant, Kind)| *k == kind && *until <= now;
            if self.fading.iter().any(over) {
                self.fading.retain(|(_, k)| *k != kind);
                let mut faults = self.cluster.faults();
                match kind {
                    Kind::SlowLink => faults.slow_link_ms.clear(),
                    _ => faults.slow_disk_ms.clear(),
                }
                self.cluster.put(faults)?;
            }
        }
        Ok(())
    }
}
