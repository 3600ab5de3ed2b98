//! Decides whether a push is accepted: a pure function of the replicated state and the pushes in flight.

use crate::shard::members::Member;
use paraft_common::{Step, Version};

/// The decision on a push.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// Accept it.
    Accept,
    /// It is already applied: acknowledge it again.
    Applied,
    /// Its first try is proposed but not yet applied: the ack is in flight. Without this case a retry that arrives
    /// in between would be applied twice.
    InFlight,
    /// Its round was closed without it: drop it, and notify its worker.
    Dropped,
    /// It is not the next step of this worker and unit.
    WrongStep {
        /// The expected step.
        expected: Step,
    },
    /// It names a pulled version that the unit has not reached.
    FutureVersion {
        /// The unit's version.
        current: Version,
    },
}

/// Decides on one push for unit `unit`.
///
/// `in_flight`: the step of this worker and unit that is accepted but not yet applied.
pub fn admit(
    member: &Member,
    unit: usize,
    step: Step,
    pulled: Version,
    current: Version,
    in_flight: Option<Step>,
) -> Admission {
    let applied = member.step(unit).unwrap_or_default();
    if member.is_dropped(unit, step) {
        Admission::Dropped
    } else if step <= applied && step > Step(0) {
        Admission::Applied
    } else if in_flight == Some(step) {
        Admission::InFlight
    } else if step != applied.next() {
        Admission::WrongStep { expected: applied.next() }
    } else if pulled > current {
        Admission::FutureVersion { current }
    } else {
        Admission::Accept
    }
}

#[cfg(test)]
#[path = "admission_tests.rs"]
mod tests;
