//! A session against servers with scripted answers: what it keeps, resends, waits for and releases.

use bytes::Bytes;
use paraft_common::optim::Overrides;
use paraft_common::{
    BucketId, Mode, ParamGroup, ShardId, Step, WorkerId, config::ServerJob, retry::RetryPolicy,
};
use paraft_proto::{
    Ack, Advice, FromShard, Opened, Refused, RoundNorm, ToShard, Weights, WireKind, from_shard, limits,
    to_shard::Kind,
};
use paraft_session::{Effect, Event, HANDOVER, Input, Options, Pull, Session, SessionError};
use proptest::prelude::*;
use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    ops::Range,
    time::Duration,
};

const BUCKETS: usize = 4;
/// Values of a bucket.
const LEN: usize = 2;

fn session(job: ServerJob, shards: u32) -> Session {
    patient(job, shards, Duration::from_secs(5))
}

fn patient(job: ServerJob, shards: u32, deadline: Duration) -> Session {
    with_stages(job, shards, deadline, None)
}

fn with_stages(job: ServerJob, shards: u32, deadline: Duration, stages: Option<Range<usize>>) -> Session {
    let mut session = Session::new(Options {
        servers: vec!["a".into(), "b".into(), "c".into()],
        shards,
        replicas: 3,
        worker: WorkerId(0),
        job_text: job.to_toml().expect("a valid job"),
        job,
        retry: RetryPolicy { base: Duration::from_millis(10), max: Duration::from_millis(100), deadline },
        handover: HANDOVER,
        stages,
        draw: Box::new(|| 0.5),
    });
    session.join();
    session
}

fn job(mode: Mode) -> ServerJob {
    ServerJob::new("protocol", mode, BUCKETS * LEN, LEN)
}

/// The servers' side: the streams, and the messages on each shard's latest stream.
#[derive(Default)]
struct Servers {
    now: Duration,
    dialled: BTreeMap<ShardId, (u64, String)>,
    /// The second stream of a shard, to another server.
    beside: BTreeMap<ShardId, (u64, String)>,
    /// Every server that received a request on a second stream.
    asked: Vec<String>,
    /// The term that a leader names next.
    term: u64,
    /// The messages since the stream was opened.
    came: BTreeMap<ShardId, VecDeque<Kind>>,
}

impl Servers {
    fn new() -> Self {
        Self { term: 1, ..Self::default() }
    }

    fn carry_out(&mut self, session: &mut Session) {
        while let Some(effect) = session.next_effect() {
            match effect {
                Effect::Dial { shard, dial, address, .. } => {
                    self.dialled.insert(shard, (dial, address));
                    self.came.insert(shard, VecDeque::new());
                }
                Effect::Ask { shard, dial, address, .. } => {
                    assert!(self.dialled.get(&shard).is_some_and(|(_, own)| *own != address));
                    self.asked.push(address.clone());
                    self.beside.insert(shard, (dial, address));
                }
                Effect::AskNoMore(shard) => assert!(self.beside.remove(&shard).is_some()),
                Effect::Turn(shard) => {
                    let stream = self.beside.remove(&shard).expect("one that was asked");
                    assert!(self.dialled.insert(shard, stream).is_none(), "its own is hung up first");
                    self.came.insert(shard, VecDeque::new());
                }
                Effect::HangUp { shard, .. } => _ = self.dialled.remove(&shard),
                Effect::Send(shard, ToShard { kind }) => {
                    assert!(self.dialled.contains_key(&shard), "sent without a stream");
                    self.came.entry(shard).or_default().extend(kind);
                }
                Effect::SendInitial(_) | Effect::InitialKnown(_) | Effect::Acked(_) => {}
            }
        }
    }

    fn says(&mut self, session: &mut Session, shard: ShardId, kind: from_shard::Kind) {
        let Some((dial, _)) = self.dialled.get(&shard).cloned() else { return };
        self.says_on(session, (shard, dial), kind);
    }

    /// Answers on the second stream.
    fn answers(&mut self, session: &mut Session, shard: ShardId, kind: from_shard::Kind) {
        let Some((dial, _)) = self.beside.get(&shard).cloned() else { return };
        self.says_on(session, (shard, dial), kind);
    }

    fn says_on(&mut self, session: &mut Session, (shard, dial): (ShardId, u64), kind: from_shard::Kind) {
        let message = FromShard { kind: Some(kind) }.into();
        session.handle(self.now, Input::Message { shard, dial, message });
        self.carry_out(session);
    }

    fn opens(&mut self, session: &mut Session, shard: ShardId, of: u64, clock: u64) {
        let opened = self.opened(of, clock);
        self.says(session, shard, opened);
    }

    fn opened(&self, session: u64, clock: u64) -> from_shard::Kind {
        from_shard::Kind::Opened(Opened {
            session,
            clock,
            initialised: true,
            term: self.term,
            ..Opened::default()
        })
    }

    fn breaks(&mut self, session: &mut Session, shard: ShardId) {
        let Some((dial, _)) = self.dialled.get(&shard) else { return };
        session.handle(self.now, Input::Broken { shard, dial: *dial, cause: "cut".into() });
        self.carry_out(session);
    }

    fn refuses(&mut self, session: &mut Session, shard: ShardId, advice: Advice, leader: &str) {
        self.says(session, shard, refused(advice, leader));
    }

