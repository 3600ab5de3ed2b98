//! The extension class behind `paraft.Run`.

use crate::{
    errors, logs,
    memory::{self, Memory},
    rows,
    signals::Signals,
};
use paraft_tls::{Access, access::As};
use paraft_worker::{
    Evaluation, Interrupt, Job, OpenRun, OptimizerState, Overrides, ParamGroup, Setup, StepOutcome,
    TensorKind, TensorSpec, WeightBuffer, WorkerError, WorkerOptions, slow::Slowness,
};
use parking_lot::Mutex;
use pyo3::{prelude::*, types::PyDict};
use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    process,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
};

/// A worker's part in a job.
///
/// Any thread of the creating process may call each method, one at a time; forked processes may not. The
/// interpreter runs other threads during a wait.
#[pyclass(module = "paraft._paraft", name = "Run")]
pub struct Run {
    inner: Mutex<Inner>,
    /// The job's name.
    name: String,
    /// The thread inside a call, by [`this_thread`]; 0: none.
    holder: AtomicUsize,
    signals: Arc<Signals>,
    process: u32,
    /// Lengths of the tensors, in order.
    lengths: Vec<usize>,
    /// Address and length of the loop's own weights.
    weights: (usize, usize),
}

struct Inner {
    /// `None`: left, or failed to join.
    run: Option<OpenRun>,
    /// The gradients of tensors without one.
    zeros: Vec<f32>,
}

/// A worker's state after a step: its last step, whether it continues from another step, whether nothing is left to
/// train.
type StepState = (u64, bool, bool);

