//! How many layers to ask for ahead, by measured times.

use std::time::{Duration, Instant};

/// The maximum number of layers asked for at once.
const MAX_PULLS_AHEAD: usize = 8;

/// Decides how many layers to ask for ahead.
pub(super) struct Pace {
    /// When the computation of the current layer started.
    pub(super) since: Instant,
    /// The duration of a layer and of a pull asked for ahead, each an exponential mean.
    layer: Option<Duration>,
    pull: Option<Duration>,
}

impl Pace {
    pub(super) fn new() -> Self {
        Self { since: Instant::now(), layer: None, pull: None }
    }

    /// Records that a layer was computed.
    pub(super) fn computed(&mut self) {
        note(&mut self.layer, self.since.elapsed());
    }

    /// Records a pull that arrived before its use, or `waited` later.
    pub(super) fn came(&mut self, asked: Instant, waited: Duration) {
        // A pull without a wait took at most this long; the exact time is unknown.
        let took = asked.elapsed();
        match (self.pull, waited < took / 16) {
            (Some(known), true) => note(&mut self.pull, known.min(took)),
            _ => note(&mut self.pull, took),
        }
    }

    /// The number of layers that are computed during one pull.
    pub(super) fn ahead(&self) -> usize {
        let (Some(layer), Some(pull)) = (self.layer, self.pull) else { return 1 };
        let n = pull.as_secs_f64() / layer.as_secs_f64().max(1e-6);
        (n.ceil() as usize).clamp(1, MAX_PULLS_AHEAD)
    }
}

fn note(mean: &mut Option<Duration>, took: Duration) {
    *mean = Some(mean.map_or(took, |mean| (mean * 7 + took) / 8));
}

#[cfg(test)]
#[path = "pace_tests.rs"]
mod tests;
