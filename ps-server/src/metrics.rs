//! What Prometheus reads at `/metrics`: the same numbers as status, in the field's naming.

use crate::rpc::status::StatusService;
use axum::{Router, extract::State, http::header, response::IntoResponse, routing::get};
use prometheus_client::{
    encoding::{EncodeMetric, MetricEncoder, NoLabelSet, text::encode},
    metrics::{MetricType, counter::ConstCounter, gauge::ConstGauge},
    registry::{Registry, Unit},
};
use std::{future::Future, io};
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

/// The page as text. Built anew for each scrape from the status, so that no number is kept twice.
pub async fn render(status: &StatusService) -> String {
    let reply = status.reply(false).await;
    let mut registry = Registry::with_prefix("paraft");
    registry.register("server", "Id of this server.", ConstGauge::new(reply.server as i64));
    registry.register_with_unit(
        "process_cpu",
        "CPU time used.",
        Unit::Seconds,
        ConstCounter::new(reply.cpu_seconds),
    );
    let rss = ConstGauge::new(reply.peak_rss_bytes as i64);
    registry.register_with_unit("process_peak_resident", "Peak resident set.", Unit::Bytes, rss);
    for s in &reply.shards {
        let sub =
            registry.sub_registry_with_labels([("shard".into(), s.shard.to_string().into())].into_iter());
        let is_leader = i64::from(s.role == "leader");
        sub.register("shard_leader", "1 where this server leads the shard.", ConstGauge::new(is_leader));
        sub.register("raft_term", "Raft term.", ConstGauge::new(s.term as i64));
        sub.register("raft_applied_index", "Log index applied.", ConstGauge::new(s.applied_index as i64));
        sub.register(
            "shard_version",
            "Updates applied to the shard's buckets.",
            ConstGauge::new(s.version as i64),
        );
        sub.register(
            "shard_values",
            "Values held, without optimizer state.",
            ConstGauge::new(s.values as i64),
        );
        let active = s.members.iter().filter(|m| !m.finished).count() as i64;
        sub.register("workers", "Members that train.", ConstGauge::new(active));
        let slowest = s.members.iter().filter(|m| !m.finished).map(|m| m.clock).min().unwrap_or(0);
        sub.register("slowest_step", "Clock of the slowest member.", ConstGauge::new(slowest as i64));
        sub.register("pushes", "Pushes applied.", ConstCounter::new(s.pushes));
        sub.register(
            "duplicate_pushes",
            "Entries recognised as applied before.",
            ConstCounter::new(s.duplicates),
        );
        sub.register("refused_messages", "Messages refused.", ConstCounter::new(s.refused));
        sub.register("pulls", "Pulls asked for.", ConstCounter::new(s.pulls));
        sub.register(
            "pulls_waited",
            "Pulls that the consistency rule held back.",
            ConstCounter::new(s.pulls_waited),
        );
        sub.register_with_unit(
            "push",
            "Payload of applied pushes.",
            Unit::Bytes,
            ConstCounter::new(s.bytes_pushed),
        );
        sub.register_with_unit(
            "pull",
            "Payload of answered pulls.",
            Unit::Bytes,
            ConstCounter::new(s.bytes_pulled),
        );
        sub.register(
            "workers_lost",
            "Members that left without finishing.",
            ConstCounter::new(s.workers_lost),
        );
        let delays = Delays(s.delay_counts.clone());
        sub.register("push_delay_versions", "Age of a gradient when it was applied, in versions.", delays);
    }
    let mut text = String::new();
    let _ = encode(&mut text, &registry);
    text
}

/// The delay histogram as it is kept, in Prometheus' buckets.
#[derive(Debug)]
struct Delays(Vec<u64>);

impl EncodeMetric for Delays {
    fn encode(&self, mut encoder: MetricEncoder) -> std::fmt::Result {
        const BOUNDS: [u64; 12] = [0, 1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128];
        let mut buckets: Vec<(f64, u64)> = BOUNDS.iter().map(|b| (*b as f64, 0)).collect();
        buckets.push((f64::MAX, 0));
        let (mut sum, mut count) = (0.0, 0);
        for (delay, &n) in self.0.iter().enumerate() {
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
