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

use super::effects::{ReplyHandle, SwitchResult};
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
            let why = "another switch is under way; ask again";
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
mod tests {
    use super::*;
    use proptest::prelude::*;
    use tokio::sync::oneshot;

    proptest! {
        /// Each switch is proposed once and has a greater number than the one in force. Each requester gets one
        /// answer, and a positive one only for its own switch or one that is over.
        #[test]
        fn a_switch_is_proposed_once_and_told_once(
            ops in prop::collection::vec((0u8..4, prop::option::of(1u64..6), 0u32..3), 1..60),
        ) {
            let job = ServerJob::new("switching", Mode::Ssp(1), 8, 8);
            let mut now = InForce::first(Mode::Ssp(1), None);
            let mut switching = Switching::default();
            let mut waits: Vec<(u64, oneshot::Receiver<SwitchResult>)> = Vec::new();
            let mut proposed: Option<(u64, Mode)> = None;
            for (op, number, bound) in ops {
                match op {
                    0 | 1 => {
                        let (tx, mut rx) = oneshot::channel();
                        let mode = Mode::Ssp(bound);
                        let answer = switching.ask(number, RequestedMode::Choice(mode.into()), Some(tx.into()), now, &job);
                        match answer {
                            Some((asker, switched)) => {
                                let over = number.is_some_and(|n| n <= now.number);
                                prop_assert_eq!(switched.is_ok(), over, "{:?}", switched);
                                asker.answer(switched);
                                prop_assert!(rx.try_recv().is_ok());
                            }
                            None => waits.push((number.unwrap_or(now.number + 1), rx)),
                        }
                    }
                    2 => {
                        let Some((number, mode, auto)) = switching.propose() else { continue };
                        prop_assert!(number > now.number && auto.is_none());
                        prop_assert!(proposed.is_none_or(|(n, _)| n < number), "twice");
                        proposed = Some((number, mode));
                    }
                    _ => {
                        let Some((number, mode)) = proposed.take() else { continue };
                        now = InForce { number, mode, ..now };
                        switching.over().into_iter().for_each(|asker| asker.answer(Ok(now)));
                        prop_assert!(!switching.is_under_way());
                        // A request that a greater number overtook is released without an answer.
                        waits.retain_mut(|(n, rx)| match rx.try_recv() {
                            Ok(told) => { assert!(*n <= number.max(*n) && told.is_ok()); false }
                            Err(oneshot::error::TryRecvError::Closed) => false,
                            Err(oneshot::error::TryRecvError::Empty) => true,
                        });
                        prop_assert!(waits.is_empty(), "nobody waits for a switch that is over");
                    }
                }
                prop_assert_eq!(waits.is_empty() || switching.is_under_way(), true);
            }
        }
    }
}
