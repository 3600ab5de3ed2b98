//! A worker's session in simulated time: the session of real workers, over the simulated network.
//!
//! It differs from the real I/O in time only: a task of the simulator waits instead of a thread. Not
//! modelled: the limits on unacknowledged pushes (`proto/src/limits.rs`), which no small model reaches;
//! chunks; checkpoints. A dial reaches the leader directly; the search for a leader costs retries and
//! no redirects.

use crate::{
    chance::{Chance, Draws},
    error::SimError,
    stream::{FromServer, Process, Stream},
    world::World,
};
use bytes::Bytes;
use paraft_common::{BucketId, Mode, SessionId, ShardId, Step, WorkerId, retry::RetryPolicy};
use paraft_proto::{FromShard, ToShard, WithBulk};
use paraft_server::{
    rpc::convert,
    shard::{command::EvalSums, command::InitPart, leader::Message},
};
use paraft_session::{
    Arrived, Effect, Encoders, Event, HANDOVER, Input, Options, Pull, Pulled, Reported, Session, SessionError,
};
use std::{collections::BTreeMap, sync::Arc, time::Duration};
use tokio::sync::mpsc;

/// A worker's session with all shards of a job.
pub(crate) struct Client {
    world: Arc<World>,
    worker: WorkerId,
    process: Arc<Process>,
    heard: mpsc::UnboundedReceiver<FromServer>,
    hears: mpsc::UnboundedSender<FromServer>,
    session: Session,
    /// With the session's number for each.
    streams: BTreeMap<ShardId, (u64, Arc<Stream>)>,
    /// The deadline that the clock will deliver.
    armed: Option<Duration>,
    encoders: Encoders,
    /// Its first value in the flat vector: a rank with a stage holds none before.
    first: usize,
    pub bytes_pushed: u64,
    pub bytes_pulled: u64,
}

impl Client {
    /// Joins the job on every shard; returns the step to resume from.
    pub async fn join(world: &Arc<World>, process: &Arc<Process>) -> Result<(Self, Step), SimError> {
        let (hears, heard) = mpsc::unbounded_channel();
        let worker = process.worker;
        // A restarted process draws the same delays again: it has the same seed and stream.
        let mut retries = Chance::new(world.seed, Draws::Retries(process.place as u32));
        let session = Session::new(Options {
            servers: vec!["the leader".into()],
            shards: world.shards,
            replicas: 1,
            worker,
            job: world.job.clone(),
            job_text: world.job_text.to_string(),
            retry: RetryPolicy {
                base: Duration::from_millis(10),
                max: Duration::from_millis(100),
                deadline: world.timeout,
            },
            handover: HANDOVER,
            stages: process.stage.map(|stage| stage..stage + 1),
            draw: Box::new(move || retries.uniform()),
        });
        let mut client = Self {
            world: world.clone(),
            worker,
            process: process.clone(),
            heard,
            hears,
            session,
            streams: BTreeMap::new(),
            armed: None,
            encoders: Encoders::new(&world.job, &world.layout, worker),
            first: process.stage.map_or(0, |stage| world.first_of(stage)),
            bytes_pushed: 0,
            bytes_pulled: 0,
        };
        client.session.join();
        loop {
            if let Event::Joined(start) = client.next().await? {
                return Ok((client, start));
            }
        }
    }

    fn now(&self) -> Duration {
        Duration::from_nanos(self.world.clock.now())
    }

    // ---- the session's I/O ----

    /// The next event.
    async fn next(&mut self) -> Result<Event, SimError> {
        loop {
            let polled = self.session.poll(self.now());
            self.carry_out();
            if let Some(event) = polled.map_err(|e| self.failed(e))? {
                return Ok(event);
            }
            // The worker holds a sender itself, so the channel never closes.
            let Some(heard) = self.heard.recv().await else { std::future::pending().await };
            if let Some(input) = self.input(heard) {
                self.session.handle(self.now(), input);
            }
        }
    }

