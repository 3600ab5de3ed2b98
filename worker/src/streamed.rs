//! A worker that holds some layers of its model at a time (`memory.resident`).
//!
//! Both flat vectors are as long as the model, but only the pages of present layers take memory ([`Pages`]). A step
//! passes through the layers forward and backward. Each layer is pulled before its use, the next ones while this
//! one computes, and the layers needed last are released first. The gradient is pushed bucket by bucket, which
//! frees its memory. All pulls of a step read the same version: in lock-step no bucket changes before this worker
//! has pushed its own gradient for it, so the backward pass sees the same bits as the forward pass.
//!
//! The number of layers asked for ahead follows from measured times: as many as are computed while one such pull
//! arrives. The waiting bytes are bounded ([`PULL_AHEAD_BYTES`]): of a larger layer a part is pulled ahead, the
//! rest when it is needed.
//!
//! If all weights are needed at once (evaluations, the end), they lie in a file ([`Scratch`]).

mod pace;
mod step;

pub(crate) use step::StreamedStep;

use crate::worker::WorkerError;
use pace::Pace;
use paraft_client::{Client, ClientError, PULL_AHEAD_BYTES, Places, Pull, Pulled};
use paraft_common::{BucketId, Share, Step, need::Bytes};
use paraft_host::{Pages, Scratch};
use paraft_job::Resident;
use paraft_models::Layer;
use std::{
    collections::BTreeSet,
    ops::Range,
    path::{Path, PathBuf},
    time::Instant,
};

const F32: usize = size_of::<f32>();

/// See the module.
pub(crate) struct Streamed {
    /// The buckets of each layer, in rising order. Neighbouring layers may share a bucket.
    layers: Vec<Vec<usize>>,
    /// The values of each bucket.
    buckets: Vec<Range<usize>>,
    weights: Pages,
    gradient: Pages,
    /// Whether each bucket's weights are in memory.
    here: Vec<bool>,
    /// The pull that brought each bucket last, and the number of pulls.
    brought: Vec<u64>,
    pulls: u64,
    /// Number of values in memory.
    held: usize,
    /// The maximum of `held`.
    most: usize,
    /// The step of the weights.
    done: Step,
    /// The last requested layer, and whether the pass is the backward pass.
    at: usize,
    back: bool,
    /// A pull in progress.
    asked: Option<PendingPull>,
    pace: Pace,
    /// All weights, and their step.
    whole: Option<Scratch>,
    whole_of: Option<Step>,
    folder: PathBuf,
}

/// A pull that was asked for ahead.
struct PendingPull {
    pull: Pull,
    /// The buckets of that pull.
    wanted: Vec<usize>,
    at: Instant,
}

/// The destination of a pull of some buckets.
struct Into<'a> {
    weights: &'a mut Pages,
    buckets: &'a [Range<usize>],
    wanted: &'a [usize],
}

impl Places for Into<'_> {
    fn place(&mut self, bucket: BucketId) -> Option<&mut [f32]> {
        let i = bucket.0 as usize;
        self.wanted.contains(&i).then(|| &mut self.weights[self.buckets[i].clone()])
    }
}

/// Why a step failed.
#[derive(Debug)]
pub(crate) enum StreamError {
    /// This worker was removed and has joined again; it continues from this pull.
    Rejoined(Pulled),
    Failed(WorkerError),
}

impl From<ClientError> for StreamError {
    fn from(e: ClientError) -> Self {
        Self::Failed(e.into())
    }
}

