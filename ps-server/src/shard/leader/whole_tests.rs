//! Tests of the whole leader, one input at a time: sequences that the simulation seldom reaches.

use super::{tests::first_shard_of, *};
use crate::{
    raft::{Leadership, ProposeError, Replicated, Role},
    shard::{InitPart, Outcome},
};
use paraft_common::optim::Overrides;
use paraft_common::{
    BucketId, Durability, Mode, Payload, Seq, ServerId, Step, Version, WorkerId, config::ServerJob,
};
use paraft_proto::RefusalKind;
use std::{cell::Cell, time::Duration};

#[derive(Default)]
struct Alone {
    asleep: Cell<bool>,
    slept: Cell<bool>,
}

impl GroupStatus for Alone {
    fn leads(&self) -> bool {
        true
    }

    fn leader_address(&self) -> Option<String> {
        None
    }

    fn is_asleep(&self) -> bool {
        self.asleep.get()
    }

    fn has_slept(&self) -> bool {
        self.slept.take()
    }
}

/// A leader and its log. The test commits the entries.
struct World {
    shard: Arc<Shard>,
    leader: Leader,
    group: Alone,
    now: Instant,
    job: String,
    /// Proposals that are not committed.
    log: VecDeque<(u64, Proposal)>,
    /// Committed commands, in order.
    committed: Vec<Command>,
    sent: Vec<(ConnId, Reply)>,
    closed: Vec<ConnId>,
    /// Whether the workers' scripts clip their steps.
    clipped: bool,
}

impl World {
    /// Worker 0 has a session on stream 1.
    fn new(mode: Mode) -> Self {
        Self::with(mode, |_| {})
    }

    fn with(mode: Mode, change: impl FnOnce(&mut ServerJob)) -> Self {
        Self::of(1, mode, change)
    }

    /// The first of `shards` shards.
    fn of(shards: u32, mode: Mode, change: impl FnOnce(&mut ServerJob)) -> Self {
        let mut job = ServerJob { workers: 1, ..ServerJob::new("whole", mode, 8, 8) };
        change(&mut job);
        let shard = Arc::new(first_shard_of(&job, shards));
        let mut sessions = 0;
        let draw = move || {
            sessions += 1;
            SessionId(sessions)
        };
        let leader = Leader::new(shard.clone(), Arc::default(), 1, Box::new(draw));
        let mut world = Self {
            shard,
            leader,
            group: Alone::default(),
            now: Instant::now(),
            job: job.to_toml().expect("a valid job"),
            log: VecDeque::new(),
            committed: Vec::new(),
            sent: Vec::new(),
            closed: Vec::new(),
            clipped: false,
        };
        let (leader, role) = (Some(ServerId(0)), Role::Leader);
        world.hears(Input::Leadership(Leadership { term: 1, leader, leads: true, role }));
        let (worker, job, liveness) = (WorkerId(0), world.job.clone(), Arc::default());
        world.hears(Input::Open { conn: 1, worker, session: None, job, liveness });
        world.commit();
        assert!(matches!(world.sent(), [(1, Reply::Opened { .. })]));
        world
    }

    fn hears(&mut self, input: Input) {
        let mut inputs = vec![input];
        while let Some(input) = inputs.pop() {
            let now = Now { at: self.now, moment: Moment::default() };
            self.leader.handle(now, &self.group, input);
            while let Some(effect) = self.leader.next_effect() {
                match effect {
                    Effect::Propose(number, proposal) => self.log.push_back((number, proposal)),
                    Effect::Confirm(number) => inputs.push(Input::Outcome(number, Ok(Outcome::Done))),
                    Effect::Send(conn, reply) => self.sent.push((conn, reply)),
                    Effect::Close(conn) => self.closed.push(conn),
                    Effect::Compute(_, work) => inputs.push(Input::Computed(Ok(work()))),
                    Effect::SwitchResult(asker, switched) => asker.answer(switched),
                    Effect::EditResult(asker, edited) => asker.answer(edited),
                    Effect::FetchResult(asker, fetched) => asker.answer(fetched),
                    Effect::Sleep => {
                        self.group.asleep.set(true);
                        self.group.slept.set(true);
                        inputs.push(Input::SleepOrWake);
                    }
                    Effect::Wake => {
                        self.group.asleep.set(false);
                        inputs.push(Input::SleepOrWake);
                    }
                }
            }
        }
    }