    fn input(&mut self, heard: FromServer) -> Option<Input> {
        let dial = |shard: &ShardId, conn| {
            self.streams.get(shard).filter(|(_, s)| s.conn == conn).map(|(dial, _)| *dial)
        };
        Some(match heard {
            FromServer::Tick => {
                self.armed = None;
                Input::Tick
            }
            FromServer::Closed(shard, conn) => {
                let cause = "the server closed the stream".into();
                Input::Broken { shard, dial: dial(&shard, conn)?, cause }
            }
            FromServer::Reply(shard, conn, reply) => {
                let (dial, server) = (dial(&shard, conn)?, 0);
                Input::Message { shard, dial, message: convert::reply(server, reply).into() }
            }
        })
    }

    fn carry_out(&mut self) {
        while let Some(effect) = self.session.next_effect() {
            match effect {
                Effect::Dial { shard, dial, open, .. } => {
                    let session = (open.session > 0).then_some(SessionId(open.session));
                    let open = (self.worker, session, self.world.job_text.clone());
                    if let Some(s) = self.world.servers.dial(shard, &self.process, &self.hears, open) {
                        self.streams.insert(shard, (dial, s));
                    }
                }
                Effect::HangUp { shard, .. } => {
                    if let Some((_, stream)) = self.streams.remove(&shard) {
                        self.world.servers.hang_up(&stream);
                    }
                }
                Effect::Send(shard, message) => self.send(shard, message),
                Effect::SendInitial(shard) => self.send_initial(shard),
                Effect::InitialKnown(_) | Effect::Acked(_) => {}
                // A dial reaches the leader, so no other server needs to be asked.
                Effect::Ask { .. } | Effect::AskNoMore(_) | Effect::Turn(_) => {}
            }
        }
        let deadline = self.session.deadline();
        if let Some(at) = deadline.filter(|at| self.armed.is_none_or(|armed| *at < armed)) {
            let hears = self.hears.clone();
            self.world.clock.at(at.as_nanos() as u64, move || _ = hears.send(FromServer::Tick));
            self.armed = Some(at);
        }
    }

    fn send(&mut self, shard: ShardId, message: ToShard) {
        let (stream, host) = (self.streams.get(&shard), self.world.servers.hosts.get(&shard));
        let Some(((dial, stream), host)) = stream.zip(host) else { return };
        let message = WithBulk::from(message);
        let bytes = message.bulk.iter().map(|b| b.len() as u64).sum();
        match convert::message(&host.state, message) {
            Ok(Some(message)) => self.world.servers.send(stream, bytes, message),
            Ok(None) => {}
            Err(refusal) => {
                let message = FromShard::from(refusal).into();
                self.session.handle(self.now(), Input::Message { shard, dial: *dial, message });
            }
        }
    }

    fn send_initial(&self, shard: ShardId) {
        let Some((_, stream)) = self.streams.get(&shard) else { return };
        for (bucket, payload) in (0u32..).map(BucketId).zip(&self.world.initial) {
            if self.session.shard_of(bucket) == shard {
                let message =
                    Message::Init { bucket, part: InitPart::FRESH, payload: payload.clone().into() };
                self.world.servers.send(stream, payload.len() as u64, message);
            }
        }
    }

    fn failed(&self, e: SessionError) -> SimError {
        let worker = self.worker;
        match e {
            SessionError::Unreachable { shard, causes, .. } => {
                let why = causes.into_iter().next().map_or_else(String::new, |(_, cause)| cause);
                SimError::Unreachable { worker, shard, why }
            }
            SessionError::Refused { shard, message, .. } => SimError::Refused { worker, shard, why: message },
            SessionError::Protocol { shard, ref what } => {
                SimError::Refused { worker, shard, why: what.clone() }
            }
            SessionError::StateLost { shard } => SimError::Refused { worker, shard, why: e.to_string() },
        }
    }

    // ---- the interface of the training loop ----

