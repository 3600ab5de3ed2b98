//! A server's reports to the leader of the control group, and how it executes the directives in the answer.

use super::{Agent, ReportOutcome};
use crate::{
    control::{
        calls::{ReportAnswer, SentReport},
        jobs::JobFacts,
        plan::{Action, AsideReport, Directive, JobReport, ReplicaReport, Report},
    },
    replicas::{Aside, Replica},
    shard::leader::{Event, RequestedMode},
};
use paraft_common::{JobShard, auto::Switch};
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};

/// A reason that keeps a server out for this long is logged. The reachability check runs every 2 s.
const KEPT_OUT_LOG_DELAY: Duration = Duration::from_secs(5);
/// A leader whose group sleeps sends no heartbeats: after this long without its answer it counts as missing.
const ASLEEP_TIMEOUT: Duration = Duration::from_millis(500);

impl Agent {
    /// What this server holds; sleeping replicas are taken from the report `before`.
    pub(super) fn own_report(&self, before: Option<&Report>) -> Report {
        let replicas = self.replicas.all().into_iter().map(|(id, r)| {
            let asleep = before.and_then(|b| b.replicas.get(&id)).filter(|then| slept_since(&r, then));
            (id, asleep.cloned().unwrap_or_else(|| Arc::new(self.report_of(id, &r))))
        });
        let mut replicas: BTreeMap<JobShard, Arc<ReplicaReport>> = replicas.collect();
        for (shard, waits) in self.replicas.stopped() {
            replicas.entry(shard).or_insert_with(|| {
                Arc::new(ReplicaReport {
                    node: waits.node.unwrap_or_default(),
                    founding: waits.founding.unwrap_or_default(),
                    founded: true,
                    trouble: waits.why,
                    no_room: waits.empty,
                    // An empty place has no storage that could recover.
                    stopped: (!waits.empty).then(|| waits.since.elapsed()),
                    ..ReplicaReport::default()
                })
            });
        }
        let aside = |a: Aside| AsideReport {
            shard: a.shard,
            founding: a.founding.unwrap_or_default(),
            readable: a.last.is_ok(),
            name: a.name,
        };
        Report {
            address: self.options.address.clone(),
            node: self.group().me(),
            replicas,
            reached: self
                .agreed
                .read(|s| self.reach.reached(s.servers.iter().map(|(id, m)| (*id, m.address.as_str())))),
            asides: self.replicas.asides().map(|all| all.into_iter().map(aside).collect()),
            control_trouble: self.control.stopped().map(|(why, _)| why).unwrap_or_default(),
        }
    }

    /// Reports to the leader of the control group, wherever it is, and follows the answer. Fails as
    /// [`Self::belong`].
    pub(super) async fn report(self: &Arc<Self>) -> Result<ReportOutcome, String> {
        if let (fleet @ 1.., fleets) = self.agreed.read(|s| (s.fleet, s.shape)) {
            self.belong(fleet, fleets)?;
        }
        let before = self.reported.lock().clone();
        let last = before.as_ref().map(|(report, ..)| &**report);
        let report = Arc::new(self.own_report(last));
        let same = last.is_some_and(|last| report.is_equivalent(last));
        let number = rand::random_range(1..u64::MAX);
        let server = self.options.server;
        let whole = || SentReport { server, number, report: (*report).clone(), ..SentReport::default() };
        if self.group().leadership().borrow().leads {
            *self.reported.lock() = Some((report.clone(), 0, String::new()));
            let Ok(directives) = self.take_report(whole()) else { return Ok(ReportOutcome::News) };
            let quiet = same && directives.is_empty();
            self.follow(self.agreed.read(|s| s.generation), directives);
            return Ok(if quiet { ReportOutcome::Nothing } else { ReportOutcome::News });
        }
        // Until a server has it, no server has the base of the next difference.
        *self.reported.lock() = Some((report.clone(), 0, String::new()));
        let difference = |address: &str| {
            let (last, since, _) = before.as_ref().filter(|(.., to)| to == address)?;
            let (report, gone) = report.since(last);
            Some(SentReport { server, number, since: *since, report, gone })
        };
        // The leader, if known, else every known server; its own address, too, where another process may
        // listen.
        let mut asked = BTreeSet::new();
        let mut next: Vec<String> =
            self.agreed.read(|s| s.servers.values().map(|m| m.address.clone()).collect());
        next.extend(self.options.servers.iter().cloned());
        next.extend(self.group().leader_address());
        while let Some(address) = next.pop() {
            if !asked.insert(address.clone()) {
                continue;
            }
            let told = difference(&address).unwrap_or_else(whole);
            let mut reply = self.send_report(&address, &told).await;
            if reply.as_ref().is_ok_and(|r| r.whole) {
                reply = self.send_report(&address, &whole()).await;
            }
            match reply {
                Ok(reply) if reply.accepted => {
                    if reply.number == number {
                        *self.reported.lock() = Some((report.clone(), number, address.clone()));
                    }
                    self.told(&address, &reply.why);
                    let quiet = same && reply.directives.is_empty() && reply.why.is_empty();
                    let early = reply.generation < self.agreed.read(|s| s.generation);
                    self.follow(reply.generation, reply.directives);
                    return Ok(match quiet {
                        _ if early => ReportOutcome::Early,
                        true => ReportOutcome::Nothing,
                        false => ReportOutcome::News,
                    });
                }
                Ok(reply) => {
                    // A server that does not lead gives no reason.
                    if !reply.why.is_empty() {
                        self.told(&address, &reply.why);
                    }
                    next.extend(reply.leader);
                }
                Err(e) => tracing::debug!(peer = %address, error = %e, "the report was not taken"),
            }
        }
        // In its sleep this replica would not notice that its leader is gone.
        let group = self.group();
        if group.is_asleep() {
            let _ = group.ensure_awake().await; // tried again with the next report
        }
        Ok(ReportOutcome::News)
    }

