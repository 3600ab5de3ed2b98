//! The rule that chooses a job's staleness bound, on the wire: its input, and its switches.

use super::convert::MAX_SWITCHES;
use paraft_common::{
    AutoConfig,
    auto::{Counted, Report, Switch},
};
use paraft_proto::{AutoReport, AutoRule, AutoSwitch};
use std::time::Duration;

/// A report for the wire.
pub fn to_report(r: &Report) -> AutoReport {
    let Report { term, rule, number, mode, loosest, members, counted } = *r;
    let us = |d: Duration| u64::try_from(d.as_micros()).unwrap_or(u64::MAX);
    AutoReport {
        rule: Some(AutoRule { min_staleness: rule.min_staleness, max_staleness: rule.max_staleness }),
        term,
        number,
        mode: mode.to_string(),
        loosest: loosest.to_string(),
        members,
        lasted_us: us(counted.lasted),
        pulls: counted.pulls,
        waited_us: us(counted.waited),
        delay_sum: counted.delays.0,
        pushes: counted.delays.1,
        loss_sum: counted.losses.0,
        losses: counted.losses.1,
        lead: counted.lead,
    }
}

/// A report from the wire; `None`: unusable for a rule.
pub fn from_report(r: AutoReport) -> Option<Report> {
    let rule = r.rule?;
    let rule = AutoConfig { min_staleness: rule.min_staleness, max_staleness: rule.max_staleness };
    rule.validate().ok()?;
    let counted = Counted {
        lasted: Duration::from_micros(r.lasted_us),
        pulls: r.pulls,
        waited: Duration::from_micros(r.waited_us),
        delays: (r.delay_sum, r.pushes),
        losses: (r.loss_sum.is_finite().then_some(r.loss_sum)?, r.losses),
        lead: r.lead,
    };
    let number = (r.number < MAX_SWITCHES).then_some(r.number)?; // so that the next one exists
    let (mode, loosest) = (r.mode.parse().ok()?, r.loosest.parse().ok()?);
    Some(Report { term: r.term, rule, number, mode, loosest, members: r.members, counted })
}

/// A switch for the wire.
pub fn to_switch(s: Switch) -> AutoSwitch {
    AutoSwitch { number: s.number, mode: s.mode.to_string(), loosest: s.loosest.to_string() }
}

/// A switch from the wire; `None`: an impossible one, or one to an unknown mode.
pub fn from_switch(s: &AutoSwitch) -> Option<Switch> {
    let number = (1..=MAX_SWITCHES).contains(&s.number).then_some(s.number)?;
    Some(Switch { number, mode: s.mode.parse().ok()?, loosest: s.loosest.parse().ok()? })
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use paraft_common::Mode;

    /// A report in which no value is a default.
    pub fn report() -> Report {
        let rule = AutoConfig { min_staleness: 1, max_staleness: 9 };
        let counted = Counted {
            lasted: Duration::from_micros(1_500_001),
            pulls: 11,
            waited: Duration::from_micros(12),
            delays: (13, 14),
            losses: (1.5, 16),
            lead: 17,
        };
        Report { term: 6, rule, number: 3, mode: Mode::Ssp(4), loosest: Mode::Asp, members: 2, counted }
    }

    #[test]
    fn what_no_rule_could_go_by_is_left_out() {
        let whole = to_report(&report());
        assert_eq!(from_report(whole.clone()), Some(report()));
        let rule = whole.rule;
        for bad in [
            AutoReport { rule: None, ..whole.clone() },
            AutoReport { rule: rule.map(|r| AutoRule { max_staleness: 0, ..r }), ..whole.clone() },
            AutoReport { rule: rule.map(|r| AutoRule { min_staleness: 10, ..r }), ..whole.clone() },
            AutoReport { loss_sum: f64::INFINITY, ..whole.clone() },
            AutoReport { number: MAX_SWITCHES, ..whole.clone() },
            AutoReport { mode: "ssp:x".into(), ..whole.clone() },
            AutoReport { loosest: String::new(), ..whole },
        ] {
            assert_eq!(from_report(bad.clone()), None, "{bad:?}");
        }
        let switch = Switch { number: 4, mode: Mode::Ssp(2), loosest: Mode::Asp };
        let wire = to_switch(switch);
        assert_eq!(from_switch(&wire), Some(switch));
        for number in [0, MAX_SWITCHES + 1] {
            assert_eq!(from_switch(&AutoSwitch { number, ..wire.clone() }), None);
        }
    }
}
