//! One task of an engine: a worker, and on the first tasks also a server.
//!
//! The first task holds the run's folder and the job, writes the record, and announces the end
//! (`gather`). Engines restart tasks: a restarted task is a worker without a server.

use crate::{
    ask::ask_all,
    ended::RecordedEnd,
    failure::Failure,
    files::{SERVERS_FILE, put},
    fleet::{Fleet, JOB_FILE, server_data},
    gather::{self, First, Meeting, Over, Plan, check_interrupted},
    launch::{Record, absolute_paths},
    script::{self, Rendezvous},
};
use nix::sys::signal::Signal;
use paraft_engines::Place;
use paraft_record::RunRecord;
use paraft_worker::{Job, checkpoints, exit};
use std::{
    fs,
    net::TcpListener,
    path::{Path, PathBuf},
    sync::atomic::{AtomicI32, Ordering::Relaxed},
    thread::sleep,
    time::Duration,
};

/// The first line for the user.
pub fn recognised(place: &Place, servers: u32) -> String {
    let Place { engine, rank, tasks, first, port, .. } = place;
    let brings = if *rank < servers { "a worker and a server" } else { "a worker" };
    format!("{engine}: task {rank} of {tasks}, {brings}; the tasks meet at {first}:{port}")
}

/// For failures of the first task before the bootstrap: it notifies the others of the reason.
pub fn before_all<T>(place: &Place, what: Result<T, Failure>) -> Result<T, Failure> {
    what.inspect_err(|why| gather::refuse(place, why))
}

/// The first task: trains the job with the others, in `dir`; returns the run's record.
pub fn first(
    place: &Place,
    job: &Job,
    dir: &Path,
    resume: Option<&Path>,
    interrupted: &AtomicI32,
) -> Result<RunRecord, Failure> {
    let begun = || {
        let dir = fs::canonicalize(dir).map_err(|e| Failure::write(dir, e))?;
        let mut resolved = job.clone();
        absolute_paths(&mut resolved)?;
        checkpoints::try_out(&resolved, Some(&dir))?;
        let record = Record::begin(&mut resolved, &dir, resume, true, None, |_, _| Ok(()))?;
        let port = TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr());
        let port = port.map_err(|e| Failure::new(exit::UNAVAILABLE, format!("no port: {e}")))?.port();
        Ok((dir, resolved, record, port))
    };
    let (ref dir, resolved, mut record, port) = before_all(place, begun())?;
    let plan = Plan {
        run_dir: dir.clone(),
        job: resolved.to_toml(),
        resume: resume.map(Path::to_path_buf),
        servers: resolved.servers(),
        port,
        host: String::new(),
        founded: Vec::new(),
    };
    let all = First::listen(place, plan)?;
    let mut part = Part::join(place, &resolved, interrupted)?;
    let servers_file = dir.join(SERVERS_FILE);
    fs::write(&servers_file, part.fleet.addresses.join(",")).map_err(|e| Failure::write(&servers_file, e))?;
    record.before(ask_all(&part.fleet.addresses, false));
    let code = part.train(interrupted, || all.all_ended()).inspect_err(|e| {
        match interrupted.load(Relaxed) {
            0 => record.failed(e, dir),
            _ => record.killed(),
        }
        all.end(Some(e.code()));
    })?;
    record.end(&ask_all(&part.fleet.addresses, false), &resolved)?;
    all.end(None);
    part.stop();
    let mut record = record.close(dir)?;
    RecordedEnd::in_order(&record).note(dir, &mut record);
    match code {
        exit::OK => Ok(record),
        code => Err(Failure::new(
            code,
            format!("the script of task {} was killed; the others have ended", place.rank),
        )),
    }
}

/// Another task; returns its exit code.
pub fn other(place: &Place, job: &Job, interrupted: &AtomicI32) -> Result<i32, Failure> {
    let mut part = Part::join(place, job, interrupted)?;
    let code = part.train(interrupted, || false);
    part.stop();
    code
}

/// This task's processes.
struct Part {
    rank: u32,
    /// The data of its server, which is removed after the run.
    leaves: Option<PathBuf>,
    fleet: Fleet,
    meeting: Meeting,
}