    /// Applies the first proposal; the leader does not receive the outcome yet.
    fn applies(&mut self) -> Input {
        let (number, proposal) = self.log.pop_front().expect("something is proposed");
        let outcome = self.shard.apply(&proposal);
        self.committed.push(proposal.command);
        Input::Outcome(number, Ok(outcome))
    }

    /// Commits and applies all proposals; the leader receives each outcome.
    fn commit(&mut self) {
        while !self.log.is_empty() {
            let outcome = self.applies();
            self.hears(outcome);
        }
    }

    /// Sets the initial weights of the bucket.
    fn init(&mut self) {
        self.init_bucket(0);
    }

    fn init_bucket(&mut self, bucket: u32) {
        let (bucket, part, payload) = (BucketId(bucket), InitPart::FRESH, vec![0u8; 32].into());
        self.hears(Input::Message(1, Message::Init { bucket, part, payload }));
        self.commit();
    }

    fn push(&mut self, step: u64) {
        self.push_with(step, None, false);
    }

    fn push_with(&mut self, step: u64, rate: Option<f64>, skip: bool) {
        self.push_to(0, step, 1.0, rate, skip);
    }

    fn push_to(&mut self, bucket: usize, step: u64, sum_of_squares: f64, rate: Option<f64>, skip: bool) {
        self.push_on(1, bucket, step, sum_of_squares, rate, skip);
    }

    fn push_on(
        &mut self,
        conn: ConnId,
        bucket: usize,
        step: u64,
        sum_of_squares: f64,
        rate: Option<f64>,
        skip: bool,
    ) {
        let payload = Payload::from(vec![0u8; if skip { 0 } else { 32 }]);
        let (seq, step, pulled) = (Seq(step), Step(step), Version(0));
        let (samples, arrived) = (1, Moment::default());
        let push = Message::Push {
            seq,
            step,
            bucket,
            pulled,
            samples,
            sum_of_squares,
            payload,
            overrides: Overrides::rate(rate),
            skip,
            clipped: self.clipped,
            arrived,
        };
        self.hears(Input::Message(conn, push));
    }

    fn pull(&mut self, done: u64) {
        let (done, have, only) = (Step(done), Vec::new(), Vec::new());
        let pull = Message::Pull {
            done,
            last: false,
            checkpoint: false,
            barrier: false,
            have,
            loss: None,
            only,
            rows: Vec::new(),
        };
        self.hears(Input::Message(1, pull));
    }

    /// Replies since the last call; the worker has read them.
    fn sent(&mut self) -> &'static [(ConnId, Reply)] {
        for (_, reply) in &mut self.sent {
            if let Reply::Weights(w) = reply {
                w.unread = None;
            }
        }
        Vec::leak(std::mem::take(&mut self.sent))
    }

    /// Steps that were acknowledged since the last call.
    fn acks(&mut self) -> Vec<u64> {
        let ack = |(_, reply): &(ConnId, Reply)| match reply {
            Reply::Ack { seq, .. } => Some(seq.0),
            _ => None,
        };
        self.sent().iter().filter_map(ack).collect()
    }

    fn updates(&self) -> Vec<Step> {
        self.committed.iter().filter_map(Command::latest_step).collect()
    }
}

#[test]
fn deposed_leader_answers_only_not_leader() {
    let mut world = World::new(Mode::Asp);
    world.pull(0);
    assert!(matches!(world.sent(), [(1, Reply::Weights(_))]));
    world.push(1);
    world.sent();
    Replicated::in_term(&*world.shard, 2);
    world.pull(0);
    let sent = world.sent();
    let [(1, Reply::Refused(refusal))] = sent else { panic!("{sent:?}") };
    assert!(matches!(refusal.kind, RefusalKind::NotLeader { .. }), "{refusal:?}");
    assert_eq!(world.closed, [1]);
    // It does not receive the outcomes of its proposals either.
    let outcome = world.applies();
    world.hears(outcome);
    assert!(world.sent().is_empty());
}