#[pymethods]
impl Run {
    /// Joins a job, and waits for its first weights.
    ///
    /// `job`: a job file, or None; `set`: assignments over it, as for `--set`. `tensors`: name, shape and whether
    /// it is trained, in the order of the `values` float32 at `address`, which `owner` keeps alive. `groups`:
    /// values, rate and decay of each, its own `[optimizer]` table if it has one, and whether it maximizes. `brings`: these are a new job's initial weights; `state`: the addresses of
    /// the optimizer's state vectors, each as long as the trained part, after this many `updates` of each group. `results`: so many of
    /// the last tensors are results of the script's own optimizer. `note`: the
    /// script's description in checkpoints. `tables`: sparse tables in TOML. `samples`: number of training samples, for leased chunks.
    #[new]
    #[pyo3(signature = (*, job, set, rank, servers, tensors, groups, samples, data, brings, address, values, owner, state=Vec::new(), updates=Vec::new(), results=0, note=String::new(), tables=Vec::new(), run_dir=None, resume=None, metrics=None, log_file=None, trace=None, slow=1.0, straggle=None, certs=None))]
    #[allow(clippy::too_many_arguments)]
    fn new(
        py: Python<'_>,
        job: Option<PathBuf>,
        set: Vec<String>,
        rank: u32,
        servers: Vec<String>,
        tensors: Vec<(String, Vec<usize>, bool)>,
        groups: Vec<(usize, f64, f64, Option<String>, bool)>,
        samples: usize,
        data: String,
        brings: bool,
        address: usize,
        values: usize,
        owner: Py<PyAny>,
        state: Vec<usize>,
        updates: Vec<u64>,
        results: usize,
        note: String,
        tables: Vec<String>,
        run_dir: Option<PathBuf>,
        resume: Option<PathBuf>,
        metrics: Option<String>,
        log_file: Option<PathBuf>,
        trace: Option<(PathBuf, u64)>,
        slow: f64,
        straggle: Option<String>,
        certs: Option<PathBuf>,
    ) -> PyResult<Self> {
        let job = job_of(py, job, &set)?;
        if servers.len() as u32 != job.servers() {
            let (named, has) = (servers.len(), job.servers());
            let why = format!(
                "{named} servers are named, and the job has {has}; the list must be the servers' own"
            );
            return Err(errors::config(py, &why));
        }
        let metrics = metrics.map(|m| m.parse()).transpose();
        let metrics = metrics.map_err(|e| errors::config(py, &format!("metrics address: {e}")))?;
        let slow = Slowness::of(slow, straggle.as_deref()).map_err(|e| errors::config(py, &e))?;
        let access = match &certs {
            None => Access::of_environment(As::Worker),
            certs => Access::of(certs.as_deref(), false, As::Worker),
        };
        access.map_err(|e| errors::config(py, &format!("PARAFT_CERTS: {e}")))?.set();
        logs::start(log_file.as_deref())?;
        paraft_host::raise_descriptor_limit();
        let signals = Arc::new(Signals::new());
        let options = WorkerOptions {
            run_dir,
            resume,
            metrics,
            trace,
            slow,
            interrupt: signals.clone() as Arc<dyn Interrupt>,
            ..WorkerOptions::new(rank, servers)
        };
        let first_result = tensors.len().saturating_sub(results);
        let specs: Vec<TensorSpec> = (tensors.iter().enumerate())
            .map(|(i, (name, shape, trained))| match trained {
                _ if i >= first_result => TensorSpec::result(name, shape),
                true => TensorSpec::param(name, shape),
                false => TensorSpec::buffer(name, shape),
            })
            .collect();
        let groups = groups.into_iter().map(group).collect::<Result<_, _>>();
        let groups = groups.map_err(|e| errors::config(py, &e))?;
        let tables = tables.iter().map(|t| paraft_worker::cli::table(t)).collect::<Result<_, _>>();
        let tables = tables.map_err(|e| errors::config(py, &e))?;
        let lengths: Vec<usize> = specs.iter().map(TensorSpec::len).collect();
        if lengths.iter().sum::<usize>() != values {
            return Err(errors::misuse(py, &format!("{values} values for tensors of another length")));
        }
        let Some(mut memory) = Memory::new(address, values, owner) else {
            return Err(errors::misuse(py, "no memory for the weights"));
        };
        let trained = (specs.iter().filter(|t| t.kind == TensorKind::Param)).map(TensorSpec::len).sum();
        let vectors: Option<Vec<_>> =
            state.iter().map(|at| memory::with(*at, trained, <[f32]>::to_vec)).collect();
        let Some(vectors) = vectors else {
            return Err(errors::misuse(py, "no memory for the optimizer's state"));
        };
        let state = updates.iter().any(|n| *n > 0).then_some(OptimizerState { vectors, updates });
        let joined = py.detach(|| {
            // Built-in workers of the job may train on this data too.
            let data = paraft_worker::cli::data_name(&job)?.unwrap_or(data);
            let first = brings.then(|| memory.weights().to_vec());
            let init = first.map(|w| Box::new(move |_, into: &mut [f32]| into.copy_from_slice(&w)) as Box<_>);
            let setup =
                Setup { init, data, groups, state, note, tables, ..Setup::new(specs, samples, |_, _| {}) };
            OpenRun::join(&job, &options, setup, Box::new(memory))
        });
        let this = Self {
            inner: Mutex::new(Inner { run: None, zeros: Vec::new() }),
            name: job.name.clone(),
            holder: AtomicUsize::new(0),
            signals,
            process: process::id(),
            lengths,
            weights: (address, values),
        };
        let run = joined.map_err(|e| this.raised(py, &e))?;
        this.inner.lock().run = Some(run);
        logs::hand_over(py)?;
        Ok(this)
    }

    /// Hands over the gradient of a tensor at this address, contiguous float32 of the tensor's length. Complete
    /// buckets are pushed. 0: zeros.
    fn ready(&self, py: Python<'_>, tensor: usize, address: usize) -> PyResult<()> {
        self.on(py, |inner, lengths| inner.ready(lengths, tensor, address))
    }

    /// Ends a minibatch. `gradients`: tensors whose gradients are not pushed yet, with their addresses, as for
    /// `ready`. Waits as the job's mode requires; then the next weights are there. `loss`: NaN if unknown.
    fn step(
        &self,
        py: Python<'_>,
        gradients: Vec<(usize, usize)>,
        loss: f32,
        samples: u64,
    ) -> PyResult<StepState> {
        self.on(py, |inner, lengths| {
            for (tensor, address) in gradients {
                inner.ready(lengths, tensor, address)?;
            }
            inner.wait(|run| run.step(loss, samples))
        })
    }

