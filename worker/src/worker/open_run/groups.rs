//! Steps that leave groups of parameters out.

use super::OpenRun;
use crate::worker::WorkerError;
use paraft_common::TensorKind;

impl OpenRun {
    /// Leaves groups of parameters out of this step, before its first gradient: their weights and their optimizer's state
    /// stay. Every worker leaves out the same ones. Their tensors get no [`Self::ready`].
    ///
    /// # Errors
    /// A gradient of the step was handed over, or the job has local steps.
    pub fn leave_out(&mut self, groups: &[u16]) -> Result<(), WorkerError> {
        let step = self.pushing()?;
        self.pushes.leave_out(&mut self.driver, step, groups)?;
        self.left_out += u64::from(groups.contains(&0));
        self.before = Some((groups.to_vec(), self.driver.client.versions()));
        Ok(())
    }

    /// Whether the last step, which left groups out, changed nothing in the others: in a round another worker has left
    /// those out, or has skipped the step. Then no worker's gradients of the step are applied.
    pub fn missed_round(&mut self) -> bool {
        let Some((out, before)) = self.before.take() else { return false };
        let (now, rounds) = (self.driver.client.versions(), self.driver.client.mode().1.averages());
        let buckets = self.driver.layout.buckets().iter().zip(before.iter().zip(&now));
        let mut own = buckets.filter(|(b, _)| b.kind == TensorKind::Param && !out.contains(&b.group));
        rounds && own.any(|(_, (before, now))| now <= before)
    }
}
