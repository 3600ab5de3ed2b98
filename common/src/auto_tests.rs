//! Tests of `auto`.

use super::*;
use Mode::{Asp, Ssp};

const CALM: Window = Window { idle: 0.07, delay: 1.0, members: 4, lead: 8, loss: None };
const RULE: AutoConfig = AutoConfig { min_staleness: 0, max_staleness: 16 };

fn once(window: Window, mode: Mode, loosest: Mode) -> Option<(Mode, Mode, SwitchReason)> {
    Watch::default().decide(&RULE, &window, mode, loosest).map(|n| (n.mode, n.loosest, n.why))
}

#[test]
fn waiting_loosens_up_to_what_is_left() {
    let waits = |idle| Window { idle, ..CALM };
    assert_eq!(RULE, AutoConfig::default());
    assert_eq!(once(CALM, Ssp(8), Asp), None);
    for (from, to) in [(Ssp(0), Ssp(1)), (Ssp(1), Ssp(2)), (Ssp(12), Ssp(16)), (Ssp(16), Asp)] {
        assert_eq!(once(waits(0.2), from, Asp), Some((to, Asp, SwitchReason::Waiting)), "{from}");
    }
    assert_eq!(once(waits(0.2), Asp, Asp), None);
    assert_eq!(once(waits(0.31), Ssp(0), Asp), Some((Asp, Asp, SwitchReason::Stragglers)));
    assert_eq!(once(waits(0.31), Ssp(0), Ssp(4)), Some((Ssp(4), Ssp(4), SwitchReason::Stragglers)));
    assert_eq!(once(waits(0.31), Ssp(4), Ssp(4)), None, "not beyond what is left");
    assert_eq!(once(waits(0.2), Ssp(4), Ssp(4)), None);
}

#[test]
fn an_unneeded_bound_is_halved() {
    let calm = |lead| Window { idle: 0.01, lead, ..CALM };
    assert_eq!(once(calm(2), Ssp(8), Asp), Some((Ssp(4), Asp, SwitchReason::Unneeded)));
    assert_eq!(once(calm(3), Ssp(8), Asp), None);
    assert_eq!(once(calm(8), Asp, Asp), Some((Ssp(16), Asp, SwitchReason::Unneeded)));
    assert_eq!(once(calm(9), Asp, Asp), None);
    assert_eq!(once(calm(0), Ssp(0), Asp), None);
    assert_eq!(once(Window { idle: 0.06, ..calm(0) }, Ssp(8), Asp), None, "the share is between the two");
}

#[test]
fn near_convergence_it_tightens_for_good() {
    let (mut watch, mut mode, mut loosest) = (Watch::default(), Asp, Asp);
    let mut seen = Vec::new();
    // 3, 1.5, ... and then constant, while workers wait all the time.
    for i in 0..40 {
        let loss = Some(3.0 * 0.5f64.powi(i.min(4)));
        if let Some(n) = watch.decide(&RULE, &Window { idle: 0.5, loss, ..CALM }, mode, loosest) {
            (mode, loosest) = (n.mode, n.loosest);
            seen.push((i, n.mode, n.why));
        }
    }
    let steps = [Ssp(16), Ssp(8), Ssp(4), Ssp(2), Ssp(1), Ssp(0)];
    let expected: Vec<_> =
        (2..).map(|n| 4 * n).zip(steps).map(|(i, m)| (i, m, SwitchReason::Plateau)).collect();
    assert_eq!(seen, expected);
    assert_eq!(loosest, Ssp(0));
}

#[test]
fn a_loss_that_rises_and_late_gradients_tighten_at_once() {
    let mut watch = Watch::default();
    let loss = |l| Window { loss: Some(l), ..CALM };
    assert_eq!(watch.decide(&RULE, &loss(1.0), Asp, Asp), None);
    assert_eq!(watch.decide(&RULE, &loss(1.25), Asp, Asp), None);
    let n = watch.decide(&RULE, &loss(1.26), Ssp(16), Asp).unwrap();
    assert_eq!((n.mode, n.loosest, n.why), (Ssp(8), Ssp(8), SwitchReason::Rising));
    let late = |delay| Window { delay, ..CALM };
    assert_eq!(once(late(12.0), Asp, Asp), None, "four times three others");
    assert_eq!(once(late(12.1), Asp, Asp), Some((Ssp(16), Ssp(16), SwitchReason::Late)));
    assert_eq!(once(late(12.1), Ssp(0), Asp), None);
}

#[test]
fn the_rule_takes_over_from_any_mode() {
    let rule = AutoConfig { min_staleness: 2, max_staleness: 10 };
    for (from, to) in [(Mode::Bsp, 2), (Ssp(0), 2), (Ssp(5), 5), (Ssp(11), 2)] {
        assert_eq!(rule.from_mode(from), Ssp(to), "{from}");
    }
    assert_eq!(rule.from_mode(Asp), Asp);
    assert_eq!([Ssp(8), Ssp(10), Asp].map(|m| rule.looser(m)), [Some(Ssp(10)), Some(Asp), None]);
    assert_eq!([Ssp(3), Ssp(2), Asp].map(|m| rule.tighter(m)), [Some(Ssp(2)), None, Some(Ssp(10))]);
    assert_eq!(RULE.first(), Ssp(1));
}

#[test]
fn ranges_are_checked() {
    for (key, bad) in [
        ("max_staleness", AutoConfig { max_staleness: 0, ..RULE }),
        ("min_staleness", AutoConfig { min_staleness: 17, ..RULE }),
    ] {
        assert_eq!(bad.validate().unwrap_err().key, format!("auto.{key}"));
    }
    assert_eq!(RULE.validate(), Ok(()));
}