    /// Whether the script's optimizer is to run on the pulled mean gradient; `False`: all workers skip the step; None:
    /// there is none.
    fn applies(&self, py: Python<'_>) -> PyResult<Option<bool>> {
        self.on(py, |inner, _| Ok(inner.run()?.applies()))
    }

    /// The optimizer has run: writes its results. Waits as `step` does.
    fn applied(&self, py: Python<'_>) -> PyResult<StepState> {
        self.on(py, |inner, _| inner.wait(OpenRun::applied))
    }

    /// Continues a step's interrupted wait.
    fn continue_wait(&self, py: Python<'_>) -> PyResult<StepState> {
        self.on(py, |inner, _| inner.wait(OpenRun::continue_wait))
    }

    /// Options for the next gradients, per group: the rate, and by name those that differ from the group's
    /// (`weight_decay`, `momentum`, `square`, `eps`, `clip_value`). Empty: the job's.
    fn options(&self, py: Python<'_>, of_groups: Vec<(f64, HashMap<String, f64>)>) -> PyResult<()> {
        let set = |(rate, options): &(f64, HashMap<String, f64>)| {
            let of = |name: &str| options.get(name).copied();
            Overrides {
                rate: Some(*rate),
                weight_decay: of("weight_decay"),
                momentum: of("momentum"),
                square: of("square"),
                eps: of("eps"),
                clip_value: of("clip_value"),
            }
        };
        let of_groups = of_groups.iter().map(set).collect();
        self.on(py, |inner, _| {
            inner.run()?.override_options(of_groups);
            Ok(())
        })
    }

    /// Records a value of the current step by name.
    fn log(&self, py: Python<'_>, name: String, value: f64) -> PyResult<()> {
        self.on(py, |inner, _| inner.run()?.log(&name, value))
    }

    /// The script has overwritten weights, and the change must not stay: the next pull brings all weights,
    /// including those without an update.
    fn forget_weights(&self, py: Python<'_>) -> PyResult<()> {
        self.on(py, |inner, _| {
            inner.run()?.forget_weights();
            Ok(())
        })
    }

    /// Whether the next steps are clipped by the norm of their mean gradient.
    fn clip_steps(&self, py: Python<'_>, clips: bool) -> PyResult<()> {
        self.on(py, |inner, _| inner.run()?.clip_steps(clips))
    }

    /// The norm of the step's mean gradient; `gradients` as for `step`, which clips it to `bound`.
    #[pyo3(signature = (gradients, bound=None))]
    fn norm(&self, py: Python<'_>, gradients: Vec<(usize, usize)>, bound: Option<f64>) -> PyResult<f64> {
        self.on(py, |inner, lengths| {
            for (tensor, address) in gradients {
                inner.ready(lengths, tensor, address)?;
            }
            inner.run()?.norm(bound)
        })
    }

    /// Reads rows of a table: of `count` int64 ids at an address, into float32 at another.
    fn rows(&self, py: Python<'_>, table: usize, ids: usize, count: usize, into: usize) -> PyResult<()> {
        self.on(py, |inner, _| rows::read(inner.run()?, table, (ids, count), into))
    }

    /// Pulls rows of a table while the script does something else: of `count` int64 ids at an address.
    fn prefetch(&self, py: Python<'_>, table: usize, ids: usize, count: usize) -> PyResult<()> {
        self.on(py, |inner, _| rows::prefetch(inner.run()?, table, (ids, count)))
    }

    /// Adds gradients of rows to the current step: of `count` int64 ids at an address, float32 at another.
    fn add_rows(
        &self,
        py: Python<'_>,
        table: usize,
        ids: usize,
        count: usize,
        gradients: usize,
    ) -> PyResult<()> {
        self.on(py, |inner, _| rows::add(inner.run()?, table, (ids, count), gradients))
    }

    /// The rate of each table for the next steps; None: its optimizer's.
    fn table_rates(&self, py: Python<'_>, rates: Vec<Option<f64>>) -> PyResult<()> {
        self.on(py, |inner, _| {
            inner.run()?.set_table_rates(rates);
            Ok(())
        })
    }