    fn passes(&mut self, session: &mut Session, time: Duration) {
        self.now += time;
        session.handle(self.now, Input::Tick);
        self.carry_out(session);
    }

    fn pushes(&self, shard: ShardId) -> Vec<u64> {
        let came = self.came.get(&shard).into_iter().flatten();
        came.filter_map(|k| if let Kind::Push(p) = k { Some(p.seq) } else { None }).collect()
    }
}

fn refused(advice: Advice, leader: &str) -> from_shard::Kind {
    let leader = leader.into();
    from_shard::Kind::Refused(Refused { advice: advice as i32, leader, ..Refused::default() })
}

fn push(session: &mut Session, servers: &mut Servers, bucket: u32, step: u64) {
    session.push(servers.now, BucketId(bucket), Step(step), Bytes::from(vec![0; LEN * 4]));
    servers.carry_out(session);
}

fn joined(session: &mut Session, servers: &mut Servers, clocks: &[u64]) -> Step {
    servers.carry_out(session);
    for (shard, clock) in (0..).map(ShardId).zip(clocks) {
        servers.opens(session, shard, 7, *clock);
    }
    let polled = session.poll(servers.now);
    servers.carry_out(session);
    match polled {
        Ok(Some(Event::Joined(step))) => step,
        other => panic!("{other:?}"),
    }
}

fn of_rates(rates: &[f64]) -> Vec<Overrides> {
    rates.iter().map(|rate| Overrides::rate(Some(*rate))).collect()
}

#[test]
fn shards_that_are_behind_are_brought_to_the_latest_clock() {
    let (mut session, mut servers) = (session(job(Mode::Asp), 2), Servers::new());
    assert_eq!(joined(&mut session, &mut servers, &[3, 5]), Step(5));
    assert!(matches!(servers.came[&ShardId(0)].back(), Some(Kind::Advance(a)) if a.step == 5));
    assert!(servers.came[&ShardId(1)].is_empty());
}

#[test]
fn pushes_say_the_rate_that_the_worker_has_set_last() {
    let job = ServerJob { buffers_len: LEN, ..job(Mode::Asp) };
    let (mut session, mut servers) = (session(job, 1), Servers::new());
    joined(&mut session, &mut servers, &[0]);
    let rate = |servers: &Servers| match servers.came[&ShardId(0)].back() {
        Some(Kind::Push(p)) => p.rate,
        other => panic!("{other:?}"),
    };
    let mut seen = Vec::new();
    for rates in [vec![], vec![0.5], vec![0.25], vec![]] {
        session.override_options(of_rates(&rates));
        push(&mut session, &mut servers, 0, 1);
        seen.push(rate(&servers));
    }
    assert_eq!(seen, [None, Some(0.5), Some(0.25), None]);
    session.override_options(of_rates(&[0.5]));
    push(&mut session, &mut servers, BUCKETS as u32, 1);
    assert_eq!(rate(&servers), None, "running statistics have none");
}

#[test]
fn each_group_of_parameters_has_its_rate() {
    let group = |values| ParamGroup::new(values, 0.1, 0.0);
    let job = ServerJob { groups: vec![group(2 * LEN), group(LEN), group(LEN)], ..job(Mode::Asp) };
    let (mut session, mut servers) = (session(job, 1), Servers::new());
    joined(&mut session, &mut servers, &[0]);
    session.override_options(of_rates(&[0.5, 0.25, 0.125]));
    (0..BUCKETS as u32).for_each(|bucket| push(&mut session, &mut servers, bucket, 1));
    let rate = |kind: &Kind| if let Kind::Push(p) = kind { p.rate } else { None };
    let said: Vec<_> = servers.came[&ShardId(0)].iter().filter_map(rate).collect();
    assert_eq!(said, [0.5, 0.5, 0.25, 0.125]);
}

#[test]
fn skipped_step_sends_a_mark_for_every_bucket() {
    let (mut session, mut servers) = (session(job(Mode::Bsp), 2), Servers::new());
    joined(&mut session, &mut servers, &[0, 0]);
    session.override_options(of_rates(&[0.5]));
    (0..BUCKETS as u32).for_each(|bucket| push(&mut session, &mut servers, bucket, 1));
    session.skip(servers.now, Step(2));
    servers.carry_out(&mut session);
    servers.breaks(&mut session, ShardId(1));
    servers.passes(&mut session, Duration::from_secs(1));
    servers.opens(&mut session, ShardId(1), 7, 0);
    for shard in [ShardId(0), ShardId(1)] {
        let came = servers.came[&shard].iter();
        let marks: Vec<_> = came
            .filter_map(|k| match k {
                Kind::Push(p) => Some((p.seq, p.step, p.bucket % 2, p.skip, p.payload.len(), p.rate)),
                _ => None,
            })
            .collect();
        let (of, len, rate) = (shard.0, LEN * 4, Some(0.5));
        assert_eq!(marks[..2], [(1, 1, of, false, len, rate), (2, 1, of, false, len, rate)]);
        assert_eq!(marks[2..], [(3, 2, of, true, 0, None), (4, 2, of, true, 0, None)]);
    }
    session.pull(servers.now, Pull::of(Step(2)), false);
    servers.carry_out(&mut session);
    assert_eq!(session.skipped(), 0);
    for shard in [ShardId(0), ShardId(1)] {
        for (bucket, last) in [(shard.0, false), (shard.0 + 2, true)] {
            let skipped = u64::from(last);
            let weights =
                Weights { bucket, done: 2, last, skipped, mode: "bsp".into(), ..Weights::default() };
            servers.says(&mut session, shard, from_shard::Kind::Weights(weights));
        }
    }
    let pulled = loop {
        match session.poll(servers.now).expect("it goes on") {
            Some(Event::Pulled(pulled)) => break pulled,
            Some(_) => {}
            None => panic!("the pull is answered"),
        }
    };
    assert_eq!((pulled.done, session.skipped()), (Step(2), 1));
}

