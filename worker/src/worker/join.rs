//! Joins a job: the worker's initial state, its sessions, checkpoints and record.

use super::{
    Plan, Setup, WorkerError, WorkerOptions,
    driver::{Driver, Scores},
    evaluate::own_share,
};
use crate::{
    checkpoints::{self, Author, Checkpoints},
    job::{Job, TransportConfig},
    metrics::Gauges,
    recorder::{self, Recorder},
    start,
};
use paraft_client::{Client, ClientOptions, HANDOVER, Transport};
use paraft_common::{Step, WorkerId, config::ServerJob, layout::Cuts, local::LocalWeights};
use paraft_trace::Stages;
use paraft_trainer::Trainer;
use std::{ops::Range, path::Path, sync::Arc, time::Duration};

/// A worker that has joined.
pub(super) struct JoinedWorker {
    pub driver: Driver,
    /// The step to continue from.
    pub start: Step,
    /// Writes the trace's file when the run ends, however it ends.
    pub flush: Option<Flush>,
}

/// A rank with some stages of its worker's model.
pub(super) struct Staged<'a> {
    /// The values of each stage.
    pub values: Vec<usize>,
    /// This rank's stages.
    pub here: Range<usize>,
    /// Maps the step from which this worker may continue to the step of its group.
    pub meet: &'a mut dyn FnMut(Step) -> Result<Step, WorkerError>,
}

/// Joins the job on its servers: alone, or for the group that this rank leads.
pub(super) fn join(
    job: &Job,
    options: &WorkerOptions,
    setup: Setup,
    plan: &Plan,
    gauges: Arc<Gauges>,
    leads: bool,
    staged: Option<Staged<'_>>,
) -> Result<JoinedWorker, WorkerError> {
    // For programs without [`cli`](crate::cli).
    paraft_simd::choice().map_err(|e| WorkerError::Job(e.to_string()))?;
    let Setup { tensors, samples, data, classifies, mut init, groups, state, note, tables, .. } = setup;
    let cuts =
        Cuts { groups: &groups, stages: staged.as_ref().map_or(&[], |s| &s.values), ..Cuts::default() };
    let mut server_job = job.server_job_cut_on(&tensors, cuts, &data);
    let layout = job.layout_cut(tensors, cuts).and_then(|l| l.with_tables(&tables));
    let layout = layout.map_err(|e| WorkerError::Job(e.to_string()))?;
    server_job.tables.clone_from(&tables);
    let local = LocalWeights::new(&job.local, &job.descent(), layout.params_len(), layout.len());
    let (resume, scratch) = (options.resume.as_deref(), options.scratch_folder());
    let mut beginning =
        start::begin(job, resume, init.as_deref_mut(), (&layout, &groups, &tables), plan, &scratch)?;
    let begun = beginning.start.as_ref().map_or(0, |s| s.epochs);
    // A checkpoint or a model file takes precedence over this worker's weights.
    if let Some(state) = state.filter(|_| init.is_some() && beginning.start.is_none()) {
        state.bring(&server_job, &layout, &mut beginning.initial)?;
    }
    // All workers of a job have the same initial state, whichever worker supplied it.
    let (budget, first) = (plan.budget(job, beginning.start.as_ref()), Step(beginning.step()));
    let resumed = resume.map(|_| (first, plan.left_out));
    server_job.start = beginning.start;
    server_job.chunks = plan.leased;
    let stages = staged.as_ref().map(|s| s.here.clone());
    let client = ClientOptions { stages, ..client_options(job, options, server_job, leads) };
    let worker = client.worker;
    recorder::try_out(options.run_dir.as_deref())?;
    let author = Author::new(job, plan, layout.tensors(), &client, note);
    let checkpoints = Checkpoints::start(job, options.run_dir.as_deref(), plan, author.clone(), first)?;
    // The ranks tell the leader of a group when to end.
    let interrupt = (!leads).then(|| options.interrupt.clone());
    let (mut client, mut start) = Client::join_until(client, beginning.initial, interrupt)?;
    let run = recorder::described(job, layout.params_len() as u64, budget, resumed);
    let recorder = Recorder::new(worker, options.run_dir.as_deref(), gauges.clone(), run, client.founding())?;
    if let Some(staged) = staged {
        let joined = start;
        start = (staged.meet)(start)?;
        if start > joined {
            client.advance_to(start);
        }
    }
    client.encode_by(&layout);
    gauges.stages(client.stages().clone());
    let place = options.rank % job.ranks_of_worker();
    let flush = options
        .trace
        .as_ref()
        .map(|(folder, steps)| begin_trace(&client, place, folder, *steps))
        .transpose()?;
    let trainer = Trainer::new(
        paraft_trainer::Options {
            worker,
            steps: plan.steps,
            local: job.local.clone(),
            layout: layout.clone(),
            batch: job.train.batch,
            evaluates: plan.evaluations(job),
            share: own_share(job, options.rank),
            due: job.checkpoints().map(|c| plan.checkpoints(c)),
            leased: plan.leased,
            begun,
        },
        start,
    );
    let scores = Scores {
        workers: u64::from(job.train.workers),
        samples: samples as u64,
        classifies,
        at: plan.evaluations(job),
    };
    let on_demand = (author, checkpoints::place(job, options.run_dir.as_deref()).ok());
    let mut driver = Driver::new(
        options,
        (client, trainer),
        plan.clone(),
        (recorder, gauges, begun),
        (checkpoints, on_demand),
        (layout, local),
        scores,
    );
    driver.descent = (!job.local.is_local()).then(|| job.descent());
    Ok(JoinedWorker { driver, start, flush })
}

pub(super) fn transport(job: &Job) -> Transport {
    match job.cluster.transport {
        TransportConfig::Auto => Transport::Auto,
        TransportConfig::Tcp => Transport::Tcp,
    }
}

/// The identity under which the servers know this process, or the group that it leads.
pub(super) fn client_options(
    job: &Job,
    options: &WorkerOptions,
    server_job: ServerJob,
    leads: bool,
) -> ClientOptions {
    ClientOptions {
        servers: options.servers.clone(),
        shards: job.shards(),
        replicas: job.cluster.replicas,
        worker: WorkerId(options.rank / job.ranks_of_worker()),
        job: server_job,
        device: job.device().to_string(),
        transport: transport(job),
        timeout: Duration::from_millis(job.cluster.timeout_ms),
        handover: match leads {
            false => HANDOVER,
            // The group's former leader may only be paused: its lease must expire.
            true => HANDOVER + Duration::from_millis(job.cluster.grace_ms),
        },
        stages: None,
    }
}

/// Writes the trace's file when the run ends, however it ends.
pub(super) struct Flush(Arc<Stages>);

impl Drop for Flush {
    fn drop(&mut self) {
        self.0.flush();
    }
}

/// `place`: this process's index among its worker's ranks.
pub(super) fn begin_trace(
    client: &Client,
    place: u32,
    folder: &Path,
    steps: u64,
) -> Result<Flush, WorkerError> {
    let process = match (client.worker().0, place) {
        (worker, 0) => format!("worker-{worker}"),
        (worker, place) => format!("worker-{worker}-rank-{place}"),
    };
    let cannot = |e| WorkerError::Trace(folder.to_path_buf(), e);
    client.stages().trace(folder, &process, steps).map_err(cannot)?;
    Ok(Flush(client.stages().clone()))
}
