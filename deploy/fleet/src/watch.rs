//! Handles the end of a process of a running job: a restart, a loss that the others survive, or the end
//! of the run.

use crate::{
    failure::Failure, files::wall, fleet::Fleet, observe::Observer, process::Process, progress::Progress,
    scale::Wanted,
};
use idle::IdleTime;
use nix::sys::signal::Signal;
use paraft_common::{ServerId, WorkerId};
use paraft_host::cpu_seconds_of;
use paraft_record::{Event, Incident, IncidentKind, MetricsWriter, event};
use paraft_worker::{Job, exit};
use std::{
    collections::{BTreeMap, BTreeSet},
    os::unix::process::ExitStatusExt,
    time::{Duration, Instant},
};

mod idle;
mod script;

/// The delay before the restart of a killed process. The cause of the kill may be over by then, and a
/// process that dies at once costs little.
pub const RESTART_DELAY: Duration = Duration::from_secs(1);

/// One of the fleet's processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum FleetProcess {
    Server(usize),
    Worker(usize),
}

/// The launcher's state of its processes.
pub(crate) struct Watch<'a> {
    job: &'a Job,
    /// A worker has trained.
    started: bool,
    /// Restarts of each process.
    restarts: BTreeMap<FleetProcess, u32>,
    /// Group workers with a rank that ended successfully: their other ranks end soon.
    over: BTreeSet<usize>,
    /// The ranks of those workers that still run.
    rests: BTreeMap<usize, IdleTime>,
    /// Processes that ended early, with the time of their restart, if any.
    pending: Vec<(FleetProcess, Option<Instant>)>,
    /// The requested number of workers; `None` if it cannot change.
    wanted: Option<Wanted>,
    /// The number of requests so far.
    said: u64,
    /// Workers that are absent without a kill.
    away: BTreeMap<usize, Absence>,
    /// Workers that returned and have not trained since.
    back: BTreeSet<usize>,
    /// What happens to the servers, from the first look on until the workers have ended.
    observer: Option<Observer>,
}

/// Why a worker is absent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Absence {
    /// It was asked to leave.
    Leaves,
    /// It has left, and returns when more workers are requested.
    Left,
    /// It returned and ended before it trained, which it would repeat.
    ForGood,
}

impl<'a> Watch<'a> {
    /// The state of a job that has just started.
    pub(crate) fn new(job: &'a Job, wanted: Option<Wanted>) -> Self {
        Self {
            wanted,
            said: 0,
            away: BTreeMap::new(),
            back: BTreeSet::new(),
            job,
            started: false,
            restarts: BTreeMap::new(),
            over: BTreeSet::new(),
            rests: BTreeMap::new(),
            pending: Vec::new(),
            observer: None,
        }
    }

    /// Takes in the workers' new events.
    pub(crate) fn follow(&mut self, events: &[Event]) {
        for event in events {
            if let Event::Train(t) = event {
                self.started = true;
                self.back.remove(&(t.worker.0 as usize));
            }
        }
    }

    /// Returns true when all workers have ended. A killed process is restarted while
    /// `cluster.max_restarts` allows it; otherwise it is lost and the others continue. A worker that
    /// fails with an error ends the run, since the others would fail alike.
    pub(crate) fn look(
        &mut self,
        fleet: &mut Fleet,
        writer: &mut MetricsWriter,
        progress: &Progress,
    ) -> Result<bool, Failure> {
        self.record_observed(fleet, writer)?;
        self.look_at_servers(fleet, writer, progress)?;
        self.scale(fleet, writer, progress)?;
        let running = self.look_at_workers(fleet, writer, progress)?;
        let lost = |(process, again): &&(FleetProcess, Option<Instant>)| {
            matches!(process, FleetProcess::Worker(_)) && again.is_none()
        };
        let lost = self.pending.iter().filter(lost).count();
        let for_good = self.away.values().filter(|away| **away == Absence::ForGood).count();
        if lost > 0 && lost + for_good == fleet.workers.len() {
            let last = fleet.workers.iter_mut().find_map(Process::killed_by);
            let code = last.filter(|_| !self.job.cluster.script.is_empty()).map_or(exit::FAILED, |n| 128 + n);
            return Err(Failure::new(code, "all workers are lost"));
        }
        // After all others have finished, a returning worker has nothing to do.
        let finished = fleet.workers.iter_mut().any(|w| w.ended().is_some_and(|s| s.success()));
        let comes_back =
            self.pending.iter().any(|(p, again)| matches!(p, FleetProcess::Worker(_)) && again.is_some())
                || self.away.values().any(|away| *away != Absence::ForGood);
        if running == 0 && (finished || !comes_back) {
            self.record_observed(fleet, writer)?;
            self.observer = None;
            return Ok(true);
        }
        self.start_again(fleet, writer, progress)?;
        Ok(false)
    }