    /// Sets the number of samples behind the next pushes.
    pub fn weigh(&mut self, samples: usize) {
        self.session.weigh(samples);
    }

    /// Encodes a bucket's gradient as this worker pushes it.
    pub fn encode(&mut self, bucket: BucketId, step: Step, gradient: &[f32]) -> Bytes {
        let kind = self.world.layout.buckets()[bucket.0 as usize].kind;
        let mut out = Vec::new();
        self.encoders.encode(bucket, step, gradient, self.world.job.encoding(kind), &mut out);
        out.into()
    }

    /// Pushes a bucket's gradient, encoded.
    pub fn push(&mut self, bucket: BucketId, step: Step, payload: Bytes) {
        self.bytes_pushed += payload.len() as u64;
        self.session.push(self.now(), bucket, step, payload);
        self.carry_out();
    }

    /// Sets the mean loss of the step before the next pull.
    pub fn note_loss(&mut self, loss: f32) {
        self.session.note_loss(loss);
    }

    /// Requests weights ahead of the pull itself.
    pub fn ask(&mut self, pull: Pull) {
        self.session.ask_ahead(self.now(), pull, false);
        self.carry_out();
    }

    /// Requests the weights after a step before its pushes are sent, if rounds are averaged.
    pub fn ask_ahead(&mut self, done: Step) {
        if self.session.mode().1.averages() {
            self.session.ask_ahead(self.now(), Pull::of(done), true);
            self.carry_out();
        }
    }

    /// Waits until the consistency rule admits the worker, and writes the weights.
    pub async fn pull(&mut self, pull: Pull, weights: &mut [f32]) -> Result<Pulled, SimError> {
        self.session.pull(self.now(), pull, true); // there is one buffer
        loop {
            match self.next().await? {
                Event::Weights(arrived) => self.take(&arrived, weights)?,
                Event::Pulled(pulled) => {
                    if pulled.rejoined {
                        self.encoders.forget();
                    }
                    self.carry_out();
                    return Ok(pulled);
                }
                _ => {}
            }
        }
    }

    /// The versions of all buckets at the last pull.
    pub fn versions(&self) -> Vec<u64> {
        self.session.versions()
    }

    /// Sets the versions of the weights behind the next pushes; `None`: those of the last pull.
    pub fn computed_at(&mut self, versions: Option<Vec<u64>>) {
        self.session.computed_at(versions);
    }

    /// The current mode in the shards' replies to the last pull, and the number of switches.
    pub fn mode(&self) -> (u64, Mode) {
        self.session.mode()
    }

    fn take(&mut self, arrived: &Arrived, weights: &mut [f32]) -> Result<(), SimError> {
        if arrived.weights.not_modified {
            return Ok(());
        }
        let bucket = BucketId(arrived.weights.bucket);
        let spec = self.world.layout.buckets()[bucket.0 as usize];
        let range = spec.range();
        let here = weights.get_mut(range.start - self.first..range.end - self.first).unwrap_or_default();
        let read = arrived.payload.reader().values(here);
        read.map_err(|e| SimError::Refused {
            worker: self.worker,
            shard: arrived.shard,
            why: format!("the weights of {bucket}: {e}"),
        })?;
        self.bytes_pulled += arrived.payload.len() as u64;
        Ok(())
    }

    /// Sends this worker's share of a held-out evaluation to shard 0.
    pub fn report(&mut self, epoch: u64, sums: EvalSums) {
        self.session.report(epoch, sums.loss_sum, sums.correct, sums.count);
        self.carry_out();
    }

    /// Evaluations that completed since the last call.
    pub fn evaluations(&mut self) -> Vec<Reported> {
        self.session.evaluations()
    }

    /// Reports that this worker has done all its steps.
    pub fn finish(&mut self) {
        self.session.finish();
        self.carry_out();
    }

    /// Leaves normally: its streams end.
    pub fn leave(self) {
        for (_, stream) in self.streams.into_values() {
            self.world.servers.hang_up(&stream);
        }
    }
}
