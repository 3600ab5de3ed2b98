//! Pulls that a replica answers from what it has applied, whether it leads or not.
//!
//! What is applied here is a prefix of what the leader applies, so the clocks here are lower bounds of the true ones: where
//! the consistency rule holds for them, it holds. What is read may lack what the leader has already; the delay of the
//! push that is computed from it counts that as it counts every other lag.

use super::{
    bucket::pulled_bytes,
    form::Form,
    owner::{Counters, Weights},
    state::Shard,
};
use bytes::Bytes;
use paraft_common::{Step, Version, WorkerId};
use paraft_proto::RefusalKind;
use paraft_trace::Moment;
use std::{collections::BTreeSet, sync::atomic::Ordering::Relaxed};

/// A pull that waits here, or a part of one.
#[derive(Debug)]
pub struct Read {
    worker: WorkerId,
    done: Step,
    /// For each local bucket, the version that the worker has by this stream; or nothing.
    have: Vec<Version>,
    /// For each local bucket, the version that the answer must have reached; or nothing.
    at_least: Vec<Version>,
    /// Local buckets that are not sent; `None` before it is known how many there are.
    todo: Option<BTreeSet<usize>>,
    waited: bool,
}

impl Read {
    /// Of `worker`, which has finished `done` steps, for these local buckets; none: for all. It has the versions `have`, and
    /// the answer must have reached `at_least`.
    pub fn new(
        worker: WorkerId,
        done: Step,
        only: Vec<usize>,
        (have, at_least): (Vec<Version>, Vec<Version>),
    ) -> Self {
        let todo = Some(only).filter(|o| !o.is_empty()).map(|o| o.into_iter().collect());
        Self { worker, done, have, at_least, todo, waited: false }
    }