#[test]
fn refused_push_ends_no_session_and_can_be_skipped() {
    let (mut session, mut servers) = (session(job(Mode::Bsp), 1), Servers::new());
    joined(&mut session, &mut servers, &[0]);
    (0..BUCKETS as u32).for_each(|bucket| push(&mut session, &mut servers, bucket, 1));
    session.pull(servers.now, Pull::of(Step(1)), false);
    servers.carry_out(&mut session);
    for seq in [2, 2, 3] {
        let (advice, kind) = (Advice::Fix as i32, WireKind::NotFinite as i32);
        let refused = Refused { advice, kind, seq, ..Refused::default() };
        servers.says(&mut session, ShardId(0), from_shard::Kind::Refused(refused));
    }
    for _ in 0..2 {
        let said = session.poll(servers.now);
        let not_finite = matches!(&said, Err(SessionError::Refused { kind: WireKind::NotFinite, .. }));
        assert!(not_finite, "{said:?}");
    }
    assert!(matches!(session.poll(servers.now), Ok(None)), "it goes on, and waits");
    session.skip(servers.now, Step(1));
    servers.carry_out(&mut session);
    let marks = |k: &Kind| if let Kind::Push(p) = k { p.skip.then_some((p.seq, p.bucket)) } else { None };
    let came: Vec<_> = servers.came[&ShardId(0)].iter().filter_map(marks).collect();
    assert_eq!(came, [(5, 1), (6, 2)], "the buckets of these pushes, and no others");
    // Only these are sent again.
    servers.breaks(&mut session, ShardId(0));
    servers.passes(&mut session, Duration::from_secs(1));
    servers.opens(&mut session, ShardId(0), 7, 0);
    assert_eq!(servers.pushes(ShardId(0)), [1, 4, 5, 6]);
}

#[test]
fn pushes_waiting_for_norm_of_skipped_step_are_not_sent() {
    let clip = paraft_common::optim::ClipConfig { norm: Some(1.0), value: None };
    let (mut session, mut servers) = (session(ServerJob { clip, ..job(Mode::Asp) }, 1), Servers::new());
    joined(&mut session, &mut servers, &[0]);
    push(&mut session, &mut servers, 0, 1);
    session.skip(servers.now, Step(1));
    servers.carry_out(&mut session);
    let skips = |k: &Kind| if let Kind::Push(p) = k { Some((p.bucket, p.skip)) } else { None };
    let came: Vec<_> = servers.came[&ShardId(0)].iter().filter_map(skips).collect();
    assert_eq!(came, [(0, true), (1, true), (2, true), (3, true)]);
}

#[test]
fn pushes_that_wait_for_a_norm_wait_for_no_left_out_bucket() {
    let clip = paraft_common::optim::ClipConfig { norm: Some(1.0), value: None };
    let (mut session, mut servers) = (session(ServerJob { clip, ..job(Mode::Asp) }, 1), Servers::new());
    joined(&mut session, &mut servers, &[0]);
    session.skip_bucket(servers.now, BucketId(0), Step(1));
    for bucket in (1..BUCKETS as u32).map(BucketId) {
        session.push(servers.now, bucket, Step(1), Bytes::from(1f32.to_le_bytes().repeat(LEN)));
        servers.carry_out(&mut session);
    }
    let of = |k: &Kind| if let Kind::Push(p) = k { Some((p.bucket, p.skip, p.sum_of_squares)) } else { None };
    let came: Vec<_> = servers.came[&ShardId(0)].iter().filter_map(of).collect();
    let norm = ((BUCKETS - 1) * LEN) as f64;
    assert_eq!(came, [(0, true, 0.0), (1, false, norm), (2, false, norm), (3, false, norm)]);
}

/// The first of two stages, with two shards of four.
fn first_stage(mode: Mode) -> (Session, Servers) {
    let clip = paraft_common::optim::ClipConfig { norm: Some(1.0), value: None };
    let job = ServerJob { clip, stages: vec![BUCKETS / 2 * LEN; 2], ..job(mode) };
    let (mut session, mut servers) =
        (with_stages(job, 4, Duration::from_secs(5), Some(0..1)), Servers::new());
    assert_eq!(session.shards().collect::<Vec<_>>(), [ShardId(0), ShardId(2)]);
    joined(&mut session, &mut servers, &[0, 0, 0]);
    (session, servers)
}

fn norms(servers: &Servers, shard: u32) -> Vec<f64> {
    let of = |k: &Kind| if let Kind::Norm(n) = k { Some(n.sum_of_squares) } else { None };
    servers.came.get(&ShardId(shard)).into_iter().flatten().filter_map(of).collect()
}

