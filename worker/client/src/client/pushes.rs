//! Pushes: a worker sends gradients, and waits for their acks.

use super::Client;
use crate::{acks::Acked, connect::Transport, error::ClientError, io};
use bytes::Bytes;
use paraft_common::{
    BucketId, Encoding, Layout, ShardId, Step, TensorKind,
    codec::{F32_BYTES, copy_f32_le},
    encoding::sum_of_squares,
    optim::Overrides,
    table::put_rows,
};
use paraft_lanes::shared::{Memory, SHARED_BYTES};
use paraft_proto::limits;
use paraft_session::{Encoders, Event, sum_of_parts};
use paraft_trace::{Moment, Stage};
use std::{
    sync::{Arc, mpsc},
    time::{Duration, Instant},
};

/// The squares of a step's gradient, as far as it is pushed.
#[derive(Debug, Default)]
pub(super) struct Measured {
    values: usize,
    squares: f64,
    took: Duration,
}

/// Shared memory for unacknowledged pushes; `None`: the socket carries the payloads.
pub(super) fn push_memory(layout: &Layout, transport: Transport) -> Option<Arc<Memory>> {
    let bytes = layout.len() * F32_BYTES;
    if transport != Transport::Auto || bytes < SHARED_BYTES {
        return None;
    }
    // Two steps of a small model may be in flight. Each bucket may leave a partial page.
    let bytes = (2 * bytes).min(limits::PUSH_WINDOW_BYTES) + 2 * layout.buckets().len().min(1024) * 4096;
    Memory::new(bytes).inspect_err(|error| tracing::debug!(%error, "no shared memory for pushes")).ok()
}

impl Client {
    /// The number of samples behind the next pushes' gradients. The servers count them.
    pub fn weigh(&mut self, samples: usize) {
        self.io.session().weigh(samples);
    }

    /// Sets what replaces the job's options for the next pushes, for each parameter group, or once if the job has no
    /// groups. Empty: the job's own. A round uses the mean of its pushes' options.
    ///
    /// # Panics
    /// If the number of groups is another.
    pub fn override_options(&mut self, of_groups: Vec<Overrides>) {
        self.io.session().override_options(of_groups);
    }

    /// The versions of the last pull, as [`Self::computed_at`] takes them.
    pub fn versions(&self) -> Vec<u64> {
        self.io.session().versions()
    }

    /// States that the next pushes' gradients are computed at these weight versions, which are older than the last
    /// pull. The servers measure the delay from them. `None`: the versions of the last pull, which is the default.
    pub fn computed_at(&mut self, versions: Option<Vec<u64>>) {
        self.io.session().computed_at(versions);
    }

    /// Pushes one bucket's gradient for `step`. Returns at once unless more than
    /// [`PUSH_WINDOW_BYTES`](limits::PUSH_WINDOW_BYTES) wait for their acks. The client copies the payload once,
    /// into the bytes that it sends, in the job's encoding of the bucket.
    ///
    /// # Panics
    /// If `gradient` does not have the bucket's length.
    pub fn push(&mut self, bucket: BucketId, step: Step, gradient: &[f32]) {
        let spec = self.layout.buckets()[bucket.0 as usize];
        assert_eq!(gradient.len(), spec.len, "the gradient of {bucket} has the wrong length");
        let encoding = self.encoding(bucket);
        let encoder = self.encoders.of(bucket);
        let len = encoder.map_or_else(|| encoding.encoded_len(gradient.len()), |e| e.encoded_len());
        // Wait first: the room becomes available together with a free buffer.
        self.counters.waited += self.io.room(len, self.interrupt.as_deref());
        let begin = Moment::now();
        let slot = self.memory.as_ref().filter(|_| encoding == Encoding::F32).and_then(|m| m.slot(len));
        let payload = match slot {
            Some(mut slot) => {
                copy_f32_le(gradient, slot.as_mut());
                slot.freeze()
            }
            None => self.pool.bytes(len, |out| {
                self.encoders.encode(bucket, step, gradient, encoding, out);
            }),
        };
        let stage = if encoding == Encoding::F32 { Stage::Copy } else { Stage::Encode };
        let there = Moment::now();
        self.note(stage, (begin, there), step, bucket, len);
        self.send(bucket, step, payload, there);
    }

