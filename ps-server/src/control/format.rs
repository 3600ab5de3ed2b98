//! The layout of the agreed state in a snapshot. It starts with its number: the snapshot of another build is
//! refused by name, not misread.

use super::{orders::Orders, state::State};
use crate::{
    header::{self, HeaderError},
    raft::ApplyError,
};

/// Raised with each change of the layout of [`State`].
const FORMAT: u16 = 1;

/// Encodes a state for a snapshot.
pub fn write(state: &State) -> Result<Vec<u8>, HeaderError> {
    header::encode(&(FORMAT, header::encode(&(state, &state.orders))?))
}

/// From one.
pub fn read(head: &[u8]) -> Result<State, ApplyError> {
    let bad = |e: HeaderError| ApplyError::Damaged(format!("a snapshot of the control group: {e}"));
    let (format, state): (u16, Vec<u8>) = header::decode(head).map_err(bad)?;
    match format {
        FORMAT => {
            let (state, orders) = header::decode::<(State, Orders)>(&state).map_err(bad)?;
            Ok(State { orders, ..state })
        }
        _ => Err(ApplyError::Newer(format!(
            "this snapshot of the control group has format {format}, this build reads format {FORMAT}: use the build that \
             wrote it"
        ))),
    }
}
