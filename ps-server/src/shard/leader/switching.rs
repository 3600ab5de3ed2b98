//! The live switch of the mode: one entry of the log, before which pushes are of the mode before, and from which on they
//! are of the new one.
//!
//! ```text
//!  asked ─▶ SwitchMode in the log ─▶ applied: open rounds, waiting pulls by the new rule
//! ```
//!
//! Each shard switches at its own place in its own log. Whoever asks tells every shard; and a worker that hears of a switch
//! with its pull tells the shards that have not come to it, so that none is left behind where the one who asked was cut
//! off. Numbers make that harmless.
//!
//! Nothing is lost or doubled by it: a push that waits in an open round when the mode stops averaging becomes an update of
//! its own; one that comes when it averages opens a round. Where the job clips by the norm of the whole gradient, workers
//! send that norm in the asynchronous modes only: there the step that is under way is finished in lock-step.

use super::effects::{Asker, Switched};
use paraft_common::{InForce, Mode, ModeChoice, config::ServerJob};
use paraft_proto::RefusalKind;

/// What somebody wants.
#[derive(Clone, Copy, Debug)]
pub enum Wanted {
    /// A mode, or that the rule chooses it from now on.
    Choice(ModeChoice),
    /// What the rule has decided.
    Decided {
        /// The mode.
        mode: Mode,
        /// The loosest that may be chosen from now on.
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
    askers: Vec<Asker<Switched>>,
}

/// The switch of the mode that is under way, if one is.
#[derive(Debug, Default)]
pub struct Switching(Option<Switch>);

impl Switching {
    /// Somebody asks for a switch. `number`: the switch that it is to be, unless it is over already; `None`: the next.
    /// Gives what is known at once.
    pub fn ask(
        &mut self,
        number: Option<u64>,
        wanted: Wanted,
        asker: Option<Asker<Switched>>,
        now: InForce,
        job: &ServerJob,
    ) -> Option<(Asker<Switched>, Switched)> {
        let answer = |asker: Option<Asker<Switched>>, switched| Some((asker?, switched));
        let (mode, auto) = match wanted {
            Wanted::Choice(ModeChoice::Fixed(mode)) => (mode, None),
            Wanted::Choice(ModeChoice::Auto) => (job.auto.from_mode(now.mode), Some(Mode::Asp)),
            Wanted::Decided { mode, loosest } => (mode, Some(loosest)),
        };
        let asked = number;
        let number = number.unwrap_or(now.number + 1);
        if number <= now.number {
            return answer(asker, Ok(now));
        }
        let other = |s: &Switch| (s.mode, s.auto) != (mode, auto);
        if asked.is_none() && self.0.as_ref().is_some_and(other) {
            // Two who want different modes: the second gets its own switch, behind the first one's.
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

    /// Whether one is under way.
    pub fn is_under_way(&self) -> bool {
        self.0.is_some()
    }

    /// What is to be proposed, once: its number, the mode, and what the rule may still choose.
    pub fn propose(&mut self) -> Option<(u64, Mode, Option<Mode>)> {
        let s = self.0.as_mut().filter(|s| !s.proposed)?;
        s.proposed = true;
        Some((s.number, s.mode, s.auto))
    }

    /// It is applied, or was refused: who hears it.
    pub fn over(&mut self) -> Vec<Asker<Switched>> {
        self.0.take().map(|s| s.askers).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use tokio::sync::oneshot;

    proptest! {
        /// Each switch is proposed once and has a greater number than what is in force; whoever asks hears once, and who hears
        /// that it is in force asked for this switch, or for one that is over.
        #[test]
        fn a_switch_is_proposed_once_and_told_once(
            ops in prop::collection::vec((0u8..4, prop::option::of(1u64..6), 0u32..3), 1..60),
        ) {
            let job = ServerJob::new("switching", Mode::Ssp(1), 8, 8);
            let mut now = InForce::first(Mode::Ssp(1), None);
            let mut switching = Switching::default();
            let mut waits: Vec<(u64, oneshot::Receiver<Switched>)> = Vec::new();
            let mut proposed: Option<(u64, Mode)> = None;
            for (op, number, bound) in ops {
                match op {
                    0 | 1 => {
                        let (tx, mut rx) = oneshot::channel();
                        let mode = Mode::Ssp(bound);
                        let answer = switching.ask(number, Wanted::Choice(mode.into()), Some(tx.into()), now, &job);
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
                        // One that was overtaken by a greater number is let go without an answer.
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
