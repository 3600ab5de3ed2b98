//! `paraft relay`: reads versions of a job once, and gives them to many readers.
//!
//! ```text
//!  servers ──▶ relay ──▶ relays, readers near it
//! ```
//!
//! It reads only what is asked for. A reader asks it as it asks a server, with `--fleet RELAY:7080`.

use crate::{pull::export::failure, serve::certified};
use clap::Args;
use paraft_client::reader::{Fetcher, News, ReadError, Reader, ValueType, WholeVersion};
use paraft_common::{BucketId, Encoding, ShardId, Step};
use paraft_fleet::{failure::Failure, targets::FleetArg};
use paraft_host::lifeline;
use paraft_proto::RefusalKind;
use paraft_server::{
    rpc::relay::{Missed, Origin, RelayedJob, RelayedVersion},
    server::relay,
    shard::versions::Encoded,
};
use paraft_tls::{Access, access::As};
use paraft_worker::exit;
use parking_lot::Mutex;
use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};
use tokio::net::TcpListener;

/// Versions of each type that stay: readers ask shard by shard, and for differences to what they have.
const MAX_HELD: usize = 4;
/// After so long without a version the servers are asked whether they are there.
const READ_TIMEOUT: Duration = Duration::from_secs(5);
/// For a job that was started again under its name.
const OPEN_TIMEOUT: Duration = Duration::from_secs(5);

#[derive(Args)]
pub struct RelayArgs {
    /// The job's name, as `paraft status` shows it.
    job: String,
    #[command(flatten)]
    fleet: FleetArg,
    /// Where readers and other relays connect.
    #[arg(long, value_name = "HOST:PORT", default_value = "0.0.0.0:7080")]
    listen: String,
    /// Seconds to wait for the job.
    #[arg(long, value_name = "SECONDS", default_value_t = 30.0, value_parser = crate::pull::seconds)]
    timeout: f64,
}

/// Runs the command; returns the exit code.
///
/// # Errors
///
/// The fleet does not answer or has no such job, or the address is taken.
pub fn run(args: &RelayArgs) -> Result<i32, Failure> {
    certified()?;
    let servers = args.fleet.to_ask()?.servers_for(As::Peer)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let runtime = runtime.map_err(|e| Failure::new(exit::FAILED, format!("no runtime: {e}")))?;
    runtime.block_on(async {
        let within = Duration::from_secs_f64(args.timeout);
        let reader = Reader::open(&servers, &args.job, ValueType::F32, within).await.map_err(failure)?;
        let listener = TcpListener::bind(&args.listen).await;
        let listener =
            listener.map_err(|e| Failure::new(exit::IO, format!("--listen {}: {e}", args.listen)))?;
        let at = listener.local_addr().map_err(|e| Failure::new(exit::IO, e.to_string()))?;
        eprintln!("job `{}` is relayed on {at}", args.job);
        let source = Source {
            servers,
            name: args.job.clone(),
            job: Mutex::new(Relayed::of(reader)),
            is_cut_off: AtomicBool::new(false),
        };
        let stop = async { _ = lifeline::terminated().await };
        let served = relay(Arc::new(source), listener, Access::ours(), stop).await;
        served.map_err(|e| Failure::new(exit::IO, e.to_string()))?;
        Ok(exit::OK)
    })
}

/// The servers, as a relay reads from them.
struct Source {
    servers: Vec<String>,
    name: String,
    job: Mutex<Arc<Relayed>>,
    /// The last try to read failed.
    is_cut_off: AtomicBool,
}

/// The job that is relayed, since it was founded.
struct Relayed {
    about: Arc<RelayedJob>,
    reader: Reader,
    types: [Typed; 3],
}

/// Its versions of one type.
#[derive(Default)]
struct Typed {
    fetcher: Mutex<Option<Arc<Fetcher<WholeVersion>>>>,
    held: Mutex<VecDeque<Arc<RelayedVersion>>>,
}

impl Relayed {
    fn of(reader: Reader) -> Arc<Self> {
        let about = Arc::new(RelayedJob {
            name: reader.name().into(),
            toml: reader.job().into(),
            layout: reader.layout().clone(),
            shards: reader.shards(),
            founding: reader.founding(),
        });
        Arc::new(Self { about, reader, types: Default::default() })
    }

