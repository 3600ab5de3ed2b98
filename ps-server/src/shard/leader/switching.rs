//! The live switch of the mode: one entry of the log. Pushes before it are of the old mode, pushes after it of the
//! new one.
//!
//! ```text
//!  asked ─▶ SwitchMode in the log ─▶ applied: open rounds, waiting pulls by the new rule
//! ```
//!
//! Each shard switches at its own place in its own log. The requester sends the switch to every shard. A worker
//! that learns of a switch with its pull sends it to the shards that have not switched, so no shard is left behind
//! if the requester was cut off. Numbers make repeated requests harmless.
//!
//! A switch loses and doubles nothing. A push that waits in an open round when the mode stops averaging becomes an
//! update by itself; a push that arrives when the mode averages opens a round. If the job clips by the norm of the
//! whole gradient, workers send that norm in the asynchronous modes only: the step in progress then finishes in
//! lock-step.

use super::answers::{ReplyHandle, SwitchResult};
use paraft_common::{InForce, Mode, ModeChoice, config::ServerJob};
use paraft_proto::RefusalKind;

/// The requested mode.
#[derive(Clone, Copy, Debug)]
pub enum RequestedMode {
    /// A mode, or that the rule chooses it from now on.
    Choice(ModeChoice),
    /// What the rule has decided.
    Decided {
        /// The mode.
        mode: Mode,
        /// The loosest mode that may be chosen from now on.
        loosest: Mode,
    },
}

/// A switch that is not applied yet.
#[derive(Debug)]
struct Switch {
    number: u64,
    mode: Mode,
    auto: Option<Mode>,
    proposed: bool,
    askers: Vec<ReplyHandle<SwitchResult>>,
}

/// The switch in progress, if any.
#[derive(Debug, Default)]
pub struct Switching(Option<Switch>);

impl Switching {
    /// Requests a switch. `number`: the number of the switch, ignored if that switch is over; `None`: the next.
    /// Returns the answer if it is already known.
    pub fn ask(
        &mut self,
        number: Option<u64>,
        wanted: RequestedMode,
        asker: Option<ReplyHandle<SwitchResult>>,
        now: InForce,
        job: &ServerJob,
    ) -> Option<(ReplyHandle<SwitchResult>, SwitchResult)> {
        let answer = |asker: Option<ReplyHandle<SwitchResult>>, switched| Some((asker?, switched));
        let (mode, auto) = match wanted {
            RequestedMode::Choice(ModeChoice::Fixed(mode)) => (mode, None),
            RequestedMode::Choice(ModeChoice::Auto) => (job.auto.from_mode(now.mode), Some(Mode::Asp)),
            RequestedMode::Decided { mode, loosest } => (mode, Some(loosest)),
        };
        let asked = number;
        let number = number.unwrap_or(now.number + 1);
        if number <= now.number {
            return answer(asker, Ok(now));
        }
        let other = |s: &Switch| (s.mode, s.auto) != (mode, auto);
        if asked.is_none() && self.0.as_ref().is_some_and(other) {
            // For two requests of different modes: the second gets its own switch after the first one's.
            let why = "another switch is in progress; ask again";
            return answer(asker, Err(RefusalKind::Unavailable(why.into())));
        }
        if let Err(e) = job.may_switch(mode) {
            return answer(asker, Err(RefusalKind::BadJob(e.to_string())));
        }
        match &mut self.0 {
            Some(s) if s.number >= number => s.askers.extend(asker),
            _ => {
                let askers = asker.into_iter().collect();
                self.0 = Some(Switch { number, mode, auto, proposed: false, askers });
            }
        }
        None
    }

    /// Whether a switch is in progress.
    pub fn is_under_way(&self) -> bool {
        self.0.is_some()
    }

    /// Takes the switch to propose, once: its number, the mode, and the loosest mode that the rule may choose.
    pub fn propose(&mut self) -> Option<(u64, Mode, Option<Mode>)> {
        let s = self.0.as_mut().filter(|s| !s.proposed)?;
        s.proposed = true;
        Some((s.number, s.mode, s.auto))
    }

    /// Ends the switch, applied or refused, and returns the handles to answer.
    pub fn over(&mut self) -> Vec<ReplyHandle<SwitchResult>> {
        self.0.take().map(|s| s.askers).unwrap_or_default()
    }
}

#[cfg(test)]
#[path = "switching_tests.rs"]
mod tests;
