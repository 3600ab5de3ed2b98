//! The oracle: training in one process, without servers.

use paraft_common::{
    BucketSpec, Encoding, Layout, Payload, ShardId, Step, TensorKind,
    codec::put_f32_le,
    config::ServerJob,
    encoding::{Encoder, Values, stretches, sum_of_squares},
    local::{Fragments, LocalWeights},
    optim::{Gradient, Hyper, apply_buffer, norm_factor},
    placement,
};
use paraft_data::Sampler;
use paraft_models::Batch;
use paraft_worker::{
    Job,
    samples::{fill, shape_of},
    worker::Plan,
};

/// How the oracle computes the mean gradient of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// The workers' minibatches form one minibatch, as in training without a fleet. Its mean equals the
    /// fleet's up to the rounding of the sums.
    Union,
    /// One minibatch after the other, with their gradients added in ascending order of ranks and
    /// divided by their number. These are the fleet's additions in the fleet's order, of the encoded
    /// values with each worker's residual, so every bit must be equal. Not for jobs that clip.
    Shares,
}

/// Why the oracle cannot train a job.
#[derive(Debug, thiserror::Error)]
pub enum OracleError {
    /// The job is incomplete or invalid.
    #[error("the oracle cannot train this job: {0}")]
    Job(String),
}

fn bad(e: impl std::fmt::Display) -> OracleError {
    OracleError::Job(e.to_string())
}