/// Another worker may end a clipped step before this one has all parts of its norm: one shard's new weights, asked for
/// ahead, then come before another's part.
#[test]
fn weights_that_come_before_a_norm_are_kept_for_the_pull() {
    let (mut session, mut servers) = (session(job(Mode::Bsp), 2), Servers::new());
    joined(&mut session, &mut servers, &[0, 0]);
    session.clip_steps(true);
    session.ask_ahead(servers.now, Pull::of(Step(1)), false);
    (0..BUCKETS as u32).for_each(|bucket| push(&mut session, &mut servers, bucket, 1));
    session.ask_norm(Step(1));
    servers.carry_out(&mut session);
    let round = |sum_of_squares| from_shard::Kind::RoundNorm(RoundNorm { step: 1, sum_of_squares });
    servers.says(&mut session, ShardId(0), round(1.0));
    let arrived = Weights {
        bucket: 0,
        version: 1,
        done: 1,
        mode: "bsp".into(),
        not_modified: true,
        ..Weights::default()
    };
    servers.says(&mut session, ShardId(0), from_shard::Kind::Weights(arrived));
    assert!(!session.has_news(), "who waits sleeps on");
    assert!(matches!(session.poll(servers.now), Ok(None)));
    servers.says(&mut session, ShardId(1), round(3.0));
    assert!(matches!(session.poll(servers.now), Ok(Some(Event::NormParts(_)))));
    session.pull(servers.now, Pull::of(Step(1)), false);
    assert!(matches!(session.poll(servers.now), Ok(Some(Event::Weights(_)))), "they are here");
}

/// A push that is refused has no ack, and its step has a norm all the same.
#[test]
fn a_refused_push_is_heard_before_a_wait_for_a_norm_ends() {
    let (mut session, mut servers) = (session(job(Mode::Bsp), 1), Servers::new());
    joined(&mut session, &mut servers, &[0]);
    session.clip_steps(true);
    (0..BUCKETS as u32).for_each(|bucket| push(&mut session, &mut servers, bucket, 1));
    session.ask_norm(Step(1));
    for seq in 1..=BUCKETS as u64 {
        let (advice, kind) = (Advice::Fix as i32, WireKind::NotFinite as i32);
        let refused = Refused { advice, kind, seq, ..Refused::default() };
        servers.says(&mut session, ShardId(0), from_shard::Kind::Refused(refused));
    }
    (0..BUCKETS).for_each(|_| assert!(session.poll(servers.now).is_err()));
    session.skip(servers.now, Step(1));
    session.ask_norm(Step(1));
    servers.carry_out(&mut session);
    assert!(matches!(session.poll(servers.now), Ok(None)));
    let round = from_shard::Kind::RoundNorm(RoundNorm { step: 1, sum_of_squares: 0.0 });
    servers.says(&mut session, ShardId(0), round);
    assert!(matches!(session.poll(servers.now), Ok(Some(Event::NormParts(_)))));
}

/// The acks of a clipped step may come while the next one's norm is asked for: they do not end that wait.
#[test]
fn acks_of_a_clipped_step_do_not_end_the_next_ones_wait() {
    let (mut session, mut servers) = (session(job(Mode::Bsp), 1), Servers::new());
    joined(&mut session, &mut servers, &[0]);
    session.clip_steps(true);
    let round = |step, sum_of_squares| from_shard::Kind::RoundNorm(RoundNorm { step, sum_of_squares });
    let ack = |seq| from_shard::Kind::Ack(Ack { seq, version: 1, ..Ack::default() });
    for step in 1..=2 {
        (0..BUCKETS as u32).for_each(|bucket| push(&mut session, &mut servers, bucket, step));
        session.ask_norm(Step(step));
        servers.carry_out(&mut session);
        assert!(matches!(session.poll(servers.now), Ok(None)), "no part of {step} has come");
        servers.says(&mut session, ShardId(0), round(step, 4.0));
        let parts = session.poll(servers.now);
        assert!(matches!(&parts, Ok(Some(Event::NormParts(p))) if *p == [(ShardId(0), 4.0)]), "{parts:?}");
        session.tell_norm(Step(step), 4.0, Some(1.0));
        (0..BUCKETS as u64)
            .for_each(|i| servers.says(&mut session, ShardId(0), ack((step - 1) * BUCKETS as u64 + i + 1)));
    }
    servers.carry_out(&mut session);
    let bounds: Vec<_> = (servers.came[&ShardId(0)].iter())
        .filter_map(|k| if let Kind::Norm(n) = k { Some((n.step, n.bound)) } else { None })
        .collect();
    assert_eq!(bounds, [(1, Some(1.0)), (2, Some(1.0))]);
    // A step that was applied without its norm, as behind a switch of the mode.
    (0..BUCKETS as u32).for_each(|bucket| push(&mut session, &mut servers, bucket, 3));
    session.ask_norm(Step(3));
    (0..BUCKETS as u64).for_each(|i| servers.says(&mut session, ShardId(0), ack(2 * BUCKETS as u64 + i + 1)));
    assert!(matches!(session.poll(servers.now), Ok(Some(Event::Settled(None)))));
}

