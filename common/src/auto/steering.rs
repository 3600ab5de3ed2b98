//! The remote side of the rule. It receives periodic reports of the counters of shard 0's leader, forms
//! windows from them, and returns the switch that the rule wants until a report shows it in force.
//!
//! All state here may be lost at any moment. A successor starts with its own window, and detects a
//! plateau of the loss again. The limit on the bound is part of the report, so it is not lost.

use super::{AutoConfig, Next, SwitchReason, WINDOW, Watch, Window};
use crate::consistency::Mode;
use std::time::Duration;

/// A leader's counters since it leads, or since the last switch of the mode.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Counted {
    /// Time from the first pull to the last.
    pub lasted: Duration,
    /// Answered pulls.
    pub pulls: u64,
    /// Total time that pulls waited for other workers.
    pub waited: Duration,
    /// The sum of the pushes' delays, in versions, and the number of pushes.
    pub delays: (u64, u64),
    /// The sum of the reported training losses, and their number.
    pub losses: (f64, u64),
    /// The largest lead, in steps, of a worker over the slowest since the previous report.
    pub lead: u64,
}

/// The report of shard 0's leader on a job in mode `auto`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Report {
    /// The Raft term of the leader that counts.
    pub term: u64,
    /// The job's rule.
    pub rule: AutoConfig,
    /// The number of the switch to the current mode.
    pub number: u64,
    /// The current mode.
    pub mode: Mode,
    /// The loosest mode that the rule may still choose.
    pub loosest: Mode,
    /// Members that train.
    pub members: u32,
    /// The counters.
    pub counted: Counted,
}

/// A switch that the rule wants. If a switch with this or a later number is in force, it is done or
/// obsolete.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Switch {
    /// Its number.
    pub number: u64,
    /// The new mode.
    pub mode: Mode,
    /// The loosest mode that the rule may choose from then on.
    pub loosest: Mode,
}

/// The state for a job between reports.
#[derive(Clone, Copy, Debug, Default)]
pub struct Steering {
    watch: Watch,
    window: Option<OpenWindow>,
    wanted: Option<(Switch, SwitchReason)>,
}

/// An open window.
#[derive(Clone, Copy, Debug)]
struct OpenWindow {
    /// The Raft term of the leader that counts.
    term: u64,
    /// The number of the switch since which it counts.
    number: u64,
    /// The counters at the start of the window.
    from: Counted,
    /// The largest lead since, and the reported number of pulls at the last report.
    lead: u64,
    heard: u64,
}

impl Steering {
    /// Handles a report. Returns the switch that the rule wants, and why, at every report until it is
    /// in force.
    pub fn hear(&mut self, report: &Report) -> Option<(Switch, SwitchReason)> {
        let Report { term, rule, number, mode, loosest, members, counted } = *report;
        self.wanted = self.wanted.filter(|(w, _)| w.number > number);
        if self.wanted.is_some() {
            return self.wanted;
        }
        let same = |w: &OpenWindow| (w.term, w.number) == (term, number) && w.from.pulls <= counted.pulls;
        let begun = match self.window {
            Some(window) if same(&window) => window,
            // The counters restarted at the switch, so all of them belong to the current mode.
            Some(_) => OpenWindow { term, number, from: Counted::default(), lead: 0, heard: 0 },
            // Another instance may have decided on the counts so far.
            None => OpenWindow { term, number, from: counted, lead: 0, heard: counted.pulls },
        };
        // A report may arrive twice.
        let lead = if counted.pulls > begun.heard { counted.lead.max(begun.lead) } else { begun.lead };
        let begun = OpenWindow { lead, heard: counted.pulls, ..begun };
        self.window = Some(begun);
        let pulls = counted.pulls - begun.from.pulls;
        if members == 0 || pulls < u64::from(WINDOW) * u64::from(members) {
            return None;
        }
        self.window = Some(OpenWindow { from: counted, lead: 0, ..begun });
        let window = between(&begun, &counted, members);
        let Next { mode, loosest, why } = self.watch.decide(&rule, &window, mode, loosest)?;
        self.wanted = Some((Switch { number: number + 1, mode, loosest }, why));
        self.wanted
    }
}

/// The window between `begun` and `now`.
fn between(begun: &OpenWindow, now: &Counted, members: u32) -> Window {
    let OpenWindow { from, lead, .. } = begun;
    let mean = |sum: f64, n: u64| (n > 0).then(|| sum / n as f64);
    let all = now.lasted.saturating_sub(from.lasted).as_secs_f64() * f64::from(members);
    let waited = now.waited.saturating_sub(from.waited).as_secs_f64();
    let delays = (now.delays.0.saturating_sub(from.delays.0), now.delays.1.saturating_sub(from.delays.1));
    Window {
        idle: if all > 0.0 { waited / all } else { 0.0 },
        delay: mean(delays.0 as f64, delays.1).unwrap_or(0.0),
        members: members as usize,
        lead: *lead,
        loss: mean(now.losses.0 - from.losses.0, now.losses.1.saturating_sub(from.losses.1)),
    }
}

#[cfg(test)]
#[path = "steering_tests.rs"]
mod tests;