/// Minibatch training in this thread. Step `k` is one update by the mean gradient over the samples of
/// all ranks in their step `k`, in the same buckets. With local steps (`[local]`) the workers train one
/// after the other, in either order. With stages (`[parallel]`) a minibatch is trained micro-batch by
/// micro-batch; with schedule "2bw" each one, except the first after an evaluation or a checkpoint,
/// uses the weights of the step before the last.
pub fn oracle(job: &Job, order: Order) -> Result<Vec<f32>, OracleError> {
    let data = job.data.as_ref().ok_or_else(|| bad("it has no data"))?;
    let data = data.load(&job.base_dir).map_err(bad)?;
    let config = job.model.as_ref().ok_or_else(|| bad("it has no model"))?;
    let mut model = config.build(shape_of(&data.train)).map_err(bad)?;
    let layout = job.layout(model.tensors()).map_err(bad)?;
    let servers = job.server_job(&model.tensors());
    let mut weights = vec![0.0; layout.len()];
    model.init(job.seed, &mut weights);
    layout.buckets().iter().for_each(|b| servers.constrain(*b, &mut weights[b.range()]));
    let mut slots: Vec<Vec<Vec<f32>>> =
        layout.buckets().iter().map(|b| servers.optimizer.new_slots(b.len)).collect();
    let plan = Plan::new(job, &data.train).map_err(bad)?;
    let mut locals: Vec<LocalWeights> = (0..job.shares())
        .filter_map(|_| LocalWeights::new(&job.local, &job.descent(), layout.params_len(), layout.len()))
        .collect();
    locals.iter_mut().for_each(|r| r.begin(&weights));
    let t = &job.train;
    let mut sampler = Sampler::new(data.train.len(), job.seed);
    (sampler.shuffle, sampler.drop_last, sampler.drop_last_batch) = (t.shuffle, t.drop_last, t.drop_last);
    let world = job.shares() as usize;
    let (per_epoch, total) = (plan.per_epoch, plan.total);
    let mut shares = Vec::new();
    let parts = if job.parallel.is_cut() { job.micro_batches() } else { 1 };
    let continues = job.parallel.is_cut() && job.parallel.schedule.overlaps_minibatches();
    // The weights before the last update.
    let mut before = Vec::new();
    let mut encoders: Vec<Vec<Encoder>> = (0..world).map(|rank| encoders(&layout, &servers, rank)).collect();
    for k in 0..total {
        if k % per_epoch == 0 {
            shares = (0..world).map(|r| sampler.batches(k / per_epoch, r, world, t.batch)).collect();
        }
        let step = Step(k + 1);
        let mut gradient_at = |weights: &[f32], samples: &[u32]| -> Result<Vec<f32>, OracleError> {
            let mut batch = Batch::default();
            fill(&data.train, samples, &mut batch).map_err(bad)?;
            let mut gradient = vec![0.0; layout.len()];
            let parts = parts.min(batch.n);
            if parts < 2 {
                model.step(weights, &mut gradient, &batch, &mut |_, _| {}).map_err(bad)?;
                return Ok(gradient);
            }
            let mut sum = vec![0.0; layout.len()];
            for m in 0..parts {
                let part = batch.part(batch.n * m / parts..batch.n * (m + 1) / parts);
                model.step(weights, &mut gradient, &part, &mut |_, _| {}).map_err(bad)?;
                let share = part.n as f32 / batch.n as f32;
                for (s, g) in sum.iter_mut().zip(&gradient) {
                    *s = if m == 0 { share * g } else { *s + share * g };
                }
            }
            Ok(sum)
        };
        let fragments = job.local.fragments();
        if fragments.stream() {
            let streamed = Streamed { plan: &plan, layout: &layout, servers: &servers, fragments, step };
            streamed.step(&mut weights, &mut slots, &mut locals, &mut encoders, |local, w| {
                let samples = shares[w].next().ok_or_else(|| bad("an epoch is too short"))?;
                gradient_at(local, &samples)
            })?;
            continue;
        }
        let (mut pushes, mut share) = (Vec::new(), 1.0 / world as f32);
        for (local, minibatches) in locals.iter_mut().zip(&mut shares) {
            let minibatches = minibatches.take(plan.minibatches_of(step) as usize);
            for (i, samples) in (plan.minibatches_before(step)..).zip(minibatches) {
                let gradient = gradient_at(local.weights(), &samples)?;
                local.step(i, &gradient).map_err(bad)?;
            }
            pushes.push(local.push(&weights).to_vec());
        }
        if locals.is_empty() {
            let each: Vec<Vec<u32>> = shares.iter_mut().filter_map(Iterator::next).collect();
            let minibatches = match order {
                Order::Union => {
                    share = 1.0;
                    vec![each.concat()]
                }
                Order::Shares => each,
            };
            let late = continues && k > 0 && !plan.ends_at(job, Step(k));
            for samples in minibatches {
                pushes.push(gradient_at(if late { &before } else { &weights }, &samples)?);
            }
            if continues {
                before.clone_from(&weights);
            }
        }
        let mut sum: Option<Vec<f32>> = None;
        for (mut gradient, encoders) in pushes.into_iter().zip(&mut encoders) {
            if order == Order::Shares {
                for (spec, encoder) in layout.buckets().iter().zip(encoders) {
                    as_sent(encoder, step, &mut gradient[spec.range()])?;
                }
            }
            sum = Some(match sum {
                None => gradient,
                Some(sum) => plus(&sum, &gradient),
            });
        }
        let gradient = sum.unwrap_or_default();
        let pushes: Vec<Payload> = layout.buckets().iter().map(|b| le(&gradient[b.range()])).collect();
        let clip =
            servers.clip.norm.map_or(1.0, |max| norm_factor(max, norm(&layout, &pushes, job.shards())));
        for ((spec, push), slots) in layout.buckets().iter().zip(&pushes).zip(&mut slots) {
            apply(&servers, k, *spec, (share, clip), push, &mut weights[spec.range()], slots);
        }
        locals.iter_mut().for_each(|r| r.pulled(&weights));
    }
    Ok(weights)
}

/// Updates one bucket by the sum of its pushes, after `k` earlier updates. `scale`: the factor of one
/// push, including clipping.
fn apply(
    servers: &ServerJob,
    k: u64,
    spec: BucketSpec,
    (share, clip): (f32, f32),
    push: &Payload,
    into: &mut [f32],
    slots: &mut [Vec<f32>],
) {
    if spec.kind == TensorKind::Buffer {
        return apply_buffer(into, Gradient { payload: push, encoding: Encoding::F32, scale: share });
    }
    let lr = servers.optimizer.lr() * servers.schedule.factor(k as f64, servers.workers as usize);
    let hyper = Hyper { lr: lr as f32, t: k + 1, clip_value: servers.clip.value };
    let gradient = Gradient { payload: push, encoding: Encoding::F32, scale: share * clip };
    servers.optimizer.apply(&hyper, into, slots, gradient);
    servers.constrain(spec, into);
}