    async fn send_report(&self, address: &str, told: &SentReport) -> Result<ReportAnswer, String> {
        let call = self.calls.report(address, self.fleet(), told);
        match self.group().is_asleep() {
            true => tokio::time::timeout(ASLEEP_TIMEOUT, call).await.unwrap_or_else(|e| Err(e.to_string())),
            false => call.await,
        }
    }

    /// Logs what keeps this server out, once, and only if it lasts: right after a return the leader may still
    /// answer as before.
    fn told(&self, peer: &str, why: &str) {
        let mut since = self.kept_out.lock();
        match *since {
            _ if why.is_empty() => *since = None,
            None => *since = Some(Instant::now()),
            Some(at) if at.elapsed() < KEPT_OUT_LOG_DELAY => {}
            Some(_) if self.complained.swap(true, Relaxed) => {}
            Some(_) => tracing::error!(%peer, "{why}"),
        }
    }

    /// Executes directives. Each may be outdated; one that no longer applies changes nothing.
    fn follow(self: &Arc<Self>, generation: u64, directives: Vec<Directive>) {
        if self.generation.fetch_max(generation, Relaxed) > generation {
            return; // from a former leader
        }
        for d in directives {
            let Some(busy) = DirectiveGuard::begin(self, d.shard) else { continue };
            let this = self.clone();
            tokio::spawn(async move {
                let done = this.carry_out(&d).await;
                drop(busy);
                match done {
                    // The next plan depends on what is here now.
                    Ok(())
                        if matches!(d.what, Action::Host { .. } | Action::Found { .. } | Action::Remove) =>
                    {
                        this.done.notify_one();
                    }
                    Ok(()) => {}
                    Err(e) => {
                        tracing::info!(shard = %d.shard, what = ?d.what, error = %e, "a directive failed; it will be planned again");
                    }
                }
            });
        }
    }

