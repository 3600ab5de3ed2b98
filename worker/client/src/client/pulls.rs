//! Pulls: a worker waits for weights, and the client writes them to their destination.

use super::Client;
use crate::{error::ClientError, io};
use paraft_common::{BucketId, ShardId, Step, codec::F32_BYTES};
use paraft_proto::limits;
use paraft_session::{Arrived, Event, Pull, Pulled, SessionError, sum_of_parts};
use paraft_trace::{Moment, Stage};
use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

/// How long the client waits for another worker to supply the missing parts of a step's gradient norm, when this
/// worker's processes do not know all parts.
const NORM_TIMEOUT: Duration = Duration::from_secs(2);

/// The destination of pulled weights.
pub trait Places {
    /// The destination of a bucket's values; `None`: the caller does not want them.
    fn place(&mut self, bucket: BucketId) -> Option<&mut [f32]>;
    /// The values at this place are complete. `changed`: the client wrote them; otherwise they equal those of the
    /// previous pull.
    fn placed(&mut self, bucket: BucketId, changed: bool) {
        let _ = (bucket, changed);
    }
}

/// A worker that has results to write beside its own finds out after this time whether there is room for more.
const ROOM_INTERVAL: Duration = Duration::from_millis(20);

/// The results of a step that other workers write, and this one if they do not.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RestOfResults {
    /// Their buckets.
    pub buckets: BTreeSet<BucketId>,
    /// Those of them that this worker has written in their place.
    pub written: BTreeSet<BucketId>,
    /// The step has no result: mark them as skipped.
    pub skips: bool,
}

/// Identifies a buffer. The servers do not send a bucket again if it is unchanged since the last pull into the same
/// buffer.
pub fn address(buffer: &[f32]) -> (usize, usize) {
    (buffer.as_ptr() as usize, buffer.len())
}

/// Wants no values: the caller only waits for the pull's answer.
impl Places for () {
    fn place(&mut self, _: BucketId) -> Option<&mut [f32]> {
        None
    }
}

/// The part of a gradient norm that the worker's processes know together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Norm {
    /// The sum of squares of that part.
    pub sum_of_squares: f64,
    /// Whether that part is the whole gradient.
    pub whole: bool,
}

/// Shares the parts of a step's norm between the worker's processes. The client calls it once in each pull, with
/// the parts that this process's shards have sent and `true`. If the pull is answered without them, the client
/// passes the squares of what this process has pushed, as far as it knows them; the list is complete where shards
/// apply pushes one by one. Returns what the worker's processes know together.
pub type Shares<'a> = dyn FnMut(&[(ShardId, f64)], bool) -> Result<Norm, ClientError> + 'a;

impl Client {
    /// Asks for the weights after step `done` before its pushes go out. The servers can then send a bucket's
    /// weights while the client still pushes others. The weights wait in memory for the [`Self::pull`] of `done`,
    /// which must follow.
    ///
    /// Does nothing if it would not help or would change the result: for a model that would fill the memory, and in
    /// modes where a later pull reads fresher weights.
    pub fn ask_ahead(&mut self, done: Step) {
        let mut session = self.io.session();
        let bytes = session.own_len() * F32_BYTES;
        if session.mode().1.averages() && bytes <= limits::PULL_AHEAD_BYTES {
            session.ask_ahead(io::now(), Pull::of(done), self.holds.is_some());
        }
    }

    /// Asks for weights ahead of a [`Self::pull_by`] with the same argument. Does nothing if the weights would fill
    /// the memory that they wait in.
    pub fn ask(&mut self, pull: Pull) {
        let len = |b: &BucketId| self.layout.bucket(*b).map_or(0, |s| s.len);
        let only = pull.only.iter().map(len).sum();
        let mut session = self.io.session();
        let values = if pull.only.is_empty() { session.own_len() } else { only };
        if values * F32_BYTES <= limits::PULL_AHEAD_BYTES {
            session.ask_ahead(io::now(), pull, false);
        }
    }