fn plus(a: &[f32], b: &[f32]) -> Vec<f32> {
    a.iter().zip(b).map(|(a, b)| a + b).collect()
}

/// A step of workers whose weights stream in fragments.
struct Streamed<'a> {
    plan: &'a Plan,
    layout: &'a Layout,
    servers: &'a ServerJob,
    fragments: Fragments,
    step: Step,
}

impl Streamed<'_> {
    /// All workers train a minibatch, then the next; `gradient` returns that of a worker at its
    /// weights.
    fn step(
        &self,
        weights: &mut [f32],
        slots: &mut [Vec<Vec<f32>>],
        locals: &mut [LocalWeights],
        encoders: &mut [Vec<Encoder>],
        mut gradient: impl FnMut(&[f32], usize) -> Result<Vec<f32>, OracleError>,
    ) -> Result<(), OracleError> {
        let Self { plan, layout, step, .. } = *self;
        let (before, of) = (plan.minibatches_before(step), plan.minibatches_of(step));
        let share = 1.0 / locals.len() as f32;
        for i in 1..=of {
            for (w, local) in locals.iter_mut().enumerate() {
                let gradient = gradient(local.weights(), w)?;
                local.step(before + i - 1, &gradient).map_err(bad)?;
            }
            let turn = self.fragments.due(i, of, layout);
            for b in turn {
                let spec = layout.buckets()[b];
                let mut sum: Option<Vec<f32>> = None;
                for (local, encoders) in locals.iter_mut().zip(&mut *encoders) {
                    let mut push = local.push_fragment(spec.range()).to_vec();
                    as_sent(&mut encoders[b], step, &mut push)?;
                    sum = Some(sum.map_or(push.clone(), |s| plus(&s, &push)));
                }
                let (sum, into) = (le(&sum.unwrap_or_default()), &mut weights[spec.range()]);
                apply(self.servers, step.0 - 1, spec, (share, 1.0), &sum, into, &mut slots[b]);
                locals.iter_mut().for_each(|l| l.take_over(weights, spec.range()));
            }
        }
        Ok(())
    }
}

/// The sum of squares of the trained part, in the system's order: bucket by bucket within a shard, then
/// shard by shard. The order of a floating-point sum changes its last bits.
fn norm(layout: &Layout, pushes: &[Payload], shards: u32) -> f64 {
    let part = |s: u32| -> f64 {
        placement::buckets_of(layout, ShardId(s), shards)
            .iter()
            .filter(|(_, spec)| spec.kind == TensorKind::Param)
            .map(|(id, spec)| {
                sum_of_squares(&pushes[id.0 as usize], Encoding::F32, spec.len).unwrap_or(f64::NAN)
            })
            .sum()
    };
    (0..shards).map(part).sum()
}

/// The encoders of a worker's buckets, as its client creates them.
fn encoders(layout: &Layout, servers: &ServerJob, worker: usize) -> Vec<Encoder> {
    let encoder = |(i, spec): (u64, &BucketSpec)| {
        let encoding = servers.encoding(spec.kind);
        let matrices = match encoding {
            Encoding::PowerSgd(rank) => stretches(layout, *spec, rank),
            _ => Vec::new(),
        };
        Encoder::new(encoding, spec.len, matrices, (worker as u64) << 32 | i)
    };
    (0..).zip(layout.buckets()).map(encoder).collect()
}

/// The values after encoding and decoding.
fn as_sent(encoder: &mut Encoder, step: Step, values: &mut [f32]) -> Result<(), OracleError> {
    let mut sent = Vec::new();
    encoder.encode(step, values, &mut sent);
    Values::new(&sent.into(), encoder.encoding(), values.len()).map_err(bad)?.read(values).map_err(bad)
}

fn le(values: &[f32]) -> Payload {
    let mut out = Vec::new();
    put_f32_le(values, &mut out);
    out.into()
}

/// The maximal difference of two weight vectors, relative to the largest weight of the first.
///
/// # Panics
///
/// If their lengths differ.
pub fn distance(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len(), "vectors of different lengths");
    let largest = a.iter().fold(0f32, |m, x| m.max(x.abs()));
    let apart = a.iter().zip(b).fold(0f32, |m, (x, y)| m.max((x - y).abs()));
    f64::from(apart) / f64::from(largest)
}
