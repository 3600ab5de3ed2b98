//! A worker's Prometheus metrics.

use crate::worker::WorkerError;
use axum::{Router, extract::State, http::header, response::IntoResponse, routing::get};
use paraft_tls::{Need, Wire, listen::wires};
use paraft_trace::Stages;
use prometheus_client::{
    encoding::text::encode,
    metrics::{
        counter::{ConstCounter, Counter},
        family::Family,
        gauge::ConstGauge,
    },
    registry::{Registry, Unit},
};
use std::{
    net::{SocketAddr, TcpListener},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    thread,
};
use tokio::sync::mpsc;

/// Numbers that the training loop stores and a scrape reads.
#[derive(Debug, Default)]
pub struct Gauges {
    pub step: AtomicU64,
    pub samples: AtomicU64,
    pub bytes_pushed: AtomicU64,
    pub bytes_pulled: AtomicU64,
    loss: AtomicU64,
    waited: AtomicU64,
    stages: OnceLock<Arc<Stages>>,
}

type StageLabel = [(&'static str, &'static str); 1];

impl Gauges {
    pub fn loss(&self, loss: f64) {
        self.loss.store(loss.to_bits(), Relaxed);
    }

    pub fn waited(&self, seconds: f64) {
        self.waited.store(seconds.to_bits(), Relaxed);
    }

    /// Sets the client's stages. Call it once.
    pub fn stages(&self, stages: Arc<Stages>) {
        let _ = self.stages.set(stages);
    }

    fn render(&self) -> String {
        let f = |a: &AtomicU64| f64::from_bits(a.load(Relaxed));
        let n = |a: &AtomicU64| a.load(Relaxed);
        let usage = paraft_host::usage();
        let mut r = Registry::with_prefix("paraft_worker");
        r.register("step", "Steps done", ConstGauge::new(n(&self.step) as i64));
        r.register("samples", "Samples trained on", ConstCounter::new(n(&self.samples)));
        r.register("train_loss", "Mean loss of the last steps", ConstGauge::new(f(&self.loss)));
        let waited = ConstCounter::new(f(&self.waited));
        r.register_with_unit("wait", "Time spent in pulls, network included", Unit::Seconds, waited);
        let pushed = ConstCounter::new(n(&self.bytes_pushed));
        r.register_with_unit("push", "Payload pushed", Unit::Bytes, pushed);
        let pulled = ConstCounter::new(n(&self.bytes_pulled));
        r.register_with_unit("pull", "Payload pulled", Unit::Bytes, pulled);
        r.register_with_unit("cpu", "CPU time used", Unit::Seconds, ConstCounter::new(usage.cpu_seconds));
        let seconds = Family::<StageLabel, Counter<f64, AtomicU64>>::default();
        let spans = Family::<StageLabel, Counter>::default();
        for total in self.stages.get().map(|s| s.totals()).into_iter().flatten() {
            let label = [("stage", total.stage.name())];
            seconds.get_or_create(&label).inc_by(total.time.as_secs_f64());
            spans.get_or_create(&label).inc_by(total.spans);
        }
        r.register_with_unit("stage", "Time of the stages' spans, added up", Unit::Seconds, seconds);
        r.register("stage_spans", "Spans of each stage: buckets that went through it", spans);
        let mut text = String::new();
        let _ = encode(&mut text, &r);
        text
    }
}

/// Serves `/metrics`, if the options say so.
pub fn serve_at(at: Option<SocketAddr>, gauges: &Arc<Gauges>, job: &str) -> Result<(), WorkerError> {
    let Some(at) = at else { return Ok(()) };
    let cannot = |e: std::io::Error| format!("--metrics {at}: {e}");
    let listener = TcpListener::bind(at)
        .map_err(|e| WorkerError::Job(format!("{}; choose another port or 0", cannot(e))))?;
    let bound = listener.local_addr().map_or(at, |a| a);
    tracing::info!(at = %bound, "serving /metrics");
    serve(listener, gauges.clone(), job.into()).map_err(|e| WorkerError::Job(cannot(e)))
}

/// Accepted connections of clients that may read the job.
struct Wires(mpsc::Receiver<Wire>);

impl axum::serve::Listener for Wires {
    type Io = Wire;
    type Addr = ();

    async fn accept(&mut self) -> (Wire, ()) {
        match self.0.recv().await {
            Some(wire) => (wire, ()),
            None => std::future::pending().await,
        }
    }

    fn local_addr(&self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Serves `/metrics` on its own thread until the process ends.
fn serve(listener: TcpListener, gauges: Arc<Gauges>, job: String) -> std::io::Result<()> {
    listener.set_nonblocking(true)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let page = |State(g): State<Arc<Gauges>>| async move {
        let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
        ([(header::CONTENT_TYPE, kind)], g.render()).into_response()
    };
    let app = Router::new().route("/metrics", get(page)).with_state(gauges);
    let serve = move || {
        runtime.block_on(async move {
            if let Ok(listener) = tokio::net::TcpListener::from_std(listener) {
                let _ = axum::serve(Wires(wires(listener, Need::Reader, job)), app).await;
            }
        });
    };
    thread::Builder::new().name("metrics".into()).spawn(serve).map(|_| ())
}
