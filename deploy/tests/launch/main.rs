//! `paraft launch` as a user meets it: scripts of sh and of Python's standard library as workers, real processes, real signals.
//! What the `paraft` package does with a script's variables is not its matter; where workers must train, the script runs
//! `paraft worker` with them.

#[path = "../cli/common.rs"]
#[allow(dead_code, unused_imports)]
mod common;

mod ends;
mod place;
mod role;
mod trains;
mod wrong;

use common::*;
use std::os::unix::fs::PermissionsExt;

/// A folder for a script and its run.
struct Place {
    scratch: tempfile::TempDir,
}

impl Place {
    fn new() -> Self {
        Self { scratch: tempfile::tempdir().expect("scratch") }
    }

    fn run_dir(&self) -> PathBuf {
        self.scratch.path().join("run")
    }

    /// An executable script of this name.
    fn script(&self, name: &str, text: &str) -> PathBuf {
        let path = self.scratch.path().join(name);
        fs::write(&path, text).expect("script");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("executable");
        path
    }

    /// `paraft launch` with one server, up to the script.
    fn launch(&self, flags: &[&str]) -> Command {
        let mut c = paraft();
        c.current_dir(self.scratch.path()).env_remove("OMP_NUM_THREADS");
        c.args(["launch", "--servers", "1", "--run-dir"]).arg(self.run_dir()).args(flags);
        c.stdout(Stdio::piped()).stderr(Stdio::piped());
        c
    }

    fn read(&self, name: &str) -> String {
        fs::read_to_string(self.run_dir().join(name)).unwrap_or_default()
    }

    /// Waits until a file of the run's folder has this text.
    fn says(&self, name: &str, words: &str) {
        wait(&format!("{name} to say {words}"), || match self.read(name) {
            text if text.contains(words) => Ok(()),
            text => Err(format!("{text}; {:?}", processes(self.scratch.path()))),
        });
    }

    /// Waits until every process is gone whose command line names the folder.
    fn is_empty(&self) {
        wait("every process to end", || match processes(self.scratch.path()) {
            left if left.is_empty() => Ok(()),
            left => Err(format!("{left:?}")),
        });
    }
}

/// Exit code, standard output, standard error.
fn ended(child: Child) -> (Option<i32>, String, String) {
    let out = child.wait_with_output().expect("output");
    (out.status.code(), text(&out.stdout), text(&out.stderr))
}

fn run_out(mut command: Command) -> (Option<i32>, String, String) {
    ended(command.spawn().expect("paraft starts"))
}

/// Whether there is a Python to run scripts; the others are of sh.
fn python() -> bool {
    let there = Command::new("python3").args(["-c", ""]).status().is_ok_and(|s| s.success());
    if !there {
        eprintln!("SKIPPED: there is no python3");
    }
    there
}