    /// Takes the buckets that may go out now, the first of a forward pass first; the last of them says so. To be called
    /// again after the shard has applied something.
    ///
    /// # Errors
    /// Where the log has cuts for entries: between two of them only the leader has the weights that its workers wait
    /// for.
    pub fn take(&mut self, shard: &Shard, counters: &Counters) -> Result<Vec<Weights>, RefusalKind> {
        let since = Moment::now();
        // Buckets and clocks of one moment: those of a snapshot that is installed meanwhile must not let the buckets go
        // that were here before it.
        let decided = shard.view(|conf, m| {
            let Some(conf) = conf.filter(|c| c.buckets.iter().all(|b| b.initialised())) else {
                return Ok(None);
            };
            let todo = self.todo.get_or_insert_with(|| (0..conf.buckets.len()).collect());
            if m.form == Form::Images {
                let why = "the log holds image cuts: only the leader has the latest weights";
                return Err(RefusalKind::Unavailable(why.into()));
            }
            let member = m.members.get(self.worker).filter(|_| m.started);
            let slowest = m.members.active().map(|(_, m)| m.clock()).min().unwrap_or(Step(u64::MAX));
            let ready = |b: &usize| {
                let own = member.and_then(|m| m.steps.get(*b)).is_some_and(|s| *s >= self.done);
                own && m.in_force.mode.may_proceed(m.members.slowest_in(*b), self.done)
            };
            Ok(Some((
                conf.clone(),
                todo.iter().copied().filter(ready).collect::<Vec<_>>(),
                slowest,
                m.stop,
                m.in_force,
                member.map_or(self.done, |m| m.clock()),
            )))
        })?;
        let Some((conf, ready, slowest, stop, in_force, clock)) = decided else { return Ok(Vec::new()) };
        let Some(todo) = &mut self.todo else { return Ok(Vec::new()) };
        let mut out = Vec::new();
        for bucket in ready {
            // Steps are recorded after the weights have changed: these have at least what the rule asks for.
            let data = conf.buckets[bucket].image();
            let version = data.version;
            if self.at_least.get(bucket).is_some_and(|least| version < *least) {
                continue;
            }
            todo.remove(&bucket);
            let not_modified = self.have.get(bucket) == Some(&version);
            let payload = match not_modified {
                true => Bytes::new(),
                false => pulled_bytes(&conf.job, conf.buckets[bucket].spec.kind, &data),
            };
            counters.bytes_pulled.fetch_add(payload.len() as u64, Relaxed);
            counters.not_modified.fetch_add(u64::from(not_modified), Relaxed);
            out.push(Weights {
                bucket: conf.buckets[bucket].id,
                version,
                payload,
                not_modified,
                last: todo.is_empty(),
                done: self.done,
                slowest,
                stop,
                in_force,
                clock: clock.max(self.done),
                finishers: Vec::new(),
                section: false,
                since,
            });
        }
        if !todo.is_empty() && !std::mem::replace(&mut self.waited, true) {
            counters.pulls_waited.fetch_add(1, Relaxed);
        }
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shard::{Command, Contribution, InitPart, Outcome, Proposal};
    use paraft_common::{
        BucketId, Encoding, LogForm, Mode, Payload, Seq, SessionId, ShardId, config::ServerJob,
    };

    /// Two buckets of one value, two workers.
    struct World {
        shard: Shard,
        sessions: Vec<SessionId>,
        counters: Counters,
    }

    fn value(v: f32) -> Payload {
        v.to_le_bytes().to_vec().into()
    }

    impl World {
        fn new(mode: Mode, log: LogForm) -> Self {
            let job = ServerJob { workers: 2, log, grace_ms: 0, ..ServerJob::new("reads", mode, 2, 1) };
            let mut world = Self {
                shard: Shard::new(ShardId(0), 1),
                sessions: Vec::new(),
                counters: Counters::default(),
            };
            world.shard.apply(&Command::Configure { job: job.to_toml().expect("valid") }.into());
            for b in 0..2 {
                let command = Command::Init { bucket: BucketId(b), part: InitPart::FRESH };
                world.shard.apply(&Proposal { command, payload: value(0.0) });
            }
            for w in 0..2 {
                match world.shard.apply(&Command::Join { worker: WorkerId(w) }.into()) {
                    Outcome::Joined { session, .. } => world.sessions.push(session),
                    other => panic!("{other:?}"),
                }
            }
            world
        }

        fn push(&self, worker: u32, bucket: u32, step: u64) {
            let contribution = Contribution {
                worker: WorkerId(worker),
                session: self.sessions[worker as usize],
                seq: Seq(step * 2 + u64::from(bucket)),
                step: Step(step),
                pulled: Version(0),
                samples: 1,
            };
            let command = Command::Update {
                bucket: BucketId(bucket),
                contributions: vec![contribution],
                encoding: Encoding::F32,
                factor: 1.0,
                closes: false,
            };
            let outcome = self.shard.apply(&Proposal { command, payload: value(1.0) });
            assert!(matches!(outcome, Outcome::Updated { applied: true, .. }), "{outcome:?}");
        }

        /// Buckets and versions that go out; a full stop behind the last.
        fn take(&self, read: &mut Read) -> Vec<String> {
            let all = read.take(&self.shard, &self.counters).expect("updates");
            let name = |w: &Weights| {
                let same = if w.not_modified { "=" } else { "" };
                format!("{}v{}{same}{}", w.bucket.0, w.version.0, if w.last { "." } else { "" })
            };
            all.iter().map(name).collect()
        }
    }

    fn read(worker: u32, done: u64) -> Read {
        Read::new(WorkerId(worker), Step(done), Vec::new(), (Vec::new(), Vec::new()))
    }

    #[test]
    fn a_bucket_goes_out_once_the_rule_holds_for_what_is_applied_here_and_not_again() {
        let world = World::new(Mode::Ssp(1), LogForm::Updates);
        let mut pull = read(0, 2);
        assert!(world.take(&mut pull).is_empty(), "its own pushes have not come here");
        world.push(0, 0, 1);
        world.push(0, 0, 2);
        assert!(world.take(&mut pull).is_empty(), "worker 1 is two steps behind");
        world.push(1, 0, 1);
        assert_eq!(world.take(&mut pull), ["0v3"]);
        assert!(world.take(&mut pull).is_empty(), "once");
        world.push(1, 1, 1);
        world.push(0, 1, 1);
        assert!(world.take(&mut pull).is_empty(), "one push of its own is missing");
        world.push(0, 1, 2);
        assert_eq!(world.take(&mut pull), ["1v3."]);
        assert_eq!(world.counters.pulls_waited.load(Relaxed), 1);
    }

    #[test]
    fn nothing_goes_out_before_the_job_has_begun_here() {
        let (empty, counters) = (Shard::new(ShardId(0), 1), Counters::default());
        let mut pull = read(0, 0);
        assert!(pull.take(&empty, &counters).expect("not yet").is_empty());
        let world = World::new(Mode::Asp, LogForm::Updates);
        assert_eq!(world.take(&mut pull), ["0v0", "1v0."]);
    }

    #[test]
    fn a_worker_from_another_replica_does_not_go_back_and_has_nothing_twice() {
        let world = World::new(Mode::Asp, LogForm::Updates);
        world.push(1, 0, 1);
        let (have, at_least) = (vec![Version(1), Version(7)], vec![Version(1), Version(1)]);
        let mut pull = Read::new(WorkerId(0), Step(0), Vec::new(), (have, at_least));
        assert_eq!(world.take(&mut pull), ["0v1="], "of bucket 1 it has seen more elsewhere");
        world.push(1, 1, 1);
        assert_eq!(world.take(&mut pull), ["1v1."]);
    }

    #[test]
    fn between_two_cuts_the_leader_is_to_be_asked() {
        let world = World::new(Mode::Asp, LogForm::Images);
        let refused = read(0, 0).take(&world.shard, &world.counters);
        assert!(matches!(refused, Err(RefusalKind::Unavailable(_))), "{refused:?}");
    }
}
