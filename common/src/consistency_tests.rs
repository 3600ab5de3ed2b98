//! Tests of `consistency`.

use super::*;

#[test]
fn the_inequality_at_its_edges() {
    for (mode, slowest, done, may) in [
        (Mode::Bsp, 3, 3, true),
        (Mode::Bsp, 3, 4, false),
        (Mode::Ssp(0), 3, 4, false),
        (Mode::Ssp(2), 3, 5, true),
        (Mode::Ssp(2), 3, 6, false),
        (Mode::Asp, 0, u64::MAX, true),
    ] {
        assert_eq!(mode.may_proceed(Step(slowest), Step(done)), may, "{mode} {slowest} {done}");
    }
}

#[test]
fn a_switch_takes_effect_after_its_step() {
    let switch = InForce { number: 1, mode: Mode::Asp, before: Mode::Bsp, after: Step(7), auto: None };
    assert_eq!([6, 7, 8].map(|s| switch.of_push(Step(s))), [Mode::Bsp, Mode::Bsp, Mode::Asp]);
    assert_eq!(InForce::first(Mode::Ssp(2), None).of_push(Step(0)), Mode::Ssp(2));
}

#[test]
fn modes_read_back_what_they_print() {
    for m in [Mode::Bsp, Mode::Ssp(0), Mode::Ssp(4), Mode::Asp] {
        assert_eq!(m.to_string().parse(), Ok(m));
    }
    for bad in ["", "BSP", "ssp", "ssp:", "ssp:-1", "ssp:9999999", "async"] {
        assert!(bad.parse::<Mode>().is_err(), "{bad}");
    }
}