    /// Asks for rows ahead of the [`Self::pull_rows`] with the same arguments, which must follow, with no other wait between.
    pub fn ask_rows(&mut self, done: Step, wanted: Vec<(BucketId, Vec<u64>)>) {
        let (only, rows) = wanted.into_iter().unzip();
        self.io.session().ask_ahead(io::now(), Pull { only, rows, ..Pull::of(done) }, false);
    }

    /// Waits until the consistency rule lets a worker that has finished `done` steps continue, and writes the
    /// weights.
    ///
    /// The servers do not send a bucket that is unchanged since the last pull into the same buffer. So `weights`
    /// must be as that pull left it; otherwise call [`Self::forget_weights`] before.
    pub fn pull(&mut self, done: Step, weights: &mut [f32]) -> Result<Pulled, ClientError> {
        self.pull_by(Pull::of(done), weights)
    }

    /// Waits until every member has finished, then writes the final weights.
    pub fn pull_final(&mut self, done: Step, weights: &mut [f32]) -> Result<Pulled, ClientError> {
        self.pull_by(Pull { last: true, ..Pull::of(done) }, weights)
    }

    /// Like [`Self::pull`], with the options of `pull`. A pull of only some buckets writes to the buffer of the
    /// previous pull.
    pub fn pull_by(&mut self, pull: Pull, weights: &mut [f32]) -> Result<Pulled, ClientError> {
        self.pull_held(pull, address(weights), None, |client, arrived| {
            let spec = client.layout.bucket(BucketId(arrived.weights.bucket));
            let into = spec.and_then(|spec| weights.get_mut(spec.range()));
            client.take(arrived, into)
        })
    }

    /// Like [`Self::pull_by`] after this worker has written its own results. Results that are missing after a lease were
    /// to be written by a worker that is gone: this one writes them too, from `weights`. All workers have the same
    /// bits, so it does not matter who does.
    ///
    /// # Errors
    /// See [`Self::pull`].
    pub fn pull_results(
        &mut self,
        pull: Pull,
        weights: &mut [f32],
        rest: &mut RestOfResults,
    ) -> Result<Pulled, ClientError> {
        let (began, step, into) = (Instant::now(), pull.done, Some(address(weights)));
        self.io.session().pull(io::now(), pull, self.holds == into);
        self.holds = None; // until the pull has filled it
        let mut until = Some(began + self.options.job.lease());
        let pulled = loop {
            match self.io.next(self.interrupt.as_deref(), until)? {
                Some(Event::Weights(arrived)) => {
                    let (shard, bucket) = (arrived.shard, BucketId(arrived.weights.bucket));
                    rest.buckets.remove(&bucket);
                    let spec = self.layout.bucket(bucket).copied();
                    self.take(&arrived, spec.and_then(|spec| weights.get_mut(spec.range())))?;
                    drop(arrived);
                    self.io.give_back(shard);
                }
                Some(Event::Pulled(pulled)) => break pulled,
                Some(_) => {}
                None => {
                    until = self.write_rest(step, weights, rest).then(|| Instant::now() + ROOM_INTERVAL);
                }
            }
        };
        if pulled.rejoined {
            self.encoders.forget();
        }
        self.holds = into;
        self.counters.waited += began.elapsed();
        Ok(pulled)
    }

    /// Writes results in the place of other workers, as far as there is room; returns whether some remain.
    fn write_rest(&mut self, step: Step, weights: &[f32], rest: &mut RestOfResults) -> bool {
        while let Some(bucket) = rest.buckets.first().copied() {
            let spec = self.layout.buckets()[bucket.0 as usize];
            if !self.io.session().has_room(spec.len * F32_BYTES) {
                return true;
            }
            rest.buckets.remove(&bucket);
            rest.written.insert(bucket);
            match rest.skips {
                true => self.skip_bucket(bucket, step),
                false => self.push(bucket, step, &weights[spec.range()]),
            }
        }
        false
    }