    /// Notes the servers that have ended.
    fn look_at_servers(
        &mut self,
        fleet: &mut Fleet,
        writer: &mut MetricsWriter,
        progress: &Progress,
    ) -> Result<(), Failure> {
        for (i, server) in fleet.servers.iter_mut().enumerate() {
            if let Some(status) = server.ended().filter(|_| !self.is_down(FleetProcess::Server(i))) {
                let (name, end) = (server.name.clone(), server.end());
                // The first server of the list bootstraps the fleet, so it restarts at once.
                let then = match i == 0 && !self.started {
                    true => "the others continue if it had founded the fleet, and wait for it if not",
                    false => "the others continue as long as they are a majority",
                };
                let restarts = self.restarts_left(FleetProcess::Server(i));
                let then = self.down(FleetProcess::Server(i), then);
                progress.warn(&format!("{name} {end}; {then}"));
                let id = ServerId(i as u64);
                self.observer.iter().for_each(|o| o.ended(id));
                let (how, code, signal) = (server.obituary(), status.code(), status.signal());
                put(writer, IncidentKind::ServerEnded { server: id, how, code, signal, restarts })?;
            }
        }
        Ok(())
    }

    /// Notes the workers that have ended; returns the number of those that run.
    fn look_at_workers(
        &mut self,
        fleet: &mut Fleet,
        writer: &mut MetricsWriter,
        progress: &Progress,
    ) -> Result<usize, Failure> {
        let mut running = 0;
        let size = self.job.ranks_of_worker() as usize;
        for (i, worker) in fleet.workers.iter_mut().enumerate() {
            let ended = worker.ended().filter(|status| !status.success());
            if let Some(away) = self.away.get_mut(&i).filter(|_| ended.is_some()) {
                if *away == Absence::Leaves {
                    *away = Absence::Left;
                    let worker = WorkerId(i as u32);
                    let reason = "fewer workers are wanted".into();
                    writer.write(&Event::Leave(event::Leave { wall: wall(), worker, rank: None, reason }))?;
                }
                continue;
            }
            // The other workers may have finished the job, which is no failure of the run.
            if ended.is_some() && self.back.remove(&i) && worker.killed_by().is_none() {
                let how = worker.end();
                progress.note(&format!("{} came back and had nothing to train: {how}", worker.name));
                self.away.insert(i, Absence::ForGood);
                continue;
            }
            let over = size > 1 && self.over.contains(&(i / size));
            let Some(status) = worker.ended() else {
                let cpu_seconds = cpu_seconds_of(worker.id()).unwrap_or_default();
                let now = Instant::now();
                let rest = || IdleTime { cpu_seconds, since: now };
                if over && self.rests.entry(i).or_insert_with(rest).hangs(cpu_seconds, now) {
                    progress.warn(&format!("{} hangs, and its group is done; it is killed", worker.name));
                    worker.signal(Signal::SIGKILL);
                }
                running += 1;
                continue;
            };
            if status.success() {
                self.over.insert(i / size);
            } else if over {
                continue;
            }
            if status.success() || self.is_down(FleetProcess::Worker(i)) {
                continue;
            }
            let how = worker.obituary();
            let comes_back = self.restarts_left(FleetProcess::Worker(i));
            let killed = worker.killed_by();
            // Before the first step the others wait for it.
            if killed.is_none() || !(self.started || comes_back) {
                if !self.job.cluster.script.is_empty() {
                    return Err(script::failed(&mut fleet.workers, i));
                }
                // The run has failed: do not wait until the servers notice.
                let code = status.code().unwrap_or(exit::FAILED);
                let words = worker.last_words();
                let said = worker.reason().map(|why| format!(": {why}")).unwrap_or_default();
                let first = format!("{} {how} before the others{said}", worker.name);
                return Err(Failure::new(code, first)
                    .of_output(&words)
                    .help(format!("its log is {}.log in the run's folder", worker.name)));
            }
            let (name, size) = (worker.name.clone(), size as u32);
            let without = match self.job.parallel.is_cut() {
                true => "the other ranks take its part of the model over",
                false => "the others continue",
            };
            let then = self.down(FleetProcess::Worker(i), without);
            progress.warn(&format!("{name} {how}; {then}"));
            writer.write(&Event::Leave(event::Leave {
                wall: wall(),
                worker: WorkerId(i as u32 / size),
                rank: (size > 1).then_some(i as u32 % size),
                reason: how,
            }))?;
        }
        Ok(running)
    }

