//! Properties of the leased sampler's state, over random workers that request, die, return and change leaders.

use super::{
    Command, Outcome, Proposal, Shard,
    chunks::Answer,
    properties::{configured, job, join, new, over_the_wire, sent},
};
use paraft_common::{
    SessionId, WorkerId,
    config::{ChunkPlan, ServerJob},
    optim::OptimizerConfig,
};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

const WORKERS: u32 = 4;

/// The next event.
#[derive(Clone, Debug)]
enum Op {
    /// The worker takes its next action: join, request, train, request again. `heard`: the answer reaches it.
    Go { worker: u32, heard: bool },
    /// Its lease ends without its knowledge.
    Leave { worker: u32 },
    /// Its process is replaced.
    Restart { worker: u32 },
    /// An old command is repeated.
    Repeat { which: prop::sample::Index },
    /// Another replica leads, which started from a snapshot.
    Failover,
}

fn an_op(departures: u32) -> impl Strategy<Value = Op> {
    prop_oneof![
        30 => (0..WORKERS, prop::bool::weighted(0.9)).prop_map(|(worker, heard)| Op::Go { worker, heard }),
        departures => (0..WORKERS).prop_map(|worker| Op::Leave { worker }),
        departures => (0..WORKERS).prop_map(|worker| Op::Restart { worker }),
        2 => any::<prop::sample::Index>().prop_map(|which| Op::Repeat { which }),
        1 => Just(Op::Failover),
    ]
}

#[derive(Clone, Debug, Default)]
struct Worker {
    session: Option<SessionId>,
    request: u64,
    epochs: u64,
    /// The chunk that it trains.
    has: Option<(u64, u64)>,
    /// Requested, without a final answer.
    asked: Option<Command>,
    ended: bool,
}

struct World {
    plan: ChunkPlan,
    shard: Shard,
    log: Vec<Proposal>,
    workers: Vec<Worker>,
    /// How often each chunk was trained in a session that lived.
    trained: BTreeMap<(u64, u64), u32>,
}

impl World {
    fn new(job: &ServerJob, plan: ChunkPlan) -> Self {
        let (shard, configure) = configured(job);
        let workers = vec![Worker::default(); WORKERS as usize];
        Self { plan, shard, log: vec![configure], workers, trained: BTreeMap::new() }
    }

    fn apply(&mut self, command: Command) -> Outcome {
        let proposal = command.into();
        let outcome = self.shard.apply(&proposal);
        self.log.push(proposal);
        outcome
    }

    fn answer(&self, w: u32) -> Option<Answer> {
        let request = self.workers[w as usize].request;
        self.shard.read(|m| m.chunks.as_ref().and_then(|c| c.answer(WorkerId(w), request, false)))
    }

    fn lives(&self, w: u32) -> bool {
        let session = self.workers[w as usize].session;
        session.is_some_and(|s| self.shard.read(|m| m.members.in_session(WorkerId(w), s).is_some()))
    }

    fn go(&mut self, w: u32, heard: bool) -> Result<(), TestCaseError> {
        let worker = WorkerId(w);
        let me = &mut self.workers[w as usize];
        if me.ended {
            return Ok(());
        }
        let Some(session) = me.session else {
            if let Outcome::Joined { session, .. } = self.apply(join(w)) {
                self.workers[w as usize] = Worker { session: Some(session), ..Worker::default() };
            }
            return Ok(());
        };
        let lives = self.lives(w);
        let me = &mut self.workers[w as usize];
        let take = me.asked.clone().unwrap_or_else(|| {
            me.request += 1;
            let (epoch, request) = (me.epochs, me.request);
            Command::Acquire { worker, session, request, epoch, done: me.has.map(|(_, chunk)| chunk) }
        });
        if me.asked.is_none()
            && lives
            && let Some(chunk) = me.has
        {
            *self.trained.entry(chunk).or_default() += 1;
        }
        me.has = None;
        me.asked = Some(take.clone());
        self.apply(take);
        if !lives {
            // It learns that its session is over.
            self.workers[w as usize] = Worker::default();
            return Ok(());
        }
        let Some(answer) = self.answer(w).filter(|_| heard) else { return Ok(()) };
        let me = &mut self.workers[w as usize];
        match answer {
            Answer::Train { epoch, chunk } => (me.epochs, me.has) = (epoch, Some((epoch, chunk))),
            Answer::Over { epochs, .. } => {
                me.epochs = epochs;
                let all = (0..epochs).flat_map(|e| (0..self.plan.per_epoch).map(move |c| (e, c)));
                for chunk in all {
                    prop_assert!(self.trained.contains_key(&chunk), "{chunk:?} was left out");
                }
            }
            Answer::Ended => me.ended = true,
            Answer::Wait => return Ok(()),
        }
        me.asked = None;
        Ok(())
    }

