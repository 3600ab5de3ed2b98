//! The failure of a script on one of its ranks.

use crate::{failure::Failure, process::Process};
use paraft_worker::exit;
use std::time::{Duration, Instant};

/// A bug in a script fails on all ranks, so the first rank, which the user watches, gets this time to
/// show it.
const FIRST_RANK_TIMEOUT: Duration = Duration::from_secs(1);

/// The failure of a run whose script failed on this rank. A traceback that the user has seen is not
/// repeated.
pub(super) fn failed(workers: &mut [Process], rank: usize) -> Failure {
    let said = |w: &Process| w.last_words();
    let last = |words: &str| words.lines().next_back().unwrap_or_default().to_string();
    let words = said(&workers[rank]);
    let began = Instant::now();
    if rank > 0 && workers[0].is_seen() {
        while workers[0].ended().is_none() && began.elapsed() < FIRST_RANK_TIMEOUT {
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    let seen = workers.iter().any(|w| w.is_seen() && last(&said(w)) == last(&words));
    let worker = &mut workers[rank];
    let code = match (worker.killed_by(), worker.ended().and_then(|s| s.code())) {
        (Some(signal), _) => 128 + signal,
        (None, code) => code.unwrap_or(exit::FAILED),
    };
    let how = worker.obituary();
    let how = format!("{} {how}", worker.name);
    let failure = match seen || words.is_empty() {
        true => Failure::new(code, how),
        false => Failure::new(code, format!("{how}:\n{words}")),
    };
    let file = workers[rank].output().display().to_string();
    failure.of_output(&words).help(format!("all that it said is in {file}"))
}
