//! The vectors of a bucket, copied on write. A reader shares a vector; a change copies only that vector, and only
//! if a reader still has it.
//!
//! Weights are in this process's memory or, if workers of this host pull them, in memory that those workers map.

use paraft_lanes::shared::{Memory, Slot};
use std::{
    any::Any,
    collections::TryReserveError,
    fmt,
    ops::{Deref, DerefMut},
    sync::{Arc, Weak},
};

/// Values of a bucket, in private or shared memory. A clone shares them until one of the two is changed.
#[derive(Clone)]
pub struct Weights(Arc<Place>);

enum Place {
    Own(Vec<f32>),
    Shared(Slot),
}

impl Weights {
    /// Whether workers of this host can map them.
    pub fn is_shared(&self) -> bool {
        matches!(*self.0, Place::Shared(_))
    }

    /// See [`read_elsewhere`].
    pub(super) fn read_elsewhere(&self) -> Option<ReaderEntry> {
        read_elsewhere(&self.0)
    }

    /// A copy in shared memory; `None`: there is no room.
    pub fn to_shared(&self, memory: &Arc<Memory>) -> Option<Self> {
        let mut slot = memory.slot(size_of_val(&**self))?;
        bytemuck::cast_slice_mut(slot.as_mut()).copy_from_slice(self);
        Some(Self(Arc::new(Place::Shared(slot))))
    }

    /// A private copy, if there is memory for it.
    pub fn try_copy(&self) -> Result<Self, TryReserveError> {
        self.0.try_copy().map(|place| Self(Arc::new(place)))
    }
}

impl Place {
    fn values(&self) -> &[f32] {
        match self {
            Self::Own(own) => own,
            // A slot starts at a page boundary.
            Self::Shared(slot) => bytemuck::cast_slice(slot.as_ref()),
        }
    }

    /// A copy in the same kind of memory, if there is room.
    fn try_copy(&self) -> Result<Self, TryReserveError> {
        let values = self.values();
        if let Self::Shared(slot) = self
            && let Some(mut copy) = slot.memory().slot(size_of_val(values))
        {
            bytemuck::cast_slice_mut(copy.as_mut()).copy_from_slice(values);
            return Ok(Self::Shared(copy));
        }
        try_copy(values).map(Self::Own)
    }
}

/// A vector that a reader has, and its bytes.
pub(super) type ReaderEntry = (Weak<dyn Any + Send + Sync>, u64);

/// Values that may have several readers.
pub(super) trait Values: Any + Send + Sync {
    /// Bytes of all values.
    fn bytes(&self) -> usize;
}

impl Values for Place {
    fn bytes(&self) -> usize {
        size_of_val(self.values())
    }
}

impl Values for Vec<f32> {
    fn bytes(&self) -> usize {
        size_of_val(&**self)
    }
}

impl Values for Vec<Vec<f32>> {
    fn bytes(&self) -> usize {
        self.iter().map(Values::bytes).sum()
    }
}

/// The entry for [`super::replaced_vectors`] of values that are about to change; `None` if they have no reader, so the
/// change copies nothing.
pub(super) fn read_elsewhere<V: Values>(values: &Arc<V>) -> Option<ReaderEntry> {
    let weak = || Arc::downgrade(values) as Weak<dyn Any + Send + Sync>;
    (Arc::strong_count(values) > 1).then(|| (weak(), values.bytes() as u64))
}

/// A copy, if there is memory for it.
pub(super) fn try_copy(values: &[f32]) -> Result<Vec<f32>, TryReserveError> {
    let mut own = Vec::new();
    own.try_reserve_exact(values.len())?;
    own.extend_from_slice(values);
    Ok(own)
}

impl AsRef<[f32]> for Weights {
    fn as_ref(&self) -> &[f32] {
        self
    }
}

impl From<Vec<f32>> for Weights {
    fn from(own: Vec<f32>) -> Self {
        Self(Arc::new(Place::Own(own)))
    }
}

impl Clone for Place {
    fn clone(&self) -> Self {
        self.try_copy().unwrap_or_else(|_| Self::Own(self.values().to_vec()))
    }
}

impl Deref for Weights {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        self.0.values()
    }
}

impl DerefMut for Weights {
    fn deref_mut(&mut self) -> &mut [f32] {
        match Arc::make_mut(&mut self.0) {
            Place::Own(own) => own,
            Place::Shared(slot) => bytemuck::cast_slice_mut(slot.as_mut()),
        }
    }
}

impl PartialEq for Weights {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl fmt::Debug for Weights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&**self).finish()
    }
}

/// The state vectors of the optimizer and the algorithm. A clone shares them until one of the two is changed.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Slots(Arc<Vec<Vec<f32>>>);

impl Slots {
    /// See [`read_elsewhere`].
    pub(super) fn read_elsewhere(&self) -> Option<ReaderEntry> {
        read_elsewhere(&self.0)
    }

    /// A private copy, if there is memory for it.
    pub fn try_copy(&self) -> Result<Self, TryReserveError> {
        let slots = self.iter().map(|slot| try_copy(slot)).collect::<Result<Vec<_>, _>>()?;
        Ok(slots.into())
    }
}

impl From<Vec<Vec<f32>>> for Slots {
    fn from(slots: Vec<Vec<f32>>) -> Self {
        Self(Arc::new(slots))
    }
}

impl Deref for Slots {
    type Target = [Vec<f32>];

    fn deref(&self) -> &[Vec<f32>] {
        &self.0
    }
}

impl DerefMut for Slots {
    fn deref_mut(&mut self) -> &mut [Vec<f32>] {
        // A bucket without slots has nothing to copy.
        let slots: &mut Vec<Vec<f32>> = Arc::make_mut(&mut self.0);
        slots
    }
}
