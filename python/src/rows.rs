//! Rows of sparse tables, at addresses that Python gives.

use crate::{errors, memory};
use paraft_worker::{OpenRun, WorkerError};
use pyo3::prelude::*;

/// Address and number of int64 ids.
type Ids = (usize, usize);

/// Reads rows, into float32 at this address.
pub fn read(run: &mut OpenRun, table: usize, ids: Ids, into: usize) -> Result<(), WorkerError> {
    let ids = ids_at(ids)?;
    memory::with_mut(into, ids.len() * dim(run, table), |values| run.rows(table, &ids, values))
        .unwrap_or_else(|| Err(WorkerError::Misuse(format!("no memory for rows lies at {into:#x}"))))
}

/// Pulls rows ahead of their reading.
pub fn prefetch(run: &mut OpenRun, table: usize, ids: Ids) -> Result<(), WorkerError> {
    run.prefetch(table, &ids_at(ids)?)
}

/// Adds gradients of rows: float32 at this address.
pub fn add(run: &mut OpenRun, table: usize, ids: Ids, gradients: usize) -> Result<(), WorkerError> {
    let ids = ids_at(ids)?;
    memory::with(gradients, ids.len() * dim(run, table), |values| run.add_rows(table, &ids, values))
        .unwrap_or_else(|| Err(WorkerError::Misuse(format!("no gradients of rows lie at {gradients:#x}"))))
}

fn dim(run: &OpenRun, table: usize) -> usize {
    run.tables().get(table).map_or(0, |t| t.dim)
}

fn ids_at((address, count): Ids) -> Result<Vec<u64>, WorkerError> {
    let read = |bytes: &[u8]| bytes.as_chunks().0.iter().map(|id| u64::from_le_bytes(*id)).collect();
    memory::with_bytes(address, count * 8, read)
        .or_else(|| (count == 0).then(Vec::new))
        .ok_or_else(|| WorkerError::Misuse("no ids of rows lie at address 0".into()))
}

/// Checks a table, in TOML.
#[pyfunction]
pub fn check_table(py: Python<'_>, entry: &str) -> PyResult<()> {
    paraft_worker::cli::table(entry).map(drop).map_err(|why| errors::config(py, &why))
}
