//! The events of one run in order, and the numbers that follow from them.
//!
//! No process is assumed to end normally. A killed worker wrote no totals, so its last progress line
//! replaces them. If one side's byte count is short because a process died, the other side's count is
//! used.

use crate::{
    Diverged, Eval, Event, Incarnations, Incident, IncidentKind, Leave, METRICS_FILE, ModeSwitch,
    RecordError, Run, Server, Shard, Staleness, Summary, Train, Worker, count, read_events,
    story::{self, Moment},
    total,
};
use paraft_common::histogram::DelayHistogram;
use paraft_common::{ServerId, ShardId, WorkerId};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// How a run ended. Its record alone doesn't say it.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct RunEnd {
    /// `finished`, `stopped`, `failed`, `interrupted`, `running`, `no-end`.
    pub state: &'static str,
    /// The recorded reason.
    pub reason: Option<String>,
    /// A sentence for people; `None` if it finished.
    #[serde(skip)]
    pub sentence: Option<String>,
}

/// The lines of one run, sorted by kind.
#[derive(Clone, Debug, PartialEq)]
pub struct RunRecord {
    /// The configuration. The first `run` line counts.
    pub run: Run,
    /// Progress of all workers, by training clock.
    pub train: Vec<Train>,
    /// Evaluations by samples; each evaluation once, by its first line.
    pub evals: Vec<Eval>,
    /// Totals of the workers that ended normally, by worker; the last line counts.
    pub workers: Vec<Worker>,
    /// The last counters of every (shard, server).
    pub shards: Vec<Shard>,
    /// The resources of the servers; the last line of each counts.
    pub servers: Vec<Server>,
    /// Switches of the mode as each worker received them, in the order of the file.
    pub switches: Vec<ModeSwitch>,
    /// Departures of workers, in the order of the file.
    pub leaves: Vec<Leave>,
    /// Failures, elections and orders, in the order of the file.
    pub incidents: Vec<Incident>,
    /// What happened besides training, by time.
    pub moments: Vec<Moment>,
    /// Why training ended early, if the loss or a gradient became NaN or infinite.
    pub diverged: Option<Diverged>,
    /// The target accuracy of time-to-accuracy. It starts as the run's own target; a comparison may set
    /// one target for all its runs.
    pub target_accuracy: Option<f64>,
    /// How the run ended, as who reads its folder has noted it.
    pub end: Option<RunEnd>,
}

impl RunRecord {
    /// Reads [`METRICS_FILE`] in the folder `dir`. The run may be in progress.
    pub fn load(dir: impl AsRef<Path>) -> Result<Self, RecordError> {
        let path = dir.as_ref().join(METRICS_FILE);
        Self::from_events(read_events(&path)?).ok_or(RecordError::NoRun { path })
    }

    /// Sorts the events of one run; `None` without a `run` event. A `summary` event is ignored: it can
    /// be recomputed.
    pub fn from_events(events: impl IntoIterator<Item = Event>) -> Option<Self> {
        let mut run = None;
        let mut diverged = None;
        let (mut train, mut evals, mut leaves) = (Vec::new(), Vec::new(), Vec::new());
        let mut switches = Vec::new();
        let (mut incidents, mut moments) = (Vec::new(), Vec::new());
        let mut workers = BTreeMap::<WorkerId, Worker>::new();
        let mut shards = BTreeMap::<(ShardId, ServerId), Shard>::new();
        let mut servers = BTreeMap::<ServerId, Server>::new();
        let mut evaluated = BTreeSet::new();
        let mut incarnations = Incarnations::default();
        for event in events {
            moments.extend(story::moment(&event));
            match incarnations.follow(event) {
                Event::Run(r) => run = run.or(Some(r)),
                Event::Train(t) => train.push(t),
                Event::Eval(e) if evaluated.insert((e.number(), e.is_final)) => evals.push(e),
                Event::Mode(m) => switches.push(m),
                Event::Eval(_)
                | Event::Summary(_)
                | Event::Checkpoint(_)
                | Event::Chunk(_)
                | Event::End(_)
                | Event::Evaluating(_)
                | Event::Unknown => {}
                Event::Incident(i) => incidents.push(i),
                Event::Worker(w) => _ = workers.insert(w.worker, w),
                Event::Shard(s) => _ = shards.insert((s.shard, s.server), s),
                Event::Leave(l) => leaves.push(l),
                Event::Server(s) => _ = servers.insert(s.server, s),
                Event::Diverged(d) => diverged = diverged.or(Some(d)),
            }
        }
        let run = run?;
        train.sort_by(|a: &Train, b| a.seconds.total_cmp(&b.seconds));
        if incarnations.any() {
            correct_clocks(&mut evals, &train);
        }
        if !leaves.is_empty() {
            correct_samples(&mut evals, &train);
        }
        moments.sort_by(|a: &Moment, b| a.wall.total_cmp(&b.wall));
        evals.sort_by_key(|e: &Eval| (e.samples, e.number(), e.is_final));
        let target_accuracy = run.target_accuracy;
        let (workers, shards) = (workers.into_values().collect(), shards.into_values().collect());
        let servers = servers.into_values().collect();
        Some(Self {
            run,
            train,
            evals,
            workers,
            shards,
            servers,
            switches,
            leaves,
            incidents,
            moments,
            diverged,
            target_accuracy,
            end: None,
        })
    }