/// The first worker that speaks finds a leader that may have been deposed meanwhile.
#[test]
fn silent_workers_let_the_group_sleep_until_one_speaks() {
    let mut world = World::new(Mode::Asp);
    world.init();
    world.pull(0);
    world.sent();
    let minute = world.now + Duration::from_secs(60);
    world.now = minute - Duration::from_millis(1);
    world.hears(Input::Time);
    assert!(!world.group.asleep.get(), "it may be a long step");
    world.now = minute;
    world.hears(Input::Time);
    assert!(world.group.asleep.get() && world.closed.is_empty(), "{:?}", world.closed);
    world.push(1);
    assert!(!world.group.asleep.get());
    let sent = world.sent();
    let [(1, Reply::Refused(refusal))] = sent else { panic!("{sent:?}") };
    assert!(matches!(refusal.kind, RefusalKind::Unavailable(_)), "{refusal:?}");
    assert_eq!(world.closed, [1]);
    assert!(world.log.is_empty(), "it does not propose the push");
    // It confirms that it leads, and takes the worker back.
    world.now = world.leader.deadline().expect("it restarts");
    world.hears(Input::Time);
    world.commit();
    let (worker, session, job, liveness) =
        (WorkerId(0), Some(SessionId(1)), world.job.clone(), Arc::default());
    world.hears(Input::Open { conn: 2, worker, session, job, liveness });
    assert!(matches!(world.sent().last(), Some((2, Reply::Opened { .. }))));
}

/// Its pushes wait for the norm.
#[test]
fn group_that_owes_a_worker_something_stays_awake() {
    let mut world = World::of(2, Mode::Bsp, |job| (job.params_len, job.clip.norm) = (32, Some(1.0)));
    (0..2).for_each(|bucket| world.push_to(bucket, 1, 0.0, None, false));
    world.commit();
    world.now += Duration::from_secs(600);
    world.hears(Input::Time);
    assert!(!world.group.asleep.get());
}

/// A queued reply holds no weights: an update needs no copy for it, and the worker gets the newest weights.
#[test]
fn answer_takes_its_weights_when_it_is_sent() {
    let mut world = World::new(Mode::Asp);
    world.pull(0);
    let unread = std::mem::take(&mut world.sent).pop().expect("an answer").1;
    world.push(1);
    world.commit();
    let conf = world.shard.configured().expect("a job");
    assert_eq!(conf.outdated_bytes(), 0);
    let Reply::Weights(w) = unread.taken() else { panic!("weights") };
    assert_eq!((w.version, w.not_modified, w.payload.is_empty()), (Version(1), false, false));
}

/// In rounds, a reply holds the weights of its step: for a worker that does not read, the leader keeps three
/// versions at most.
#[test]
fn pull_behind_three_unread_answers_ends_the_stream() {
    let mut world = World::new(Mode::Bsp);
    world.init();
    world.sent();
    world.pull(0);
    for step in 1..=3 {
        world.push(step);
        world.commit();
        world.pull(step);
    }
    let weights = world.sent.iter().filter(|(_, reply)| matches!(reply, Reply::Weights(_))).count();
    assert_eq!(weights, 3);
    let refused = |(_, r): &(ConnId, Reply)| matches!(r, Reply::Refused(r) if matches!(r.kind, RefusalKind::Overloaded(_)));
    assert!(world.sent.last().is_some_and(refused), "{:?}", world.sent.last());
    assert_eq!(world.closed, [1]);
}

#[test]
fn pushes_resent_at_once_are_taken_in_order() {
    let mut world = World::new(Mode::Asp);
    (1..=4).for_each(|step| world.push(step));
    assert_eq!(world.log.len(), 1, "each waits for the one before");
    world.commit();
    assert_eq!(world.acks(), [1, 2, 3, 4]);
    assert_eq!(world.updates(), [1, 2, 3, 4].map(Step));
}

