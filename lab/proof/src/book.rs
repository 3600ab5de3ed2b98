//! A ledger with an entry of its own for every push.
//!
//! Each bucket has the same length. Push number `round` of worker `w` on a bucket is 1 at one place of that bucket
//! and 0 elsewhere. For long books up to [`MAX_PER_PLACE`] pushes share a place: the n-th of them (from 0) pushes 4^n,
//! so that the place, read in base 4, has a digit for each of them. A push that was applied once, never or twice
//! reads as 1, 0 or 2 in its own digit. All sums are whole numbers below 2^24, exact in `f32` in any order.

use crate::{At, Ledger, Page};
use paraft_client::ClientError;
use paraft_common::Mode;

/// Digits of base 4 that an `f32` holds exactly.
pub const MAX_PER_PLACE: u32 = 12;
/// A longer bucket takes more pushes into a place.
const SHORT: usize = 4096;

/// The shape of a book.
#[derive(Clone, Copy, Debug)]
pub struct Book {
    /// The job and its settings; its own pages are not used.
    pub ledger: Ledger,
    /// Workers.
    pub workers: u32,
    /// Pushes of each worker on each bucket, at most.
    pub rounds: u64,
    /// Buckets.
    pub buckets: usize,
    /// Pushes that share a place; 1: plain unit vectors.
    pub per_place: u32,
}

/// What became of a push, as its worker knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It was acknowledged: it must be in once.
    Acknowledged,
    /// It was made, and nobody said that it is in: it may be in once.
    Unknown,
    /// It was never made.
    Unmade,
}

/// What the final weights say.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Pushes that were acknowledged.
    pub acknowledged: u64,
    /// Of these, such as are not in.
    pub lost: u64,
    /// Pushes that are in more than once, or were never made.
    pub doubled: u64,
    /// Pushes that were made and not acknowledged.
    pub unknown: u64,
    /// Of these, such as are in.
    pub unknown_applied: u64,
    /// Places that hold no sum of entries at all.
    pub damaged: u64,
    /// The first few entries that are wrong, in words.
    pub wrong: Vec<String>,
}

impl Book {
    /// A book of `rounds` pushes of each of `workers` on each of `buckets`.
    pub fn new(mode: Mode, workers: u32, rounds: u64, buckets: usize) -> Self {
        let entries = workers as usize * rounds as usize;
        let per_place = (entries.div_ceil(SHORT) as u32).clamp(1, MAX_PER_PLACE);
        let bucket_len = entries.div_ceil(per_place as usize).max(1);
        let ledger = Ledger {
            pages: 0,
            bucket_len,
            extra: bucket_len * buckets,
            whole: true,
            ..Ledger::new(mode, workers, rounds)
        };
        Self { ledger, workers, rounds, buckets, per_place }
    }

    /// Joins the job.
    pub fn join(&self, fleet: &At, worker: u32) -> Result<Page, ClientError> {
        self.ledger.join(fleet, worker)
    }

    /// Where a push is entered: the place in the flat vector, and its digit there. `round` from 1.
    fn entry(&self, worker: u32, round: u64, bucket: usize) -> (usize, u32) {
        let entry = u64::from(worker) * self.rounds + round - 1;
        let place = bucket * self.ledger.bucket_len + (entry / u64::from(self.per_place)) as usize;
        (place, (entry % u64::from(self.per_place)) as u32)
    }

    /// Makes `gradient` the pushes of one round of one worker; what it held of the round before goes.
    pub fn write(&self, worker: u32, round: u64, gradient: &mut [f32]) {
        for bucket in 0..self.buckets {
            if round > 1 {
                gradient[self.entry(worker, round - 1, bucket).0] = 0.0;
            }
            let (place, digit) = self.entry(worker, round, bucket);
            gradient[place] = (1u32 << (2 * digit)) as f32;
        }
    }

    /// A bucket in which a push is not: what a worker that has pushed it must never pull.
    pub fn missing(&self, worker: u32, round: u64, weights: &[f32]) -> Option<usize> {
        (0..self.buckets).find(|bucket| {
            let (place, digit) = self.entry(worker, round, *bucket);
            // (A cast of what is no such sum at all gives some number; the final weights are checked for that.)
            (-weights[place] as u32 >> (2 * digit)) & 3 == 0
        })
    }

