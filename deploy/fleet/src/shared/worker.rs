//! A worker that an engine has started: it waits for its fleet, starts its ranks as processes, and
//! reports its end to the other workers and to the engine.
//!
//! If the servers lose the job's state, the worker restarts by itself from the checkpoint that all
//! workers agree on. For any other end, its exit code tells the engine whether to restart it.

use super::{
    folder::{Address, Folder, JobEnd},
    host::host_name,
};
use crate::{
    ask,
    failure::Failure,
    fleet::Fleet,
    script::{self, Rendezvous},
};
use nix::sys::signal::Signal;
use paraft_checkpoint::Folder as Checkpoints;
use paraft_engines::Place;
use paraft_proto::{DescribeReply, is_trained};
use paraft_worker::{Job, checkpoints, exit};
use std::{
    net::TcpListener,
    path::{Path, PathBuf},
    sync::atomic::{AtomicI32, Ordering::Relaxed},
    thread::sleep,
    time::{Duration, Instant},
};

/// The configuration of a worker.
pub struct Worker<'a> {
    /// Its place in the engine's job.
    pub place: &'a Place,
    /// Its job, from the run's folder.
    pub job: &'a Job,
    /// The folder for its files.
    pub run_dir: &'a Path,
    /// The folder that it shares with the others; `None`: the place names the servers.
    pub folder: Option<&'a Folder>,
    /// How long to wait for a fleet that exists and does not answer.
    pub patience: Duration,
    /// The time to end after a signal.
    pub grace: Duration,
}

/// The poll interval.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// After this time it logs what it waits for.
const LOG_WAIT_AFTER: Duration = Duration::from_secs(10);

/// How long a worker waits for the address of worker 0.
const RENDEZVOUS_TIMEOUT: Duration = Duration::from_secs(10);

/// The maximal number of its own restarts.
const MAX_RESTARTS: u32 = 5;

