//! Requests of people and of the rule to a running job: switch the mode, stop.

use super::{
    Effect, GroupStatus, Leader, Purpose, RequestedMode,
    answers::{EditResult, ReplyHandle, SwitchResult},
    epoch::Phase,
};
use crate::shard::{
    command::{Command, Proposal},
    state::Meta,
};
use paraft_common::{
    Step,
    auto::{Counted, Report},
};

impl Leader {
    /// Handles a request to switch the mode.
    pub(super) fn switch_asked(
        &mut self,
        group: &dyn GroupStatus,
        number: Option<u64>,
        wanted: RequestedMode,
        asker: Option<ReplyHandle<SwitchResult>>,
    ) {
        let now = self.shard.read(|m| m.in_force);
        let conf = self.shard.configured();
        let answer = match (self.leading(), conf) {
            (Some(e), Some(conf)) => e.switching.ask(number, wanted, asker, now, &conf.job),
            _ => asker.map(|asker| (asker, Err(self.not_leader(group)))),
        };
        self.out.extend(answer.map(|(asker, switched)| Effect::SwitchResult(asker, switched)));
    }

    /// Publishes the counts for the rule, for this server's reports to the control group.
    pub(super) fn tell_counts(&mut self) {
        let seen = self.shard.view(|conf, m| {
            let loosest = m.in_force.auto?;
            Some((conf?.job.auto, m.in_force, loosest, m.members.active_count() as u32))
        });
        let Some((rule, in_force, loosest, members)) = seen else { return };
        let Some(e) = self.leading() else { return };
        let (term, counted) = (e.term, e.tally.take());
        let mut auto = self.counters.auto.lock();
        let lead = auto.as_ref().map_or(0, |t| t.counted.lead).max(counted.lead);
        let counted = Counted { lead, ..counted };
        let (number, mode) = (in_force.number, in_force.mode);
        *auto = Some(Report { term, rule, number, mode, loosest, members, counted });
    }

    /// Changes rows of a table.
    pub(super) fn edit_asked(
        &mut self,
        group: &dyn GroupStatus,
        edit: Proposal,
        asker: ReplyHandle<EditResult>,
    ) {
        if self.epoch.as_ref().is_some_and(|e| e.phase == Phase::Leads) {
            self.propose_behind_cut(Purpose::EditRows(asker), edit);
        } else {
            let refused = Err(self.not_leader(group));
            self.out.push_back(Effect::EditResult(asker, refused));
        }
    }

    /// Ends the job now. The request is repeated until the job has ended.
    pub(super) fn stop_asked(&mut self) {
        let leads = self.epoch.as_ref().is_some_and(|e| e.phase == Phase::Leads);
        if leads && self.shard.configured().is_some() && !self.shard.read(|m| m.stop) {
            self.propose_behind_cut(Purpose::Stop, Command::Stop.into());
        }
    }

    /// Takes the next step of a switch in progress.
    pub(super) fn propose_switch(&mut self) {
        if self.epoch.as_ref().is_none_or(|e| !e.switching.is_under_way()) {
            return;
        }
        let Some(conf) = self.shard.configured() else { return };
        let Some(e) = self.epoch.as_mut().filter(|e| e.phase == Phase::Leads) else { return };
        let Some((number, mode, auto)) = e.switching.propose() else { return };
        let after = match conf.job.clip.norm.is_some() || e.clips {
            // A mode that averages is in force at once: workers that learn of it send no norm, and a round needs
            // none.
            true if !mode.averages() => {
                // The first step whose weights no worker can have before this proposal is applied.
                let steps = |m: &Meta| m.members.iter().flat_map(|(_, m)| m.steps().iter().copied()).max();
                self.shard.read(steps).max(e.pending.last_proposed()).unwrap_or_default().next()
            }
            _ => Step(0),
        };
        self.propose(Purpose::SwitchMode, Command::SwitchMode { number, mode, after, auto }.into());
    }
}
