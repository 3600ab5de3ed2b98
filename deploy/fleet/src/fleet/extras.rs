//! The optional features of a fleet.

use crate::{existing::ExistingFleet, faults::link::Link, track::Sweep};
use paraft_worker::slow::Straggle;
use std::{collections::BTreeMap, sync::Arc};

/// Optional features of a fleet.
#[derive(Clone, Debug, Default)]
pub struct Extras {
    /// Fault points.
    pub faults: bool,
    /// Each process traces this many steps into [`TRACE_FOLDER`](paraft_trace::TRACE_FOLDER) of the run's folder.
    pub trace: Option<u64>,
    /// Slow workers, with the factor on their step time.
    pub slow: BTreeMap<u32, f64>,
    /// Occasional slow steps of all workers.
    pub straggle: Option<Straggle>,
    /// The simulated link between workers and servers; needs `cluster.transport = "tcp"`.
    pub link: Option<Link>,
    /// The simulated link between servers.
    pub between: Option<Link>,
    /// The servers belong to an existing fleet.
    pub on: Option<ExistingFleet>,
    /// The first Ctrl-C stops the job, as `paraft stop` does; not for scripts, which hear it themselves.
    pub stops_on_interrupt: bool,
    /// One of many runs of a command: its notes are the same each time and are omitted.
    pub of_many: bool,
    /// Write the run's report, before the servers end.
    pub reports: bool,
    /// The sweep that this run is a trial of, for trackers.
    pub of: Option<Arc<Sweep>>,
}