    fn play(&mut self, op: &Op) -> Result<(), TestCaseError> {
        match op {
            Op::Go { worker, heard } => self.go(*worker, *heard)?,
            Op::Leave { worker } => {
                if let Some(session) = self.workers[*worker as usize].session {
                    self.apply(Command::Leave { worker: WorkerId(*worker), session });
                }
            }
            Op::Restart { worker } => self.workers[*worker as usize] = Worker::default(),
            Op::Repeat { which } => {
                let again = which.get(&self.log).clone();
                // A repeated Join creates another session; here no worker would own it.
                if !matches!(again.command, Command::Join { .. }) {
                    self.apply(again.command);
                }
            }
            Op::Failover => {
                let next = new();
                next.install(&sent(&self.shard.cut())).map_err(|e| TestCaseError::fail(e.to_string()))?;
                self.shard = next;
            }
        }
        let mut held = BTreeSet::new();
        for w in (0..WORKERS).filter(|w| self.lives(*w)) {
            if let Some(Answer::Train { epoch, chunk }) = self.answer(w) {
                prop_assert!(held.insert((epoch, chunk)), "two workers have chunk {chunk} of epoch {epoch}");
            }
        }
        Ok(())
    }

    /// Worker 0 continues to the end, with the others or without.
    fn finish(&mut self) -> Result<(), TestCaseError> {
        let most = 20 * (self.plan.per_epoch + 2) * (self.plan.epochs + 1);
        for _ in 0..most {
            for w in 0..WORKERS {
                self.go(w, true)?;
            }
        }
        prop_assert!(self.workers.iter().all(|w| w.ended), "they wait for ever: {:?}", self.workers);
        let all = (0..self.plan.epochs).flat_map(|e| (0..self.plan.per_epoch).map(move |c| (e, c)));
        for chunk in all {
            prop_assert!(self.trained.contains_key(&chunk), "{chunk:?} was never trained");
        }
        // Another replica with the same log is equal.
        let other = new();
        self.log.iter().for_each(|p| _ = other.apply(&over_the_wire(p)));
        prop_assert_eq!(other.cut().digest(), self.shard.cut().digest());
        Ok(())
    }
}

fn a_plan() -> impl Strategy<Value = (ServerJob, ChunkPlan)> {
    (1u64..9, 1u64..4, 1u32..=WORKERS).prop_map(|(per_epoch, epochs, workers)| {
        let plan = ChunkPlan { per_epoch, epochs };
        let job = job(OptimizerConfig::sgd(1.0), 0);
        (ServerJob { chunks: Some(plan), workers, early_stop: None, ..job }, plan)
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn every_chunk_is_trained_at_least_once_whoever_leaves(
        (job, plan) in a_plan(), ops in prop::collection::vec(an_op(3), 1..150),
    ) {
        let mut world = World::new(&job, plan);
        ops.iter().try_for_each(|op| world.play(op))?;
        world.finish()?;
    }

    #[test]
    fn every_chunk_is_trained_exactly_once_where_nobody_leaves(
        (job, plan) in a_plan(), ops in prop::collection::vec(an_op(0), 1..150),
    ) {
        let mut world = World::new(&job, plan);
        ops.iter().try_for_each(|op| world.play(op))?;
        world.finish()?;
        prop_assert!(world.trained.values().all(|n| *n == 1), "{:?}", world.trained);
        prop_assert_eq!(world.shard.read(|m| m.chunks.as_ref().map(|c| c.summary().returned)), Some(0));
    }
}