#[test]
fn partial_shards_get_no_norm_before_the_sum_of_all() {
    let (mut session, mut servers) = first_stage(Mode::Bsp);
    let part = |shard: u32, sum_of_squares: f64| {
        (ShardId(shard), from_shard::Kind::RoundNorm(RoundNorm { step: 1, sum_of_squares }))
    };
    let parts = |session: &mut Session, servers: &Servers| match session.poll(servers.now) {
        Ok(Some(Event::NormParts(parts))) => Some(parts),
        Ok(None) => None,
        other => panic!("{other:?}"),
    };
    (0..2).for_each(|bucket| push(&mut session, &mut servers, bucket, 1));
    // One arrives before the pull, one during it.
    let said =
        |session: &mut Session, servers: &mut Servers, (shard, kind)| servers.says(session, shard, kind);
    said(&mut session, &mut servers, part(2, 4.0));
    session.pull(servers.now, Pull::of(Step(1)), false);
    servers.carry_out(&mut session);
    assert_eq!(parts(&mut session, &servers), None);
    said(&mut session, &mut servers, part(0, 1.0));
    assert!(session.has_news(), "who waits is woken");
    let both = vec![(ShardId(0), 1.0), (ShardId(2), 4.0)];
    assert_eq!(parts(&mut session, &servers), Some(both.clone()));
    assert_eq!(parts(&mut session, &servers), None, "once in a pull");
    assert!(norms(&servers, 0).is_empty() && norms(&servers, 2).is_empty());
    // The worker's group broke, and repeats the pull.
    session.pull(servers.now, Pull::of(Step(1)), false);
    assert_eq!(parts(&mut session, &servers), Some(both));
    session.tell_norm(Step(1), 11.0, None);
    servers.carry_out(&mut session);
    assert_eq!((norms(&servers, 0), norms(&servers, 2)), (vec![11.0], vec![11.0]));
    // A new leader closes the round once more.
    servers.breaks(&mut session, ShardId(2));
    servers.passes(&mut session, Duration::from_secs(1));
    servers.opens(&mut session, ShardId(2), 7, 0);
    said(&mut session, &mut servers, part(2, 4.0));
    assert_eq!((norms(&servers, 0), norms(&servers, 2)), (vec![11.0], vec![11.0]), "it alone is told again");
    assert_eq!(parts(&mut session, &servers), None);
}

#[test]
fn answer_to_a_cancelled_pull_does_not_answer_another() {
    let (mut session, mut servers) = first_stage(Mode::Bsp);
    session.pull(servers.now, Pull::of(Step(1)), false);
    servers.carry_out(&mut session);
    for (bucket, shard) in [(0, 0), (1, 2)] {
        let weights =
            Weights { bucket, version: 7, done: 1, last: true, mode: "bsp".into(), ..Weights::default() };
        servers.says(&mut session, ShardId(shard), from_shard::Kind::Weights(weights));
    }
    // No caller has read it.
    session.pull(servers.now, Pull::of(Step(2)), false);
    servers.carry_out(&mut session);
    assert!(matches!(session.poll(servers.now), Ok(None)), "it waits for its own");
    assert_eq!(session.untaken(), 0);
}

#[test]
fn pushes_of_some_stages_wait_for_the_norm_of_all() {
    let (mut session, mut servers) = first_stage(Mode::Asp);
    let push = |session: &mut Session, servers: &mut Servers, bucket: u32, value: f32| {
        let payload = Bytes::from(value.to_le_bytes().repeat(LEN));
        session.push(servers.now, BucketId(bucket), Step(1), payload);
        servers.carry_out(session);
    };
    push(&mut session, &mut servers, 1, 3.0);
    assert_eq!(session.pushed_squares(Step(1)), None, "not of all buckets");
    push(&mut session, &mut servers, 0, 1.0);
    assert!(servers.pushes(ShardId(0)).is_empty() && servers.pushes(ShardId(2)).is_empty());
    let own = session.pushed_squares(Step(1)).expect("all are pushed");
    assert_eq!(own, [(ShardId(0), 2.0), (ShardId(2), 18.0)]);
    session.clip_by(servers.now, Step(1), 99.0);
    servers.carry_out(&mut session);
    for shard in [0, 2] {
        let of = |k: &Kind| if let Kind::Push(p) = k { Some((p.seq, p.sum_of_squares)) } else { None };
        let came: Vec<_> = servers.came[&ShardId(shard)].iter().filter_map(of).collect();
        assert_eq!(came, [(1, 99.0)]);
    }
    // The group broke after it: the other processes may still need them.
    assert_eq!(session.pushed_squares(Step(1)), Some(own));
    session.clip_by(servers.now, Step(1), 99.0);
    servers.carry_out(&mut session);
    assert_eq!(servers.pushes(ShardId(0)), [1], "once");
    assert_eq!(session.pushed_squares(Step(2)), None);
}

