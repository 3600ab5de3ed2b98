//! `paraft feed`: keeps inference engines at the newest versions of a job that trains.
//!
//! ```text
//!  fetch, check, write to the disk      all while the engines serve
//!  each engine, beside the others:      pause, flush, load, check, resume
//! ```
//!
//! - [`engine`]: one engine, and how it takes a version. [`sglang`], [`vllm`]: what they are asked.
//! - [`folders`]: the versions on the disk.

use crate::pull::{
    export::{Source, Versions, founding},
    hf::Base,
    runtime, seconds,
};
use clap::{Args, Subcommand, ValueEnum};
use engine::{Engine, Outcome, Staged, State, update};
use folders::Folders;
use paraft_client::reader::{ValueType, Want, WholeVersion};
use paraft_fleet::{failure::Failure, out, targets::FleetArg};
use paraft_worker::exit;
use serde_json::json;
use std::{
    collections::{BTreeMap, BTreeSet},
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::watch,
};

mod engine;
mod folders;
mod sglang;
mod vllm;

/// How often a job's last version is brought to engines that do not take it.
const LAST_TRIES: u32 = 5;
/// Before engines that did not take a version are tried again with the same, at first.
const RETRY_DELAY: Duration = Duration::from_millis(500);
/// How often that is doubled at most.
const DOUBLINGS: u32 = 5;

#[derive(Args)]
pub struct FeedArgs {
    #[command(subcommand)]
    engines: Engines,
}

#[derive(Subcommand)]
enum Engines {
    /// Servers of SGLang, by /update_weights_from_disk.
    Sglang {
        #[command(flatten)]
        feed: Feed,
        /// What becomes of requests during an update.
        #[arg(long, value_enum, default_value_t = SglangPause::Retract)]
        pause: SglangPause,
    },
    /// Servers of vLLM, with the plug-in paraft.vllm and VLLM_SERVER_DEV_MODE=1.
    Vllm {
        #[command(flatten)]
        feed: Feed,
        /// What becomes of requests during an update.
        #[arg(long, value_enum, default_value_t = VllmPause::Wait)]
        pause: VllmPause,
    },
}

#[derive(Args)]
struct Feed {
    /// The engines, as http://host:30000. They read --to under the path that it has here.
    #[arg(value_name = "URL", required = true, value_parser = url)]
    urls: Vec<String>,
    /// The job's name, as `paraft status` shows it.
    #[arg(long)]
    job: String,
    #[command(flatten)]
    fleet: FleetArg,
    /// The folder for versions, each a Hugging Face folder: v000042. Two stay.
    #[arg(long, value_name = "FOLDER")]
    to: PathBuf,
    /// A Hugging Face folder, of which all but the weights is copied: config.json, the tokenizer.
    #[arg(long, value_name = "FOLDER")]
    base: Option<PathBuf>,
    /// After a version, the next one is at least so many steps later.
    #[arg(long, value_name = "STEPS", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    every: u64,
    /// The type of the values: f32, bf16 or f16, rounded by the servers.
    #[arg(long, value_name = "TYPE", default_value = "bf16")]
    dtype: ValueType,
    /// Seconds to wait for a version.
    #[arg(long, value_name = "SECONDS", default_value_t = 3600.0, value_parser = seconds)]
    timeout: f64,
    /// Seconds to wait for each answer of an engine.
    #[arg(long, value_name = "SECONDS", default_value_t = 120.0, value_parser = seconds)]
    engine_timeout: f64,
    /// One JSON object a version.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum SglangPause {
    /// They end without an answer.
    Abort,
    /// They wait, and are computed again from their first token.
    Retract,
    /// They wait with what is cached of the old weights; an engine with requests refuses to empty its cache.
    #[value(name = "in_place")]
    InPlace,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum VllmPause {
    /// They wait, and continue with what is cached of the old weights.
    Keep,
    /// They are answered first, with the old weights.
    Wait,
    /// They end without an answer.
    Abort,
}

fn url(text: &str) -> Result<String, String> {
    let rest = text.strip_prefix("http://").or_else(|| text.strip_prefix("https://"));
    match rest.is_some_and(|host| !host.trim_matches('/').is_empty()) {
        true => Ok(text.trim_end_matches('/').into()),
        false => Err("write http://HOST:PORT".into()),
    }
}

/// Runs the command; returns the exit code.
///
/// # Errors
///
/// The fleet does not answer or has no such job; a version cannot be written; or an engine does not take the last one.
pub fn run(args: &FeedArgs) -> Result<i32, Failure> {
    let (Engines::Sglang { feed, .. } | Engines::Vllm { feed, .. }) = &args.engines;
    if let Some(url) = feed.urls.iter().enumerate().find(|(i, url)| feed.urls[..*i].contains(url)) {
        return Err(Failure::new(exit::USAGE, format!("{} is named twice", url.1)));
    }
    let servers = feed.fleet.to_ask()?.servers()?;
    let within = Duration::from_secs_f64(feed.engine_timeout);
    let engine = |url: &String| -> Box<dyn Engine> {
        match &args.engines {
            Engines::Sglang { pause, .. } => {
                let mode = match pause {
                    SglangPause::Abort => "abort",
                    SglangPause::Retract => "retract",
                    SglangPause::InPlace => "in_place",
                };
                Box::new(sglang::Sglang::new(url, within, mode))
            }
            Engines::Vllm { pause, .. } => {
                let mode = match pause {
                    VllmPause::Keep => "keep",
                    VllmPause::Wait => "wait",
                    VllmPause::Abort => "abort",
                };
                let init = json!({ "servers": servers, "job": feed.job, "dtype": feed.dtype.name() });
                Box::new(vllm::Vllm::new(url, within, mode, init))
            }
        }
    };
    let engines = feed.urls.iter().map(|url| Fed::new(engine(url))).collect();
    runtime()?.block_on(feed.run(&servers, engines))
}

/// An engine, and what it was last told.
struct Fed {
    engine: Box<dyn Engine>,
    /// Step and digest of what it serves, if this process brought it.
    serves: Option<(u64, u64)>,
    /// Where it was after the update before.
    state: State,
    /// The folder that it was last told to load.
    folder: Option<PathBuf>,
    last: Option<Outcome>,
}

impl Fed {
    fn new(engine: Box<dyn Engine>) -> Self {
        Self { engine, serves: None, state: State::Behind, folder: None, last: None }
    }

