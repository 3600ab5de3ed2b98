//! `paraft chaos`: faults on a running fleet of this machine, by seed and rate.
//!
//! Kills and pauses are signals and work on any fleet. Links and disks need the fault points of `paraft
//! train --faults` (see [`paraft_fleet::faults`]). At the end, unless it is killed with SIGKILL, it
//! clears all faults: paused processes continue, killed ones are restarted, links and disks are healed.

use crate::fault_schedule::{FaultSchedule, Kind};
use clap::Args;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use paraft_client::Order;
use paraft_fleet::{
    ask,
    failure::Failure,
    faults::{Fault, Faults},
    launch, orders,
    targets::FleetArg,
};
use paraft_record::{Event, Incident, IncidentKind, MetricsWriter};
use paraft_worker::exit;
use restart::Restart;
use std::{
    process::Child,
    sync::atomic::{AtomicI32, Ordering::Relaxed},
    time::{Duration, Instant},
};
use target::Target;

mod restart;
mod target;

/// Which faults, on which fleet, for how long.
#[derive(Args)]
pub struct ChaosArgs {
    #[command(flatten)]
    pub(crate) fleet: FleetArg,
    /// The same seed draws the same faults in the same order.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Faults a minute, on average.
    #[arg(long, default_value_t = 12.0)]
    pub rate: f64,
    /// Kinds of faults, comma-separated. Links (reset, partition, slow-link) and disks (disk-full, slow-disk) need a
    /// run that was started with `paraft train --faults`.
    #[arg(long, value_delimiter = ',', default_value = "kill,pause", value_enum)]
    pub faults: Vec<Kind>,
    /// Stop after so many seconds. Default: when the fleet ends, or at Ctrl-C.
    #[arg(long)]
    pub duration: Option<u64>,
    /// A killed server is started again after so many seconds.
    #[arg(long, default_value_t = 2.0)]
    pub restart_after: f64,
    /// A pause, a partition, a full or slow disk, a slow link last this many seconds at most.
    #[arg(long, default_value_t = 3.0)]
    pub lasting: f64,
    /// Do not wait until the fleet is whole before the next server is taken away: more than a minority may be down at
    /// once, and what is in memory only is lost then.
    #[arg(long)]
    pub beyond_minority: bool,
}

/// Injects faults until the time is over; returns the exit code.
pub fn run(args: &ChaosArgs) -> Result<i32, Failure> {
    for (flag, value, from) in [
        ("--rate", args.rate, 1e-3),
        ("--restart-after", args.restart_after, 0.0),
        ("--lasting", args.lasting, 0.0),
    ] {
        if !(from..=1e6).contains(&value) {
            return Err(Failure::new(exit::USAGE, format!("{flag} {value} is not within {from} to 1000000")));
        }
    }
    let target = Target::find(&args.fleet, &args.faults)?;
    let record = target.record().and_then(|file| {
        let opened = MetricsWriter::append(file);
        opened.inspect_err(|e| eprintln!("warning: the run's record will not name the faults: {e}")).ok()
    });
    let mut chaos = Chaos {
        args,
        target,
        record,
        schedule: FaultSchedule::new(args.seed, &args.faults),
        began: Instant::now(),
        undo: Vec::new(),
        faults: Faults::default(),
        restarted: Vec::new(),
        why_not: None,
    };
    let storm = chaos.storm(&launch::interrupts());
    // Clear all faults, whatever the reason of the end.
    let healed = chaos.heal_all();
    storm.and(healed).map(|()| exit::OK)
}

/// How to clear a fault.
enum Undo {
    Restart(u32, Restart),
    Resume(u32, u32),
    Heal(Fault, u32),
    Fill(paraft_common::ServerId),
}

struct Chaos<'a> {
    args: &'a ChaosArgs,
    target: Target,
    /// The run's record, if it has one.
    record: Option<MetricsWriter>,
    schedule: FaultSchedule,
    began: Instant,
    undo: Vec<(Instant, Undo)>,
    faults: Faults,
    /// Kept so that ended children are reaped.
    restarted: Vec<Child>,
    /// The last logged reason why the next fault waits.
    why_not: Option<String>,
}

/// The retry interval of the next fault while the fleet is not whole.
const RETRY: Duration = Duration::from_millis(100);

