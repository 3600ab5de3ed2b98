//! `paraft._paraft`: a worker of a job, for a training loop in Python.
//!
//! Everything that decides anything is [`paraft_worker::OpenRun`]'s; this hands it memory of the interpreter's ([`memory`]), lets go
//! of the interpreter while it waits and looks after its signals meanwhile ([`signals`]), and says errors and log lines in Python's
//! way ([`errors`], [`logs`]).

mod digest;
mod errors;
mod logs;
mod memory;
mod run;
mod signals;

use pyo3::prelude::*;

#[pymodule]
fn _paraft(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add("__version__", env!("CARGO_PKG_VERSION"))?;
    m.add_class::<run::Run>()?;
    m.add("WHOLE_BYTES", digest::WHOLE_BYTES)?;
    m.add_function(wrap_pyfunction!(digest::digest, m)?)?;
    m.add_function(wrap_pyfunction!(end_with, m)?)?;
    Ok(())
}

/// Ends this process, as SIGTERM would, when the other end of this descriptor is closed: a launcher that is gone has nobody who
/// waits for its workers.
#[pyfunction]
fn end_with(descriptor: i32) -> PyResult<()> {
    let pipe = std::fs::File::open(format!("/proc/self/fd/{descriptor}"))?;
    paraft_host::lifeline::end_with(pipe);
    Ok(())
}
