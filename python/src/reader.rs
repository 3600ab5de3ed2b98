//! Versions of a job's weights, for processes that do not train.

use crate::{errors, logs, memory};
use paraft_tls::{Access, access::As};
use paraft_worker::{
    Layout, TensorKind,
    job::matches,
    reader::{ReadError, Reader as Versions, ValueType, Want, WholeVersion},
};
use parking_lot::Mutex;
use pyo3::prelude::*;
use std::{path::PathBuf, sync::Arc, time::Duration};
use tokio::runtime::{self, Runtime};

/// How often a wait looks for the interpreter's signals.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

/// Name, shape, and whether it is trained.
type Tensor = (String, Vec<usize>, bool);

/// Reads versions of one job.
#[pyclass]
pub struct Reader {
    runtime: Runtime,
    versions: Mutex<Versions>,
    layout: Arc<Layout>,
    dtype: ValueType,
    /// The tensors that it reads, by their places in the layout.
    chosen: Vec<usize>,
}

/// A whole version.
#[pyclass]
pub struct Version {
    version: WholeVersion,
    layout: Arc<Layout>,
    dtype: ValueType,
    chosen: Vec<usize>,
}

fn raised(py: Python<'_>, error: &ReadError) -> PyErr {
    let class = match error {
        ReadError::Timeout(_) => "VersionTimeoutError",
        ReadError::Ended { .. } => "JobEndedError",
        ReadError::NotKept { .. } => "VersionNotKeptError",
        ReadError::OtherFounding(_) => "OtherFoundingError",
        ReadError::Refused(_) => "ConfigError",
        ReadError::Damaged(_) => "DataError",
    };
    errors::of_class(py, class, &error.to_string())
}

/// Runs a future without the interpreter lock; a signal's exception ends it.
fn waited<T: Send>(
    py: Python<'_>,
    runtime: &Runtime,
    future: impl Future<Output = Result<T, ReadError>> + Send,
) -> PyResult<T> {
    let done = py.detach(|| {
        runtime.block_on(async {
            let mut future = std::pin::pin!(future);
            loop {
                tokio::select! {
                    done = &mut future => return Ok(done),
                    () = tokio::time::sleep(LOOK_INTERVAL) => Python::attach(|py| {
                        py.check_signals().and_then(|()| logs::hand_over(py))
                    })?,
                }
            }
        })
    });
    done.and_then(|done: Result<T, ReadError>| done.map_err(|e| raised(py, &e)))
}

#[pymethods]
impl Reader {
    #[new]
    #[pyo3(signature = (*, servers, job, dtype, only, timeout, certs=None))]
    fn new(
        py: Python<'_>,
        servers: Vec<String>,
        job: &str,
        dtype: &str,
        only: Option<Vec<String>>,
        timeout: f64,
        certs: Option<PathBuf>,
    ) -> PyResult<Self> {
        let dtype: ValueType = dtype.parse().map_err(|e: String| errors::config(py, &e))?;
        let access = match &certs {
            None => Access::of_environment(As::Worker),
            certs => Access::of(certs.as_deref(), false, As::Worker),
        };
        access.map_err(|e| errors::config(py, &format!("PARAFT_CERTS: {e}")))?.set();
        let runtime = runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.map_err(|e| errors::misuse(py, &format!("no runtime: {e}")))?;
        let opened = Versions::open(&servers, job, dtype, Duration::from_secs_f64(timeout));
        let mut versions = waited(py, &runtime, opened)?;
        let layout = Arc::new(versions.layout().clone());
        let tensors = layout.tensors();
        let is_chosen =
            |name: &str| only.as_ref().is_none_or(|only| only.iter().any(|one| matches(one, name)));
        let chosen: Vec<usize> = (0..tensors.len()).filter(|i| is_chosen(&tensors[*i].name)).collect();
        if chosen.is_empty() {
            let names: Vec<_> = tensors.iter().take(10).map(|t| t.name.as_str()).collect();
            let only = only.unwrap_or_default().join(", ");
            let why =
                format!("no tensor of job `{job}` is named {only}; some of its names: {}", names.join(", "));
            return Err(errors::config(py, &why));
        }
        if only.is_some() {
            versions.only(is_chosen);
        }
        Ok(Self { runtime, versions: Mutex::new(versions), layout, dtype, chosen })
    }

    /// From now on it shares what it reads with readers of this host.
    fn share(&self, py: Python<'_>) -> PyResult<()> {
        self.versions.lock().share().map_err(|e| raised(py, &e))
    }

    /// The newest version from `at_least` on, the version `exactly`, or one that was the newest at most `max_age` seconds ago.
    fn next(
        &self,
        py: Python<'_>,
        at_least: u64,
        exactly: Option<u64>,
        max_age: Option<f64>,
        timeout: f64,
    ) -> PyResult<Version> {
        let want = match (exactly, max_age) {
            (Some(step), _) => Want::Exactly(step),
            (None, Some(age)) => Want::MaxAge(Duration::from_secs_f64(age)),
            (None, None) => Want::AtLeast(at_least),
        };
        let Some(mut versions) = self.versions.try_lock() else {
            return Err(errors::misuse(
                py,
                "this reader waits for a version in another thread: open one for each thread",
            ));
        };
        let version = waited(py, &self.runtime, versions.next(want, Duration::from_secs_f64(timeout)))?;
        let (layout, dtype, chosen) = (self.layout.clone(), self.dtype, self.chosen.clone());
        Ok(Version { version, layout, dtype, chosen })
    }

    /// What it reads.
    fn tensors(&self) -> Vec<Tensor> {
        let of = |i: &usize| {
            let t = &self.layout.tensors()[*i];
            (t.name.clone(), t.shape.clone(), t.kind != TensorKind::Buffer)
        };
        self.chosen.iter().map(of).collect()
    }
}

#[pymethods]
impl Version {
    #[getter]
    fn step(&self) -> u64 {
        self.version.step
    }

    #[getter]
    fn reached(&self) -> u64 {
        self.version.reached
    }

    #[getter]
    fn is_last(&self) -> bool {
        self.version.is_last
    }

    #[getter]
    fn digest(&self) -> u64 {
        self.version.digest
    }

    #[getter]
    fn founding(&self) -> u64 {
        self.version.foundings.values().next().copied().unwrap_or_default()
    }

    #[getter]
    fn received(&self) -> u64 {
        self.version.received
    }

    /// Copies the values of a tensor of [`Reader::tensors`] to an address with room for so many bytes.
    fn copy(&self, py: Python<'_>, tensor: usize, address: usize, bytes: usize) -> PyResult<()> {
        let copied = memory::with_bytes_mut(address, bytes, |to| {
            let place = self.chosen.get(tensor)?;
            self.version.copy(&self.layout, self.dtype, *place, to)
        });
        match copied {
            Some(Some(())) => Ok(()),
            Some(None) => Err(errors::misuse(py, &format!("tensor {tensor} has not {bytes} bytes"))),
            None => Err(errors::misuse(py, &format!("no memory for a tensor lies at {address:#x}"))),
        }
    }
}
