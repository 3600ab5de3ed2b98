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

use super::{Owner, Purpose};
use crate::shard::{
    command::{Command, Outcome},
    state::Configured,
};
use paraft_common::{InForce, Mode, ModeChoice, Step, auto::Next};
use paraft_proto::RefusalKind;
use tokio::sync::oneshot;

/// Hears how it ended.
type Tell = oneshot::Sender<Result<InForce, RefusalKind>>;

/// A switch that is not applied yet.
pub struct Switching {
    number: u64,
    mode: Mode,
    auto: Option<Mode>,
    proposed: bool,
    tell: Vec<Tell>,
}

impl Switching {
    /// What the rule has decided.
    pub(super) fn decided(number: u64, next: Next) -> Self {
        let Next { mode, loosest, .. } = next;
        Self { number, mode, auto: Some(loosest), proposed: false, tell: Vec::new() }
    }
}

impl Owner {
    /// Somebody asks for a switch. `number`: the switch that it is to be, unless it is over already; `None`: the next.
    pub(super) fn switch_asked(&mut self, number: Option<u64>, choice: ModeChoice, tell: Option<Tell>) {
        let answer = |tell: Option<Tell>, result| _ = tell.map(|t| t.send(result));
        let now = self.shard.read(|m| m.in_force);
        let not_leader = self.not_leader();
        let (Some(lead), Some(conf)) = (self.lead.as_mut().filter(|l| l.ready), self.shard.configured())
        else {
            return answer(tell, Err(not_leader));
        };
        let (mode, auto) = match choice {
            ModeChoice::Fixed(mode) => (mode, None),
            ModeChoice::Auto => (conf.job.auto.from_mode(now.mode), Some(conf.job.auto.loosest())),
        };
        let asked = number;
        let number = number.unwrap_or(now.number + 1);
        if number <= now.number {
            return answer(tell, Ok(now));
        }
        let other = |s: &Switching| (s.mode, s.auto) != (mode, auto);
        if asked.is_none() && lead.switching.as_ref().is_some_and(other) {
            // Two who want different modes: the second gets its own switch, behind the first one's.
            let why = "another switch is under way; ask again";
            return answer(tell, Err(RefusalKind::Unavailable(why.into())));
        }
        if let Err(e) = conf.job.may_switch(mode) {
            return answer(tell, Err(RefusalKind::BadJob(e.to_string())));
        }
        match &mut lead.switching {
            Some(s) if s.number >= number => s.tell.extend(tell),
            _ => {
                let tell = tell.into_iter().collect();
                lead.switching = Some(Switching { number, mode, auto, proposed: false, tell });
            }
        }
    }

    /// Takes the next step of a switch under way.
    pub(super) async fn go_on_switching(&mut self, conf: &Configured) {
        let Some(lead) = &mut self.lead else { return };
        let Some(s) = lead.switching.as_mut().filter(|s| !s.proposed) else { return };
        s.proposed = true;
        let (number, mode, auto) = (s.number, s.mode, s.auto);
        let after = if conf.job.clip.norm.is_some() { self.step_under_way() } else { Step(0) };
        let command = Command::SwitchMode { number, mode, after, auto };
        self.propose(Purpose::SwitchMode, command.into()).await;
    }

    /// The step of which nobody has the weights after it, nor will before what is proposed now is applied.
    fn step_under_way(&self) -> Step {
        let applied = self
            .shard
            .read(|m| m.members.iter().flat_map(|(_, m)| m.steps().iter().copied()).max())
            .unwrap_or_default();
        let in_flight =
            self.lead.iter().flat_map(|l| l.in_flight.values().copied()).max().unwrap_or_default();
        applied.max(in_flight).next()
    }

    /// The switch is applied, or was refused.
    pub(super) fn switched(&mut self, outcome: &Outcome) {
        let in_force = self.shard.read(|m| m.in_force);
        let Some(s) = self.lead.as_mut().and_then(|l| l.switching.take()) else { return };
        let result = match outcome {
            Outcome::Refused(why) => Err(RefusalKind::Unavailable(why.clone())),
            _ => Ok(in_force),
        };
        if result.is_ok() {
            let (shard, mode, number) = (self.shard.id().0, in_force.mode, in_force.number);
            tracing::info!(shard, %mode, number, "the mode was switched");
            self.begin_window();
        }
        for tell in s.tell {
            let _ = tell.send(result.clone()); // who asked may be gone
        }
    }
}