    /// Pushes the rows of a partition of a table that have gradients in `step`: ids, rising, and the table's number of
    /// values for each. A step pushes every partition, also one without rows.
    ///
    /// # Panics
    /// If the bucket is no partition, or the lengths do not fit.
    pub fn push_rows(&mut self, bucket: BucketId, step: Step, ids: &[u64], gradients: &[f32]) {
        let (table, _) = self.layout.partition(bucket).expect("a partition of a table");
        let payload = put_rows(ids, gradients, self.options.job.tables[table].dim).to_bytes();
        self.counters.waited += self.io.room(payload.len(), self.interrupt.as_deref());
        self.send(bucket, step, payload, Moment::now());
    }

    /// The rate of each table for the next pushes, instead of the table's and the schedule; `None`: these.
    pub fn set_table_rates(&mut self, rates: Vec<Option<f64>>) {
        self.io.session().set_table_rates(rates);
    }

    /// Measures the norm of the gradient that the next pushes make up, at the cost of one more pass over it.
    pub fn begin_norm(&mut self) {
        self.measured = Some(Measured::default());
    }

    /// The norm of the parameters' gradient since [`Self::begin_norm`], as it is encoded; NaN if not all of it was pushed
    /// here. Second value: the time that measuring it took.
    pub fn end_norm(&mut self) -> Option<(f64, Duration)> {
        let Measured { values, squares, took } = self.measured.take()?;
        let norm = if values == self.layout.params_len() { squares.sqrt() } else { f64::NAN };
        Some((norm, took))
    }

    fn measure(&mut self, bucket: BucketId, payload: &Bytes) {
        let (spec, encoding) = (self.layout.buckets()[bucket.0 as usize], self.encoding(bucket));
        let Some(measured) = self.measured.as_mut().filter(|_| spec.kind == TensorKind::Param) else {
            return;
        };
        let begin = Instant::now();
        let squares = sum_of_squares(&payload.clone().into(), encoding, spec.len);
        measured.values += spec.len;
        measured.squares += squares.unwrap_or(f64::NAN); // not in its encoding: the servers refuse it
        measured.took += begin.elapsed();
    }

    /// Skips `step`, in place of its pushes, for example because the gradient is not finite. The step counts as
    /// pushed. If any worker skips a round, the round changes no weights. Where pushes are applied one by one, only
    /// this worker's push is missing. [`Counters::skipped`](super::Counters::skipped) counts it after the step's pull.
    /// Encoders keep the residuals that they hold.
    ///
    /// If the servers refused a push that is not finite, the next pull returns [`Refused`](paraft_session::SessionError::Refused)
    /// with [`WireKind::NotFinite`](paraft_proto::WireKind::NotFinite). The worker can then skip the step and pull
    /// again: the servers skip the buckets of the refused pushes, in rounds too, and apply the others. To skip all
    /// buckets, check the gradient before the first push.
    ///
    /// # Panics
    /// If the client pushed something for this step and no push was refused.
    pub fn skip(&mut self, step: Step) {
        self.io.session().skip(io::now(), step);
    }

    /// Skips one bucket, in place of its push and before the pushes of the step: the script leaves its group out of the
    /// step, or no worker has a result because the step's mean is not whole.
    pub fn skip_bucket(&mut self, bucket: BucketId, step: Step) {
        self.io.session().skip_bucket(io::now(), bucket, step);
    }

    /// The buffer of the last pull has the results of this worker's own step, so the next pull need not bring them.
    pub fn has_results(&mut self) {
        self.io.session().has_results();
    }

    /// Whether the script clips the next steps by their norm, in modes with rounds: call it before a step's first push.
    /// Each such step needs [`Self::clip_by_norm`] before its pull.
    pub fn clip_steps(&mut self, clips: bool) {
        self.io.session().clip_steps(clips);
    }

    /// The squared norm of the mean gradient of a step that is pushed, once every worker's gradient is there. `None`: it
    /// is unknown, because the step was applied without it, or this worker was taken out.
    ///
    /// # Errors
    /// See [`Self::pull`].
    pub fn norm(&mut self, step: Step) -> Result<Option<f64>, ClientError> {
        let began = Instant::now();
        self.io.session().ask_norm(step);
        let known = loop {
            match self.io.next(self.interrupt.as_deref(), None)? {
                Some(Event::NormParts(parts)) => break Some(sum_of_parts(parts)),
                Some(Event::Settled(_)) => break None,
                _ => {}
            }
        };
        self.counters.waited += began.elapsed();
        Ok(known)
    }