impl Part {
    /// Takes part in the bootstrap, and starts this task's processes. The script is its own, since
    /// paths differ between hosts.
    fn join(place: &Place, own: &Job, interrupted: &AtomicI32) -> Result<Self, Failure> {
        script::check(&own.cluster.script)?;
        let (mut meeting, plan) = Meeting::join(place, interrupted)?;
        let dir = &plan.run_dir;
        fs::create_dir_all(dir).map_err(|e| Failure::write(dir, e))?;
        let file = dir.join(JOB_FILE);
        put(&file, &plan.job).map_err(|e| Failure::write(&file, e))?;
        let mut job = Job::parse(&plan.job, &file, &[])?;
        job.cluster.script.clone_from(&own.cluster.script);
        let mut fleet = Fleet::part(dir)?;
        let servers = match plan.founded.is_empty() {
            false => plan.founded.clone(),
            true => {
                let brings = place.rank < plan.servers;
                let listens = brings.then(|| fleet.part_server(place.rank, &plan.host)).transpose()?;
                meeting.servers(listens, interrupted)?
            }
        };
        fleet.part_meets(servers)?;
        let given = |name: &str| std::env::var(name).ok().filter(|v| !v.is_empty());
        let port = given("MASTER_PORT").and_then(|p| p.parse().ok()).unwrap_or(plan.port);
        let master = (given("MASTER_ADDR").unwrap_or_else(|| place.first.clone()), port);
        let at = Rendezvous::of(place, master);
        fleet.part_rank(&job, place.rank, Some(&at), plan.resume.as_deref())?;
        let leaves = (!job.cluster.durability.on_disk()).then(|| server_data(dir, place.rank));
        Ok(Self { rank: place.rank, leaves, fleet, meeting })
    }

    fn stop(&mut self) {
        self.fleet.stop();
        self.leaves.iter().for_each(|folder| _ = fs::remove_dir_all(folder));
    }

    /// Runs until all workers have ended, or the first task is gone and this worker has ended; returns
    /// this worker's exit code.
    fn train(&mut self, interrupted: &AtomicI32, all_ended: impl Fn() -> bool) -> Result<i32, Failure> {
        let (mut code, mut alone, mut served) = (None, false, true);
        loop {
            check_interrupted(interrupted).inspect_err(|_| {
                let signal = Signal::try_from(interrupted.load(Relaxed));
                self.fleet.stop_as(signal.unwrap_or(Signal::SIGTERM));
            })?;
            let worker = &mut self.fleet.workers[0];
            if code.is_none()
                && let Some(status) = worker.ended()
            {
                let ended = match worker.killed_by() {
                    Some(signal) => 128 + signal,
                    None => status.code().unwrap_or(exit::FAILED),
                };
                self.meeting.ended(ended);
                if ended != exit::OK {
                    let how = worker.obituary();
                    let how = format!("{} {how}", worker.name);
                    if ended < 128 {
                        return Err(Failure::new(ended, how).of_output(&worker.last_words()));
                    }
                    eprintln!("warning: {how}; the others continue");
                }
                code = Some(ended);
            }
            if let Some(server) = self.fleet.servers.first_mut().filter(|_| served)
                && server.ended().is_some()
            {
                let end = server.end();
                eprintln!(
                    "warning: {} {end}; the others continue as long as they are a majority",
                    server.name
                );
                served = false;
            }
            match if alone { None } else { self.meeting.over() } {
                Some(Over::Failed(rank, by)) if rank != self.rank => {
                    self.fleet.stop();
                    return Err(Failure::new(
                        by,
                        format!("the script of task {rank} has failed, and the run is over"),
                    ));
                }
                Some(Over::Alone) => {
                    eprintln!("warning: task 0 has gone; this one trains on");
                    alone = true;
                }
                Some(_) => return Ok(code.unwrap_or(exit::OK)),
                None => {}
            }
            if let Some(code) = code
                && (alone || all_ended())
            {
                return Ok(code);
            }
            sleep(Duration::from_millis(20));
        }
    }
}

/// The job of a process with a role, from its run's folder. The first process writes it there. A
/// process with another job is refused, since servers and workers would differ.
pub fn agree_on_job(job: &Job, file: &Path, place: &Place) -> Result<Job, Failure> {
    let mut resolved = job.clone();
    absolute_paths(&mut resolved)?;
    resolved.cluster.addresses.clear();
    let own = resolved.to_toml();
    let there = crate::files::put_once(file, &own).map_err(|e| Failure::write(file, e))?;
    if there != own {
        let why = format!("{} has another job than this {} was given", file.display(), place.rank);
        return Err(Failure::new(exit::CONFIG, why).help(
            "give all processes of a run the same job file and --set, and another job a --run-dir of its own",
        ));
    }
    Ok(Job::parse(&there, file, &[])?)
}