    /// The evaluation at the end of the run: the one marked final, else the last.
    pub fn final_eval(&self) -> Option<&Eval> {
        self.evals.iter().rfind(|e| e.is_final).or_else(|| self.evals.iter().max_by_key(|e| e.number()))
    }

    /// The delays of all pushes to all shards.
    pub fn delays(&self) -> DelayHistogram {
        let mut all = DelayHistogram::default();
        for shard in &self.shards {
            all.merge(&shard.delays());
        }
        all
    }

    /// How late each worker's pushes were, over all shards.
    pub fn staleness(&self) -> BTreeMap<WorkerId, Staleness> {
        let mut all = BTreeMap::<WorkerId, Staleness>::new();
        for of in self.shards.iter().flat_map(|s| &s.staleness) {
            let sum = all
                .entry(of.worker)
                .or_insert_with(|| Staleness { worker: of.worker, ..Staleness::default() });
            sum.add(of);
        }
        all
    }

    /// The mean delay of all pushes, in versions; `None` where no delay was recorded. Delays of the histogram's last place
    /// count as that place.
    pub fn delay_mean(&self) -> Option<f64> {
        let all = self.delays();
        let sum = total(all.counts().iter().enumerate().map(|(delay, &n)| delay as f64 * n as f64));
        (all.total() > 0).then(|| sum / all.total() as f64)
    }

    /// Each worker's share of its training time spent in pulls, 0 to 1; without workers that trained
    /// for no time.
    pub fn wait_shares(&self) -> BTreeMap<WorkerId, f64> {
        let totals = self.worker_totals();
        let trained = totals.into_iter().filter(|(_, w)| w.seconds > 0.0);
        trained.map(|(worker, w)| (worker, w.wait_seconds / w.seconds)).collect()
    }

    /// The same share for all workers together.
    pub fn wait_share(&self) -> Option<f64> {
        let totals = self.worker_totals();
        let seconds = total(totals.values().map(|w| w.seconds));
        (seconds > 0.0).then(|| total(totals.values().map(|w| w.wait_seconds)) / seconds)
    }

    /// The share of all workers' training time that they waited for each other, 0 to 1. The rest of
    /// [`Self::wait_share`] is servers and network. `None` if it was not counted.
    pub fn wait_share_for_others(&self) -> Option<f64> {
        let mut by_shard = BTreeMap::<_, BTreeMap<WorkerId, f64>>::new();
        for shard in &self.shards {
            let waited = by_shard.entry(shard.shard).or_default();
            shard.waits.iter().for_each(|w| *waited.entry(w.worker).or_default() += w.seconds);
        }
        // A worker waits for all shards at the same time, so the longest wait counts.
        let mut longest = BTreeMap::<WorkerId, f64>::new();
        for (worker, seconds) in by_shard.into_values().flatten() {
            let known = longest.entry(worker).or_default();
            *known = known.max(seconds);
        }
        let seconds = total(self.worker_totals().values().map(|w| w.seconds));
        // A worker that never waited has no entry.
        let counted = !self.shards.is_empty() || self.run.workers == 1;
        (seconds > 0.0 && counted).then(|| (total(longest.into_values()) / seconds).min(1.0))
    }