    /// Ends the wait of the rounds of a clipped step; `bound`: the largest norm, if there is one.
    pub fn clip_by_norm(&mut self, step: Step, sum_of_squares: f64, bound: Option<f64>) {
        self.io.session().tell_norm(step, sum_of_squares, bound);
    }

    /// Sets this worker's encoders. Call it before the first push. `layout` has the model's tensors, in which
    /// powersgd finds its matrices; without this call it finds none.
    ///
    /// # Panics
    /// If the layout's buckets differ from the job's.
    pub fn encode_by(&mut self, layout: &Layout) {
        assert_eq!(layout.buckets(), self.layout.buckets(), "the model's layout is not the job's");
        self.encoders = Encoders::new(&self.options.job, layout, self.options.worker);
    }

    /// The encoding in which a device should write a bucket's values for [`Self::push_encoded`]. `None`: pass plain
    /// values to [`Self::push`], because this worker keeps a residual of each push.
    pub fn device_encoding(&self, bucket: BucketId) -> Option<Encoding> {
        self.encoders.of(bucket).is_none().then(|| self.encoding(bucket))
    }

    /// The encoding of a bucket's values.
    pub fn encoding(&self, bucket: BucketId) -> Encoding {
        self.options.job.encoding(self.layout.buckets()[bucket.0 as usize].kind)
    }

    /// Like [`Self::push`], for a gradient that is already encoded in [`Self::encoding`]. Nothing is copied: the
    /// client sends the bytes from where they are, and drops them at their ack.
    ///
    /// # Panics
    /// If the payload's length does not match the bucket.
    pub fn push_encoded(&mut self, bucket: BucketId, step: Step, payload: Bytes) {
        let spec = self.layout.buckets()[bucket.0 as usize];
        let len = self.encoding(bucket).encoded_len(spec.len);
        assert_eq!(payload.len(), len, "the gradient of {bucket} has the wrong length");
        self.counters.waited += self.io.room(len, self.interrupt.as_deref());
        self.send(bucket, step, payload, Moment::now());
    }

    fn send(&mut self, bucket: BucketId, step: Step, payload: Bytes, there: Moment) {
        self.counters.bytes_pushed += payload.len() as u64;
        self.measure(bucket, &payload);
        self.io.session().push(Duration::from_nanos(there.0), bucket, step, payload);
    }

    /// All acks from now on, in the order of each shard's stream. If the caller subscribes before the first push,
    /// the acks name exactly the pushes for which the servers have taken responsibility.
    pub fn acks(&self) -> mpsc::Receiver<Acked> {
        let (tell, acks) = mpsc::channel();
        self.io.watch(tell);
        acks
    }

    /// The sums of squares by shard of a step that this process has pushed completely, if other processes of the
    /// worker hold the rest of the gradient and the job clips by its norm. `None`: this session has not pushed the
    /// whole step.
    pub fn pushed_squares(&self, step: Step) -> Option<Vec<(ShardId, f64)>> {
        self.io.session().pushed_squares(step)
    }

    /// Passes on the sum over all processes of the worker ([`sum_of_parts`]). In modes
    /// that apply pushes one by one, the client sends no push of the step before this call.
    pub fn clip_by(&mut self, step: Step, sum_of_squares: f64) {
        self.io.session().clip_by(io::now(), step, sum_of_squares);
    }

    /// Waits until all pushes are acknowledged, for a worker that continues without a pull: a server refuses a push
    /// until it has the push of the previous step. If the session was lost meanwhile, the worker joins again;
    /// returns the step from which it continues after a pull.
    pub fn wait_for_acks(&mut self) -> Result<Option<Step>, ClientError> {
        let began = Instant::now();
        self.io.session().settle();
        let settled = loop {
            if let Event::Settled(joined) = self.next()? {
                break joined;
            }
        };
        if settled.is_some() {
            self.encoders.forget();
        }
        self.counters.waited += began.elapsed();
        Ok(settled)
    }
}
