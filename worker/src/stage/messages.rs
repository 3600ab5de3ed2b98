//! The messages between the ranks of a pipeline.

/// Kinds of messages between stages.
pub(super) const ACTIVATION: u32 = 1;
pub(super) const GRADIENT: u32 = 2;
pub(super) const LENT: u32 = 3;
pub(super) const LENT_GRADIENT: u32 = 4;
pub(super) const FINAL: u32 = 5;
/// A message was received; another may follow.
pub(super) const RECEIVED: u32 = 6;
/// Sent while other ranks are still in the step.
pub(super) const LOSS: u32 = 7;
pub(super) const CONTINUES: u32 = 8;
/// Between ranks with the same stages: weights, gradients, and the slices' exchanges.
pub(super) const DISTRIBUTE: u32 = 9;
pub(super) const JOIN: u32 = 10;
pub(super) const SLICES: u32 = 11;
pub(super) const DISTRIBUTED: u32 = 12;
/// Between the ranks that speak with servers.
pub(super) const NORM: u32 = 13;

/// The maximum number of unread messages: in an evaluation, of gradients of one stage, and of final weights.
pub(super) const MAX_UNREAD: usize = 8;