    async fn carry_out(&self, d: &Directive) -> Result<(), String> {
        let group = || self.replicas.get(d.shard).map(|r| r.group).ok_or("it is not here");
        match &d.what {
            Action::Host { founding, shards, durability } => {
                self.replicas.host(d.shard, *shards, *durability, *founding).await
            }
            Action::Found { founding, members } => {
                let replica =
                    self.replicas.get(d.shard).filter(|r| r.founding == *founding).ok_or("it is not here")?;
                if !replica.group.membership().members.is_empty() {
                    return Ok(());
                }
                replica.group.found(members).await
            }
            Action::Retire { node, index } => self.replicas.retire(d.shard, *node, *index).await,
            Action::Learner(node, address) => group()?.add_learner(*node, address).await,
            Action::Voters(voters) => {
                tracing::info!(shard = %d.shard, ?voters, "changing who votes");
                group()?.set_members(voters).await
            }
            Action::Diverged { node, at, majority } => {
                let why = format!(
                    "it has diverged: at log index {} its state hashes to {:016x}, that of the majority to {majority:016x}; \
                     this server's memory or disk may be failing",
                    at.index, at.digest
                );
                self.replicas.fail(d.shard, *node, why).await;
                Ok(())
            }
            Action::Transfer(to) => group()?.transfer(*to).await,
            Action::Remove => self.replicas.remove(d.shard).await,
            Action::Stop => {
                let leader = self.replicas.get(d.shard).ok_or("it is not here")?.leader;
                leader.send(Event::Stop).await.map_err(|e| e.to_string())
            }
            Action::Switch(Switch { number, mode, loosest }) => {
                let leader = self.replicas.get(d.shard).ok_or("it is not here")?.leader;
                // What comes of it is reported.
                let (number, wanted) =
                    (Some(*number), RequestedMode::Decided { mode: *mode, loosest: *loosest });
                leader.send(Event::SwitchMode { number, wanted, tx: None }).await.map_err(|e| e.to_string())
            }
        }
    }
}

impl Agent {
    fn report_of(&self, shard: JobShard, r: &Replica) -> ReplicaReport {
        let lead = *r.group.leadership().borrow();
        let membership = r.group.membership();
        // A group that has ended, but was not stopped, is about to wait.
        let own = r.group.trouble().or_else(|| r.shard.lacks_room());
        let waits = own.is_some() && !r.group.was_failed();
        let refuses = self.cannot_serve(shard, r).filter(|_| own.is_none());
        let stopped = match &refuses {
            Some(_) => Some(self.control.stopped().map_or(Duration::ZERO, |(_, since)| since.elapsed())),
            None => (waits && r.folder.is_some()).then_some(Duration::ZERO),
        };
        let trouble = own.or(refuses).unwrap_or_default();
        ReplicaReport {
            node: r.group.me(),
            founding: r.founding,
            founded: !membership.members.is_empty(),
            leads: lead.leads,
            term: lead.term,
            applied: r.group.applied_index(),
            bytes: r.shard.configured().map_or(0, |c| c.bytes()),
            membership,
            stopped,
            no_room: waits && r.folder.is_none() && r.shard.lacks_room().is_some(),
            trouble,
            digests: r.group.digests(),
            caught_up: if lead.leads { r.group.caught_up() } else { BTreeSet::new() },
            job: lead.leads.then(|| job_of(r)).flatten(),
        }
    }
}

/// Marks a shard with a directive in progress, until it is dropped, even by a panic.
struct DirectiveGuard(Arc<Agent>, JobShard);

impl DirectiveGuard {
    /// `None`: another directive is in progress.
    fn begin(agent: &Arc<Agent>, shard: JobShard) -> Option<Self> {
        let new = agent.busy.lock().insert(shard);
        new.then(|| Self(agent.clone(), shard))
    }
}

impl Drop for DirectiveGuard {
    fn drop(&mut self) {
        self.0.busy.lock().remove(&self.1);
    }
}

/// Whether a replica sleeps, and slept when `then` was reported: then it has not changed.
fn slept_since(r: &Replica, then: &ReplicaReport) -> bool {
    let lead = *r.group.leadership().borrow();
    let as_then = (r.group.me(), r.founding, r.group.applied_index(), lead.leads, lead.term)
        == (then.node, then.founding, then.applied, then.leads, then.term);
    as_then && r.group.is_asleep() && then.trouble.is_empty() && r.group.trouble().is_none()
}

/// The job that a shard reports, if this server leads it.
fn job_of(replica: &Replica) -> Option<JobReport> {
    let shard = &replica.shard;
    let configured = shard.configured()?;
    let job = &configured.job;
    Some(JobReport {
        facts: JobFacts {
            name: job.name.chars().take(JobFacts::NAME_CHARS).collect(),
            mode: job.mode,
            workers: job.workers,
            durability: job.durability,
        },
        shards: u32::try_from(job.buckets()).unwrap_or(u32::MAX),
        finished: shard.is_over(),
        auto: replica.counters.take_auto(shard),
    })
}
