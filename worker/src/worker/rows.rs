//! Rows of sparse tables: how a worker pulls those that a minibatch names, and pushes their gradients.

use super::{WorkerError, driver::Driver, pushes::misuse};
use paraft_client::Pulled;
use paraft_common::{
    BucketId, Step, TableSpec,
    table::{ID_BYTES, MAX_PULLED_IDS, MAX_PUSH_BYTES},
};
use std::collections::BTreeMap;

/// A table, by its place among the job's tables.
pub(super) type Table<'a> = (usize, &'a TableSpec);

/// Rows of partitions: for each bucket, rising, the ids.
pub(super) type Wanted = Vec<(BucketId, Vec<u64>)>;

/// The most rows of one partition in a pull of all partitions of a table.
pub(super) fn most_per_partition(spec: &TableSpec) -> usize {
    let most = MAX_PULLED_IDS.min(MAX_PUSH_BYTES / (4 * spec.dim)) / (spec.partitions as usize).max(1);
    most.max(1)
}

/// Reads the rows of the ids at `places`, which may come several times, into `values`, `dim` for each id. If this worker
/// had been taken out and has joined again, it returns that pull: then all weights are in `weights`, and rows are not
/// complete.
///
/// # Errors
/// The servers cannot be reached or refuse, or the wait was interrupted: with the rows that were asked for, since the same
/// pull would bring only the rest.
///
/// # Panics
/// If `values` has another length.
pub(super) fn pull(
    driver: &mut Driver,
    (table, spec): Table<'_>,
    (ids, at): (&[u64], Vec<u32>),
    values: &mut [f32],
    weights: &mut [f32],
) -> Result<Option<Pulled>, (WorkerError, Wanted)> {
    let dim = spec.dim;
    assert_eq!(values.len(), ids.len() * dim, "values of rows");
    let partitions = driver.layout.partitions(table);
    // For each partition the ids, and their places in `ids`.
    let mut by_partition: BTreeMap<u32, (Vec<u64>, Vec<u32>)> = BTreeMap::new();
    for at in at {
        let id = ids[at as usize];
        let of = by_partition.entry(spec.partition_of(id)).or_default();
        of.0.push(id);
        of.1.push(at);
    }
    let most = most_per_partition(spec);
    let mut from = 0;
    while by_partition.values().any(|(ids, _)| ids.len() > from) {
        let part = |ids: &[u64]| ids.iter().skip(from).take(most).copied().collect::<Vec<_>>();
        let wanted = by_partition.iter().map(|(p, (ids, places))| (*p, part(ids), places));
        let wanted: Vec<_> = wanted.filter(|(_, ids, _)| !ids.is_empty()).collect();
        let places: Vec<&[u32]> = wanted.iter().map(|(_, _, places)| &places[from..]).collect();
        let asked: Wanted =
            wanted.iter().map(|(p, ids, _)| (BucketId(partitions.start + p), ids.clone())).collect();
        let done = driver.done();
        let take = |place: usize, rows: &[f32]| {
            for (at, row) in places[place].iter().zip(rows.chunks_exact(dim)) {
                values[*at as usize * dim..][..dim].copy_from_slice(row);
            }
        };
        let pulled = driver.client.pull_rows(done, asked.clone(), weights, take);
        let pulled = pulled.map_err(|e| (e.into(), asked))?;
        if pulled.rejoined {
            return Ok(Some(pulled));
        }
        from += most;
    }
    Ok(None)
}

/// Checks that pushes hold the gradients of these ids, each once.
///
/// # Errors
/// A partition has too many.
pub(super) fn check(spec: &TableSpec, ids: &[u64]) -> Result<(), WorkerError> {
    let most = MAX_PUSH_BYTES / (ID_BYTES + 4 * spec.dim);
    let mut counts = vec![0; spec.partitions as usize];
    ids.iter().for_each(|id| counts[spec.partition_of(*id) as usize] += 1);
    match counts.into_iter().find(|rows| *rows > most) {
        None => Ok(()),
        Some(rows) => Err(misuse(format!(
            "a step with {rows} rows for one partition of table `{}`, and a push holds {most}: give the table more \
             partitions, or make the minibatch smaller",
            spec.name
        ))),
    }
}

/// Pushes a table's part of a step: every partition, also those without rows. `ids` rise; each has `dim` values.
pub(super) fn push(
    driver: &mut Driver,
    (table, spec): Table<'_>,
    step: Step,
    (ids, gradients): (&[u64], &[f32]),
) {
    let mut parts = vec![(Vec::new(), Vec::new()); spec.partitions as usize];
    for (id, grad) in ids.iter().zip(gradients.chunks_exact(spec.dim)) {
        let part = &mut parts[spec.partition_of(*id) as usize];
        part.0.push(*id);
        part.1.extend_from_slice(grad);
    }
    for (bucket, (ids, values)) in driver.layout.partitions(table).zip(parts) {
        driver.client.push_rows(BucketId(bucket), step, &ids, &values);
    }
}
