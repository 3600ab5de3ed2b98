//! A fleet as processes of this machine, and how to ask one: what the commands of the product, the laboratory and the tests of
//! the binary share.
//!
//! - [`process`]: a process that ends with this one. [`fleet`]: a job's servers and workers as such processes.
//!   [`script`]: a worker that is a user's script.
//! - [`launch`]: a job on a fleet of its own, from its start to its record; `watch`: what happens when a process of it ends.
//!   [`run_dir`]: the folder of a run; `files`: what lies in it. [`track`]: the run in TensorBoard and MLflow while it goes on.
//! - [`pages`]: where the servers of a fleet serve their live page.
//! - [`scale`]: how many workers of a run train.
//! - [`task`]: the part of an engine's task of the fleet that the tasks are together; `gather`: how they meet.
//! - [`shared`]: what the processes of a fleet share that an engine has started one by one: found or join.
//!   [`notice`]: that this host will be taken away.
//! - [`existing`]: a job on a fleet that stands already.
//! - [`submitted`]: a run that an engine has, by its folder. [`targets`]: which servers a command means.
//! - [`ask`]: what servers say of themselves, and the control group of all; [`view`]: how the fleet is by that. [`orders`]: what they are
//!   to do.
//! - [`faults`]: the fault points, of a fleet that was started with them.
//! - [`failure`]: how a command ends. [`progress`], [`table`]: what a user sees of a run.
//!
//! What it is not: fleets in one process are the tests' own, since they put servers and workers on threads and look into
//! them.

/// `println!` to a reader that may close the pipe early (head): not an error worth a panic.
#[macro_export]
macro_rules! out {
    ($($t:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stdout(), $($t)*);
    }};
}

pub mod ask;
pub mod certs;
pub mod existing;
pub mod failure;
pub mod faults;
mod files;
pub mod fleet;
mod gather;
pub mod launch;
pub mod notice;
pub mod orders;
pub mod pages;
pub mod process;
pub mod progress;
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
