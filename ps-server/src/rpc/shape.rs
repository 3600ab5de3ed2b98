//! A fleet's or a job's shape: wire to domain and back.

use crate::control::Shape;
use paraft_common::Durability;
use paraft_proto::FleetShape;

/// A shape from the wire; `None` if it is invalid.
pub fn shape_of(shape: Option<&FleetShape>) -> Option<Shape> {
    let s = shape?;
    let durability: Durability = s.durability.parse().ok()?;
    Some(Shape { shards: s.shards, replicas: s.replicas, durability })
}

/// A shape for the wire.
pub fn shape_to(s: Shape) -> FleetShape {
    FleetShape { shards: s.shards, replicas: s.replicas, durability: s.durability.name().into() }
}