impl Streamed {
    /// For a model of these layers with these buckets of its flat vector. `folder` holds the file for all weights.
    ///
    /// # Errors
    /// The model is not divided into layers, or a layer exceeds the limit.
    pub fn new(
        layers: &[Layer],
        buckets: Vec<Range<usize>>,
        resident: Resident,
        folder: &Path,
    ) -> Result<Self, WorkerError> {
        if layers.is_empty() {
            return Err(WorkerError::Job(
                "memory.resident: this model isn't divided in layers (Model::layers); take [memory] out"
                    .into(),
            ));
        }
        let of = |layer: &Layer| -> Vec<usize> {
            let touches = |b: &Range<usize>| layer.params.iter().any(|p| p.start < b.end && b.start < p.end);
            (0..buckets.len()).filter(|i| touches(&buckets[*i])).collect()
        };
        let layers: Vec<Vec<usize>> = layers.iter().map(of).collect();
        let values = |layer: &Vec<usize>| layer.iter().map(|b| buckets[*b].len()).sum::<usize>();
        let sizes: Vec<usize> = layers.iter().map(values).collect();
        let largest = sizes.iter().copied().max().unwrap_or_default();
        let most = resident.values(largest);
        if most < largest {
            let layer = sizes.iter().position(|s| *s == largest).unwrap_or_default();
            let bytes = |values: usize| Bytes((values * F32) as u64);
            return Err(WorkerError::Job(format!(
                "memory.resident is {}, and layer {layer} of {}, with the buckets that it lies in, takes {}; with twice as much the next \
                 layer can come while one computes",
                bytes(most),
                sizes.len(),
                bytes(largest)
            )));
        }
        let len = buckets.last().map_or(0, |b| b.end);
        let pages = || {
            Pages::new(len).map_err(|e| WorkerError::Job(format!("no address space for {len} values: {e}")))
        };
        Ok(Self {
            here: vec![false; buckets.len()],
            brought: vec![0; buckets.len()],
            pulls: 0,
            layers,
            weights: pages()?,
            gradient: pages()?,
            buckets,
            held: 0,
            most,
            done: Step(0),
            at: 0,
            back: false,
            asked: None,
            pace: Pace::new(),
            whole: None,
            whole_of: None,
            folder: folder.to_path_buf(),
        })
    }

    /// All weights, from the file. Zeros before the first pull of everything.
    pub fn whole(&self) -> &[f32] {
        self.whole.as_deref().unwrap_or_default()
    }

    /// The memory that a pull of everything writes; then call [`Self::landed`].
    pub fn buffer(&mut self) -> Result<&mut [f32], WorkerError> {
        let whole = match self.whole.take() {
            Some(whole) => whole,
            None => scratch(&self.folder, self.weights.len())?,
        };
        self.whole_of = None;
        Ok(self.whole.insert(whole))
    }

    /// A pull of everything is complete.
    pub fn landed(&mut self, pulled: &Pulled) {
        self.begin(pulled.done);
        self.whole_of = Some(pulled.done);
    }

    /// Pulls all weights of the last step into the file. Returns this worker's share of the held-out samples if the
    /// servers assign it only now: pulls of some layers do not carry it.
    pub fn fetch_whole(&mut self, client: &mut Client) -> Result<Option<Share>, WorkerError> {
        if self.whole_of == Some(self.done) {
            return Ok(None);
        }
        let done = self.done;
        let pulled = client.pull_by(Pull::of(done), self.buffer()?)?;
        self.whole_of = Some(pulled.done);
        Ok(pulled.share)
    }

    /// The pull between two steps. It keeps only the first layer.
    pub fn pull_between(&mut self, client: &mut Client, pull: Pull) -> Result<Pulled, ClientError> {
        self.begin(pull.done);
        let first = self.layers[0].clone();
        // The shards keep a checkpoint's image for a pull of everything.
        let only = if pull.checkpoint { Vec::new() } else { ids(&first) };
        let pulled = self.pull(client, Pull { only, ..pull }, &first)?;
        self.done = pulled.done;
        Ok(pulled)
    }

    /// Drops the weights of the last step: the next step cannot use them.
    fn begin(&mut self, done: Step) {
        self.weights.release(0..self.weights.len());
        self.here.fill(false);
        (self.held, self.at, self.back, self.done) = (0, 0, false, done);
    }

    fn pull(&mut self, client: &mut Client, pull: Pull, wanted: &[usize]) -> Result<Pulled, ClientError> {
        let pulled =
            client.pull_to(pull, &mut Into { weights: &mut self.weights, buckets: &self.buckets, wanted })?;
        self.pulls += 1;
        for b in wanted {
            (self.here[*b], self.brought[*b]) = (true, self.pulls);
            self.held += self.buckets[*b].len();
        }
        Ok(pulled)
    }

    /// Like [`Self::pull`], within a step.
    fn pull_within(&mut self, client: &mut Client, pull: Pull, wanted: &[usize]) -> Result<(), StreamError> {
        let pulled = self.pull(client, pull, wanted)?;
        match pulled.rejoined {
            false => Ok(()),
            true => {
                self.begin(pulled.done);
                Err(StreamError::Rejoined(pulled))
            }
        }
    }

    fn missing(&self, layer: usize) -> Vec<usize> {
        self.layers[layer].iter().copied().filter(|b| !self.here[*b]).collect()
    }

    /// The layers after this one, up to the end of the step.
    fn behind(&self, layer: usize) -> impl Iterator<Item = usize> + use<> {
        let there = if self.back { 0..0 } else { layer + 1..self.layers.len() };
        let back = if self.back { layer } else { self.layers.len() };
        there.chain((0..back).rev())
    }