impl Chaos<'_> {
    fn say(&self, what: &str, target: &str) {
        out!("{:9.3} s  {what:<10} {target}", self.began.elapsed().as_secs_f64());
    }

    /// Says that a fault was injected, also in the run's record. Its end is not recorded: the run may have
    /// ended by then, and its summary is its last line.
    fn injected(&mut self, fault: &str, target: &str) {
        self.say(fault, target);
        let what = IncidentKind::Fault { fault: fault.into(), target: target.into() };
        let incident = Incident { wall: paraft_host::clock::unix_ms() as f64 / 1e3, what };
        let written = self.record.as_mut().map_or(Ok(()), |r| r.write(&Event::Incident(incident)));
        if let Err(e) = written {
            eprintln!("warning: no more faults in the run's record: {e}");
            self.record = None;
        }
    }

    fn storm(&mut self, interrupted: &AtomicI32) -> Result<(), Failure> {
        let mut next = Instant::now() + self.pause();
        let mut fault = self.schedule.draw();
        loop {
            let over = self.args.duration.is_some_and(|d| self.began.elapsed() > Duration::from_secs(d));
            if over || interrupted.load(Relaxed) != 0 {
                return Ok(());
            }
            self.take_back(Instant::now())?;
            if self.ended() {
                self.say("end", "the fleet has ended");
                self.undo.clear(); // no fault is left to clear
                return Ok(());
            }
            if Instant::now() >= next {
                match self.inject(fault)? {
                    Ok(()) => {
                        self.why_not = None;
                        next = Instant::now() + self.pause();
                        fault = self.schedule.draw();
                    }
                    Err(why) => {
                        if self.why_not.is_none() {
                            self.say("wait", &why);
                        }
                        self.why_not = Some(why);
                        next = Instant::now() + RETRY;
                    }
                }
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Whether the run is over: its launcher has ended all its servers, and none awaits a restart.
    fn ended(&mut self) -> bool {
        self.restarted.retain_mut(|c| !matches!(c.try_wait(), Ok(Some(_))));
        let waits = self.undo.iter().any(|(_, u)| matches!(u, Undo::Restart(..)));
        !waits && (0..self.target.addresses.len() as u32).all(|p| self.target.pid(p).is_none())
    }

    /// Exponential times between faults, as in a Poisson process, so some faults come close together.
    fn pause(&mut self) -> Duration {
        let u = (self.schedule.pick(1_000_000) as f64 + 1.0) / 1_000_001.0;
        Duration::from_secs_f64(-u.ln() * 60.0 / self.args.rate)
    }

    fn lasting(&mut self) -> Duration {
        let most = (self.args.lasting * 1000.0) as u64;
        self.schedule.millis(most / 10, most.max(1))
    }

    /// Injects a fault. The inner `Err` says why it must wait.
    fn inject(&mut self, fault: Kind) -> Result<Result<(), String>, Failure> {
        if !self.args.beyond_minority
            && matches!(
                fault,
                Kind::Kill | Kind::Pause | Kind::Partition | Kind::DiskFull | Kind::Eio | Kind::Readonly
            )
        {
            let impairs =
                |u: &Undo| !matches!(u, Undo::Heal(Fault::SlowLink | Fault::SlowDisk, _) | Undo::Fill(_));
            if self.undo.iter().any(|(_, u)| impairs(u)) {
                return Ok(Err("another server is away".into()));
            }
            if let Err(why) = self.target.whole() {
                return Ok(Err(why));
            }
        }
        let n = self.target.addresses.len();
        let place = self.schedule.pick(n) as u32;
        let Some(pid) = self.target.pid(place) else {
            return Ok(Err(format!("server {place} is away")));
        };
        let at = format!("server {place} ({}, process {pid})", self.target.addresses[place as usize]);
        let now = Instant::now();
        match fault {
            Kind::Kill => {
                let restart = Restart::of(pid, place, &self.target).map_err(|e| {
                    Failure::new(exit::IO, format!("how process {pid} was started cannot be read: {e}"))
                })?;
                signal(pid, Signal::SIGKILL)?;
                self.injected("kill", &at);
                let due = now + Duration::from_secs_f64(self.args.restart_after);
                self.undo.push((due, Undo::Restart(place, restart)));
            }
            Kind::Pause => {
                signal(pid, Signal::SIGSTOP)?;
                let lasting = self.lasting();
                self.injected("pause", &format!("{at} for {:.1} s", lasting.as_secs_f64()));
                self.undo.push((now + lasting, Undo::Resume(place, pid)));
            }
            Kind::Reset => {
                *self.faults.resets.entry(place).or_default() += 1;
                self.write()?;
                self.injected("reset", &format!("all connections of {at}"));
            }
            Kind::Drain => return self.drain(place, now),
            _ => {
                let Some(put) = fault.lasting() else {
                    return Err(Failure::new(exit::USAGE, format!("{} is put on no server", fault.name())));
                };
                let lasting = self.lasting();
                let ms = self.schedule.millis(1, 50).as_millis() as u64;
                let how = if put == Fault::Partition && n > 2 && self.schedule.one_in(2) {
                    let other = (place + 1 + self.schedule.pick(n - 1) as u32) % n as u32;
                    self.faults.cut.insert((place, other));
                    format!("between {at} and server {other}")
                } else {
                    self.faults.put(put, place, ms);
                    match put {
                        Fault::Partition => format!("around {at}"),
                        Fault::SlowLink => format!("{at} by {ms} ms"),
                        Fault::SlowDisk => format!("{at} by {ms} ms an fsync"),
                        _ => at,
                    }
                };
                self.write()?;
                self.injected(put.name(), &format!("{how} for {:.1} s", lasting.as_secs_f64()));
                self.undo.push((now + lasting, Undo::Heal(put, place)));
            }
        }
        Ok(Ok(()))
    }

    /// Whether a server accepts connections and does not answer. A query of the fleet would block on it
    /// and delay the clearing of other faults, so queries are postponed.
    fn hangs(&self) -> bool {
        self.undo.iter().any(|(_, u)| matches!(u, Undo::Resume(..) | Undo::Heal(Fault::Partition, _)))
    }

    fn drain(&mut self, place: u32, now: Instant) -> Result<Result<(), String>, Failure> {
        if self.hangs() {
            return Ok(Err("another server does not answer".into()));
        }
        if self.undo.iter().any(|(_, u)| matches!(u, Undo::Fill(_))) {
            return Ok(Err("another server is being emptied".into()));
        }
        let Some(fleet) = ask::describe(&self.target.addresses) else {
            return Ok(Err("the control group has no leader".into()));
        };
        let address = self.target.addresses[place as usize].clone();
        let Some(info) = fleet.servers.iter().find(|s| s.address == address) else {
            return Ok(Err(format!("the control group does not know {address}")));
        };
        let id = paraft_common::ServerId(info.server);
        if let Err(why) = self.order_drain(id, false) {
            return Ok(Err(why));
        }
        let lasting = self.lasting();
        self.injected("drain", &format!("server {place} ({address}) for {:.1} s", lasting.as_secs_f64()));
        self.undo.push((now + lasting, Undo::Fill(id)));
        Ok(Ok(()))
    }

    fn order_drain(&self, server: paraft_common::ServerId, undo: bool) -> Result<(), String> {
        let order = Order::Drain { server, undo };
        let given = orders::given_again(&self.target.addresses, &order, orders::token(), ORDER_TIMEOUT);
        given.map(drop).map_err(|refused| refused.message)
    }

    fn write(&self) -> Result<(), Failure> {
        let Some(door) = self.target.fault_points() else { return Ok(()) };
        self.faults.write(&door).map_err(|e| Failure::write(&door, e))
    }

    /// Clears the faults that are due.
    fn take_back(&mut self, now: Instant) -> Result<(), Failure> {
        let (due, later) = std::mem::take(&mut self.undo).into_iter().partition(|(at, _)| *at <= now);
        self.undo = later;
        let mut due: Vec<(Instant, Undo)> = due;
        // To fill a server is to ask the fleet: faults that keep servers from answering are cleared first.
        due.sort_by_key(|(at, u)| (matches!(u, Undo::Fill(_)), *at));
        for (_, undo) in due {
            match undo {
                Undo::Restart(place, restart) => {
                    let child = restart.start().map_err(|e| {
                        Failure::new(exit::FAILED, format!("server {place} does not start again: {e}"))
                    })?;
                    self.say("restart", &format!("server {place} as process {}", child.id()));
                    self.restarted.push(child);
                }
                Undo::Resume(place, pid) => {
                    signal(pid, Signal::SIGCONT)?;
                    self.say("resume", &format!("server {place} (process {pid})"));
                }
                Undo::Heal(fault, place) => {
                    self.faults.heal(fault, place);
                    self.write()?;
                    self.say("heal", &format!("{} of server {place}", fault.name()));
                }
                Undo::Fill(id) if self.hangs() => self.undo.push((now + RETRY, Undo::Fill(id))),
                Undo::Fill(id) => match self.order_drain(id, true) {
                    Ok(()) => self.say("undo", &format!("the draining of {id}")),
                    Err(_) => self.undo.push((now + RETRY * 5, Undo::Fill(id))),
                },
            }
        }
        Ok(())
    }

    /// Clears all faults; tries all, and returns the first failure.
    fn heal_all(&mut self) -> Result<(), Failure> {
        let far = Instant::now() + Duration::from_secs(86_400 * 365);
        let mut first = Ok(());
        let timeout = Instant::now() + Duration::from_secs(10);
        while !self.undo.is_empty() && Instant::now() < timeout {
            let healed = self.take_back(far);
            first = first.and(healed);
            if !self.undo.is_empty() {
                std::thread::sleep(RETRY);
            }
        }
        self.faults = Faults::default();
        first.and(self.write())
    }
}

/// The timeout of an order: a server that accepts an order accepts it at once.
const ORDER_TIMEOUT: Duration = Duration::from_secs(2);

/// Sends a signal. A process that has ended in the meantime is no error.
fn signal(pid: u32, signal: Signal) -> Result<(), Failure> {
    match kill(Pid::from_raw(pid as i32), signal) {
        Ok(()) | Err(nix::errno::Errno::ESRCH) => Ok(()),
        Err(e) => Err(Failure::new(exit::UNAVAILABLE, format!("{signal} to process {pid}: {e}"))
            .help("run it as the user who started the servers")),
    }
}