    /// Leaves groups of parameters out of this step.
    fn leave_out(&self, py: Python<'_>, groups: Vec<u16>) -> PyResult<()> {
        self.on(py, |inner, _| inner.run()?.leave_out(&groups))
    }

    /// Whether the last step, which left groups out, changed nothing because of another worker.
    fn missed_round(&self, py: Python<'_>) -> PyResult<bool> {
        self.on(py, |inner, _| Ok(inner.run()?.missed_round()))
    }

    /// Skips this step: nothing is pushed, and it counts as done.
    fn skip(&self, py: Python<'_>) -> PyResult<()> {
        self.on(py, |inner, _| inner.run()?.skip())
    }

    /// With local steps: whether the loop's weights differ from the servers' weights of the last pull.
    fn moved(&self, py: Python<'_>) -> PyResult<bool> {
        let (address, len) = self.weights;
        self.on(py, |inner, _| {
            let bits = |w: &f32| w.to_bits();
            let theirs = inner.run()?.weights().iter().map(bits);
            Ok(memory::with(address, len, |own| own.iter().map(bits).ne(theirs)).unwrap_or(false))
        })
    }

    /// The epoch, from 0, and the samples of the current chunk; None: there is none to start.
    fn chunk(&self, py: Python<'_>) -> PyResult<Option<(u64, Vec<u32>)>> {
        self.on(py, |inner, _| Ok(inner.run()?.chunk().map(|(epoch, samples)| (epoch, samples.to_vec()))))
    }

    /// The minibatches of the chunk start.
    fn prepared(&self, py: Python<'_>) -> PyResult<()> {
        self.on(py, |inner, _| inner.run()?.prepared())
    }

    /// Reports this worker's share of a held-out evaluation.
    fn report(&self, py: Python<'_>, epoch: u64, loss_sum: f64, correct: u64, count: u64) -> PyResult<()> {
        self.on(py, |inner, _| inner.run()?.report(epoch, &Evaluation { loss_sum, correct, count }))
    }

    /// Writes a checkpoint into a folder, by default the job's; returns the checkpoint's folder.
    #[pyo3(signature = (folder=None))]
    fn save(&self, py: Python<'_>, folder: Option<PathBuf>) -> PyResult<String> {
        let path = self.on(py, |inner, _| inner.run()?.save(folder.as_deref()))?;
        let path = std::path::absolute(&path).unwrap_or(path);
        Ok(path.to_string_lossy().into_owned())
    }

    /// The loop has ended: waits for the other workers; then the final weights are there.
    fn finish(&self, py: Python<'_>) -> PyResult<()> {
        self.on(py, |inner, _| inner.run()?.finish())
    }

    /// Ends this worker's part, at once if it has not finished.
    fn leave(&self, py: Python<'_>) -> PyResult<()> {
        if process::id() != self.process {
            return Ok(());
        }
        self.not_inside(py)?;
        let left = py.detach(|| self.inner.lock().run.take().map(OpenRun::leave));
        left.map_or(Ok(()), |()| logs::hand_over(py))
    }

    /// Its last step and mode, whether nothing is left to train, bytes moved and time waited.
    fn status<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let (done, mode, over, c) = self.on(py, |inner, _| {
            let run = inner.run()?;
            Ok((run.done().0, run.mode().1.to_string(), run.is_over(), run.counters()))
        })?;
        let d = PyDict::new(py);
        d.set_item("name", &self.name)?;
        d.set_item("step", done)?;
        d.set_item("mode", mode)?;
        d.set_item("over", over)?;
        d.set_item("bytes_pushed", c.bytes_pushed)?;
        d.set_item("bytes_pulled", c.bytes_pulled)?;
        d.set_item("wait_seconds", c.waited.as_secs_f64())?;
        d.set_item("rejoins", c.rejoins)?;
        d.set_item("dropped", c.dropped)?;
        d.set_item("skipped", c.skipped)?;
        Ok(d)
    }
}

/// A group of parameters from Python: values, rate, decay, its own optimizer in TOML, whether it maximizes.
fn group(of: (usize, f64, f64, Option<String>, bool)) -> Result<ParamGroup, String> {
    let (values, lr, weight_decay, optimizer, maximize) = of;
    let optimizer = optimizer.map(|table| paraft_worker::cli::optimizer(&table)).transpose()?;
    Ok(ParamGroup { values, lr, weight_decay, maximize, optimizer })
}

