//! The leader of the control group: it takes reports, plans, and commits the plan's commands.

use super::Agent;
use crate::{
    control::{
        auto::AutoRules,
        calls::SentReport,
        groups::Groups,
        membership,
        plan::{ControlChange, Directive, Health, LastReport, Plan, Report, View, plan},
        state::{Command, State},
    },
    raft::Membership,
    replicated::Group,
};
use paraft_common::{JobShard, ServerId};
use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

/// A report within this time after a plan is answered from that plan; the next plan, which the report causes,
/// includes it. A server reports a few times per election timeout, and a client that sends thousands a second
/// must not cause a plan for each.
pub(super) const PLAN_PAUSE: Duration = Duration::from_millis(5);

/// Why a report was refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReportRefusal {
    /// This server does not lead the control group.
    NotLeader,
    /// The report is a difference to one that this server does not have: send the whole report.
    Whole,
    /// Another process has this server's id, at this address.
    Another(String),
}

/// State of the control group's leader only; lost with the leadership.
#[derive(Default)]
pub(in crate::control) struct LeaderState {
    pub since: Option<Instant>,
    pub heard: BTreeMap<ServerId, LastReport>,
    pub health: BTreeMap<JobShard, (Health, String)>,
    pub(super) lost_since: BTreeMap<JobShard, Instant>,
    /// Servers that too few other servers reach.
    pub unreached: BTreeMap<ServerId, String>,
    /// The rule that chooses a job's staleness bound.
    auto: AutoRules,
    /// The last plan.
    pub(super) planned: Option<LastPlan>,
}

/// A plan, kept for repeated reports.
pub(in crate::control) struct LastPlan {
    pub at: Instant,
    /// Generation of the agreed state that it was made from.
    generation: u64,
    directives: BTreeMap<ServerId, Vec<Directive>>,
}

impl Agent {
    /// Takes a report, if this server leads the control group; returns the directives for the reporter.
    pub fn take_report(&self, told: SentReport) -> Result<Vec<Directive>, ReportRefusal> {
        if !self.group().leadership().borrow().leads {
            return Err(ReportRefusal::NotLeader);
        }
        let SentReport { server, number, since: base, report, gone } = told;
        let members = self.group().membership().members;
        let mut leading = self.leading.lock();
        let since = leading.since.ok_or(ReportRefusal::NotLeader)?;
        let silent = self.options.timeouts.silent;
        let heard = leading.heard.get(&server);
        let report = match heard {
            _ if base == 0 => report,
            Some(last) if last.number == base => report.merged_onto(&last.report, &gone),
            _ => return Err(ReportRefusal::Whole),
        };
        if let Some(held_at) = membership::holder(server, &report, heard, &members, since, silent) {
            return Err(ReportRefusal::Another(format!(
                "{server} is there already, at {held_at}: two processes have the same --id or --advertise, or that one has \
                 died a moment ago"
            )));
        }
        let like = heard.is_some_and(|h| report.is_equivalent(&h.report));
        leading.heard.insert(server, LastReport { number, report, at: Instant::now() });
        // Time alone also calls for plans: this server makes one at its own pace.
        if let Some(planned) = &leading.planned
            && planned.generation == self.agreed.read(|s| s.generation)
            && (planned.at.elapsed() < PLAN_PAUSE || like && planned.directives.values().all(Vec::is_empty))
        {
            let directives = planned.directives.get(&server).cloned().unwrap_or_default();
            if !like {
                self.news.notify_one();
            }
            return Ok(directives);
        }
        self.news.notify_one();
        drop(leading);
        let mut plan = self.plan().ok_or(ReportRefusal::NotLeader)?;
        Ok(plan.directives.remove(&server).unwrap_or_default())
    }

    fn plan(&self) -> Option<Plan> {
        let mut leading = self.leading.lock();
        let since = leading.since?;
        let state = self.agreed.get();
        let group = self.group();
        let (control, control_caught_up) = (group.membership(), group.caught_up());
        let LeaderState { heard, lost_since, auto, .. } = &mut *leading;
        heard.retain(|server, _| !state.forgotten.contains(server));
        let view = View {
            state: &state,
            control: &control,
            control_caught_up: &control_caught_up,
            lost_since,
            heard,
            now: Instant::now(),
            since,
            timeouts: self.options.timeouts,
            founding: rand::random::<u64>() | (1 << 63),
            unix_ms: paraft_host::clock::unix_ms(),
        };
        let mut plan = plan(&view);
        for (server, switch) in auto.steer(&view) {
            plan.directives.entry(server).or_default().push(switch);
        }
        let unreached = view.unreached();
        leading.unreached = unreached;
        leading.health = plan.health.clone();
        leading.lost_since.retain(|shard, _| plan.all_lost.contains(shard));
        for shard in &plan.all_lost {
            leading.lost_since.entry(*shard).or_insert_with(Instant::now);
        }
        let (generation, directives) = (state.generation, plan.directives.clone());
        leading.planned = Some(LastPlan { at: Instant::now(), generation, directives });
        Some(plan)
    }

    pub(super) async fn lead(self: Arc<Self>) {
        let mut starts = self.control.starts();
        // Until the server ends, or the replica starts again.
        while starts.borrow_and_update().is_some() {
            self.lead_when_elected(self.group()).await;
            self.leading.lock().since = None;
            if starts.changed().await.is_err() {
                return;
            }
        }
    }

