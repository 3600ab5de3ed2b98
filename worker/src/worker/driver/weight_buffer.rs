//! Where pulled weights go.

use crate::worker::WorkerError;
use paraft_client::{Client, Pull, Pulled};
use paraft_common::Layout;

/// The destination of pulled weights. With a user's own local steps: the memory of the user's weights.
pub trait WeightBuffer {
    /// The current weights.
    fn weights(&mut self) -> &[f32];
    /// The memory that the next pull writes; then call [`Self::landed`].
    ///
    /// # Errors
    /// There is no such memory.
    fn buffer(&mut self) -> Result<&mut [f32], WorkerError>;
    /// A pull of everything has written the memory.
    ///
    /// # Errors
    /// The weights cannot be moved to where they are used.
    fn landed(&mut self, pulled: &Pulled, layout: &Layout) -> Result<(), WorkerError>;
    /// Pulls in this destination's own way. `None`: pull everything into [`Self::buffer`].
    ///
    /// # Errors
    /// Those of a pull.
    fn pull(&mut self, _client: &mut Client, _pull: &Pull) -> Option<Result<Pulled, WorkerError>> {
        None
    }
}

/// Weights in this process's memory.
impl WeightBuffer for Vec<f32> {
    fn weights(&mut self) -> &[f32] {
        self
    }

    fn buffer(&mut self) -> Result<&mut [f32], WorkerError> {
        Ok(self)
    }

    fn landed(&mut self, _: &Pulled, _: &Layout) -> Result<(), WorkerError> {
        Ok(())
    }
}