    fn update(&mut self, version: &WholeVersion, staged: &Staged<'_>) {
        // The others do not wait again for one that is gone.
        if let Some(last) = self.last.as_mut().filter(|last| last.state != State::Current)
            && let Err(why) = self.engine.answers()
        {
            (last.why, last.paused, last.told) = (Some(why), Duration::ZERO, false);
            return;
        }
        // What is said of it should this thread panic.
        let why = Some("the feed itself failed".to_string());
        let (url, state) = (self.engine.url().to_string(), State::HalfLoaded);
        self.last = Some(Outcome { url, state, why, paused: Duration::ZERO, told: true });
        let outcome = update(self.engine.as_mut(), staged, std::mem::replace(&mut self.state, state));
        if outcome.told {
            self.folder = Some(staged.folder.to_path_buf());
        }
        self.state = outcome.state;
        self.serves = match outcome.state {
            State::Current => Some((version.step, version.digest)),
            State::Behind => self.serves,
            State::HalfLoaded | State::Paused => None,
        };
        self.last = Some(outcome);
    }

    fn serves(&self, version: &WholeVersion) -> bool {
        let is_current = self.last.as_ref().is_some_and(|last| last.state == State::Current);
        is_current && self.serves == Some((version.step, version.digest))
    }
}

impl Feed {
    async fn run(&self, servers: &[String], mut engines: Vec<Fed>) -> Result<i32, Failure> {
        let ended = self.follow(servers, &mut engines).await;
        ended.map_err(|failure| engines.iter().filter_map(line).fold(failure, Failure::more_help))
    }

    async fn follow(&self, servers: &[String], engines: &mut [Fed]) -> Result<i32, Failure> {
        let mut stop = signals()?;
        let within = Duration::from_secs_f64(self.timeout);
        let source = Source { servers, job: &self.job, dtype: self.dtype, only: &[], within };
        let mut versions = tokio::select! {
            versions = Versions::open(&source, Want::AtLeast(0), Some(self.every)) => versions?,
            code = stopped(&mut stop) => return Ok(code),
        };
        let base = Base::read(self.base.as_deref(), versions.export())?;
        let mut folders = Folders::open(&self.to, base)?;
        let mut noted = folders.noted();
        for fed in engines.iter_mut().filter(|fed| noted.iter().any(|url| url == fed.engine.url())) {
            fed.state = State::HalfLoaded;
        }
        // Those of another command stay noted.
        noted.retain(|url| !engines.iter().any(|fed| url == fed.engine.url()));
        let note = |folders: &Folders, engines: &[Fed], of: &dyn Fn(&Fed) -> bool| {
            let ours = engines.iter().filter(|fed| of(fed)).map(|fed| fed.engine.url());
            folders.note(noted.iter().map(String::as_str).chain(ours))
        };
        let (mut failures, mut tries_of_last, mut all_loaded) = (0u32, 0, false);
        let (mut asked, mut newer) = (Instant::now(), None);
        loop {
            let version = match newer.take() {
                Some(version) => version,
                None => tokio::select! {
                    version = versions.next() => match version? {
                        Some(version) => version,
                        None => return Ok(exit::OK),
                    },
                    code = stopped(&mut stop) => return Ok(code),
                },
            };
            let arrived = Instant::now();
            let folder = folders.stage(versions.export(), &version)?;
            // Should this process be killed, the next one knows which engines may be half loaded.
            note(&folders, engines, &|fed| !fed.serves(&version))?;
            all(engines, &version, &folder);
            note(&folders, engines, &|fed| fed.state == State::HalfLoaded)?;
            let is_current = engines.iter().all(|fed| fed.serves(&version));
            self.tell(engines, &version, &folder, [arrived - asked, arrived.elapsed()]);
            all_loaded |= is_current;
            let used: BTreeSet<_> = engines.iter().filter_map(|fed| fed.folder.clone()).collect();
            folders.clear(&used, all_loaded)?;
            if let Some(code) = *stop.borrow() {
                return Ok(code);
            }
            asked = Instant::now();
            if is_current {
                failures = 0;
                continue;
            }
            failures += 1;
            tries_of_last += u32::from(version.is_last);
            if tries_of_last >= LAST_TRIES {
                let why = format!("job `{}` has ended, and engines do not have its last version", self.job);
                return Err(Failure::new(exit::UNAVAILABLE, why));
            }
            // The engines that are well do not wait for it: a newer version comes first.
            let tries = if version.is_last { tries_of_last } else { failures };
            let until = asked + RETRY_DELAY * 2u32.pow((tries - 1).min(DOUBLINGS));
            newer = tokio::select! {
                version = tokio::time::timeout_at(until.into(), versions.next()) => match version {
                    Ok(version) => version?,
                    Err(_) => None,
                },
                code = stopped(&mut stop) => return Ok(code),
            };
            if newer.is_none() {
                tokio::select! {
                    () = tokio::time::sleep_until(until.into()) => versions.again(),
                    code = stopped(&mut stop) => return Ok(code),
                }
            }
        }
    }

