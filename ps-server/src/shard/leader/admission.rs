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
mod tests {
    use super::*;
    use paraft_common::SessionId;

    #[test]
    fn a_push_is_taken_once_whenever_its_retry_arrives() {
        let m = Member::new(SessionId(1), vec![Step(4), Step(5)], Vec::new());
        let v = Version(7);
        let cases = [
            (0, 5, 7, None, Admission::Accept),
            (0, 5, 0, None, Admission::Accept),
            (0, 5, 7, Some(5), Admission::InFlight),
            (0, 4, 7, None, Admission::Applied),
            (1, 5, 9, None, Admission::Applied),
            (1, 7, 7, None, Admission::WrongStep { expected: Step(6) }),
            (0, 0, 7, None, Admission::WrongStep { expected: Step(5) }),
            (0, 5, 8, None, Admission::FutureVersion { current: v }),
        ];
        for (unit, step, pulled, in_flight, want) in cases {
            let got = admit(&m, unit, Step(step), Version(pulled), v, in_flight.map(Step));
            assert_eq!(got, want, "unit {unit} step {step}");
        }
        // Its push of step 3 is applied; those of 4 and 5 came too late.
        let m = Member::new(SessionId(1), vec![Step(5)], vec![Step(3), Step(0)]);
        let answers = [3, 4, 5, 6, 7].map(|step| admit(&m, 0, Step(step), v, v, None));
        use Admission::{Accept, Applied, Dropped};
        assert_eq!(answers[..4], [Applied, Dropped, Dropped, Accept]);
        assert_eq!(answers[4], Admission::WrongStep { expected: Step(6) });
        // Its push of step 6 is applied before it learns of 4 and 5.
        let mut m = m;
        m.take(0, Step(6));
        let answers = [3, 4, 5, 6, 7].map(|step| admit(&m, 0, Step(step), v, v, None));
        assert_eq!(answers, [Applied, Dropped, Dropped, Applied, Accept]);
        m.take(0, Step(7));
        let answers = [4, 5, 6].map(|step| admit(&m, 0, Step(step), v, v, None));
        assert_eq!(answers, [Dropped, Dropped, Applied], "and those stay what they were");
    }
}