    fn typed(&self, dtype: Encoding) -> (&Typed, ValueType) {
        let [f32, bf16, f16] = &self.types;
        match dtype {
            Encoding::Bf16 => (bf16, ValueType::Bf16),
            Encoding::F16 => (f16, ValueType::F16),
            _ => (f32, ValueType::F32),
        }
    }

    fn fetcher(&self, dtype: Encoding) -> Arc<Fetcher<WholeVersion>> {
        let (typed, values) = self.typed(dtype);
        let begin = || Arc::new(Fetcher::begin(self.reader.again(values), READ_TIMEOUT));
        typed.fetcher.lock().get_or_insert_with(begin).clone()
    }

    fn held(&self, dtype: Encoding, step: Step) -> Option<Arc<RelayedVersion>> {
        let held = self.typed(dtype).0.held.lock();
        held.iter().find(|version| version.step == step).cloned()
    }

    /// Holds what was read, once.
    fn hold(&self, dtype: Encoding, version: &WholeVersion) -> Arc<RelayedVersion> {
        let mut held = self.typed(dtype).0.held.lock();
        if let Some(known) = held.iter().find(|known| known.step.0 == version.step) {
            return known.clone();
        }
        let buckets = version.buckets.iter().map(|(id, values)| {
            let updates = version.updates.get(id).copied().unwrap_or(0);
            (BucketId(*id), (updates, Encoded::of(values.clone(), dtype)))
        });
        let buckets = buckets.collect();
        let foundings = version.foundings.clone();
        let relayed = Arc::new(RelayedVersion { step: Step(version.step), foundings, buckets });
        held.push_back(relayed.clone());
        if held.len() > MAX_HELD {
            held.pop_front();
        }
        relayed
    }
}

impl Source {
    fn now(&self) -> Arc<Relayed> {
        self.job.lock().clone()
    }

    /// The job was started again under its name.
    async fn begin_again(&self, old: &Arc<Relayed>) {
        let opened = Reader::open(&self.servers, &self.name, ValueType::F32, OPEN_TIMEOUT).await;
        let mut job = self.job.lock();
        if let Ok(reader) = opened
            && Arc::ptr_eq(&job, old)
        {
            *job = Relayed::of(reader);
        }
    }
}

impl Origin for Source {
    fn job(&self) -> Arc<RelayedJob> {
        self.now().about.clone()
    }

    fn reached(&self) -> (Step, bool) {
        let job = self.now();
        let fetchers = job.types.iter().filter_map(|typed| Some(typed.fetcher.lock().as_ref()?.news()));
        let news = fetchers
            .fold(News::default(), |a, b| News { reached: a.reached.max(b.reached), over: a.over || b.over });
        (Step(news.reached), news.over)
    }

    fn held(&self, dtype: Encoding, step: Step) -> Option<Arc<RelayedVersion>> {
        self.now().held(dtype, step)
    }

    async fn next(&self, dtype: Encoding, least: Step, confirm: bool) -> Result<Arc<RelayedVersion>, Missed> {
        let job = self.now();
        let since = confirm.then(Instant::now);
        match job.fetcher(dtype).next(least.0, since).await {
            Ok((version, _)) => {
                if self.is_cut_off.swap(false, SeqCst) {
                    eprintln!("versions arrive again");
                }
                let held = tokio::task::spawn_blocking(move || job.hold(dtype, &version)).await;
                held.map_err(|e| Missed::Refused(RefusalKind::Unavailable(e.to_string())))
            }
            Err(ReadError::Ended { last, .. }) => Err(Missed::Ended(Step(last))),
            Err(ReadError::OtherFounding(_)) => {
                self.begin_again(&job).await;
                Err(Missed::Refused(RefusalKind::OtherFounding(ShardId(0))))
            }
            Err(error) => {
                let from = self.servers.join(", ");
                let why = format!("the relay cannot read from {from}: {error}");
                if !self.is_cut_off.swap(true, SeqCst) {
                    eprintln!("warning: {why}. Readers are told so, and ask their other addresses");
                }
                Err(Missed::Refused(RefusalKind::Unavailable(why)))
            }
        }
    }
}
