//! The temporary files of a benchmark.

use paraft_fleet::failure::Failure;
use paraft_worker::exit;
use std::path::Path;
use tempfile::TempDir;

/// A folder that is deleted at the end.
pub fn folder() -> Result<TempDir, Failure> {
    tempfile::tempdir().map_err(|e| Failure::new(exit::IO, format!("no temporary folder: {e}")).help(HELP))
}

const HELP: &str = "temporary files go into another folder with TMPDIR";

/// The failure of a benchmark's own file or folder.
pub fn write(path: &Path, e: impl std::fmt::Display) -> Failure {
    Failure::write(path, e).help(HELP)
}
