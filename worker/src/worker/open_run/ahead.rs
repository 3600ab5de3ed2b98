//! Rows that a loop will read soon: they are pulled while it does something else.

use super::{NextAction, OpenRun, misuse};
use crate::worker::{
    WorkerError,
    rows::{Wanted, most_per_partition},
};
use paraft_common::{BucketId, Step, table::MAX_PULLED_IDS};
use std::collections::{BTreeMap, HashMap};

/// A pull of rows that was asked for and is not complete.
#[derive(Debug)]
struct Asked {
    wanted: Wanted,
    /// What has arrived, by place in `wanted`. An interrupted wait keeps it: the same pull then brings only the rest.
    came: Vec<(usize, Vec<f32>)>,
    /// Its reader was interrupted: what arrives is dropped.
    drops: bool,
}

/// Rows of a table, in the order in which they came.
#[derive(Debug, Default)]
struct Found {
    places: HashMap<u64, usize>,
    values: Vec<f32>,
}

/// Rows that are pulled ahead of their reading. They are of one step: what is not read before the next one is dropped, so
/// that no row is older than the weights of its step.
#[derive(Debug, Default)]
pub(super) struct Ahead {
    /// Ids by table that no pull asks for yet.
    queued: BTreeMap<usize, Vec<u64>>,
    asked: Option<Asked>,
    /// By table, after this step.
    found: BTreeMap<usize, Found>,
    of: Step,
    /// The loop has read rows in this step: what it names from now on is for the next.
    pub read: bool,
}

impl Ahead {
    /// A reader was interrupted while it waited for these rows.
    pub fn cut_off(&mut self, wanted: Wanted) {
        self.asked = Some(Asked { wanted, came: Vec::new(), drops: true });
    }

    /// The loop has handed over the step's gradients: it reads no more rows of this step, and the step's own pull replaces theirs.
    pub fn abandon(&mut self) {
        self.asked = None;
    }

    /// Forgets rows of another step than this one.
    fn follow(&mut self, done: Step) {
        if self.of != done {
            self.of = done;
            self.found.clear();
            self.read = false;
        }
    }

    /// Writes the rows that are there; returns the places of the others.
    pub fn give(&mut self, done: Step, table: usize, dim: usize, ids: &[u64], into: &mut [f32]) -> Vec<u32> {
        self.follow(done);
        let Some(found) = self.found.get(&table) else { return (0..ids.len() as u32).collect() };
        let mut missing = Vec::new();
        for (at, (id, row)) in (0..).zip(ids.iter().zip(into.chunks_exact_mut(dim))) {
            match found.places.get(id) {
                Some(place) => row.copy_from_slice(&found.values[place * dim..][..dim]),
                None => missing.push(at),
            }
        }
        missing
    }
}

impl OpenRun {
    /// Pulls rows while the loop does something else: [`Self::rows`] then finds them there. In a step that has read rows
    /// already, or handed over a gradient, these are for the next step: the pull begins at the end of [`Self::step`]. They
    /// are as fresh as the job's mode lets their step read. Rows that are not read in that step are dropped, and of very many
    /// ids only the first are pulled.
    ///
    /// # Errors
    /// There is no such table.
    pub fn prefetch(&mut self, table: usize, ids: &[u64]) -> Result<(), WorkerError> {
        if self.tables().get(table).is_none() {
            return Err(misuse(format!("table {table} of {}", self.tables().len())));
        }
        let done = self.driver.done();
        self.ahead.follow(done);
        self.ahead.queued.entry(table).or_default().extend(ids);
        if !self.ahead.read && !self.pushes.begun() {
            self.ask_ahead()?;
        }
        Ok(())
    }

    /// Asks for what is queued, unless a pull is in flight.
    pub(super) fn ask_ahead(&mut self) -> Result<(), WorkerError> {
        if self.ahead.asked.is_some() || !matches!(self.asked, NextAction::Gradient { .. }) {
            return Ok(());
        }
        let (mut by_bucket, mut room) = (BTreeMap::<BucketId, Vec<u64>>::new(), MAX_PULLED_IDS);
        for (table, mut ids) in std::mem::take(&mut self.ahead.queued) {
            let Some(spec) = self.tables().get(table) else { continue };
            let (first, most) = (self.driver.layout.partitions(table).start, most_per_partition(spec));
            ids.sort_unstable();
            ids.dedup();
            for id in ids {
                let of = by_bucket.entry(BucketId(first + spec.partition_of(id))).or_default();
                if of.len() < most && room > 0 {
                    of.push(id);
                    room -= 1;
                }
            }
        }
        let wanted: Wanted = by_bucket.into_iter().filter(|(_, ids)| !ids.is_empty()).collect();
        if !wanted.is_empty() {
            self.driver.client.ask_rows(self.driver.done(), wanted.clone());
            self.ahead.asked = Some(Asked { wanted, came: Vec::new(), drops: false });
        }
        Ok(())
    }

    /// Waits for the rows that are asked for. Called before every other pull after the same step, because a session has one at
    /// a time, and tells answers apart by the step.
    ///
    /// If this worker had been taken out, all weights came instead, and it continues from another step.
    pub(super) fn settle(&mut self) -> Result<(), WorkerError> {
        let Some(mut asked) = self.ahead.asked.take() else { return Ok(()) };
        let done = self.driver.done();
        let take = |place: usize, rows: &[f32]| asked.came.push((place, rows.to_vec()));
        let pulled = match self.driver.client.pull_rows(done, asked.wanted.clone(), self.into.buffer()?, take)
        {
            Ok(pulled) => pulled,
            Err(e) => {
                self.ahead.asked = Some(asked);
                return Err(e.into());
            }
        };
        if pulled.rejoined {
            self.landed_elsewhere(pulled)?;
        } else if !asked.drops {
            self.ahead.follow(done);
            for (place, rows) in asked.came {
                let (bucket, ids) = &asked.wanted[place];
                let Some((table, _)) = self.driver.layout.partition(*bucket) else { continue };
                let found = self.ahead.found.entry(table).or_default();
                let first = found.values.len() / self.tables.dim(table).max(1);
                found.values.extend(rows);
                found.places.extend((first..).zip(ids).map(|(place, id)| (*id, place)));
            }
        }
        Ok(())
    }
}
