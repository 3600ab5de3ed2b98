//! The metrics at `/metrics` for Prometheus: the numbers of the status, under Prometheus' naming rules.

use crate::{connections::BoundedListener, rpc::status::StatusService};
use axum::{Router, extract::State, http::header, response::IntoResponse, routing::get};
use paraft_proto::{Bin, ShardStatus, StatusReply};
use parking_lot::Mutex;
use prometheus_client::{
    encoding::{EncodeMetric, MetricEncoder, NoLabelSet, text::encode},
    metrics::{
        MetricType, TypedMetric,
        counter::{ConstCounter, Counter},
        family::Family,
        gauge::{ConstGauge, Gauge},
    },
    registry::{Registry, Unit},
};
use std::{future::Future, io, sync::atomic::AtomicU64};

/// Serves `/metrics` until `shutdown` resolves.
pub async fn serve(
    listener: BoundedListener,
    status: StatusService,
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> io::Result<()> {
    let app = Router::new().route("/metrics", get(page)).with_state(status);
    axum::serve(listener, app).with_graceful_shutdown(shutdown).await
}

async fn page(State(status): State<StatusService>) -> impl IntoResponse {
    let text = render(&status).await;
    ([(header::CONTENT_TYPE, "application/openmetrics-text; version=1.0.0; charset=utf-8")], text)
}

type StageLabel = [(&'static str, &'static str); 1];

type Labels = [(&'static str, String); 1];

/// A shard and its job: several jobs have a shard 0.
type ShardLabels = [(&'static str, String); 2];

/// One number of a shard's status. The help texts end without a dot: the library adds one.
type StatusNumber = fn(&ShardStatus) -> u64;

const GAUGES: [(&str, &str, StatusNumber); 10] = [
    ("shard_leader", "1 where this server leads the shard and serves workers", |s| u64::from(s.leads)),
    ("raft_term", "Raft term", |s| s.term),
    ("raft_applied_index", "Log index applied", |s| s.applied_index),
    ("shard_version", "Updates applied to the shard's buckets", |s| s.version),
    ("shard_values", "Values held, without optimizer state", |s| s.values),
    ("shard_state_bytes", "Bytes of weights and optimizer state", |s| s.state_bytes),
    ("log_length_bytes", "Bytes of the replica's log, without what is purged", |s| s.log_bytes),
    ("log_memory_bytes", "Bytes of the replica's log that are in memory", |s| s.log_memory_bytes),
    ("workers", "Members that train", |s| active(s).count() as u64),
    ("slowest_step", "Clock of the slowest member that trains", |s| active(s).min().unwrap_or(0)),
];

const COUNTERS: [(&str, &str, Option<Unit>, StatusNumber); 14] = [
    ("pushes", "Pushes applied", None, |s| s.pushes),
    ("duplicate_pushes", "Entries recognised as applied before", None, |s| s.duplicates),
    ("refused_messages", "Messages refused for what they are", None, |s| s.refused),
    ("redirected_messages", "Messages sent to the leader, or told to come again", None, |s| s.redirected),
    ("pulls", "Pulls asked for", None, |s| s.pulls),
    ("not_modified", "Buckets of pulls that were not sent, since their workers had them", None, |s| {
        s.not_modified
    }),
    ("pulls_waited", "Pulls that the consistency rule held back", None, |s| s.pulls_waited),
    ("push", "Payload of applied pushes", Some(Unit::Bytes), |s| s.bytes_pushed),
    ("pull", "Payload of answered pulls", Some(Unit::Bytes), |s| s.bytes_pulled),
    ("pushes_lost", "Acknowledged pushes that went down with a leader", None, |s| s.pushes_lost),
    ("state_deltas", "State deltas begun", None, |s| s.deltas),
    ("snapshots_installed", "Snapshots of other replicas installed", None, |s| s.snapshots_installed),
    ("log", "Payload proposed to the log", Some(Unit::Bytes), |s| s.bytes_logged),
    ("workers_lost", "Members that left without finishing", None, |s| s.workers_lost),
];

/// As in `paraft status --json`.
fn memory_of(s: &ShardStatus) -> [(&'static str, u64); 7] {
    [
        ("state", s.memory_allocated.saturating_sub(s.memory_kept)),
        ("kept", s.memory_kept),
        ("log", s.log_memory_bytes),
        ("copies", s.memory_copies),
        ("staged", s.memory_staged),
        ("queued", s.memory_queued),
        ("staleness", s.memory_staleness),
    ]
}

/// The clocks of the members that train.
fn active(s: &ShardStatus) -> impl Iterator<Item = u64> + '_ {
    s.members.iter().filter(|m| !m.finished).map(|m| m.clock)
}

/// The page as text. Built from the status for each scrape, so that no number is kept twice.
pub async fn render(status: &StatusService) -> String {
    let reply = status.reply(false, false).await;
    let mut registry = Registry::with_prefix("paraft");
    registry.register("server", "Id of this server", ConstGauge::new(reply.server as i64));
    let cpu = ConstCounter::new(reply.cpu_seconds);
    registry.register_with_unit("process_cpu", "CPU time used", Unit::Seconds, cpu);
    let rss = ConstGauge::new(reply.peak_rss_bytes as i64);
    registry.register_with_unit("process_peak_resident", "Peak resident set", Unit::Bytes, rss);
    let diverged = ConstCounter::new(reply.replicas_diverged);
    registry.register(
        "replicas_diverged",
        "Replicas stopped because their state was not the majority's",
        diverged,
    );
    connections(&mut registry, &reply);
    if reply.storage_size > 0 {
        let help = "What may still be written to the file system of the data folder";
        byte_gauge(&mut registry, "storage_free", help, reply.storage_free);
        byte_gauge(&mut registry, "storage_size", "Size of that file system", reply.storage_size);
    }
    shard_gauges(&mut registry, &reply);
    if let Some(m) = &reply.memory {
        let help = "What this server may still take, by the bound that leaves least";
        byte_gauge(&mut registry, "memory_free", help, m.free);
        byte_gauge(&mut registry, "memory_limit", "That bound", m.limit);
        byte_gauge(
            &mut registry,
            "memory_promised",
            "Set aside for replicas, and not allocated yet",
            m.promised,
        );
    }
    shard_counters(&mut registry, &reply);
    staleness(&mut registry, &reply);
    let seconds = Family::<StageLabel, Counter<f64, AtomicU64>>::default();
    let spans = Family::<StageLabel, Counter>::default();
    for total in status.replicas.stages().totals() {
        let label = [("stage", total.stage.name())];
        seconds.get_or_create(&label).inc_by(total.time.as_secs_f64());
        spans.get_or_create(&label).inc_by(total.spans);
    }
    let help = "Time of the stages' spans, added up over all shards";
    registry.register_with_unit("stage", help, Unit::Seconds, seconds);
    registry.register("stage_spans", "Spans of each stage: buckets that went through it", spans);
    let mut text = String::new();
    let _ = encode(&mut text, &registry);
    text
}

fn byte_gauge(registry: &mut Registry, name: &str, help: &str, bytes: u64) {
    registry.register_with_unit(name, help, Unit::Bytes, ConstGauge::new(bytes as i64));
}

fn labels(s: &ShardStatus) -> ShardLabels {
    [("job_name", s.job_name.clone()), ("shard", s.shard.to_string())]
}

fn shard_gauges(registry: &mut Registry, reply: &StatusReply) {
    for (name, help, value) in GAUGES {
        let family = Family::<ShardLabels, Gauge>::default();
        for s in &reply.shards {
            family.get_or_create(&labels(s)).set(value(s) as i64);
        }
        registry.register(name, help, family);
    }
    let memory = Family::<[(&'static str, String); 3], Gauge>::default();
    for s in &reply.shards {
        for (kind, bytes) in memory_of(s) {
            let [job, shard] = labels(s);
            memory.get_or_create(&[job, shard, ("kind", kind.to_string())]).set(bytes as i64);
        }
    }
    registry.register_with_unit("memory", "Memory of a replica, by what it is for", Unit::Bytes, memory);
}

fn shard_counters(registry: &mut Registry, reply: &StatusReply) {
    for (name, help, unit, value) in COUNTERS {
        let family = Family::<ShardLabels, Counter>::default();
        for s in &reply.shards {
            family.get_or_create(&labels(s)).inc_by(value(s));
        }
        match unit {
            Some(unit) => registry.register_with_unit(name, help, unit, family),
            None => registry.register(name, help, family),
        }
    }
    let delays = Family::<ShardLabels, BinnedHistogram>::default();
    for s in &reply.shards {
        delays.get_or_create(&labels(s)).add(DELAYS, delay_bins(&s.delay_counts), None);
    }
    registry.register("push_delay_versions", "Age of a gradient when it was applied, in versions", delays);
}

/// Connections by purpose, and closed ones by reason; descriptors; waiting payload.
fn connections(registry: &mut Registry, reply: &StatusReply) {
    let c = reply.connections.unwrap_or_default();
    let open = Family::<Labels, Gauge>::default();
    let ranks = [("unknown", c.unknown), ("reader", c.readers), ("worker", c.workers), ("server", c.servers)];
    for (rank, count) in ranks {
        open.get_or_create(&[("rank", rank.to_string())]).set(i64::from(count));
    }
    registry.register("connections", "Connections by what they have shown to be for", open);
    let closed = Family::<Labels, Counter>::default();
    let why_closed = [
        ("shed", c.shed),
        ("refused", c.refused),
        ("silent", c.silent),
        ("stalled", c.stalled),
        ("denied", c.denied),
    ];
    for (why, count) in why_closed {
        closed.get_or_create(&[("why", why.to_string())]).inc_by(count);
    }
    registry.register("connections_closed", "Connections that this server has closed or not let in", closed);
    let gauges = [
        ("connections_limit", "Connections that there may be at present", u64::from(c.limit)),
        ("descriptors", "Files and sockets that the process has open", reply.descriptors),
        ("descriptors_limit", "Files and sockets that it may have open", reply.descriptors_limit),
        ("queued_bytes", "Payload that streams have brought and no shard has taken yet", reply.queued_bytes),
        ("queued_limit_bytes", "Payload that may wait so", reply.queued_bytes_limit),
    ];
    for (name, help, value) in gauges {
        registry.register(name, help, ConstGauge::new(value as i64));
    }
}

/// Bounds of the histograms' buckets.
const DELAYS: &[f64] = &[0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0, 64.0, 128.0];
/// In average steps; powers of two, so that the counted bins fit.
const DISTANCES: &[f64] = &[0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0];
/// In seconds: 2^-10, 2^-8, ... 2^6.
const AGES: &[f64] = &[0.000_976_562_5, 0.003_906_25, 0.015_625, 0.0625, 0.25, 1.0, 4.0, 16.0, 64.0];

/// How late each worker's pushes were, over the shards that this server led.
fn staleness(registry: &mut Registry, reply: &StatusReply) {
    let [delays, distances, ages] =
        std::array::from_fn(|_| Family::<ShardLabels, BinnedHistogram>::default());
    let late = reply.shards.iter().flat_map(|s| s.staleness.iter().map(move |l| (&s.job_name, l)));
    for (job, l) in late {
        let of = [("job_name", job.clone()), ("worker", l.worker.to_string())];
        let bins = |bins: &[Bin]| bins.iter().map(|b| (b.upper, b.count)).collect();
        delays.get_or_create(&of).add(DELAYS, delay_bins(&l.delay_counts), None);
        distances.get_or_create(&of).add(DISTANCES, bins(&l.distance), Some(l.distance_sum));
        ages.get_or_create(&of).add(AGES, bins(&l.age_seconds), Some(l.age_seconds_sum));
    }
    for (name, help, family) in [
        (
            "worker_push_delay_versions",
            "Versions between the pull and the apply of a worker's pushes",
            delays,
        ),
        ("worker_push_distance_steps", "Way of the weights meanwhile, in average steps", distances),
        ("worker_push_age_seconds", "Seconds between the pull and the apply of a worker's pushes", ages),
    ] {
        registry.register(name, help, family);
    }
}

fn delay_bins(counts: &[u64]) -> Vec<(f64, u64)> {
    counts.iter().enumerate().map(|(delay, n)| (delay as f64, *n)).collect()
}

/// A histogram from kept bins, in Prometheus' buckets: the library's own type takes only single values.
#[derive(Debug, Default)]
struct BinnedHistogram(Mutex<Buckets>);

#[derive(Debug, Default)]
struct Buckets {
    bounds: &'static [f64],
    /// One more than there are bounds.
    counts: Vec<u64>,
    sum: f64,
}

impl BinnedHistogram {
    /// Adds bins, each an upper bound and a count. Without `sum`, the bounds are the values.
    fn add(&self, bounds: &'static [f64], bins: Vec<(f64, u64)>, sum: Option<f64>) {
        let mut all = self.0.lock();
        all.bounds = bounds;
        all.counts.resize(bounds.len() + 1, 0);
        all.sum += sum.unwrap_or_else(|| bins.iter().map(|(upper, n)| upper * *n as f64).sum());
        for (upper, n) in bins {
            let at = bounds.iter().position(|b| upper <= *b).unwrap_or(bounds.len());
            all.counts[at] += n;
        }
    }
}

impl TypedMetric for BinnedHistogram {
    const TYPE: MetricType = MetricType::Histogram;
}

impl EncodeMetric for BinnedHistogram {
    fn encode(&self, mut encoder: MetricEncoder) -> std::fmt::Result {
        let all = self.0.lock();
        let bounds = all.bounds.iter().copied().chain([f64::INFINITY]);
        let buckets: Vec<(f64, u64)> = bounds.zip(all.counts.iter().copied()).collect();
        let count = all.counts.iter().sum();
        encoder.encode_histogram::<NoLabelSet>(all.sum, count, &buckets, None)
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Histogram
    }
}

#[cfg(test)]
#[path = "metrics_tests.rs"]
mod tests;