    /// If fewer workers are requested, asks the last ones to leave. If more are, restarts those that
    /// left and, at a new request, those that were lost. A present worker has precedence over an absent
    /// one.
    fn scale(
        &mut self,
        fleet: &mut Fleet,
        writer: &mut MetricsWriter,
        progress: &Progress,
    ) -> Result<(), Failure> {
        let Some((wanted, said)) = self.wanted.as_mut().filter(|_| self.started).map(Wanted::now) else {
            return Ok(());
        };
        if said != self.said {
            self.said = said;
            put(writer, IncidentKind::WorkersWanted { workers: wanted })?;
            for i in 0..fleet.workers.len() {
                let lost = (FleetProcess::Worker(i), None);
                if self.pending.contains(&lost) {
                    self.pending.retain(|p| *p != lost);
                    self.away.insert(i, Absence::Left);
                }
            }
        }
        // A finished worker frees no place for another to return to, and cannot leave.
        let (mut finished, mut there, mut away) = (0, Vec::new(), Vec::new());
        for i in 0..fleet.workers.len() {
            let ended = fleet.workers[i].ended();
            match self.away.get(&i) {
                _ if ended.is_some_and(|status| status.success()) => finished += 1,
                _ if self.pending.contains(&(FleetProcess::Worker(i), None)) => {}
                None => there.push(i),
                Some(Absence::ForGood) => {}
                Some(_) if ended.is_some() => away.push(i),
                Some(_) => {}
            }
        }
        let wanted = wanted as usize;
        for i in there.iter().skip(wanted).copied() {
            let worker = &mut fleet.workers[i];
            // A worker that waits for its restart leaves once it runs.
            if worker.ended().is_none() {
                self.away.insert(i, Absence::Leaves);
                worker.signal(Signal::SIGTERM);
                progress.note(&format!("{} leaves; workers wanted: {wanted}", worker.name));
            }
        }
        for i in away.into_iter().take(wanted.saturating_sub(there.len() + finished)) {
            self.away.remove(&i);
            progress.note(&format!("{} comes back; workers wanted: {wanted}", fleet.workers[i].name));
            match fleet.restart_worker(self.job, i) {
                Ok(()) => {
                    self.back.insert(i);
                    put(writer, IncidentKind::WorkerBack { worker: WorkerId(i as u32), rank: None })?;
                }
                Err(e) => {
                    let then = self.down(FleetProcess::Worker(i), "it stays away");
                    progress.warn(&format!("{}; {then}", e.message()));
                }
            }
        }
        Ok(())
    }

    /// Records what the observer has seen. Elections before the first step belong to the start.
    fn record_observed(&mut self, fleet: &Fleet, writer: &mut MetricsWriter) -> Result<(), Failure> {
        let start = || Observer::start(fleet.addresses.clone(), self.job.name.clone());
        let seen = self.observer.get_or_insert_with(start).take();
        let started = self.started;
        let of_server = |what: &IncidentKind| {
            matches!(what, IncidentKind::ServerBack { .. } | IncidentKind::ServerDrained { .. })
        };
        let counts = |i: &Incident| started || of_server(&i.what);
        for incident in seen.into_iter().filter(counts) {
            writer.write(&Event::Incident(incident))?;
        }
        Ok(())
    }

    fn restarts_left(&self, process: FleetProcess) -> bool {
        self.restarts.get(&process).copied().unwrap_or(0) < self.job.cluster.max_restarts
    }

    fn is_down(&self, process: FleetProcess) -> bool {
        self.pending.iter().any(|(p, _)| *p == process)
    }

    /// The message for a process that is down.
    fn down(&mut self, process: FleetProcess, without: &str) -> String {
        let again = self.restarts_left(process);
        self.pending.push((process, again.then(|| Instant::now() + RESTART_DELAY)));
        match again {
            true => format!("started again in {:.1} s", RESTART_DELAY.as_secs_f64()),
            false => without.to_string(),
        }
    }

    /// Restarts the processes that are due.
    fn start_again(
        &mut self,
        fleet: &mut Fleet,
        writer: &mut MetricsWriter,
        progress: &Progress,
    ) -> Result<(), Failure> {
        let now = Instant::now();
        let (due, wait) =
            std::mem::take(&mut self.pending).into_iter().partition(|(_, at)| at.is_some_and(|at| at <= now));
        self.pending = wait;
        for (process, _) in due {
            *self.restarts.entry(process).or_default() += 1;
            let started = match process {
                FleetProcess::Server(i) => fleet.restart_server(i),
                FleetProcess::Worker(i) => fleet.restart_worker(self.job, i),
            };
            match (started, process) {
                (Ok(()), FleetProcess::Worker(i)) => {
                    let (rank, size) = (i as u32, self.job.ranks_of_worker());
                    let worker = WorkerId(rank / size);
                    put(
                        writer,
                        IncidentKind::WorkerBack { worker, rank: (size > 1).then_some(rank % size) },
                    )?;
                }
                // The observer says when it answers.
                (Ok(()), FleetProcess::Server(_)) => {}
                (Err(e), _) => {
                    let then = self.down(process, "it stays down");
                    progress.warn(&format!("{}; {then}", e.message()));
                }
            }
        }
        Ok(())
    }
}

/// Records what has just happened.
fn put(writer: &mut MetricsWriter, what: IncidentKind) -> Result<(), Failure> {
    Ok(writer.write(&Event::Incident(Incident { wall: wall(), what }))?)
}