/// A switch reaches one shard after the other, also within a step: all pushes of a step go out as the first
/// one did.
#[test]
fn the_pushes_of_a_step_all_bring_the_norm_or_none_does() {
    let clip = paraft_common::optim::ClipConfig { norm: Some(1.0), value: None };
    for (mode, switched) in [(Mode::Asp, "bsp"), (Mode::Bsp, "asp")] {
        let (mut session, mut servers) = (session(ServerJob { clip, ..job(mode) }, 2), Servers::new());
        joined(&mut session, &mut servers, &[0, 0]);
        let push = |session: &mut Session, bucket: usize, step: u64| {
            let payload = Bytes::from(1f32.to_le_bytes().repeat(LEN));
            session.push(Duration::ZERO, BucketId(bucket as u32), Step(step), payload);
        };
        push(&mut session, 0, 1);
        session.pull(servers.now, Pull::of(Step(0)), false);
        servers.carry_out(&mut session);
        for shard in [0, 1] {
            let weights = Weights {
                bucket: shard,
                last: true,
                mode: switched.into(),
                mode_number: 1,
                ..Weights::default()
            };
            servers.says(&mut session, ShardId(shard), from_shard::Kind::Weights(weights));
        }
        while session.poll(servers.now).expect("it goes on").is_some() {}
        (1..BUCKETS).for_each(|bucket| push(&mut session, bucket, 1));
        (0..BUCKETS).for_each(|bucket| push(&mut session, bucket, 2));
        servers.carry_out(&mut session);
        let of = |k: &Kind| if let Kind::Push(p) = k { Some((p.step, p.sum_of_squares > 0.0)) } else { None };
        let came: BTreeSet<_> = servers.came.values().flatten().filter_map(of).collect();
        let alone = mode == Mode::Asp;
        assert_eq!(came, BTreeSet::from([(1, alone), (2, !alone)]), "{mode}");
    }
}

/// An abandoned step was not sent to any shard, and does not hold back the next one.
#[test]
fn pushes_without_their_norm_are_dropped_at_the_next_step() {
    let (mut session, mut servers) = first_stage(Mode::Asp);
    (0..2).for_each(|bucket| push(&mut session, &mut servers, bucket, 1));
    session.advance_to(Step(4));
    (0..2).for_each(|bucket| push(&mut session, &mut servers, bucket, 5));
    session.clip_by(servers.now, Step(5), 9.0);
    servers.carry_out(&mut session);
    let of = |k: &Kind| if let Kind::Push(p) = k { Some((p.step, p.sum_of_squares)) } else { None };
    let came: Vec<_> = servers.came.values().flatten().filter_map(of).collect();
    assert_eq!(came, [(5, 9.0), (5, 9.0)]);
}

#[test]
fn worker_pushes_up_to_the_window_until_acks_come() {
    let (mut session, mut servers) = (session(job(Mode::Asp), 1), Servers::new());
    joined(&mut session, &mut servers, &[0]);
    assert!(session.has_room(2 * limits::PUSH_WINDOW_BYTES), "one push always goes out");
    push(&mut session, &mut servers, 0, 1);
    let rest = limits::PUSH_WINDOW_BYTES - LEN * 4;
    assert!(session.has_room(rest) && !session.has_room(rest + 1));
    servers.says(&mut session, ShardId(0), from_shard::Kind::Ack(Ack { seq: 1, ..Ack::default() }));
    assert!(session.has_room(limits::PUSH_WINDOW_BYTES));
    // No ack is needed in a failed session.
    push(&mut session, &mut servers, 1, 1);
    servers.refuses(&mut session, ShardId(0), Advice::Fix, "");
    assert!(session.has_room(limits::PUSH_WINDOW_BYTES));
    assert!(matches!(session.poll(servers.now), Err(SessionError::Refused { .. })));
}

#[test]
fn lost_session_rejoins_in_next_wait_and_pulls_from_there() {
    let (mut session, mut servers) = (session(job(Mode::Asp), 2), Servers::new());
    joined(&mut session, &mut servers, &[2, 2]);
    push(&mut session, &mut servers, 0, 3);
    servers.refuses(&mut session, ShardId(0), Advice::Stop, "");
    // The worker does not know yet: its pushes to that shard are dropped, and take no room in the window.
    push(&mut session, &mut servers, 2, 3);
    assert!(session.has_room(limits::PUSH_WINDOW_BYTES));
    session.pull(servers.now, Pull::of(Step(3)), false);
    assert!(matches!(session.poll(servers.now), Ok(None)));
    servers.carry_out(&mut session);
    servers.passes(&mut session, Duration::from_millis(200));
    for shard in [ShardId(0), ShardId(1)] {
        servers.opens(&mut session, shard, 8, 6);
    }
    assert!(matches!(session.poll(servers.now), Ok(None)));
    servers.carry_out(&mut session);
    for shard in [ShardId(0), ShardId(1)] {
        assert!(servers.pushes(shard).is_empty(), "what was pushed in the old session");
        assert!(
            matches!(servers.came[&shard].back(), Some(Kind::Pull(p)) if p.done == 6 && p.have.is_empty())
        );
        let weights = Weights { done: 6, slowest: 6, last: true, not_modified: true, ..Weights::default() };
        let weights = Weights { bucket: shard.0, ..weights };
        servers.says(&mut session, shard, from_shard::Kind::Weights(weights));
    }
    let mut pulled = None;
    while let Ok(Some(event)) = session.poll(servers.now) {
        if let Event::Pulled(p) = event {
            pulled = Some(p);
        }
    }
    let pulled = pulled.expect("both shards have answered");
    assert!(pulled.rejoined && pulled.done == Step(6));
    assert_eq!(session.rejoins(), 1);
}

