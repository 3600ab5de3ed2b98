//! Rows of a ledger: a step adds 1 to some rows of a table, so that each row ends as the number of pushes that named it.

use crate::tally::{Fate, Tally};
use paraft_client::{Client, ClientError};
use paraft_common::{
    BucketId, Step, TableSpec,
    table::{MAX_PULLED_IDS, WhenFull, hash_id},
};
use std::collections::BTreeMap;

/// The rows of a ledger.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LedgerRows {
    /// Rows of the table once its first steps are done.
    pub rows: u64,
    /// Rows that a later step names.
    pub per_step: u32,
    /// The table's partitions.
    pub partitions: u32,
    /// Workers: the first steps of all make every row.
    pub workers: u32,
}

/// Rows that one of the first steps makes.
const MADE_PER_STEP: u64 = 50_000;

impl LedgerRows {
    /// The table: one value a row, SGD with rate 1, zeros.
    pub fn table(&self) -> TableSpec {
        let full = WhenFull::Refuse;
        TableSpec { partitions: self.partitions, full, ..TableSpec::new("rows", 1, self.rows) }
    }

    /// The ids that a worker's step names, distinct and rising.
    pub fn named(&self, worker: u32, step: Step) -> Vec<u64> {
        let first = ((step.0 - 1) * u64::from(self.workers) + u64::from(worker)) * MADE_PER_STEP;
        let made = first.min(self.rows)..(first + MADE_PER_STEP).min(self.rows);
        let key = hash_id(u64::from(worker) << 40 ^ step.0);
        let drawn = (0..u64::from(self.per_step)).map(|i| hash_id(key ^ i) % self.rows);
        let mut all: Vec<u64> = made.chain(drawn).collect();
        all.sort_unstable();
        all.dedup();
        all
    }

    /// Pushes the rows of a worker's round as part of a step, partition by partition.
    pub fn push(&self, client: &mut Client, worker: u32, (step, round): (Step, Step)) {
        let table = self.table();
        let mut parts = vec![Vec::new(); self.partitions as usize];
        self.named(worker, round).into_iter().for_each(|id| parts[table.partition_of(id) as usize].push(id));
        let first = client.layout().partitions(0).start;
        for (bucket, ids) in (first..).zip(parts) {
            client.push_rows(BucketId(bucket), step, &ids, &vec![-1.0; ids.len()]);
        }
    }

    /// Reads all rows. The members have finished.
    ///
    /// # Errors
    /// The servers are not reached.
    pub fn read(
        &self,
        client: &mut Client,
        done: Step,
        weights: &mut [f32],
    ) -> Result<Vec<f32>, ClientError> {
        let (table, first) = (self.table(), client.layout().partitions(0).start);
        let mut values = vec![0.0; self.rows as usize];
        let ids: Vec<u64> = (0..self.rows).collect();
        for some in ids.chunks(MAX_PULLED_IDS) {
            let mut parts: BTreeMap<BucketId, Vec<u64>> = BTreeMap::new();
            some.iter()
                .for_each(|id| parts.entry(BucketId(first + table.partition_of(*id))).or_default().push(*id));
            let wanted: Vec<_> = parts.into_iter().collect();
            let asked = wanted.clone();
            client.pull_rows(done, asked, weights, |place, rows| {
                wanted[place].1.iter().zip(rows).for_each(|(id, value)| values[*id as usize] = *value);
            })?;
        }
        Ok(values)
    }

    /// Counts what the rows say. `last`: the last step that a worker began; `fate`: what became of a worker's push of a
    /// partition.
    pub fn count(
        &self,
        values: &[f32],
        last: impl Fn(u32) -> u64,
        fate: impl Fn(u32, Step, usize) -> Fate,
        tally: &mut Tally,
    ) {
        let table = self.table();
        let (mut sure, mut open) = (vec![0u32; values.len()], vec![0u32; values.len()]);
        for worker in 0..self.workers {
            for step in (1..=last(worker)).map(Step) {
                let fates: Vec<Fate> =
                    (0..self.partitions as usize).map(|partition| fate(worker, step, partition)).collect();
                for id in self.named(worker, step) {
                    match fates[table.partition_of(id) as usize] {
                        Fate::Acknowledged => sure[id as usize] += 1,
                        Fate::Unknown => open[id as usize] += 1,
                        Fate::Unmade => {}
                    }
                }
            }
        }
        for (id, value) in values.iter().enumerate() {
            let (sure, open) = (sure[id], open[id]);
            tally.rows += u64::from(sure);
            if value.fract() != 0.0 || *value < 0.0 {
                tally.damaged += 1;
            } else if (*value as u32) < sure {
                tally.lost += u64::from(sure - *value as u32);
            } else if *value as u32 > sure + open {
                tally.doubled += u64::from(*value as u32 - sure - open);
            } else {
                continue;
            }
            tally.note(|| {
                format!("row {id} reads {value}, and {sure} pushes of it are acknowledged, {open} not")
            });
        }
    }
}
