//! Converts a worker's errors to exceptions of `paraft.errors`, one class per kind.

use paraft_worker::{ErrorKind, WorkerError};
use pyo3::{prelude::*, types::PyModule};

/// The exception of an error.
pub fn raised(py: Python<'_>, e: &WorkerError) -> PyErr {
    let class = match (e, e.kind()) {
        (WorkerError::Misuse(_), _) => "MisuseError",
        (_, ErrorKind::Unavailable) => "UnavailableError",
        (_, ErrorKind::Config) => "ConfigError",
        (_, ErrorKind::Data) => "DataError",
        (_, ErrorKind::Io) => "RecordError",
        (_, ErrorKind::Diverged) => "DivergedError",
        (_, ErrorKind::Failed | ErrorKind::Interrupted) => "ParaftError",
    };
    let raised = of_class(py, class, &e.to_string());
    if e.is_rank_taken() {
        let _ = raised.value(py).setattr("rank_taken", true);
    }
    raised
}

/// An invalid call.
pub fn misuse(py: Python<'_>, why: &str) -> PyErr {
    of_class(py, "MisuseError", why)
}

/// An invalid setting.
pub fn config(py: Python<'_>, why: &str) -> PyErr {
    of_class(py, "ConfigError", why)
}

/// An exception of a class of `paraft.errors`.
pub fn of_class(py: Python<'_>, class: &str, text: &str) -> PyErr {
    let made = PyModule::import(py, "paraft.errors").and_then(|m| m.getattr(class)?.call1((text,)));
    made.map_or_else(|e| e, PyErr::from_value)
}