    /// Brings a layer into memory, and asks for the next ones if there is room.
    fn bring(&mut self, layer: usize, client: &mut Client) -> Result<(), StreamError> {
        let again = layer == self.at;
        if again && self.asked.is_some() && self.missing(layer).is_empty() {
            return Ok(());
        }
        if !again {
            self.pace.computed();
        }
        self.back |= layer < self.at;
        self.at = layer;
        if !self.missing(layer).is_empty()
            && let Some(asked) = self.asked.take()
        {
            let waits = Instant::now();
            self.pull_within(client, asked.pull, &asked.wanted)?;
            self.pace.came(asked.at, waits.elapsed());
        }
        let missing = self.missing(layer);
        if !missing.is_empty() {
            self.make_room(&missing, &[layer]);
            self.pull_within(client, self.of(&missing), &missing)?;
        }
        if self.asked.is_none() {
            self.ask_ahead(layer, client);
        }
        if !again {
            self.pace.since = Instant::now();
        }
        Ok(())
    }

    /// Asks for the missing buckets of the layers after this one.
    fn ask_ahead(&mut self, layer: usize, client: &mut Client) {
        let (mut wanted, mut keep) = (Vec::new(), vec![layer]);
        let (mut bytes, mut layers) = (0, 0);
        'layers: for next in self.behind(layer) {
            let missing: Vec<usize> =
                (self.missing(next).into_iter()).filter(|b| !wanted.contains(b)).collect();
            keep.push(next);
            if missing.is_empty() {
                continue;
            }
            // Make room for the whole layer, so that the part pulled ahead can stay until the rest arrives.
            let need: Vec<usize> = wanted.iter().chain(&missing).copied().collect();
            if !self.make_room(&need, &keep) {
                break;
            }
            for b in missing {
                bytes += self.buckets[b].len() * F32;
                if bytes > PULL_AHEAD_BYTES {
                    break 'layers;
                }
                wanted.push(b);
            }
            layers += 1;
            if layers >= self.pace.ahead() {
                break;
            }
        }
        if !wanted.is_empty() {
            wanted.sort_unstable(); // a pull's buckets are sorted
            let pull = self.of(&wanted);
            client.ask(pull.clone());
            self.asked = Some(PendingPull { pull, wanted, at: Instant::now() });
        }
    }

    fn of(&self, buckets: &[usize]) -> Pull {
        Pull { only: ids(buckets), ..Pull::of(self.done) }
    }

    /// Releases the buckets needed last until these fit, but none of the layers in `keep`. Returns false, and
    /// releases nothing, if they cannot fit.
    fn make_room(&mut self, buckets: &[usize], keep: &[usize]) -> bool {
        let values = |of: &[usize]| of.iter().map(|b| self.buckets[*b].len()).sum::<usize>();
        let kept: BTreeSet<usize> = keep.iter().flat_map(|l| &self.layers[*l]).copied().collect();
        let need = values(buckets);
        let stays: Vec<usize> = kept.iter().copied().filter(|b| self.here[*b]).collect();
        if values(&stays) + need > self.most {
            return false;
        }
        while self.held + need > self.most {
            let of = |layer: usize| -> Vec<usize> {
                (self.layers[layer].iter().copied()).filter(|b| self.here[*b] && !kept.contains(b)).collect()
            };
            // Layers behind the backward pass are needed no more. Otherwise the first layers are needed last.
            let behind = if self.back { self.at + 1..self.layers.len() } else { 0..0 };
            let gone = behind.chain(0..self.layers.len()).map(of).find(|buckets| !buckets.is_empty());
            let Some(gone) = gone else { return false };
            for b in gone {
                self.here[b] = false;
                self.held -= self.buckets[b].len();
                self.weights.release(self.buckets[b].clone());
            }
        }
        true
    }
}

fn ids(buckets: &[usize]) -> Vec<BucketId> {
    buckets.iter().map(|b| BucketId(*b as u32)).collect()
}

/// A file of values in this folder.
pub(crate) fn scratch(folder: &Path, len: usize) -> Result<Scratch, WorkerError> {
    Scratch::new(folder, len).map_err(|e| {
        let bytes = Bytes((len * F32) as u64);
        WorkerError::Scratch(
            folder.to_path_buf(),
            format!("no room for {bytes}, which are needed beside what is in memory: {e}"),
        )
    })
}
