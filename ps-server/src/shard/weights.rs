//! The weights of a bucket: in memory of this process, or, where workers of this host pull them, in memory that those map.

use paraft_lanes::shared::{Memory, Slot};
use std::{
    fmt,
    ops::{Deref, DerefMut},
    sync::Arc,
};

/// Values of a bucket. Where they are makes no difference to what they are.
pub struct Weights(Place);

enum Place {
    Own(Vec<f32>),
    Shared(Slot),
}

impl Weights {
    /// Whether workers of this host can read them where they are.
    pub fn is_shared(&self) -> bool {
        matches!(self.0, Place::Shared(_))
    }

    /// A copy in shared memory; `None`: there is no room.
    pub fn to_shared(&self, memory: &Arc<Memory>) -> Option<Self> {
        let mut slot = memory.slot(size_of_val(&**self))?;
        bytemuck::cast_slice_mut(slot.as_mut()).copy_from_slice(self);
        Some(Self(Place::Shared(slot)))
    }

    /// A copy, where there is memory for it.
    pub fn try_clone(&self) -> Result<Self, std::collections::TryReserveError> {
        if let Place::Shared(slot) = &self.0
            && let Some(copy) = self.to_shared(slot.memory())
        {
            return Ok(copy);
        }
        let mut own = Vec::new();
        own.try_reserve_exact(self.len())?;
        own.extend_from_slice(self);
        Ok(own.into())
    }
}

impl From<Vec<f32>> for Weights {
    fn from(own: Vec<f32>) -> Self {
        Self(Place::Own(own))
    }
}

impl Clone for Weights {
    fn clone(&self) -> Self {
        self.try_clone().unwrap_or_else(|_| self.to_vec().into())
    }
}

impl Deref for Weights {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        match &self.0 {
            Place::Own(own) => own,
            // A slot begins with a page.
            Place::Shared(slot) => bytemuck::cast_slice(slot.as_ref()),
        }
    }
}

impl DerefMut for Weights {
    fn deref_mut(&mut self) -> &mut [f32] {
        match &mut self.0 {
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
