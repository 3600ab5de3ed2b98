//! Rows of sparse tables: a loop pulls those that a minibatch names, and adds their gradients to the step.

use super::{NextAction, OpenRun, misuse};
use crate::worker::{Job, WorkerError, rows};
use paraft_client::Pulled;
use paraft_common::{Step, TableSpec};

/// The tables of a loop, and the gradients of the current step.
#[derive(Debug, Default)]
pub(super) struct Tables {
    specs: Vec<TableSpec>,
    /// For each table the step's rows: ids, rising, and the sum of each one's gradients.
    given: Vec<(Vec<u64>, Vec<f32>)>,
    /// The step's rows are pushed, or are to be skipped.
    pushed: bool,
}

impl Tables {
    pub fn new(specs: &[TableSpec], job: &Job) -> Result<Self, WorkerError> {
        if !specs.is_empty() && job.local.is_local() {
            let why = "a job with tables has no local steps: rows are on the servers; take [local] out";
            return Err(WorkerError::Job(why.into()));
        }
        Ok(Self { specs: specs.to_vec(), given: vec![Default::default(); specs.len()], pushed: false })
    }

    /// A step begins.
    pub fn begin(&mut self) {
        self.pushed = false;
    }

    /// The step has no gradients.
    pub fn skip(&mut self) {
        self.forget();
        self.pushed = true;
    }

    fn forget(&mut self) {
        self.given.iter_mut().for_each(|(ids, values)| {
            ids.clear();
            values.clear();
        });
    }

    /// Values of a table's row.
    pub fn dim(&self, table: usize) -> usize {
        self.specs.get(table).map_or(0, |spec| spec.dim)
    }
}

/// The distinct ids, rising, and for each the sum of its gradients, added in the order in which they were given.
fn summed(ids: &[u64], values: &[f32], dim: usize) -> (Vec<u64>, Vec<f32>) {
    let mut order: Vec<u32> = (0..ids.len() as u32).collect();
    order.sort_unstable_by_key(|at| (ids[*at as usize], *at));
    let (mut rows, mut sums): (Vec<u64>, Vec<f32>) = (Vec::new(), Vec::new());
    for at in order {
        let (id, grad) = (ids[at as usize], &values[at as usize * dim..][..dim]);
        if rows.last() == Some(&id) {
            let start = sums.len() - dim;
            sums[start..].iter_mut().zip(grad).for_each(|(sum, g)| *sum += g);
        } else {
            rows.push(id);
            sums.extend_from_slice(grad);
        }
    }
    (rows, sums)
}

impl OpenRun {
    /// The tables ([`Setup::tables`](super::super::Setup::tables)).
    pub fn tables(&self) -> &[TableSpec] {
        &self.tables.specs
    }

    /// Reads rows of a table as the job's mode lets this worker read: writes the weights of each id, `dim` values, one row
    /// after another. An id may come several times. An id that no push has named has its initial values, and is not stored.
    ///
    /// If this worker had been taken out, it continues from another step, as the next [`Self::step`] says.
    ///
    /// # Errors
    /// There is no such table, `values` has another length, the job is over, or as in [`Self::step`].
    pub fn rows(&mut self, table: usize, ids: &[u64], values: &mut [f32]) -> Result<(), WorkerError> {
        let Some(spec) = self.tables.specs.get(table).cloned() else {
            return Err(misuse(format!("table {table} of {}", self.tables.specs.len())));
        };
        let dim = spec.dim;
        if values.len() != ids.len() * dim {
            let (got, rows) = (values.len(), ids.len());
            return Err(misuse(format!("{got} values for {rows} rows of {dim}")));
        }
        self.settle()?;
        if self.is_over() {
            return Ok(());
        }
        let missing = self.ahead.give(self.driver.done(), table, dim, ids, values);
        self.ahead.read = true;
        // What was named while another pull was in flight arrives while the loop uses these rows.
        if missing.is_empty() {
            return self.ask_ahead();
        }
        let into = self.into.buffer()?;
        // The same pull would bring only the rest, and this caller's values are gone.
        let pulled = rows::pull(&mut self.driver, (table, &spec), (ids, missing), values, into).map_err(
            |(why, asked)| {
                self.ahead.cut_off(asked);
                why
            },
        )?;
        let Some(pulled) = pulled else { return self.ask_ahead() };
        // All weights have come: read from the beginning, at the step from which it continues.
        self.landed_elsewhere(pulled)?;
        self.rows(table, ids, values)
    }

    /// This worker had been taken out: all weights have come, and it continues from another step.
    pub(super) fn landed_elsewhere(&mut self, pulled: Pulled) -> Result<(), WorkerError> {
        self.into.landed(&pulled, &self.driver.layout)?;
        if !matches!(self.asked, NextAction::Gradient { .. }) {
            return Err(misuse("this worker was taken out while no gradient was to be computed"));
        }
        self.driver.rejoined(pulled);
        self.next()?;
        self.moved = true;
        Ok(())
    }

    /// Adds gradients of rows to the current step: `dim` values for each id, means over the minibatch as for
    /// [`Self::ready`]. Gradients of one id add up. [`Self::step`] pushes them.
    ///
    /// # Errors
    /// There is no such table, the lengths do not fit, or a partition has more rows than one push holds; then the step has
    /// those that it had before.
    pub fn add_rows(&mut self, table: usize, ids: &[u64], gradients: &[f32]) -> Result<(), WorkerError> {
        let Some((spec, given)) = self.tables.specs.get(table).zip(self.tables.given.get_mut(table)) else {
            return Err(misuse(format!("table {table} of {}", self.tables.specs.len())));
        };
        if gradients.len() != ids.len() * spec.dim {
            let (got, rows, dim) = (gradients.len(), ids.len(), spec.dim);
            return Err(misuse(format!("{got} gradient values for {rows} rows of {dim}")));
        }
        let all = ([&given.0, ids].concat(), [&given.1, gradients].concat());
        let summed = summed(&all.0, &all.1, spec.dim);
        rows::check(spec, &summed.0)?;
        *given = summed;
        Ok(())
    }

    /// The rate of each table for the next steps, instead of the table's and the job's schedule; `None`: these.
    pub fn set_table_rates(&mut self, rates: Vec<Option<f64>>) {
        self.driver.client.set_table_rates(rates);
    }

    /// Pushes the step's rows, unless they are: every partition, also those without rows.
    pub(super) fn push_rows(&mut self, step: Step) {
        if std::mem::replace(&mut self.tables.pushed, true) {
            self.tables.forget();
            return;
        }
        for (table, spec) in self.tables.specs.iter().enumerate() {
            let (ids, values) = std::mem::take(&mut self.tables.given[table]);
            rows::push(&mut self.driver, (table, spec), step, (&ids, &values));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gradients_of_one_id_add_up_in_their_order() {
        let (ids, sums) = summed(&[7, 3, 7], &[1.0, 2.0, 3.0, 4.0, 10.0, 20.0], 2);
        assert_eq!((ids, sums), (vec![3, 7], vec![3.0, 4.0, 11.0, 22.0]));
    }
}