    fn tell(&self, engines: &[Fed], version: &WholeVersion, folder: &Path, took: [Duration; 2]) {
        let [arrival, rest] = took.map(|time| time.as_secs_f64());
        let digest = format!("{:016x}", version.digest);
        let outcomes: Vec<_> = engines.iter().filter_map(|fed| Some((fed, fed.last.as_ref()?))).collect();
        let paused = outcomes.iter().map(|(_, o)| o.paused.as_secs_f64()).fold(0.0, f64::max);
        let current = engines.iter().filter(|fed| fed.serves(version)).count();
        if self.json {
            let engines: Vec<_> = outcomes
                .iter()
                .map(|(fed, o)| {
                    json!({ "url": o.url, "state": o.state.name(), "version": fed.serves.map(|(step, _)| step),
                            "paused_seconds": o.paused.as_secs_f64(), "why": o.why })
                })
                .collect();
            out!(
                "{}",
                json!({ "job": self.job, "version": version.step, "founding": founding(version), "digest": digest,
                        "reached": version.reached, "bytes": version.received, "arrival_seconds": arrival, "seconds": rest,
                        "paused_seconds": paused, "folder": folder, "ok": current == outcomes.len(), "engines": engines })
            );
        } else {
            let of = outcomes.len();
            out!(
                "version {}  digest {digest}  {rest:.3} s, of them {paused:.3} s paused  {current} of {of} engines",
                version.step
            );
        }
        for line in engines.iter().filter_map(line) {
            eprintln!("warning: version {}: {line}", version.step);
        }
    }
}

/// Brings a version to all engines that do not serve it, at the same time.
fn all(engines: &mut [Fed], version: &WholeVersion, folder: &Path) {
    let label = version.step.to_string();
    let staged = &Staged { label: &label, folder };
    thread::scope(|scope| {
        for fed in engines.iter_mut() {
            if fed.serves(version) {
                fed.last.iter_mut().for_each(|last| last.paused = Duration::ZERO);
            } else {
                scope.spawn(move || {
                    // Its outcome says that it failed.
                    let _ = catch_unwind(AssertUnwindSafe(|| fed.update(version, staged)));
                });
            }
        }
    });
}

/// What is to be said of an engine that is not current.
fn line(fed: &Fed) -> Option<String> {
    let last = fed.last.as_ref().filter(|last| last.state != State::Current)?;
    Some(format!("{} {}: {}", last.url, last.state.advice(), last.why.as_deref().unwrap_or("no reason")))
}

/// The exit code of the first signal; `None`: there was none.
fn signals() -> Result<watch::Receiver<Option<i32>>, Failure> {
    let failed = |e| Failure::new(exit::FAILED, format!("signals cannot be received: {e}"));
    let codes = BTreeMap::from([
        (exit::INTERRUPTED, SignalKind::interrupt()),
        (exit::TERMINATED, SignalKind::terminate()),
    ]);
    let (send, receive) = watch::channel(None);
    for (code, kind) in codes {
        let (mut signal, send) = (signal(kind).map_err(failed)?, send.clone());
        tokio::spawn(async move {
            while signal.recv().await.is_some() {
                send.send_replace(Some(code));
                eprintln!("paraft feed ends once no engine is paused for an update");
            }
        });
    }
    Ok(receive)
}

async fn stopped(stop: &mut watch::Receiver<Option<i32>>) -> i32 {
    match stop.wait_for(Option::is_some).await {
        Ok(code) => code.unwrap_or(exit::TERMINATED),
        // No signal can come any more.
        Err(_) => std::future::pending().await,
    }
}