    /// The mode of the user's last switch. Choices of the rule do not count.
    pub fn switched_to(&self) -> Option<&str> {
        let last = self.switches.iter().max_by_key(|s| s.number)?;
        (self.run.mode != "auto").then_some(last.mode.as_str())
    }

    /// The mode of the run, with the last switched mode, if any: `bsp → asp`.
    pub fn modes(&self) -> String {
        match self.switched_to() {
            Some(last) => format!("{} → {last}", self.run.mode),
            None => self.run.mode.clone(),
        }
    }

    /// The totals of the whole run.
    pub fn summarize(&self) -> Summary {
        let totals = self.worker_totals();
        let samples = count(totals.values().map(|w| w.samples));
        let seconds = totals.values().map(|w| w.seconds).fold(0.0, f64::max);

        let end = self.final_eval();
        let hit = self.target_accuracy.and_then(|target| {
            let hits = self.evals.iter().filter(|e| e.accuracy.is_some_and(|a| a >= target));
            hits.min_by(|a, b| a.seconds.total_cmp(&b.seconds))
        });
        let delays = self.delays();
        let mut late = Staleness::default();
        for of in self.staleness().values() {
            late.distance.merge(&of.distance);
            late.age.merge(&of.age);
        }
        let (reported_cpu, reported_samples) =
            self.workers.iter().fold((0.0, 0), |(c, s), w| (c + w.cpu_seconds, count([s, w.samples])));
        let server_cpu = total(self.servers.iter().map(|s| s.cpu_seconds));
        // Both sides count the same payloads; the side with a dead process counts fewer.
        let larger = |of_worker: fn(&Worker) -> u64, of_shard: fn(&Shard) -> u64| {
            let sent = count(self.workers.iter().map(of_worker));
            sent.max(count(self.shards.iter().map(of_shard)))
        };
        let ranks_lost = self.leaves.iter().filter(|l| l.rank.is_some()).count();
        let (servers_lost, leaders_elected, longest_stall_seconds) = self.failures();

        Summary {
            mode: self.run.mode.clone(),
            switched_to: self.switched_to().map(str::to_string),
            workers: self.run.workers,
            samples,
            first_step_seconds: self.first_step_seconds(),
            seconds,
            samples_per_s: if seconds > 0.0 { samples as f64 / seconds } else { 0.0 },
            final_loss: end.map(|e| e.loss).or_else(|| self.last_train_loss()),
            final_accuracy: end.and_then(|e| e.accuracy),
            final_metrics: end.map(|e| e.metrics.clone()).unwrap_or_default(),
            target_accuracy: self.target_accuracy,
            seconds_to_target: hit.map(|e| e.seconds),
            samples_to_target: hit.map(|e| e.samples),
            delay_p50: delays.quantile(0.5),
            delay_p99: delays.quantile(0.99),
            delay_max: delays.max(),
            bytes_pushed: larger(|w| w.bytes_pushed, |s| s.bytes_pushed),
            bytes_pulled: larger(|w| w.bytes_pulled, |s| s.bytes_pulled),
            cpu_seconds_per_1000_samples: (reported_samples > 0)
                .then(|| (reported_cpu + server_cpu) / reported_samples as f64 * 1000.0),
            wait_seconds: total(totals.values().map(|w| w.wait_seconds)),
            workers_lost: self.workers_lost() as u32,
            ranks_lost: ranks_lost as u32,
            servers_lost,
            leaders_elected,
            longest_stall_seconds,
            pushes_lost: count(self.shards.iter().map(|s| s.pushes_lost)),
            dropped: count(self.shards.iter().map(|s| s.dropped)),
            distance_p50: late.distance.quantile(0.5),
            distance_p99: late.distance.quantile(0.99),
            age_p50: late.age.quantile(0.5),
            age_p99: late.age.quantile(0.99),
        }
    }