    /// Reads the final weights. `fate` tells of worker, round (from 1) and bucket.
    pub fn read(&self, weights: &[f32], fate: impl Fn(u32, u64, usize) -> Fate) -> Tally {
        let mut tally = Tally::default();
        let full = (1u64 << (2 * self.per_place)) as f32;
        let mut used = vec![0u32; weights.len()];
        for bucket in 0..self.buckets {
            for worker in 0..self.workers {
                for round in 1..=self.rounds {
                    let (place, digit) = self.entry(worker, round, bucket);
                    used[place] += 1;
                    let sum = -weights[place];
                    if !(sum >= 0.0 && sum < full && sum.fract() == 0.0) {
                        continue; // counted below, once a place
                    }
                    let times = (sum as u32 >> (2 * digit)) & 3;
                    let who = || format!("worker {worker}, round {round}, bucket {bucket}: {times} times");
                    tally.enter(fate(worker, round, bucket), times, who);
                }
            }
        }
        for (place, sum) in weights.iter().map(|w| -w).enumerate() {
            let possible = if used[place] == 0 { 1.0 } else { full };
            if !(sum >= 0.0 && sum < possible && sum.fract() == 0.0) {
                tally.damaged += 1;
                tally.note(|| format!("place {place} reads {}", -sum));
            }
        }
        tally
    }
}

impl Tally {
    fn enter(&mut self, fate: Fate, times: u32, who: impl Fn() -> String) {
        match fate {
            Fate::Acknowledged => {
                self.acknowledged += 1;
                self.lost += u64::from(times == 0);
            }
            Fate::Unknown => {
                self.unknown += 1;
                self.unknown_applied += u64::from(times > 0);
            }
            Fate::Unmade => {}
        }
        let most = if fate == Fate::Unmade { 0 } else { 1 };
        self.doubled += u64::from(times > most);
        if times > most || fate == Fate::Acknowledged && times == 0 {
            self.note(|| format!("{} ({fate:?})", who()));
        }
    }

    fn note(&mut self, what: impl Fn() -> String) {
        const MOST: usize = 10;
        if self.wrong.len() < MOST {
            self.wrong.push(what());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn applied(book: &Book, pushes: &[(u32, u64)]) -> Vec<f32> {
        let mut weights = vec![0.0f32; book.ledger.len()];
        for (worker, round) in pushes {
            let mut gradient = vec![0.0; weights.len()];
            book.write(*worker, *round, &mut gradient);
            weights.iter_mut().zip(&gradient).for_each(|(w, g)| *w -= g);
        }
        weights
    }

    #[test]
    fn every_push_has_an_entry_of_its_own_and_reads_as_often_as_it_was_applied() {
        for rounds in [3, 5000, 30_000] {
            let book = Book::new(Mode::Asp, 2, rounds, 3);
            assert_eq!(book.per_place > 1, rounds > 3, "{rounds}");
            // 0: once, acknowledged. 1: once, unknown. The last: twice. The one before: acknowledged and lost.
            let pushes = [(0, 1), (1, 1), (1, rounds), (1, rounds)];
            let fate = |w, r, _| match (w, r) {
                (0, 1) => Fate::Acknowledged,
                (1, r) if r == rounds - 1 => Fate::Acknowledged,
                (1, _) => Fate::Unknown,
                _ => Fate::Unmade,
            };
            let tally = book.read(&applied(&book, &pushes), fate);
            let seen = (tally.acknowledged, tally.lost, tally.doubled, tally.unknown_applied, tally.damaged);
            assert_eq!(seen, (6, 3, 3, 6, 0), "{rounds}: {tally:?}");
            // What nobody pushed is wrong, too, once for each bucket.
            let tally = book.read(&applied(&book, &[(0, 2)]), |_, _, _| Fate::Unmade);
            assert_eq!((tally.doubled, tally.lost), (3, 0));
        }
    }

    #[test]
    fn what_is_no_sum_of_entries_is_damage() {
        let book = Book::new(Mode::Asp, 1, 4, 1);
        for bad in [1.0, -0.5, -4.0, f32::NAN] {
            let mut weights = vec![0.0; book.ledger.len()];
            weights[2] = bad;
            assert_eq!(book.read(&weights, |_, _, _| Fate::Unmade).damaged, 1, "{bad}");
        }
    }

    #[test]
    fn a_gradient_that_is_written_again_holds_one_round() {
        let book = Book::new(Mode::Asp, 1, 9000, 2);
        let mut gradient = vec![0.0; book.ledger.len()];
        for round in 1..=9000 {
            book.write(0, round, &mut gradient);
        }
        assert_eq!(gradient.iter().filter(|g| **g != 0.0).count(), 2);
    }
}