#[test]
fn search_without_leader_fails_with_each_servers_answer() {
    let (mut session, mut servers) = (session(job(Mode::Asp), 1), Servers::new());
    servers.carry_out(&mut session);
    for _ in 0..200 {
        servers.breaks(&mut session, ShardId(0));
        let next = session.deadline().unwrap_or(servers.now);
        servers.passes(&mut session, next.saturating_sub(servers.now));
    }
    match session.poll(servers.now) {
        Err(SessionError::Unreachable { waited, causes, .. }) => {
            assert!(waited >= Duration::from_secs(5));
            assert_eq!(causes.iter().map(|(a, _)| a.as_str()).collect::<Vec<_>>(), ["a", "b", "c"]);
        }
        other => panic!("{other:?}"),
    }
}

/// Half a second of silence, and its effects.
fn impatient(session: &mut Session, servers: &mut Servers) {
    joined(session, servers, &[0]);
    push(session, servers, 0, 1);
    push(session, servers, 1, 2);
    servers.says(session, ShardId(0), from_shard::Kind::Ack(Ack { seq: 1, ..Ack::default() }));
    servers.passes(session, Duration::from_millis(499));
    assert!(servers.asked.is_empty());
    servers.passes(session, Duration::from_millis(1));
    assert_eq!(servers.asked, ["b"]);
}

#[test]
fn silent_leader_is_left_for_one_of_a_later_term() {
    for named in [false, true] {
        let (mut session, mut servers) = (session(job(Mode::Asp), 1), Servers::new());
        impatient(&mut session, &mut servers);
        assert_eq!(servers.dialled[&ShardId(0)].1, "a", "nobody is left for an ask");
        if named {
            servers.answers(&mut session, ShardId(0), refused(Advice::Redirect, "d"));
            assert_eq!(servers.asked, ["b", "d"]);
            // A redirect from that server is ignored.
            servers.answers(&mut session, ShardId(0), refused(Advice::Redirect, "c"));
            assert_eq!(servers.asked.len(), 2);
            servers.passes(&mut session, Duration::from_millis(100));
            servers.answers(&mut session, ShardId(0), refused(Advice::Redirect, "d"));
            assert_eq!(servers.asked, ["b", "d", "c", "d"]);
        }
        push(&mut session, &mut servers, 2, 3);
        servers.term += 1;
        let opened = servers.opened(7, 0);
        servers.answers(&mut session, ShardId(0), opened);
        assert_eq!(servers.dialled[&ShardId(0)].1, if named { "d" } else { "b" });
        assert_eq!(servers.pushes(ShardId(0)), [2, 3]);
        // It is now the shard's stream: acks arrive on it, its end is a break, and silence on it is checked.
        servers.says(&mut session, ShardId(0), from_shard::Kind::Ack(Ack { seq: 2, ..Ack::default() }));
        let before = servers.asked.len();
        servers.passes(&mut session, Duration::from_millis(500));
        assert_eq!(servers.asked[before..], ["a"]);
        servers.breaks(&mut session, ShardId(0));
        assert!(servers.beside.is_empty() && servers.dialled.is_empty());
        servers.passes(&mut session, Duration::from_millis(100));
        servers.opens(&mut session, ShardId(0), 7, 0);
        assert_eq!(servers.pushes(ShardId(0)), [3]);
    }
}

#[test]
fn slow_leader_is_kept_and_asked_about_less_often() {
    let (mut session, mut servers) = (session(job(Mode::Asp), 1), Servers::new());
    impatient(&mut session, &mut servers);
    // Five answers: it names itself; it knows no leader; no server answers; another leads the same term, or
    // an earlier one.
    let mut others = 0;
    for ms in 0..9_500 {
        servers.passes(&mut session, Duration::from_millis(1));
        let Some((dial, _)) = servers.beside.get(&ShardId(0)).cloned() else { continue };
        others += 1;
        match others % 4 {
            0 => servers.answers(&mut session, ShardId(0), refused(Advice::Redirect, "a")),
            1 => servers.answers(&mut session, ShardId(0), refused(Advice::Redirect, "")),
            2 => {
                let broken = Input::Broken { shard: ShardId(0), dial, cause: "cut".into() };
                session.handle(servers.now, broken);
                servers.carry_out(&mut session);
            }
            _ => {
                let opened = servers.opened(7, 0);
                servers.answers(&mut session, ShardId(0), opened);
            }
        }
        assert!(servers.beside.is_empty(), "after {ms} ms");
        assert_eq!(servers.dialled[&ShardId(0)].1, "a");
    }
    // After 0.5, 0.6, 0.8, 1.2, 2.0, 3.6, 6.8 s.
    assert_eq!(servers.asked, ["b", "c", "b", "c", "b", "c", "b"]);
    assert_eq!(servers.pushes(ShardId(0)), [1, 2], "and nothing is sent again");
    // Any message shows that the leader is alive.
    servers.says(&mut session, ShardId(0), from_shard::Kind::Ack(Ack { seq: 9, ..Ack::default() }));
    servers.passes(&mut session, Duration::from_millis(499));
    assert_eq!(servers.asked.len(), 7);
    servers.passes(&mut session, Duration::from_millis(1));
    assert_eq!(servers.asked.len(), 8);
    // Once the leader sends a message, the session does not wait for that answer any more.
    servers.says(&mut session, ShardId(0), from_shard::Kind::Ack(Ack { seq: 2, ..Ack::default() }));
    assert!(servers.beside.is_empty());
    servers.passes(&mut session, Duration::from_secs(60));
    assert_eq!(session.deadline(), None, "a leader that owes nothing may be silent");
    assert_eq!(servers.asked.len(), 8);
}

