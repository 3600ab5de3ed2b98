//! The pushes of a BSP round as one update: their sum and its norm. Pure functions; the leader tracks the open
//! rounds (`leader/rounds.rs`).

use super::{batched::BatchedPushes, command::Contribution};
use paraft_common::{
    Encoding, Payload, codec::F32_BYTES, encoding::sum_of_squares, optim::Overrides, table::Rows,
};

/// A push of a round.
#[derive(Clone, Debug)]
pub struct RoundPush {
    /// The worker, sequence number and step, and the version that the worker pulled.
    pub contribution: Contribution,
    /// In the encoding that the job has for the bucket.
    pub payload: Payload,
    /// What the worker sets in place of the job's options.
    pub overrides: Overrides,
    /// It has no gradient, so its round changes nothing.
    pub skip: bool,
    /// The script clips the step by its norm.
    pub clipped: bool,
}

/// A closed round: its parts, ascending by worker, or their sum.
#[derive(Clone, Debug)]
pub struct Sum {
    /// Ascending by worker.
    pub contributions: Vec<Contribution>,
    /// The payload of the update: the only push as it came, or what [`BatchedPushes`] writes.
    pub payload: Payload,
    /// Turns the sum into the mean.
    pub factor: f32,
    /// Squared norm of the mean.
    pub mean_sum_of_squares: f64,
    /// The mean of what its pushes set.
    pub overrides: Overrides,
    /// One of its pushes has no gradient: none is applied.
    pub skip: bool,
    /// A script clips the step by its norm.
    pub clipped: bool,
}

/// Bytes that the sum of `parts` pushes of `len` values reads.
pub fn bytes(parts: usize, len: usize) -> u64 {
    (parts * len * F32_BYTES) as u64
}

const CHECKED: &str = "the parts of a bucket fit it: it was checked where they came in";

/// The update of the parts, for a bucket with `len` values in `encoding`. Ascending by worker: floating-point
/// addition is not associative, so the order must not depend on arrival.
pub fn sum(parts: Vec<RoundPush>, encoding: Encoding, len: usize) -> Sum {
    sum_by(parts, |mut payloads| match payloads.len() {
        // One worker: the bytes as they came, so that BSP, SSP and ASP are bit-equal for one worker.
        0 | 1 => {
            let only = payloads.pop().unwrap_or_default();
            let squares = sum_of_squares(&only, encoding, len).expect(CHECKED);
            (only, squares)
        }
        _ => {
            let batched = BatchedPushes::of(payloads, encoding, len).expect(CHECKED);
            let sum = batched.sum();
            let squares = sum_of_squares(&sum, Encoding::F32, len).expect(CHECKED);
            (batched.payload(sum), squares)
        }
    })
}

/// As [`sum`], for rows of `dim` values of a table.
pub fn sum_rows(parts: Vec<RoundPush>, dim: usize) -> Sum {
    sum_by(parts, |mut payloads| match payloads.len() {
        0 | 1 => {
            let only = payloads.pop().unwrap_or_default();
            let squares = Rows::of(&only, dim).expect(CHECKED).sum_of_squares();
            (only, squares)
        }
        _ => {
            let rows: Result<Vec<Rows>, _> = payloads.iter().map(|p| Rows::of(p, dim)).collect();
            let sum = Rows::sum(&rows.expect(CHECKED));
            let squares = Rows::of(&sum, dim).expect(CHECKED).sum_of_squares();
            (sum, squares)
        }
    })
}

/// The update of the parts; `add` gives the payload of their sum and the sum of its squares.
fn sum_by(parts: Vec<RoundPush>, add: impl FnOnce(Vec<Payload>) -> (Payload, f64)) -> Sum {
    let clipped = parts.iter().any(|p| p.clipped);
    if parts.iter().any(|p| p.skip) {
        let contributions = parts.into_iter().map(|p| p.contribution).collect();
        let (payload, overrides) = (Payload::EMPTY, Overrides::default());
        // It waits for the norm of its step as any other sum, and adds nothing to it.
        return Sum {
            contributions,
            payload,
            factor: 1.0,
            mean_sum_of_squares: 0.0,
            overrides,
            skip: true,
            clipped,
        };
    }
    let set: Vec<_> = parts.iter().map(|p| p.overrides).collect();
    let (contributions, payloads): (Vec<_>, Vec<_>) =
        parts.into_iter().map(|p| (p.contribution, p.payload)).unzip();
    let total = contributions.len().max(1) as f64;
    let overrides = Overrides::mean(&set);
    let (payload, squares) = add(payloads);
    let (mean_sum_of_squares, factor) = (squares / (total * total), 1.0 / total as f32);
    Sum { contributions, mean_sum_of_squares, factor, payload, overrides, skip: false, clipped }
}

#[cfg(test)]
#[path = "round_tests.rs"]
mod tests;
