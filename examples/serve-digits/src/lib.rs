//! An inference server whose weights change while it answers. Each request is answered by one version, whole, and says which.

use axum::{Router, body::Bytes, extract::State, http::StatusCode, routing::post};
use paraft_worker::reader::{ReadError, Reader, ValueType, Want, WholeVersion};
use serde_json::json;
use std::{
    sync::{Arc, RwLock},
    time::Duration,
};
use tokio::task::JoinHandle;

/// How long the server waits for the next version before it asks again.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Pixels of an image, from 0 to 16.
const PIXELS: usize = 64;

/// A fully connected layer: `[out, in]` weights, and biases.
struct Layer {
    weight: Vec<f32>,
    bias: Vec<f32>,
}

/// An MLP: the weights of one version.
struct Net {
    version: u64,
    layers: Vec<Layer>,
}

impl Net {
    /// Layers are named `0`, `2`, ..., as in PyTorch's `Sequential` with a ReLU between.
    fn of(reader: &Reader, version: &WholeVersion) -> anyhow::Result<Self> {
        let names: Vec<_> = reader.layout().tensors().iter().map(|t| t.name.as_str()).collect();
        let values = |name: &str| -> anyhow::Result<Vec<f32>> {
            let place = names.iter().position(|n| *n == name);
            let bytes = place.and_then(|i| version.tensor(reader.layout(), ValueType::F32, i));
            let bytes = bytes.ok_or_else(|| anyhow::anyhow!("the job has no `{name}`: is it an MLP?"))?;
            Ok(bytes.as_chunks().0.iter().map(|v| f32::from_le_bytes(*v)).collect())
        };
        let layers = (0..names.len() / 2).map(|i| {
            Ok(Layer {
                weight: values(&format!("{}.weight", 2 * i))?,
                bias: values(&format!("{}.bias", 2 * i))?,
            })
        });
        Ok(Self { version: version.step, layers: layers.collect::<anyhow::Result<_>>()? })
    }

    fn digit(&self, pixels: &[f32]) -> usize {
        let mut x: Vec<f32> = pixels.iter().map(|p| p / 16.0).collect();
        for (i, layer) in self.layers.iter().enumerate() {
            let rows = layer.weight.chunks_exact(x.len());
            let out =
                rows.zip(&layer.bias).map(|(row, b)| row.iter().zip(&x).map(|(w, x)| w * x).sum::<f32>() + b);
            let is_last = i + 1 == self.layers.len();
            x = out.map(|v| if is_last { v } else { v.max(0.0) }).collect();
        }
        let best = x.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
        best.map_or(0, |(digit, _)| digit)
    }
}

/// The weights in use.
pub struct Digits(RwLock<Arc<Net>>);

impl Digits {
    /// A request keeps the weights that it began with.
    fn net(&self) -> Arc<Net> {
        self.0.read().unwrap_or_else(|e| e.into_inner()).clone()
    }
}

/// Reads the job's weights, and each newer version as it comes. The task ends if there will be none.
///
/// # Errors
/// The fleet does not answer, has no such job, or it is no MLP.
pub async fn follow(
    servers: &[String],
    job: &str,
) -> anyhow::Result<(Arc<Digits>, JoinHandle<anyhow::Result<()>>)> {
    let mut reader = Reader::open(servers, job, ValueType::F32, TIMEOUT).await?;
    let first = reader.next(Want::AtLeast(0), TIMEOUT).await?;
    let mut last = first.step;
    let digits = Arc::new(Digits(RwLock::new(Arc::new(Net::of(&reader, &first)?))));
    let served = digits.clone();
    let following = tokio::spawn(async move {
        loop {
            match reader.next(Want::AtLeast(last + 1), TIMEOUT).await {
                Ok(version) => {
                    // It was received and checked beside the requests; the swap is a pointer.
                    let net = Arc::new(Net::of(&reader, &version)?);
                    last = version.step;
                    *served.0.write().unwrap_or_else(|e| e.into_inner()) = net;
                }
                // The last version stays in use.
                Err(ReadError::Ended { .. }) => std::future::pending().await,
                Err(ReadError::Timeout(_)) => {}
                Err(error) => return Err(error.into()),
            }
        }
    });
    Ok((digits, following))
}

/// `POST /digit` with 64 pixels as a JSON list.
pub fn router(digits: Arc<Digits>) -> Router {
    Router::new().route("/digit", post(answer)).with_state(digits)
}

async fn answer(State(digits): State<Arc<Digits>>, body: Bytes) -> (StatusCode, String) {
    let pixels = serde_json::from_slice::<Vec<f32>>(&body).ok().filter(|p| p.len() == PIXELS);
    let Some(pixels) = pixels else {
        return (StatusCode::BAD_REQUEST, format!("send a JSON list of {PIXELS} numbers from 0 to 16\n"));
    };
    let net = digits.net();
    (StatusCode::OK, json!({ "digit": net.digit(&pixels), "version": net.version }).to_string())
}
