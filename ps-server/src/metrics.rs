//! What Prometheus reads at `/metrics`: the same numbers as status, in the field's naming.

use crate::rpc::status::StatusService;
use axum::{Router, extract::State, http::header, response::IntoResponse, routing::get};
use paraft_proto::ShardStatus;
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
use tokio::net::TcpListener;

/// Serves `/metrics` until `shutdown` resolves.
pub async fn serve(
    listener: TcpListener,
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

/// One number of a shard's status. The texts end without a dot: the library adds one.
type Of = fn(&ShardStatus) -> u64;

const GAUGES: [(&str, &str, Of); 11] = [
    ("shard_leader", "1 where this server leads the shard", |s| u64::from(s.role == "leader")),
    ("raft_term", "Raft term", |s| s.term),
    ("raft_applied_index", "Log index applied", |s| s.applied_index),
    ("shard_version", "Updates applied to the shard's buckets", |s| s.version),
    ("shard_values", "Values held, without optimizer state", |s| s.values),
    ("shard_state_bytes", "Bytes of weights and optimizer state", |s| s.state_bytes),
    ("log_length_bytes", "Bytes of the replica's log, without what is purged", |s| s.log_bytes),
    ("log_memory_bytes", "Bytes of the replica's log that are in memory", |s| s.log_memory_bytes),
    ("workers", "Members that train", |s| active(s).count() as u64),
    ("log_images", "1 where image cuts enter the shard's log, 0 where updates do", |s| {
        u64::from(s.log_form == "images")
    }),
    ("slowest_step", "Clock of the slowest member that trains", |s| active(s).min().unwrap_or(0)),
];

const COUNTERS: [(&str, &str, Option<Unit>, Of); 13] = [
    ("pushes", "Pushes applied", None, |s| s.pushes),
    ("duplicate_pushes", "Entries recognised as applied before", None, |s| s.duplicates),
    ("refused_messages", "Messages refused", None, |s| s.refused),
    ("pulls", "Pulls asked for", None, |s| s.pulls),
    ("not_modified", "Buckets of pulls that were not sent, since their workers had them", None, |s| {
        s.not_modified
    }),
    ("pulls_waited", "Pulls that the consistency rule held back", None, |s| s.pulls_waited),
    ("push", "Payload of applied pushes", Some(Unit::Bytes), |s| s.bytes_pushed),
    ("pull", "Payload of answered pulls", Some(Unit::Bytes), |s| s.bytes_pulled),
    ("pushes_lost", "Acknowledged pushes that went down with a leader", None, |s| s.pushes_lost),
    ("image_cuts", "Image cuts begun", None, |s| s.cuts),
    ("snapshots_installed", "Snapshots of other replicas installed", None, |s| s.snapshots_installed),
    ("log", "Payload proposed to the log", Some(Unit::Bytes), |s| s.bytes_logged),
    ("workers_lost", "Members that left without finishing", None, |s| s.workers_lost),
];

/// The clocks of the members that train.
fn active(s: &ShardStatus) -> impl Iterator<Item = u64> + '_ {
    s.members.iter().filter(|m| !m.finished).map(|m| m.clock)
}

/// The page as text. Built anew for each scrape from the status, so that no number is kept twice.
pub async fn render(status: &StatusService) -> String {
    let reply = status.reply(false).await;
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
    let of = |s: &ShardStatus| -> Labels { [("shard", s.shard.to_string())] };
    for (name, help, value) in GAUGES {
        let family = Family::<Labels, Gauge>::default();
        for s in &reply.shards {
            family.get_or_create(&of(s)).set(value(s) as i64);
        }
        registry.register(name, help, family);
    }
    for (name, help, unit, value) in COUNTERS {
        let family = Family::<Labels, Counter>::default();
        for s in &reply.shards {
            family.get_or_create(&of(s)).inc_by(value(s));
        }
        match unit {
            Some(unit) => registry.register_with_unit(name, help, unit, family),
            None => registry.register(name, help, family),
        }
    }
    let delays = Family::<Labels, Delays>::default();
    for s in &reply.shards {
        *delays.get_or_create(&of(s)).0.lock() = s.delay_counts.clone();
    }
    registry.register("push_delay_versions", "Age of a gradient when it was applied, in versions", delays);
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

/// The delay histogram as it is kept, in Prometheus' buckets: the library's own histogram could only be filled
/// one push at a time.
#[derive(Debug, Default)]
struct Delays(Mutex<Vec<u64>>);

impl TypedMetric for Delays {
    const TYPE: MetricType = MetricType::Histogram;
}

impl EncodeMetric for Delays {
    fn encode(&self, mut encoder: MetricEncoder) -> std::fmt::Result {
        const BOUNDS: [u64; 12] = [0, 1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128];
        let mut buckets: Vec<(f64, u64)> = BOUNDS.iter().map(|b| (*b as f64, 0)).collect();
        buckets.push((f64::INFINITY, 0));
        let (mut sum, mut count) = (0.0, 0);
        for (delay, &n) in self.0.lock().iter().enumerate() {
            sum += delay as f64 * n as f64;
            count += n;
            let at = BOUNDS.iter().position(|b| delay as u64 <= *b).unwrap_or(BOUNDS.len());
            buckets[at].1 += n;
        }
        encoder.encode_histogram::<NoLabelSet>(sum, count, &buckets, None)
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Histogram
    }
}
