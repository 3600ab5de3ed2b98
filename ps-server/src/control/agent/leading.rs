//! What a server does while it leads the control group: it takes reports, plans, and agrees on what it has planned.

use super::Agent;
use crate::{
    control::{
        auto::Follows,
        calls::Told,
        groups::Groups,
        joining,
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

/// Reports that come so soon after a plan are answered from it: the next plan, which they cause, has what they say. A
/// server reports a few times in an election's time; who sends thousands a second must not have the leader plan for each.
pub(super) const PLAN_PAUSE: Duration = Duration::from_millis(5);

/// Why a report was not taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NotTaken {
    /// This server does not lead the control group.
    NotLeader,
    /// It was told upon a report that this server has not: all of it is to be told.
    Whole,
    /// Another process is this server, and where.
    Another(String),
}

/// What only the leader of the control group knows; lost with the leadership.
#[derive(Default)]
pub(in crate::control) struct Leading {
    pub since: Option<Instant>,
    pub heard: BTreeMap<ServerId, LastReport>,
    pub health: BTreeMap<JobShard, (Health, String)>,
    pub(super) lost_since: BTreeMap<JobShard, Instant>,
    /// Servers that too few of the others reach.
    pub unreached: BTreeMap<ServerId, String>,
    /// The rule that chooses a job's staleness bound.
    auto: Follows,
    /// The last plan.
    pub(super) planned: Option<Planned>,
}

/// A plan, for those who ask again.
pub(in crate::control) struct Planned {
    pub at: Instant,
    /// Of the agreed state that it was made from.
    generation: u64,
    directives: BTreeMap<ServerId, Vec<Directive>>,
}

impl Agent {
    /// Takes a report, if this server leads the control group; gives what the reporter should do.
    pub fn take_report(&self, told: Told) -> Result<Vec<Directive>, NotTaken> {
        if !self.group().leadership().borrow().leads {
            return Err(NotTaken::NotLeader);
        }
        let Told { server, number, since: upon, report, gone } = told;
        let members = self.group().membership().members;
        let mut leading = self.leading.lock();
        let since = leading.since.ok_or(NotTaken::NotLeader)?;
        let silent = self.options.timeouts.silent;
        let heard = leading.heard.get(&server);
        let report = match heard {
            _ if upon == 0 => report,
            Some(last) if last.number == upon => report.upon(&last.report, &gone),
            _ => return Err(NotTaken::Whole),
        };
        if let Some(held_at) = joining::holder(server, &report, heard, &members, since, silent) {
            return Err(NotTaken::Another(format!(
                "{server} is there already, at {held_at}: two processes have the same --id or --advertise, or that one has \
                 died a moment ago"
            )));
        }
        let like = heard.is_some_and(|h| report.is_like(&h.report));
        leading.heard.insert(server, LastReport { number, report, at: Instant::now() });
        // Time, too, asks for plans: this server makes one at its own pace.
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
        let mut plan = self.plan().ok_or(NotTaken::NotLeader)?;
        Ok(plan.directives.remove(&server).unwrap_or_default())
    }

    fn plan(&self) -> Option<Plan> {
        let mut leading = self.leading.lock();
        let since = leading.since?;
        let state = self.agreed.get();
        let group = self.group();
        let (control, control_caught_up) = (group.membership(), group.caught_up());
        let Leading { heard, lost_since, auto, .. } = &mut *leading;
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
        leading.planned = Some(Planned { at: Instant::now(), generation, directives });
        Some(plan)
    }

    pub(super) async fn lead(self: Arc<Self>) {
        let mut starts = self.control.starts();
        // Until the server ends, or a start of the replica follows the last.
        while starts.borrow_and_update().is_some() {
            self.lead_at_times(self.group()).await;
            self.leading.lock().since = None;
            if starts.changed().await.is_err() {
                return;
            }
        }
    }

    /// Returns when this replica of the control group has stopped.
    async fn lead_at_times(&self, group: Group) {
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
            *self.leading.lock() = Leading { since: Some(Instant::now()), ..Leading::default() };
            tracing::info!(server = %self.options.server, "leads the control group");
            let mut moved = self.agreed.generations();
            while leadership.borrow_and_update().leads {
                moved.mark_unchanged();
                let began = Instant::now();
                let busy = self.step().await;
                let pause = if busy { self.interval() } else { self.idle_interval(began.elapsed()) };
                let pause = tokio::time::sleep(pause);
                tokio::select! {
                    () = pause => {}
                    () = self.news.notified() => tokio::time::sleep(PLAN_PAUSE).await,
                    // A job that was submitted wants its shards now.
                    _ = moved.changed() => tokio::time::sleep(PLAN_PAUSE).await,
                    changed = leadership.changed() => if changed.is_err() { return },
                }
            }
            let mut leading = self.leading.lock();
            (leading.since, leading.planned) = (None, None);
        }
    }

    /// Plans, and agrees on it; gives whether there was anything to do.
    async fn step(&self) -> bool {
        let state = self.agreed.get();
        if state.fleet == 0 {
            // The founder lost the leadership, or its life, before it had founded.
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
                // Nobody has to tell this server where it is itself.
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
        // Together: each waits for the disks of a majority.
        let agreeing = admit.into_iter().chain(plan.commands).map(|command| {
            tracing::debug!(?command, "agreeing");
            self.propose(command)
        });
        if let Some(e) = futures::future::join_all(agreeing).await.into_iter().find_map(Result::err) {
            tracing::warn!(error = %e, "the control group cannot agree at present");
            return true;
        }
        let changed = match plan.control {
            None => Ok(()),
            Some(ControlChange::Learner(node, address)) => self.group().add_learner(node, &address).await,
            Some(ControlChange::Remove(nodes)) => {
                tracing::info!(?nodes, "the control group lets members go that do not come back");
                self.group().remove_learners(&nodes).await
            }
            Some(ControlChange::Voters(voters)) => {
                tracing::info!(?voters, "changing who votes in the control group");
                self.group().set_voters(&voters).await
            }
        };
        if let Err(e) = changed {
            tracing::warn!(error = %e, "the control group's membership cannot change at present");
        }
        busy
    }

    /// Whether this server leads the control group and what only its leader knows is of this term.
    pub fn leads(&self) -> bool {
        self.leading.lock().since.is_some() && self.group().leadership().borrow().leads
    }

    /// For status: the agreed state, how each shard is, and when each server was last heard; `None` where this
    /// server does not lead the control group.
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
