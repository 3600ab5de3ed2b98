//! Tests of `admission`.

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