    /// Returns when this replica of the control group has stopped.
    async fn lead_when_elected(&self, group: Group) {
        let mut leadership = group.leadership();
        loop {
            if leadership.wait_for(|l| l.leads).await.is_err() {
                return;
            }
            if let Err(e) = group.barrier().await {
                tracing::debug!(error = %e, "cannot lead the control group yet");
                tokio::time::sleep(Duration::from_millis(20)).await;
                continue;
            }
            self.agreed.is_current();
            let jobs = self.agreed.read(|s| s.jobs.iter().any(|(_, job)| job.facts.is_some()));
            *self.groups.lock() = Groups::taken_over(jobs, Instant::now());
            *self.leading.lock() = LeaderState { since: Some(Instant::now()), ..LeaderState::default() };
            tracing::info!(server = %self.options.server, "leads the control group");
            let (mut moved, mut quiet) = (self.agreed.generations(), None);
            while leadership.borrow_and_update().leads {
                moved.mark_unchanged();
                let began = Instant::now();
                let busy = self.step().await;
                let pause = match busy {
                    true => self.interval(),
                    // Only a report that does not come can change anything.
                    false if group.is_asleep() => self.options.timeouts.silent / 2,
                    false => self.idle_interval(began.elapsed()),
                };
                self.sleep_if_quiet(&group, busy, &mut quiet).await;
                let pause = tokio::time::sleep(pause);
                tokio::select! {
                    () = pause => {}
                    () = self.news.notified() => tokio::time::sleep(PLAN_PAUSE).await,
                    // A submitted job needs its shards now.
                    _ = moved.changed() => tokio::time::sleep(PLAN_PAUSE).await,
                    changed = leadership.changed() => if changed.is_err() { return },
                }
            }
            let mut leading = self.leading.lock();
            (leading.since, leading.planned) = (None, None);
        }
    }

    /// Makes and commits a plan; returns whether it had any action.
    async fn step(&self) -> bool {
        let state = self.agreed.get();
        if state.fleet == 0 {
            // The founder lost the leadership, or died, before it had founded the fleet.
            let members = self.group().membership().members;
            let servers = members.iter().map(|(n, a)| (n.server(), a.clone())).collect();
            let fleet = rand::random_range(1..u64::MAX);
            if let Some(shape) = self.options.shape {
                let _ = self.propose(Command::Found { fleet, shape, servers }).await;
            }
            return true;
        }
        let admit: Vec<_> = {
            let leading = self.leading.lock();
            let new = |(id, h): (&ServerId, &LastReport)| {
                let known = state.servers.get(id).is_some_and(|s| s.address == h.report.address);
                // This server knows its own address.
                let own = *id == self.options.server && h.report.node == self.group().me();
                let there = || own || self.reach.confirms(&h.report.address, *id, h.report.node);
                let forgotten = state.forgotten.contains(id);
                (!known && !forgotten && there())
                    .then(|| Command::Admit { server: *id, address: h.report.address.clone() })
            };
            leading.heard.iter().filter_map(new).collect()
        };
        let Some(plan) = self.plan() else { return true };
        let busy = !(admit.is_empty()
            && plan.commands.is_empty()
            && plan.directives.is_empty()
            && plan.control.is_none());
        // In parallel: each waits for the disks of a majority.
        let agreeing = admit.into_iter().chain(plan.commands).map(|command| {
            tracing::debug!(?command, "agreeing");
            self.propose(command)
        });
        if let Some(e) = futures::future::join_all(agreeing).await.into_iter().find_map(Result::err) {
            // An election does this; the next plan proposes it again.
            tracing::info!(error = %e, "the control group has not agreed yet; trying again");
            return true;
        }
        let changed = match plan.control {
            None => Ok(()),
            Some(ControlChange::Learner(node, address)) => self.group().add_learner(node, &address).await,
            Some(ControlChange::Remove(nodes)) => {
                tracing::info!(?nodes, "the control group removes members that will not return");
                self.group().remove_learners(&nodes).await
            }
            Some(ControlChange::Voters(voters)) => {
                tracing::info!(?voters, "changing who votes in the control group");
                self.group().set_voters(&voters).await
            }
        };
        if let Err(e) = changed {
            tracing::info!(error = %e, "the control group's membership has not changed yet; trying again");
        }
        busy
    }

    /// Whether this server leads the control group, and its leader state belongs to this term.
    pub fn leads(&self) -> bool {
        self.leading.lock().since.is_some() && self.group().leadership().borrow().leads
    }

    /// For the status: the agreed state, the health of each shard, and the time of each server's last report.
    /// `None` if this server does not lead the control group.
    #[allow(clippy::type_complexity)]
    pub fn overview(
        &self,
    ) -> Option<(
        Arc<State>,
        Membership,
        BTreeMap<ServerId, (Report, bool)>,
        BTreeMap<JobShard, (Health, String)>,
    )> {
        let leading = self.leading.lock();
        leading.since?;
        let silent = |h: &LastReport| h.at.elapsed() > self.options.timeouts.silent;
        let heard = leading.heard.iter().map(|(s, h)| (*s, (h.report.clone(), silent(h)))).collect();
        Some((self.agreed.get(), self.group().membership(), heard, leading.health.clone()))
    }
}