    /// Like [`Self::pull_by`], for weights in the buffer with this [address]; `places` gives the destination of
    /// each bucket.
    ///
    /// If other processes of the worker use the other shards and the job clips by the norm of the whole gradient,
    /// `shares` exchanges the parts of the norm. Those processes pull the same steps in the same order. If `shares`
    /// fails, the pull ends with its error and can be repeated.
    ///
    /// # Errors
    /// See [`Self::pull`].
    pub fn pull_parts(
        &mut self,
        pull: Pull,
        buffer: (usize, usize),
        places: &mut dyn Places,
        shares: Option<&mut Shares<'_>>,
    ) -> Result<Pulled, ClientError> {
        self.pull_held(pull, buffer, shares, |client, arrived| {
            let (bucket, changed) = (BucketId(arrived.weights.bucket), !arrived.weights.not_modified);
            client.take(arrived, places.place(bucket))?;
            places.placed(bucket, changed);
            Ok(())
        })
    }

    /// Pulls rows of partitions of tables, as the consistency rule lets a worker that has finished `done` steps read them:
    /// those of each bucket (by rising id) in the order of the ids. `take` gets each bucket's place in the list and its
    /// values. If this worker had to join again, the answer says so: then no row came, but all weights.
    ///
    /// # Errors
    /// See [`Self::pull`].
    pub fn pull_rows(
        &mut self,
        done: Step,
        wanted: Vec<(BucketId, Vec<u64>)>,
        weights: &mut [f32],
        mut take: impl FnMut(usize, &[f32]),
    ) -> Result<Pulled, ClientError> {
        let (only, rows): (Vec<_>, Vec<_>) = wanted.into_iter().unzip();
        let lens = rows.iter().zip(&only).map(|(ids, bucket)| {
            let table = self.layout.partition(*bucket).map_or(0, |(table, _)| table);
            ids.len() * self.options.job.tables.get(table).map_or(0, |t| t.dim)
        });
        let lens: Vec<usize> = lens.collect();
        let pull = Pull { only: only.clone(), rows, ..Pull::of(done) };
        let mut values = Vec::new();
        self.pull_held(pull, address(weights), None, |client, arrived| {
            let bucket = BucketId(arrived.weights.bucket);
            match only.binary_search(&bucket) {
                // Not a row of it: the answer of a pull of everything, since this worker had to join again.
                Ok(place) if !arrived.payload.is_empty() => {
                    values.resize(lens[place], 0.0);
                    client.take(arrived, Some(&mut values))?;
                    take(place, &values);
                    Ok(())
                }
                _ => {
                    let spec = client.layout.bucket(bucket);
                    let into = spec.and_then(|spec| weights.get_mut(spec.range()));
                    client.take(arrived, into)
                }
            }
        })
    }

    fn pull_held(
        &mut self,
        pull: Pull,
        buffer: (usize, usize),
        shares: Option<&mut Shares<'_>>,
        take: impl FnMut(&mut Self, &Arrived) -> Result<(), ClientError>,
    ) -> Result<Pulled, ClientError> {
        let (began, step) = (Instant::now(), pull.done);
        let into = Some(buffer);
        let (holds, whole) = (self.holds == into, pull.only.is_empty());
        {
            let mut session = self.io.session();
            if session.is_asked(&pull) && self.holds.is_some() && !holds {
                let why = "weights that are asked for ahead are pulled into the buffer of the pull before";
                return Err(ClientError::Options(why.into()));
            }
            session.pull(io::now(), pull, holds);
        }
        let before = self.holds.take(); // until the pull has filled it
        let pulled = self.receive((began, step), shares, take)?;
        // A partial pull leaves the other buckets as they are, unless the worker had to join again.
        self.holds = if whole || pulled.rejoined { into } else { before };
        Ok(pulled)
    }

    /// The worker has changed its weights since the last pull. The next pull brings all weights, including buckets
    /// without updates.
    pub fn forget_weights(&mut self) {
        self.holds = None;
    }

    /// Whether an interrupted pull has received something. The same pull then brings only the rest.
    pub fn has_begun(&self) -> bool {
        self.io.session().has_begun()
    }