#[test]
fn the_rate_that_a_worker_says_is_in_the_log() {
    for mode in [Mode::Asp, Mode::Bsp] {
        let mut world = World::new(mode);
        for (step, rate) in [(1, None), (2, Some(0.25))] {
            world.push_with(step, rate, false);
            world.commit();
        }
        let rates: Vec<_> = world.committed.iter().filter_map(|c| Some(c.pushes()?.overrides.rate)).collect();
        assert_eq!(rates, [None, Some(0.25)], "{mode}");
    }
}

#[test]
fn skipped_step_is_acked_and_pull_returns_current_weights() {
    let leader = |job: &mut ServerJob| job.durability = Durability::Leader;
    for (mode, change) in [(Mode::Bsp, None), (Mode::Asp, None), (Mode::Asp, Some(leader))] {
        let mut world = World::with(mode, |job| change.into_iter().for_each(|change| change(job)));
        world.init();
        world.push_with(1, None, false);
        world.push_with(2, None, true);
        world.pull(2);
        world.commit();
        let (mut acks, mut pulled) = (Vec::new(), None);
        for (_, reply) in std::mem::take(&mut world.sent) {
            match reply.taken() {
                Reply::Ack { seq, version } => acks.push((seq.0, version.0)),
                Reply::Weights(w) if w.last => pulled = Some((w.version.0, w.clock.0, w.skipped)),
                Reply::Weights(_) => {}
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(acks, [(1, 1), (2, 1)], "{mode}");
        assert!(matches!(pulled, Some((1, _, 1))), "{mode} {pulled:?}");
        let skips = world.committed.iter().filter(|c| matches!(c, Command::Skip { .. })).count();
        assert_eq!(skips, usize::from(change.is_none()), "{mode}: at the level leader no entry has it");
    }
}

/// A job that clips by the norm of the whole gradient, which is in two buckets.
fn clips(mode: Mode) -> World {
    let mut world = World::with(mode, |job| {
        (job.params_len, job.clip.norm) = (16, Some(1.0));
    });
    (0..2).for_each(|bucket| world.init_bucket(bucket));
    world
}

fn is_answered(world: &mut World, done: u64) -> bool {
    world.pull(done);
    world.commit();
    world.sent().iter().any(|(_, reply)| matches!(reply, Reply::Weights(w) if w.last))
}

#[test]
fn a_step_whose_pushes_bring_the_norm_is_not_split_by_a_switch() {
    let mut world = clips(Mode::Asp);
    world.push_to(0, 1, 4.0, None, false);
    world.commit();
    world.hears(Input::Message(1, Message::SwitchMode { number: 1, mode: Mode::Bsp }));
    world.commit();
    world.push_to(1, 1, 4.0, None, false);
    world.commit();
    assert!(is_answered(&mut world, 1), "both buckets of the step are applied");
    // No push of the next step has the norm.
    (0..2).for_each(|bucket| world.push_to(bucket, 2, 0.0, None, false));
    world.commit();
    assert!(is_answered(&mut world, 2));
}

#[test]
fn early_norm_does_not_split_a_step() {
    let mut world = clips(Mode::Bsp);
    world.push_to(0, 1, 0.0, None, false);
    world.commit();
    world.hears(Input::Message(1, Message::Norm { step: Step(1), sum_of_squares: 4.0, bound: None }));
    world.commit();
    world.push_to(1, 1, 0.0, None, false);
    world.commit();
    assert!(is_answered(&mut world, 1));
}

/// A script may clip in a job without such clipping: every shard then waits for the worker's bound, also if it is the
/// only one.
#[test]
fn a_script_clips_a_step_by_its_own_bound() {
    for (bound, factor) in [(Some(1.0), 1.0 / (2.0 + 1e-6)), (None, 1.0), (Some(f64::INFINITY), 1.0)] {
        let mut world = World::of(1, Mode::Bsp, |job| job.params_len = 16);
        world.clipped = true;
        world.push_to(0, 1, 0.0, None, false);
        world.push_to(1, 1, 0.0, None, true);
        world.commit();
        let sent = world.sent();
        let asked = |(_, r): &(ConnId, Reply)| matches!(r, Reply::RoundNorm { step: Step(1), .. });
        assert!(sent.iter().any(asked), "{sent:?}");
        assert!(!sent.iter().any(|(_, r)| matches!(r, Reply::Ack { .. })), "it waits");
        world.hears(Input::Message(1, Message::Norm { step: Step(1), sum_of_squares: 4.0, bound }));
        world.commit();
        assert_eq!(world.acks(), [1, 1]);
        let factors: Vec<_> = world.committed.iter().filter_map(|c| Some(c.pushes()?.factor)).collect();
        assert_eq!(factors, [factor as f32], "what is left out is of no update");
    }
}

/// A worker that got a step's norm may die before it sent it to all shards; its successor pushes the step again.
#[test]
fn step_waiting_for_norm_is_pushed_again_by_successor() {
    for told in [None, Some(0), Some(1)] {
        // This shard has two of the four buckets.
        let change = |job: &mut ServerJob| (job.params_len, job.clip.norm) = (32, Some(1.0));
        let mut world = World::of(2, Mode::Bsp, change);
        (0..2).for_each(|bucket| world.push_to(bucket, 1, 0.0, None, false));
        world.commit();
        let waits = |sent: &[(ConnId, Reply)]| {
            sent.iter().filter(|(_, r)| matches!(r, Reply::RoundNorm { step: Step(1), .. })).count()
        };
        assert_eq!(waits(world.sent()), 1);
        world.hears(Input::Closed(1));
        let (worker, job, liveness) = (WorkerId(0), world.job.clone(), Arc::default());
        world.hears(Input::Open { conn: 2, worker, session: None, job, liveness });
        world.commit();
        assert_eq!(waits(world.sent()), 0, "what its predecessor has pushed is of no norm any more");
        // As from a session that got the norm of its predecessor's pushes, at any moment.
        let tells = |world: &mut World, at| {
            if told == Some(at) {
                world.hears(Input::Message(
                    2,
                    Message::Norm { step: Step(1), sum_of_squares: 4.0, bound: None },
                ));
                world.commit();
            }
        };
        for bucket in 0..2 {
            tells(&mut world, bucket);
            world.push_on(2, bucket, 1, 0.0, None, false);
            world.commit();
        }
        assert_eq!(waits(world.sent()), 1, "told at {told:?}");
        world.hears(Input::Message(2, Message::Norm { step: Step(1), sum_of_squares: 4.0, bound: None }));
        world.commit();
        assert_eq!(world.acks(), [1, 1], "told at {told:?}");
    }
}

#[test]
fn new_leader_asks_for_norm_of_remaining_buckets() {
    let mut world = World::of(2, Mode::Bsp, |job| (job.params_len, job.clip.norm) = (32, Some(1.0)));
    (0..2).for_each(|bucket| world.push_to(bucket, 1, 0.0, None, false));
    world.commit();
    world.hears(Input::Message(1, Message::Norm { step: Step(1), sum_of_squares: 4.0, bound: None }));
    let first = world.applies();
    world.hears(first);
    assert_eq!(world.acks(), [1]);
    // The other entry is lost with the epoch.
    let (number, _) = world.log.pop_front().expect("it is proposed");
    world.hears(Input::Outcome(number, Err(ProposeError::new("lost"))));
    world.now = world.leader.deadline().expect("it comes back");
    world.hears(Input::Time);
    world.commit();
    let (worker, session, job, liveness) =
        (WorkerId(0), Some(SessionId(1)), world.job.clone(), Arc::default());
    world.hears(Input::Open { conn: 2, worker, session, job, liveness });
    world.sent();
    (0..2).for_each(|bucket| world.push_on(2, bucket, 1, 0.0, None, false));
    world.commit();
    let sent = world.sent();
    assert!(sent.iter().any(|(_, r)| matches!(r, Reply::RoundNorm { step: Step(1), .. })), "{sent:?}");
    world.hears(Input::Message(2, Message::Norm { step: Step(1), sum_of_squares: 4.0, bound: None }));
    world.commit();
    assert_eq!(world.acks(), [1]);
}

#[test]
fn worker_resuming_behind_a_waiting_norm_can_finish() {
    let mut world = World::of(2, Mode::Bsp, |job| (job.params_len, job.clip.norm) = (32, Some(1.0)));
    (0..2).for_each(|bucket| world.push_to(bucket, 1, 0.0, None, false));
    world.commit();
    world.hears(Input::Message(1, Message::Advance { step: Step(1) }));
    world.commit();
    assert_eq!(world.acks(), [1, 1], "it need not keep them");
    world.hears(Input::Message(1, Message::Finish));
    world.commit();
    assert!(matches!(world.committed.last(), Some(Command::Finish { .. })), "{:?}", world.committed);
}

#[test]
fn late_outcome_leaves_the_next_push_in_flight() {
    let mut world = World::new(Mode::Asp);
    world.push(1);
    let first = world.applies();
    world.push(2);
    assert_eq!(world.log.len(), 1, "the shard shows the first: the second is taken");
    world.hears(first);
    world.push(2);
    assert_eq!(world.log.len(), 1, "its retry finds it in flight");
    world.commit();
    assert_eq!(world.acks(), [1, 2]);
}

#[test]
fn what_a_worker_says_last_is_in_the_log_behind_its_pushes() {
    let mut world = World::new(Mode::Asp);
    (1..=3).for_each(|step| world.push(step));
    world.hears(Input::Message(1, Message::Finish));
    world.commit();
    assert_eq!(world.updates(), [1, 2, 3].map(Step));
    assert!(matches!(world.committed.last(), Some(Command::Finish { .. })), "{:?}", world.committed);
    assert!(world.shard.read(|m| m.members.unfinished().next().is_none()));
}

#[test]
fn restarted_leader_fences_and_gives_up_without_answers() {
    let mut world = World::new(Mode::Ssp(1));
    world.push(1);
    let (number, _) = world.log.pop_front().expect("it is proposed");
    world.hears(Input::Outcome(number, Err(ProposeError::new("lost"))));
    assert_eq!(world.closed, [1], "its workers look for another");
    assert!(world.log.is_empty(), "not at once");
    for _ in 0..2 {
        world.now = world.leader.deadline().expect("it comes back");
        world.hears(Input::Time);
        assert!(matches!(world.log.pop_front(), Some((_, p)) if p.command == Command::Fence));
        let (worker, session, job, liveness) =
            (WorkerId(0), Some(SessionId(1)), world.job.clone(), Arc::default());
        world.hears(Input::Open { conn: 2, worker, session, job, liveness });
        assert!(matches!(world.sent().last(), Some((2, Reply::Refused(_)))), "it does not serve");
        let until = world.leader.deadline().expect("it does not wait for ever");
        assert!(until - world.now <= Duration::from_secs(5));
        world.now = until;
        world.hears(Input::Time);
    }
    world.now = world.leader.deadline().expect("it comes back");
    world.hears(Input::Time);
    world.commit();
    let (worker, session, job, liveness) =
        (WorkerId(0), Some(SessionId(1)), world.job.clone(), Arc::default());
    world.hears(Input::Open { conn: 3, worker, session, job, liveness });
    assert!(matches!(world.sent().last(), Some((3, Reply::Opened { .. }))));
}

#[test]
fn workers_beyond_the_bound_of_a_job_are_refused() {
    let mut world = World::new(Mode::Asp);
    let mut open = |conn: ConnId| {
        let (worker, job, liveness) = (WorkerId(conn as u32), world.job.clone(), Arc::default());
        world.hears(Input::Open { conn, worker, session: None, job, liveness });
        world.commit();
        match world.sent() {
            [(to, Reply::Opened { .. })] if *to == conn => true,
            [(to, Reply::Refused(r))] if *to == conn && matches!(r.kind, RefusalKind::Overloaded(_)) => false,
            other => panic!("{other:?}"),
        }
    };
    // The job's first worker has stream 1.
    let taken = (2..200).take_while(|conn| open(*conn)).count();
    assert_eq!(taken, 64);
    world.hears(Input::Message(2, Message::Finish));
    world.commit();
    world.hears(Input::Closed(2));
    world.sent();
    let (conn, worker, job, liveness) = (300, WorkerId(300), world.job.clone(), Arc::default());
    world.hears(Input::Open { conn, worker, session: None, job, liveness });
    world.commit();
    assert!(matches!(world.sent(), [(300, Reply::Opened { .. })]), "another one has finished");
}

/// Two workers whose own optimizer runs on the mean: bucket 0 has the mean, bucket 1 a result.
fn two_with_results() -> World {
    let mut world = World::with(Mode::Bsp, |job| (job.workers, job.results_len) = (2, 8));
    let (worker, job, liveness) = (WorkerId(1), world.job.clone(), Arc::default());
    world.hears(Input::Open { conn: 2, worker, session: None, job, liveness });
    world.commit();
    (0..2).for_each(|bucket| world.init_bucket(bucket));
    world.sent();
    world
}

fn write(world: &mut World, conn: ConnId, step: u64, value: f32) {
    let payload = Payload::from(value.to_le_bytes().repeat(8));
    let (seq, step, bucket, pulled) = (Seq(2 * step), Step(step), 1, Version(step - 1));
    let (samples, arrived, sum_of_squares, skip) = (1, Moment::default(), 0.0, false);
    let overrides = Overrides::default();
    let push = Message::Push {
        seq,
        step,
        bucket,
        pulled,
        samples,
        sum_of_squares,
        payload,
        overrides,
        skip,
        clipped: false,
        arrived,
    };
    world.hears(Input::Message(conn, push));
}

fn result(world: &World) -> (Version, f32) {
    world.shard.configured().expect("a job").buckets[1].peek(|d| (d.version, d.weights[0]))
}

#[test]
fn a_result_is_written_once_whoever_writes_it() {
    let mut world = two_with_results();
    for conn in [1, 2] {
        world.push_on(conn, 0, 1, 1.0, None, false);
    }
    world.commit();
    world.sent();
    // Both write it at once, and one again after a break: each is acknowledged, and one is applied.
    write(&mut world, 2, 1, -0.0);
    write(&mut world, 1, 1, 5.0);
    world.commit();
    write(&mut world, 2, 1, 7.0);
    world.commit();
    assert_eq!(result(&world).0, Version(1));
    assert_eq!(result(&world).1.to_bits(), (-0.0f32).to_bits(), "bit by bit");
    assert_eq!(world.acks(), [2, 2, 2]);
    assert!(is_answered(&mut world, 1), "it is every worker's step");
}

#[test]
fn a_result_waits_for_a_writer_and_not_for_all() {
    let mut world = two_with_results();
    for conn in [1, 2] {
        world.push_on(conn, 0, 1, 1.0, None, false);
    }
    world.commit();
    assert!(!is_answered(&mut world, 1), "nobody has written it");
    // The worker that was to write it is gone; the other one does.
    world.hears(Input::Message(2, Message::Leave));
    world.commit();
    assert!(!is_answered(&mut world, 1));
    write(&mut world, 1, 1, 3.0);
    world.commit();
    assert_eq!(result(&world), (Version(1), 3.0));
    assert!(world.sent().iter().any(|(_, reply)| matches!(reply, Reply::Weights(w) if w.last)));
}

#[test]
fn a_job_with_results_stays_in_lock_step() {
    let mut world = two_with_results();
    world.hears(Input::Message(1, Message::SwitchMode { number: 1, mode: Mode::Asp }));
    world.commit();
    assert_eq!(world.shard.read(|m| m.in_force.mode), Mode::Bsp);
    for mode in [Mode::Asp, Mode::Ssp(1)] {
        let job = ServerJob { results_len: 8, ..ServerJob::new("whole", mode, 8, 8) };
        assert!(job.validate().is_err(), "{mode}");
    }
}