#[test]
fn answering_leader_causes_no_questions_and_rare_checks() {
    let (mut session, mut servers) = (session(job(Mode::Asp), 1), Servers::new());
    joined(&mut session, &mut servers, &[0]);
    let mut deadlines = std::collections::BTreeSet::new();
    for seq in 1..=1000 {
        push(&mut session, &mut servers, 0, seq);
        deadlines.extend(session.deadline());
        servers.passes(&mut session, Duration::from_millis(10));
        servers.says(&mut session, ShardId(0), from_shard::Kind::Ack(Ack { seq, ..Ack::default() }));
    }
    assert!(servers.asked.is_empty());
    assert!(deadlines.len() <= 21, "{} in 10 s", deadlines.len());
    // The leader also owes an answer to a pull.
    session.pull(servers.now, Pull::of(Step(1000)), false);
    servers.carry_out(&mut session);
    servers.passes(&mut session, Duration::from_millis(500));
    servers.passes(&mut session, Duration::from_millis(500));
    assert!(!servers.asked.is_empty());
}

#[derive(Clone, Debug)]
enum StreamEvent {
    Push(u32),
    Ack(usize),
    Break,
    Redirect(usize),
    Retry,
    Open,
    Time(u64),
    /// A server that was asked about a silent leader leads a later term (`true`), or the same.
    Answers(bool),
}

fn happens() -> impl Strategy<Value = StreamEvent> {
    prop_oneof![
        4 => (0..BUCKETS as u32).prop_map(StreamEvent::Push),
        3 => (0usize..6).prop_map(StreamEvent::Ack),
        1 => Just(StreamEvent::Break),
        1 => (0usize..4).prop_map(StreamEvent::Redirect),
        1 => Just(StreamEvent::Retry),
        3 => Just(StreamEvent::Open),
        3 => (0u64..120).prop_map(StreamEvent::Time),
        1 => (400u64..700).prop_map(StreamEvent::Time),
        2 => any::<bool>().prop_map(StreamEvent::Answers),
    ]
}

proptest! {
    /// Whatever happens to the streams, the open one carries every unacknowledged push once, in order, and no
    /// acknowledged push; and the window counts exactly those.
    #[test]
    fn what_is_not_acknowledged_is_on_the_open_stream(all in prop::collection::vec(happens(), 0..80)) {
        const SHARD: ShardId = ShardId(0);
        let (mut session, mut servers) = (patient(job(Mode::Asp), 1, Duration::MAX), Servers::new());
        joined(&mut session, &mut servers, &[0]);
        let (mut open, mut unacked, mut step) = (true, Vec::new(), 0);
        for what in all {
            match what {
                StreamEvent::Push(bucket) => {
                    step += 1;
                    push(&mut session, &mut servers, bucket, step);
                    unacked.push(step); // also the seq
                }
                StreamEvent::Ack(i) if open && i < unacked.len() => {
                    let seq = unacked.remove(i);
                    // Twice, as for a push that was sent again.
                    for _ in 0..2 {
                        let ack = Ack { seq, ..Ack::default() };
                        servers.says(&mut session, SHARD, from_shard::Kind::Ack(ack));
                    }
                    servers.came.entry(SHARD).or_default().retain(|k| !matches!(k, Kind::Push(p) if p.seq == seq));
                }
                StreamEvent::Ack(_) => {}
                StreamEvent::Break => {
                    servers.breaks(&mut session, SHARD);
                    open = false;
                }
                StreamEvent::Redirect(to) if servers.dialled.contains_key(&SHARD) => {
                    let leader = ["a", "b", "c", "d"][to];
                    servers.refuses(&mut session, SHARD, Advice::Redirect, leader);
                    open = false;
                }
                StreamEvent::Retry if servers.dialled.contains_key(&SHARD) => {
                    servers.refuses(&mut session, SHARD, Advice::Retry, "");
                    open = false;
                }
                StreamEvent::Redirect(_) | StreamEvent::Retry => {}
                StreamEvent::Open if servers.dialled.contains_key(&SHARD) && !open => {
                    servers.opens(&mut session, SHARD, 7, 0);
                    open = true;
                }
                StreamEvent::Open => {}
                StreamEvent::Time(ms) => servers.passes(&mut session, Duration::from_millis(ms)),
                StreamEvent::Answers(later) => {
                    servers.term += u64::from(later && servers.beside.contains_key(&SHARD));
                    let opened = servers.opened(7, 0);
                    servers.answers(&mut session, SHARD, opened);
                    prop_assert!(servers.beside.is_empty());
                }
            }
            if open {
                prop_assert_eq!(servers.pushes(SHARD), unacked.clone());
            }
            let held = unacked.len() * LEN * 4;
            prop_assert!(unacked.is_empty() || session.has_room(limits::PUSH_WINDOW_BYTES - held));
            prop_assert!(unacked.is_empty() || !session.has_room(limits::PUSH_WINDOW_BYTES - held + 1));
            prop_assert!(session.poll(servers.now).is_ok());
        }
    }
}