    /// Like [`Self::pull_by`]; `places` gives the destination of each bucket, and unwanted buckets are dropped. The
    /// next pull brings everything that it asks for.
    ///
    /// # Errors
    /// See [`Self::pull`].
    pub fn pull_to(&mut self, pull: Pull, places: &mut dyn Places) -> Result<Pulled, ClientError> {
        let (began, step) = (Instant::now(), pull.done);
        self.holds = None;
        self.io.session().pull(io::now(), pull, false);
        self.receive((began, step), None, |client, arrived| {
            let into = places.place(BucketId(arrived.weights.bucket));
            if into.is_none() {
                client.counters.bytes_pulled += arrived.payload.len() as u64;
                return Ok(());
            }
            client.take(arrived, into)
        })
    }

    /// Waits until the pull that started at `began` is answered, and takes each bucket when it arrives.
    fn receive(
        &mut self,
        (began, step): (Instant, Step),
        mut shares: Option<&mut Shares<'_>>,
        mut take: impl FnMut(&mut Self, &Arrived) -> Result<(), ClientError>,
    ) -> Result<Pulled, ClientError> {
        // When part of a norm is unknown: the deadline at which the shards receive the known part.
        let mut late: Option<(Instant, f64)> = None;
        let pulled = loop {
            match self.io.next(self.interrupt.as_deref(), late.map(|(at, _)| at))? {
                Some(Event::Weights(arrived)) => {
                    take(self, &arrived)?;
                    let shard = arrived.shard;
                    drop(arrived);
                    self.io.give_back(shard);
                }
                Some(Event::NormParts(parts)) => {
                    let norm = match shares.take() {
                        Some(shares) => shares(&parts, true)?,
                        None => Norm { sum_of_squares: sum_of_parts(parts), whole: false },
                    };
                    match norm.whole {
                        true => self.io.session().tell_norm(step, norm.sum_of_squares, None),
                        false => late = Some((Instant::now() + NORM_TIMEOUT, norm.sum_of_squares)),
                    }
                }
                Some(Event::Pulled(pulled)) => break pulled,
                Some(_) => {}
                // The unknown part of the norm was lost with its worker, so the step is clipped by the known part.
                None => {
                    if let Some((_, sum_of_squares)) = late.take() {
                        tracing::warn!(%step, "part of a step's norm is unknown: clipping by the known part");
                        self.io.session().tell_norm(step, sum_of_squares, None);
                    }
                }
            }
        };
        if pulled.rejoined {
            self.encoders.forget();
        }
        if let Some(shares) = shares.take() {
            let own = self.pushed_squares(step);
            let whole = own.is_some() && self.io.session().is_one_by_one(step);
            shares(own.as_deref().unwrap_or_default(), whole)?;
        }
        self.counters.waited += began.elapsed();
        Ok(pulled)
    }

    /// A bucket as people know it.
    fn name_of(&self, bucket: BucketId) -> String {
        let of_table = |(table, partition): (usize, u32)| {
            let table = self.options.job.tables.get(table)?;
            Some(format!("partition {partition} of table `{}`", table.name))
        };
        self.layout.partition(bucket).and_then(of_table).unwrap_or_else(|| bucket.to_string())
    }

    /// Writes the received weights. Servers do not send what the worker already has.
    fn take(&mut self, arrived: &Arrived, into: Option<&mut [f32]>) -> Result<(), ClientError> {
        let (shard, w, payload) = (arrived.shard, &arrived.weights, &arrived.payload);
        let broken = |what: String| -> ClientError { SessionError::Protocol { shard, what }.into() };
        let (step, bucket, len) = (Step(w.done), BucketId(w.bucket), payload.len());
        self.note(Stage::Pull, (io::moment(arrived.asked), io::moment(arrived.at)), step, bucket, len);
        if w.not_modified {
            return Ok(());
        }
        let into = into
            .filter(|into| into.len() * F32_BYTES == len)
            .ok_or_else(|| broken(format!("{len} bytes for {}", self.name_of(bucket))))?;
        let begin = Moment::now();
        payload.reader().values(into).map_err(|e| broken(e.to_string()))?;
        self.note(Stage::Decode, (begin, Moment::now()), step, bucket, len);
        self.counters.bytes_pulled += len as u64;
        Ok(())
    }
}