    fn workers_lost(&self) -> usize {
        // A killed worker counts as lost even if it rejoined and ended normally: its totals are later
        // than its departure.
        let ended = |l: &&Leave| self.workers.iter().any(|w| w.worker == l.worker && w.wall <= l.wall);
        let lost = self.leaves.iter().filter(|l| l.rank.is_none() && !ended(l)).count();
        // A group is lost if no rank was left to write its totals.
        let wrote = |w: WorkerId| self.workers.iter().any(|t| t.worker == w);
        let of_groups = self.leaves.iter().filter(|l| l.rank.is_some() && !wrote(l.worker));
        lost + of_groups.map(|l| l.worker).collect::<BTreeSet<_>>().len()
    }

    /// Servers that ended, elections of a leader after that, and the longest stall.
    fn failures(&self) -> (u32, u32, Option<f64>) {
        let (mut servers_lost, mut leaders_elected, mut longest_stall_seconds) = (0, 0, None::<f64>);
        for incident in &self.incidents {
            match incident.what {
                IncidentKind::ServerEnded { .. } => servers_lost += 1,
                IncidentKind::LeaderChanged { handed_over: true, .. } => {}
                IncidentKind::LeaderChanged { stall_seconds, .. } => {
                    leaders_elected += 1;
                    longest_stall_seconds =
                        longest_stall_seconds.into_iter().chain(stall_seconds).reduce(f64::max);
                }
                _ => {}
            }
        }
        (servers_lost, leaders_elected, longest_stall_seconds)
    }

    fn first_step_seconds(&self) -> Option<f64> {
        let first = self.train.iter().map(|t| t.wall).min_by(f64::total_cmp);
        // A clock that was set during the run makes the difference useless.
        first.map(|wall| wall - self.run.wall).filter(|s| *s >= 0.0 && !self.run.simulated)
    }

    /// Totals by worker; a worker without totals has those of its last progress line.
    fn worker_totals(&self) -> BTreeMap<WorkerId, Worker> {
        let mut totals = BTreeMap::new();
        for t in &self.train {
            let Train { wall, worker, samples, seconds, wait_seconds, .. } = *t;
            let steps = t.step.0;
            let so_far = Worker { wall, worker, steps, samples, seconds, wait_seconds, ..Worker::default() };
            totals.insert(worker, so_far);
        }
        totals.extend(self.workers.iter().map(|w| (w.worker, w.clone())));
        totals
    }

    fn last_train_loss(&self) -> Option<f64> {
        let last: BTreeMap<_, _> = self.train_losses().map(|t| (t.worker, t.loss)).collect();
        (!last.is_empty()).then(|| last.values().sum::<f64>() / last.len() as f64)
    }

    /// The lines of workers that reported a loss, which a script need not do. A NaN loss counts as
    /// reported.
    pub(crate) fn train_losses(&self) -> impl Iterator<Item = &Train> {
        let say: BTreeSet<_> = self.train.iter().filter(|t| !t.loss.is_nan()).map(|t| t.worker).collect();
        self.train.iter().filter(move |t| say.contains(&t.worker))
    }
}

/// The line of an evaluation does not name its worker, whose clock may be that of a restarted process.
fn correct_clocks(evals: &mut [Eval], train: &[Train]) {
    for e in evals {
        let by_then = train.iter().filter(|t| t.wall <= e.wall).map(|t| t.seconds);
        e.seconds = by_then.fold(e.seconds, f64::max);
    }
}

/// A worker estimates the fleet's samples as if all workers trained: replaces that by the samples trained by then.
fn correct_samples(evals: &mut [Eval], train: &[Train]) {
    for e in evals {
        let mut by_worker = BTreeMap::<WorkerId, u64>::new();
        for t in train.iter().filter(|t| t.wall <= e.wall) {
            let so_far = by_worker.entry(t.worker).or_default();
            *so_far = t.samples.max(*so_far);
        }
        e.samples = count(by_worker.into_values());
    }
}
