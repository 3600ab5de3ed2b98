//! Pushes: admission, BSP's rounds, and the global norm over all shards.

use super::{ConnId, Lead, Message, Owner, Purpose, Reply, WaitingPull};
use crate::shard::{
    admission::{Admission, admit},
    command::{Command, Contribution, Proposal},
    round::{Part, Sum},
    state::Configured,
};
use bytes::Bytes;
use paraft_common::{Mode, Step, TensorKind, WorkerId, optim::norm_factor};
use paraft_proto::{Refusal, RefusalKind};
use std::{collections::BTreeMap, sync::atomic::Ordering::Relaxed};

impl Owner {
    pub(super) async fn message(&mut self, conn: ConnId, message: Message) {
        let Some(stream) = self.streams.get(&conn) else { return };
        let (worker, Some(session)) = (stream.worker, stream.session) else {
            return self.refuse(conn, RefusalKind::NotOpened.into());
        };
        if self.lead.as_ref().is_none_or(|l| l.by_worker.get(&worker) != Some(&conn)) {
            return self.refuse(conn, RefusalKind::NotOpened.into());
        }
        match message {
            Message::Init { bucket, part, payload } => {
                let command = Command::Init { bucket, part };
                self.propose(Purpose::Init, Proposal { command, payload }).await;
            }
            Message::Push { seq, step, bucket, pulled, sum_of_squares, payload } => {
                let contribution = Contribution { worker, session, seq, step, pulled };
                self.push(conn, contribution, bucket, sum_of_squares, payload).await;
            }
            Message::Pull { done, last, cut } => {
                self.counters.pulls.fetch_add(1, Relaxed);
                if let Some(lead) = &mut self.lead {
                    lead.pulls.retain(|p| p.conn != conn);
                    lead.pulls.push(WaitingPull { conn, worker, done, last, cut, counted: false });
                }
                self.answer_pulls();
            }
            Message::Norm { step, sum_of_squares } => self.norm(step, sum_of_squares).await,
            Message::Report { epoch, sums } => {
                let command = Command::Report { worker, session, epoch, sums };
                self.propose(Purpose::Other, command.into()).await;
            }
            Message::Advance { step } => {
                self.propose(Purpose::Other, Command::Advance { worker, session, step }.into()).await;
            }
            Message::Finish => {
                self.propose(Purpose::Other, Command::Finish { worker, session }.into()).await;
            }
        }
    }

    pub(super) async fn push(
        &mut self,
        conn: ConnId,
        c: Contribution,
        bucket: usize,
        sum_of_squares: f64,
        payload: Bytes,
    ) {
        let (Some(conf), Some(lead)) = (self.shard.configured(), &mut self.lead) else { return };
        let target = &conf.buckets[bucket];
        let in_flight = lead
            .in_flight
            .get(&(c.worker, bucket))
            .copied()
            .or_else(|| lead.rounds.waiting(c.worker, bucket))
            .or_else(|| unclipped_step(lead, c.worker, bucket));
        let current = target.version();
        let decision = self.shard.read(|m| {
            m.members
                .in_session(c.worker, c.session)
                .map(|m| admit(m, bucket, c.step, c.pulled, current, in_flight))
        });
        let refuse = |kind| Refusal { kind, seq: c.seq.0 };
        match decision {
            None => {
                let kind = RefusalKind::UnknownSession { worker: c.worker, session: c.session };
                self.refuse(conn, kind.into());
            }
            Some(Admission::Applied) => self.send(conn, Reply::Ack { seq: c.seq, version: current }),
            Some(Admission::InFlight) => {}
            Some(Admission::WrongStep { expected }) => {
                let kind = RefusalKind::WrongStep { bucket: target.id, expected, got: c.step };
                self.refuse(conn, refuse(kind));
            }
            Some(Admission::FutureVersion { current }) => {
                let (got, current) = (c.pulled.0, current.0);
                self.refuse(conn, refuse(RefusalKind::FutureVersion { bucket: target.id, got, current }));
            }
            Some(Admission::Accept) if conf.job.mode.averages() => {
                lead.rounds.add(bucket, Part { contribution: c, payload });
                self.close_rounds().await;
            }
            Some(Admission::Accept) => {
                let factor = match (conf.job.clip.norm, target.spec.kind) {
                    (Some(max), TensorKind::Param) => norm_factor(max, sum_of_squares),
                    _ => 1.0,
                };
                self.update(&conf, bucket, vec![c], factor, payload).await;
            }
        }
    }

