//! How a worker comes into a job: what it begins with, its place with the servers, its checkpoints and its record.

use super::{
    Plan, Setup, WorkerError, WorkerOptions,
    driver::{Driver, Scores},
    evaluate::own_share,
    transport,
};
use crate::{
    checkpoints::{self, Author, Checkpoints},
    job::Job,
    metrics::Gauges,
    recorder::{self, Recorder},
    start,
};
use paraft_client::{Client, ClientOptions, HANDOVER};
use paraft_common::{Step, WorkerId, config::ServerJob, layout::Cuts, local::LocalWeights};
use paraft_trace::Stages;
use paraft_trainer::Trainer;
use std::{ops::Range, path::Path, sync::Arc, time::Duration};

/// A worker that has joined.
pub(super) struct JoinedWorker {
    pub driver: Driver,
    /// The step to go on from.
    pub start: Step,
    /// Brings the trace into its file when the run ends, however it does.
    pub flush: Option<Flush>,
}

/// Of a rank that has some stages of its worker's model.
pub(super) struct Staged<'a> {
    /// Of each stage.
    pub values: Vec<usize>,
    /// This rank's.
    pub here: Range<usize>,
    /// Told where it may go on from, says where its group does.
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
    // For programs that have no [`cli`](crate::cli).
    paraft_simd::choice().map_err(|e| WorkerError::Job(e.to_string()))?;
    let Setup { tensors, samples, data, classifies, mut init, groups, state, note, .. } = setup;
    let cuts =
        Cuts { groups: &groups, stages: staged.as_ref().map_or(&[], |s| &s.values), ..Cuts::default() };
    let mut server_job = job.server_job_cut_on(&tensors, cuts, &data);
    let layout = job.layout_cut(tensors, cuts).map_err(|e| WorkerError::Job(e.to_string()))?;
    let local = LocalWeights::new(&job.local, &job.descent(), layout.params_len(), layout.len());
    let (resume, scratch) = (options.resume.as_deref(), super::scratch_folder(options));
    let mut beginning = start::begin(job, resume, init.as_deref_mut(), &layout, plan, &scratch)?;
    let begun = beginning.start.as_ref().map_or(0, |s| s.epochs);
    // A checkpoint or a model file goes before what this worker brings.
    if let Some(state) = state.filter(|_| init.is_some() && beginning.start.is_none()) {
        state.bring(&server_job, &layout, &mut beginning.initial)?;
    }
    // All workers of a job have the same beginning, whoever's the servers took.
    let (budget, resumed) =
        (plan.budget(job, beginning.start.as_ref()), resume.map(|_| Step(beginning.step())));
    server_job.start = beginning.start;
    server_job.chunks = plan.leased;
    let stages = staged.as_ref().map(|s| s.here.clone());
    let client = ClientOptions { stages, ..client_options(job, options, server_job, leads) };
    let worker = client.worker;
    recorder::try_out(options.run_dir.as_deref())?;
    let author = Author::new(job, plan, layout.tensors(), &client, note);
    let checkpoints = Checkpoints::start(job, options.run_dir.as_deref(), plan, author.clone())?;
    // Who leads a group is told by its ranks when to end.
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
            evaluates: job.eval.every_epoch,
            share: own_share(job, options.rank),
            due: job.checkpoint.as_ref().map(|c| checkpoints::due(c, plan)),
            leased: plan.leased,
            begun,
        },
        start,
    );
    let scores = Scores {
        workers: u64::from(job.train.workers),
        samples: samples as u64,
        classifies,
        every_epoch: job.eval.every_epoch,
    };
    let on_demand = (author, checkpoints::place(job, options.run_dir.as_deref()).ok());
    let driver = Driver::new(
        options,
        (client, trainer),
        plan.clone(),
        (recorder, gauges, begun),
        (checkpoints, on_demand),
        (layout, local),
        scores,
    );
    Ok(JoinedWorker { driver, start, flush })
}

/// As which worker the servers know this process, or the group that it leads.
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
            // Who led this group may only have stopped: its lease has to end.
            true => HANDOVER + Duration::from_millis(job.cluster.grace_ms),
        },
        stages: None,
    }
}

/// Brings the trace into its file when the run ends, however it does.
pub(super) struct Flush(Arc<Stages>);

impl Drop for Flush {
    fn drop(&mut self) {
        self.0.flush();
    }
}

/// `place`: among the ranks of its worker.
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