impl Inner {
    fn run(&mut self) -> Result<&mut OpenRun, WorkerError> {
        self.run.as_mut().ok_or_else(|| WorkerError::Misuse("this run is over: it was left".into()))
    }

    fn ready(&mut self, lengths: &[usize], tensor: usize, address: usize) -> Result<(), WorkerError> {
        let len = *lengths
            .get(tensor)
            .ok_or_else(|| WorkerError::Misuse(format!("there is no tensor {tensor}")))?;
        let Some(run) = self.run.as_mut() else { return self.run().map(drop) };
        if address == 0 {
            self.zeros.resize(self.zeros.len().max(len), 0.0);
            return run.ready(tensor, &self.zeros[..len]);
        }
        memory::with(address, len, |gradient| run.ready(tensor, gradient))
            .unwrap_or_else(|| Err(WorkerError::Misuse(format!("no gradient lies at {address:#x}"))))
    }

    fn wait(
        &mut self,
        wait: impl FnOnce(&mut OpenRun) -> Result<StepOutcome, WorkerError>,
    ) -> Result<StepState, WorkerError> {
        let went = wait(self.run()?)?;
        Ok((went.done.0, went.moved, went.over))
    }
}

impl Run {
    /// Runs a call without the interpreter lock.
    fn on<T: Send>(
        &self,
        py: Python<'_>,
        act: impl FnOnce(&mut Inner, &[usize]) -> Result<T, WorkerError> + Send,
    ) -> PyResult<T> {
        if process::id() != self.process {
            let why = "this run belongs to the process that made it, and this one was forked off it: only that one may train. A \
                       DataLoader's workers need no run; a worker of its own calls paraft.init()";
            return Err(errors::misuse(py, why));
        }
        self.not_inside(py)?;
        let done = py.detach(|| {
            let mut inner = self.inner.lock();
            self.holder.store(this_thread(), Relaxed);
            let done = act(&mut inner, &self.lengths);
            self.holder.store(0, Relaxed);
            done
        });
        logs::hand_over(py)?;
        done.map_err(|e| self.raised(py, &e))
    }

    /// Fails if this thread is already inside a call: a signal handler that runs during a wait would deadlock.
    fn not_inside(&self, py: Python<'_>) -> PyResult<()> {
        if self.holder.load(Relaxed) != this_thread() {
            return Ok(());
        }
        let why = "this run waits for its servers, and the handler of a signal asks it for more: have the handler set a flag, and make \
                   the call behind that which waits";
        Err(errors::misuse(py, why))
    }

    fn raised(&self, py: Python<'_>, e: &WorkerError) -> PyErr {
        // The waiting caller receives the exception of the signal handler.
        self.signals.take().unwrap_or_else(|| errors::raised(py, e))
    }
}

fn job_of(py: Python<'_>, job: Option<PathBuf>, set: &[String]) -> PyResult<Job> {
    let job = match job {
        Some(path) => Job::load(&path, set),
        None => Job::parse("", Path::new("paraft.init"), set),
    };
    job.map_err(|e| errors::config(py, &e.to_string()))
}

/// Whether each step of a job is a round of all its workers.
#[pyfunction]
pub fn in_rounds_of_all(py: Python<'_>, job: Option<PathBuf>, set: Vec<String>) -> PyResult<bool> {
    Ok(job_of(py, job, &set)?.train.in_rounds_of_all())
}

/// A thread's identity: the address of its copy of a thread-local variable.
fn this_thread() -> usize {
    thread_local!(static MARK: u8 = const { 0 });
    MARK.with(|mark| std::ptr::from_ref(mark) as usize)
}

impl Drop for Run {
    fn drop(&mut self) {
        let run = self.inner.get_mut().run.take();
        if process::id() != self.process {
            // Its threads belong to the other process, and nothing here may wait for them.
            std::mem::forget(run);
        } else if let Some(run) = run {
            Python::attach(|py| py.detach(|| run.leave()));
        }
    }
}