    pub(super) async fn update(
        &mut self,
        conf: &Configured,
        bucket: usize,
        contributions: Vec<Contribution>,
        factor: f32,
        payload: Bytes,
    ) {
        if let Some(lead) = &mut self.lead {
            for c in &contributions {
                lead.in_flight.insert((c.worker, bucket), c.step);
            }
        }
        let id = conf.buckets[bucket].id;
        let command = Command::Update { bucket: id, contributions: contributions.clone(), factor };
        self.propose(Purpose::Update { bucket, contributions }, Proposal { command, payload }).await;
    }

    /// Closes every round that is complete. Called after anything that may complete one: a push, an apply, a
    /// member that left.
    pub(super) async fn close_rounds(&mut self) {
        let Some(conf) = self.shard.configured().filter(|c| c.job.mode == Mode::Bsp) else { return };
        let Some(lead) = &mut self.lead else { return };
        let complete = self.shard.read(|m| {
            if !m.started {
                return Vec::new();
            }
            lead.rounds.complete(&m.members, &|w| lead.leaving.contains(&w))
        });
        for (step, bucket) in complete {
            let Some(lead) = &mut self.lead else { return };
            let Some(sum) = lead.rounds.close(step, bucket) else { continue };
            if conf.job.clip.norm.is_some() && conf.buckets[bucket].spec.kind == TensorKind::Param {
                lead.unclipped.entry(step).or_default().insert(bucket, sum);
                self.norm_of_step(&conf, step).await;
            } else {
                let factor = 1.0 / sum.contributions.len() as f32;
                self.update(&conf, bucket, sum.contributions, factor, sum.payload).await;
            }
        }
    }

    /// All trained buckets of a step are summed: the shard's part of the global norm is known. With one shard
    /// that is the norm; with several, the workers add the parts up and send the sum to every shard, so that
    /// no server has to know another shard's leader.
    pub(super) async fn norm_of_step(&mut self, conf: &Configured, step: Step) {
        let Some(partial) = self.partial_norm(conf, step) else { return };
        let layout = conf.job.layout();
        let trained = layout.buckets().iter().filter(|b| b.kind == TensorKind::Param).count();
        if trained.min(self.group.shards() as usize) == 1 {
            return self.norm(step, partial).await;
        }
        for conn in self.attached() {
            self.send(conn, Reply::RoundNorm { step, sum_of_squares: partial });
        }
    }

    pub(super) fn partial_norm(&self, conf: &Configured, step: Step) -> Option<f64> {
        let sums = self.lead.as_ref()?.unclipped.get(&step)?;
        let trained = conf.buckets.iter().filter(|b| b.spec.kind == TensorKind::Param).count();
        (sums.len() == trained).then(|| sums.values().map(|s| s.mean_sum_of_squares).sum())
    }

    pub(super) fn waiting_norms(&self) -> Vec<(Step, f64)> {
        let (Some(conf), Some(lead)) = (self.shard.configured(), &self.lead) else { return Vec::new() };
        lead.unclipped.keys().filter_map(|s| Some((*s, self.partial_norm(&conf, *s)?))).collect()
    }

    /// The norm over all shards is known: every bucket of the step is applied with the same factor. Later
    /// copies, from the other workers, find nothing to do.
    pub(super) async fn norm(&mut self, step: Step, sum_of_squares: f64) {
        let (Some(conf), Some(lead)) = (self.shard.configured(), &mut self.lead) else { return };
        let Some(max) = conf.job.clip.norm else { return };
        for (bucket, sum) in lead.unclipped.remove(&step).unwrap_or_default() {
            let factor = norm_factor(max, sum_of_squares) / sum.contributions.len() as f32;
            self.update(&conf, bucket, sum.contributions, factor, sum.payload).await;
        }
    }
}

fn unclipped_step(lead: &Lead, worker: WorkerId, bucket: usize) -> Option<Step> {
    let holds = |sums: &BTreeMap<usize, Sum>| {
        sums.get(&bucket).is_some_and(|s| s.contributions.iter().any(|c| c.worker == worker))
    };
    lead.unclipped.iter().find(|(_, sums)| holds(sums)).map(|(step, _)| *step)
}