impl Worker<'_> {
    /// Trains until the job is done; returns the exit code.
    pub fn run(&self, interrupted: &AtomicI32) -> Result<i32, Failure> {
        script::check(&self.job.cluster.script)?;
        let mut again = 0;
        loop {
            if let Some(code) = self.ended()? {
                if code == exit::OK {
                    eprintln!("w{}: nothing is left to train", self.place.rank);
                }
                return Ok(code);
            }
            let Some(fleet) = self.wait_for_fleet(interrupted)? else { continue };
            // The engine has restarted it after its last step.
            if is_trained(&fleet.jobs, &self.job.name) {
                return self.done();
            }
            let resume = self.start(&fleet)?;
            let code = self.train(&fleet, resume.as_deref(), interrupted)?;
            let stopped = interrupted.load(Relaxed) != 0;
            if code != exit::UNAVAILABLE || stopped || again == MAX_RESTARTS {
                return Ok(code);
            }
            again += 1;
            eprintln!(
                "w{}: no servers served it; it looks for them again ({again} of {MAX_RESTARTS})",
                self.place.rank
            );
        }
    }

    /// The exit code, if the job or this worker's part of it has ended.
    fn ended(&self) -> Result<Option<i32>, Failure> {
        if self.folder.is_some_and(|f| f.is_worker_done(self.place.rank)) {
            return Ok(Some(exit::OK));
        }
        Ok(match self.folder.map_or(Ok(None), Folder::ended)? {
            None => None,
            Some(JobEnd::Done) => Some(exit::OK),
            Some(JobEnd::Failed { worker, node, code, said }) => {
                eprintln!("error: worker w{worker} on {node} has failed, with code {code}: {said}");
                Some(code)
            }
        })
    }

    /// Waits until all shards of the fleet are served. `None`: the job is over.
    fn wait_for_fleet(&self, interrupted: &AtomicI32) -> Result<Option<DescribeReply>, Failure> {
        // `since`: when the fleet was last known not to have started, or this wait began.
        let (mut since, mut logged) = (Instant::now(), false);
        let began = Instant::now();
        loop {
            let number = interrupted.load(Relaxed);
            if number != 0 {
                return Err(Failure::new(128 + number, "interrupted while it waited for its fleet"));
            }
            if self.ended()?.is_some() {
                return Ok(None);
            }
            let (known, founded) = match self.folder {
                None => (self.place.servers.clone(), true),
                Some(folder) => (
                    folder.servers()?.into_values().map(|at| at.address).collect(),
                    folder.fleet()?.is_some(),
                ),
            };
            // An engine starts servers when resources are free, so only a fleet that existed counts as
            // missing.
            if !founded {
                since = Instant::now();
            }
            let found = if known.is_empty() { None } else { ask::describe(&known) };
            let why = match found {
                Some(fleet) if serves(&fleet) => return Ok(Some(fleet)),
                Some(_) => "not all of its shards are served",
                None if founded => "nobody answers",
                None => "it has not started yet",
            };
            if since.elapsed() > self.patience {
                let why = format!(
                    "w{} waits for its fleet for {} s: {why}",
                    self.place.rank,
                    self.patience.as_secs()
                );
                return Err(Failure::new(exit::UNAVAILABLE, why)
                    .help("the servers' logs say what they wait for; --patience SECONDS waits longer"));
            }
            if !logged && began.elapsed() > LOG_WAIT_AFTER {
                eprintln!("w{} waits for its fleet: {why}", self.place.rank);
                logged = true;
            }
            sleep(POLL_INTERVAL);
        }
    }

    /// The checkpoint to start from. All workers that start after the same loss use the same one.
    fn start(&self, fleet: &DescribeReply) -> Result<Option<PathBuf>, Failure> {
        let Some(folder) = self.folder else { return Ok(None) };
        let lost = fleet.jobs.iter().rev().find(|j| j.state == "lost").map_or(0, |j| j.founding);
        let latest = || {
            let folder = checkpoints::folder(self.job, Some(self.run_dir)).filter(|_| lost != 0)?;
            Checkpoints::new(folder).newest_whole(None)
        };
        folder.start_after(lost, latest)
    }

    fn train(
        &self,
        known: &DescribeReply,
        resume: Option<&Path>,
        interrupted: &AtomicI32,
    ) -> Result<i32, Failure> {
        let (job, rank) = (self.job, self.place.rank);
        let mut fleet = Fleet::part(self.run_dir)?;
        fleet.part_meets(addresses(known, job.servers() as usize))?;
        let at = self.rendezvous()?;
        if let Some(path) = resume {
            eprintln!("w{rank} continues from {}", path.display());
        }
        let size = job.ranks_of_worker();
        for one in rank * size..(rank + 1) * size {
            fleet.part_rank(job, one, at.as_ref(), resume)?;
        }
        let mut last = Instant::now();
        loop {
            let number = interrupted.load(Relaxed);
            if number != 0 {
                let until = Instant::now() + self.grace;
                let signal = Signal::try_from(number).unwrap_or(Signal::SIGTERM);
                fleet.workers.iter().for_each(|w| w.signal(signal));
                while fleet.workers.iter_mut().any(|w| w.ended().is_none()) && Instant::now() < until {
                    sleep(Duration::from_millis(20));
                }
                fleet.stop_as(signal);
                // A worker that has just finished is done.
                let done = fleet.workers.iter_mut().all(|w| w.ended().is_some_and(|s| s.success()));
                return if done { self.done() } else { Ok(128 + number) };
            }
            let mut running = 0;
            for worker in &mut fleet.workers {
                let Some(status) = worker.ended() else {
                    running += 1;
                    continue;
                };
                let code =
                    worker.killed_by().map_or(status.code().unwrap_or(exit::FAILED), |signal| 128 + signal);
                if code != exit::OK {
                    let said = worker.last_words();
                    let how = worker.end();
                    eprintln!("error: {} {how}", worker.name);
                    return self.failed(code, said);
                }
            }
            if running == 0 {
                return self.done();
            }
            if last.elapsed() > POLL_INTERVAL {
                last = Instant::now();
                if let Some(code) = self.ended()?.filter(|code| *code != exit::OK) {
                    return Ok(code);
                }
            }
            sleep(Duration::from_millis(20));
        }
    }

    /// The address at which a script's own processes find each other (`MASTER_ADDR`): on the host of worker 0.
    fn rendezvous(&self) -> Result<Option<Rendezvous>, Failure> {
        if self.job.cluster.script.is_empty() {
            return Ok(None);
        }
        let free = || TcpListener::bind("0.0.0.0:0").and_then(|l| l.local_addr()).map(|a| a.port());
        let port = free().map_err(|e| Failure::new(exit::UNAVAILABLE, format!("no port: {e}")))?;
        let own = super::host::own_host(None).to_string();
        let mut place = self.place.clone();
        place.tasks = self.job.train.workers;
        let Some(folder) = self.folder else { return Ok(Some(Rendezvous::of(&place, (own, port)))) };
        if place.rank == 0 {
            folder.publish("worker-0", &Address::here(format!("{own}:{port}"), &place))?;
        }
        let until = Instant::now() + RENDEZVOUS_TIMEOUT;
        loop {
            if let Some(at) = folder.address("worker-0")? {
                let (host, port) = at.address.rsplit_once(':').unwrap_or((&own, "0"));
                return Ok(Some(Rendezvous::of(&place, (host.into(), port.parse().unwrap_or(0)))));
            }
            if Instant::now() > until {
                // A script without such a meeting point need not wait for worker 0.
                return Ok(Some(Rendezvous::of(&place, (own, port))));
            }
            sleep(POLL_INTERVAL);
        }
    }

    fn done(&self) -> Result<i32, Failure> {
        self.folder.map_or(Ok(()), |f| f.worker_done(self.place.rank))?;
        Ok(exit::OK)
    }

    /// Records the job's failure if a restart would fail alike.
    fn failed(&self, code: i32, said: String) -> Result<i32, Failure> {
        let node = if self.place.node.is_empty() { host_name() } else { self.place.node.clone() };
        if let Some(path) = std::env::var_os("TORCHELASTIC_ERROR_FILE") {
            let error = serde_json::json!({"message": {"message": said, "extraInfo": {"node": node, "exitcode": code}}});
            if let Err(e) = crate::files::put(Path::new(&path), &error.to_string()) {
                eprintln!("warning: TORCHELASTIC_ERROR_FILE: {e}");
            }
        }
        if exit::may_restart(code) {
            return Ok(code);
        }
        let failed = JobEnd::Failed { worker: self.place.rank, node, code, said };
        self.folder.map_or(Ok(()), |f| f.end(&failed).map(drop))?;
        Ok(code)
    }
}

/// Whether every shard accepts pushes, or will after a recent bootstrap.
fn serves(fleet: &DescribeReply) -> bool {
    !fleet.shards.is_empty() && fleet.shards.iter().all(|s| matches!(&*s.state, "serving" | "repairing"))
}

/// Addresses of up to `many` servers of the fleet, those that answer first.
fn addresses(fleet: &DescribeReply, many: usize) -> Vec<String> {
    let (up, silent): (Vec<_>, Vec<_>) = fleet.servers.iter().partition(|s| s.state == "up");
    up.into_iter().chain(silent).map(|s| s.address.clone()).take(many).collect()
}
