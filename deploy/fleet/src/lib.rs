//! A fleet as processes of this machine, and queries of any fleet; shared by the commands of `paraft`,
//! the laboratory and the tests of the binary.
//!
//! - [`process`]: a process that ends with this one. [`fleet`]: a job's servers and workers as such
//!   processes. [`script`]: a user's script as a worker.
//! - [`launch`]: a job on its own fleet, from its start to its record; `watch`: handles the end of its
//!   processes; `observe`: elections and other events of its servers; [`launcher_log`]: what it notes.
//!   [`run_dir`]: the folder of a run; `files`: its files. [`track`]: exports the run to TensorBoard and
//!   MLflow during training.
//! - [`pages`]: the addresses of the servers' live pages.
//! - [`scale`]: the number of workers that train in a run.
//! - [`task`]: one of an engine's tasks, which together form a fleet; `gather`: their bootstrap.
//! - [`shared`]: the shared state of processes that an engine starts one by one: bootstrap or join.
//!   [`notice`]: the announced end of this host.
//! - [`existing`]: a job on an existing fleet.
//! - [`submitted`]: a run that was submitted to an engine, by its folder. [`targets`]: the fleet that
//!   a command asks or changes (`--fleet`). [`ended`]: a run that has ended, by its folder.
//! - [`ask`]: queries of servers and of the control group; [`view`]: the health of a fleet. [`orders`]:
//!   orders to a fleet. [`rows`]: rows of tables on a fleet.
//! - [`faults`]: the fault points of a fleet that was started with them.
//! - [`again`]: the command that continues an interrupted one.
//! - [`http`]: HTTP to trackers and inference engines.
//! - [`failure`]: the failure of a command. [`progress`], [`table`]: the output of a run.
//!
//! Tests build their own fleets inside one process, since they run servers and workers on threads and
//! inspect them.

/// `println!` for a reader that may close the pipe early (`head`), which is no error.
#[macro_export]
macro_rules! out {
    ($($t:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stdout(), $($t)*);
    }};
}

pub mod again;
pub mod ask;
pub mod certs;
pub mod ended;
pub mod existing;
pub mod failure;
pub mod faults;
mod files;
pub mod fleet;
mod gather;
pub mod http;
pub mod launch;
pub mod launcher_log;
pub mod notice;
mod observe;
pub mod orders;
pub mod pages;
pub mod process;
pub mod progress;
pub mod rows;
pub mod run_dir;
pub mod scale;
pub mod script;
pub mod shared;
pub mod submitted;
pub mod table;
pub mod targets;
pub mod task;
pub mod track;
pub mod view;
mod watch;

pub use watch::RESTART_DELAY;
