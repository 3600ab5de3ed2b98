//! `paraft._paraft`: a worker of a job, for a training loop in Python.
//!
//! [`paraft_worker::OpenRun`] makes all decisions. This crate passes it the interpreter's memory ([`memory`]),
//! releases the interpreter during waits and checks its signals meanwhile ([`signals`]), and converts errors and
//! log lines to Python's ([`errors`], [`logs`]). [`data`] reads sparse data; [`rows`]: tables; [`reader`]: versions for
//! processes that do not train.

mod data;
mod digest;
mod errors;
mod logs;
mod memory;
mod reader;
mod rows;
mod run;
mod signals;

use pyo3::prelude::*;

#[pymodule]
fn _paraft(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add("__version__", env!("CARGO_PKG_VERSION"))?;
    m.add_class::<run::Run>()?;
    m.add("WHOLE_BYTES", digest::WHOLE_BYTES)?;
    m.add_function(wrap_pyfunction!(digest::digest, m)?)?;
    m.add_class::<reader::Reader>()?;
    m.add_class::<reader::Version>()?;
    m.add_class::<data::SparseData>()?;
    m.add_class::<data::ClickMetrics>()?;
    m.add_function(wrap_pyfunction!(data::area_under_curve, m)?)?;
    m.add_function(wrap_pyfunction!(end_with, m)?)?;
    m.add_function(wrap_pyfunction!(run::in_rounds_of_all, m)?)?;
    m.add_function(wrap_pyfunction!(rows::check_table, m)?)?;
    Ok(())
}

/// Ends this process like SIGTERM when the other end of this descriptor closes: then the launcher is gone, and no
/// process waits for its workers.
#[pyfunction]
fn end_with(descriptor: i32) -> PyResult<()> {
    let pipe = std::fs::File::open(format!("/proc/self/fd/{descriptor}"))?;
    paraft_host::lifeline::end_with(pipe);
    Ok(())
}
