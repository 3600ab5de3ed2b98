//! Slurm: servers and workers as the elements of two job arrays. Slurm requeues each element alone
//! while the others continue.
//!
//! The scripts rely on this behaviour of Slurm 22.05. A step receives the signals of preemption and of
//! the time limit; a batch script receives none. A job is over when its script ends, for any reason.
//! Only the loss of a node, preemption and `scontrol requeue` restart a job. So `paraft` runs as a
//! step, and the script decides by its exit code whether to requeue.

use crate::{
    engine::{Artifact, Engine, Handle, Member, ProcessOutput, run, said_in},
    error::{EngineError, Kind},
    fleet::{Files, Fleet, Part, inside, quoted},
    place::Role,
};
use std::{
    path::Path,
    time::{Duration, Instant},
};

/// Slurm by `sbatch`, `squeue`, `scancel`.
pub struct Slurm;

/// `squeue`'s state of an element that is ending.
const ENDING_STATE: &str = "COMPLETING";

/// How long to wait for ending elements before a change of the workers' number fails. By default Slurm
/// kills an ending element after 30 s.
const END_TIMEOUT: Duration = Duration::from_secs(45);

/// The name of a role's script, in the run's folder.
fn script(role: Role) -> String {
    format!("{role}s.sbatch")
}

impl Engine for Slurm {
    fn name(&self) -> &'static str {
        "slurm"
    }

    fn render(&self, fleet: &Fleet) -> Result<Vec<Artifact>, EngineError> {
        let dir = fleet.run_dir.to_string_lossy();
        // In file names a backslash disables Slurm's own symbols.
        if dir.contains('\\') {
            return Err(EngineError::usage(format!("`{dir}`: Slurm takes no such path"))
                .help("choose a --run-dir without backslashes"));
        }
        let one = |role| {
            fleet.refuse_line_breaks(
                [&*dir, &fleet.program].into_iter().chain(fleet.args.iter().map(String::as_str)),
            )?;
            Ok(Artifact { name: script(role), text: batch(fleet, role, fleet.part(role)) })
        };
        fleet.roles().map(one).collect()
    }

    fn submit(&self, fleet: &Fleet) -> Result<Handle, EngineError> {
        let mut handle = Handle { engine: self.name().into(), ..Handle::default() };
        for role in fleet.roles() {
            match submitted(&fleet.run_dir.join(script(role)), &[]) {
                Ok(id) => handle.parts.push((role, id)),
                Err(e) => {
                    // An incomplete fleet would wait for the rest.
                    let _ = self.cancel(&handle, &fleet.run_dir);
                    return Err(e);
                }
            }
        }
        Ok(handle)
    }

    fn members(&self, handle: &Handle, _: &Path) -> Result<Vec<Member>, EngineError> {
        let mut members = Vec::new();
        for (role, id) in &handle.parts {
            // Slurm forgets a job that ended long ago. It is an error to ask for one such job; of several,
            // squeue lists those that it knows.
            let ids = format!("{id},{id}");
            let text = run("squeue", &["-h", "-r", "-j", &ids, "-o", "%K|%T|%N|%r|%S"])?;
            members.extend(text.lines().filter_map(|line| member(*role, line)));
        }
        members.sort_by_key(|m| (m.role, m.index));
        Ok(members)
    }

    fn cancel(&self, handle: &Handle, _: &Path) -> Result<(), EngineError> {
        let ids: Vec<&str> = handle.parts.iter().map(|(_, id)| &**id).collect();
        if ids.is_empty() { Ok(()) } else { run("scancel", &ids).map(drop) }
    }

    fn logs(&self, _: &Handle, dir: &Path, lines: usize) -> Result<Vec<ProcessOutput>, EngineError> {
        said_in(dir, lines)
    }

    fn scale(&self, handle: &Handle, dir: &Path, workers: u32) -> Result<Handle, EngineError> {
        let mut handle = handle.clone();
        let next = self.settled(&handle, dir)?.iter().filter_map(|m| m.index).max().map_or(0, |n| n + 1);
        if workers > next {
            let array = format!("--array={next}-{}", workers - 1);
            let id = submitted(&dir.join(script(Role::Worker)), &[&array])?;
            handle.parts.push((Role::Worker, id));
            return Ok(handle);
        }
        for (_, id) in handle.parts.iter().filter(|(role, _)| *role == Role::Worker) {
            for index in workers..next {
                // One of several arrays contains it.
                let _ = run("scancel", &["--quiet", &format!("{id}_{index}")]);
            }
        }
        Ok(handle)
    }
}

impl Slurm {
    /// Its workers, once none of them is ending: Slurm does not tell then whether the element is
    /// requeued.
    fn settled(&self, handle: &Handle, dir: &Path) -> Result<Vec<Member>, EngineError> {
        let until = Instant::now() + END_TIMEOUT;
        loop {
            let mut workers = self.members(handle, dir)?;
            workers.retain(|m| m.role == Role::Worker);
            let Some(ending) = workers.iter().find(|m| m.state == ENDING_STATE) else { return Ok(workers) };
            if Instant::now() >= until {
                let which = ending.index.map_or_else(String::new, |n| format!(" {n}"));
                let why = format!("Slurm is still ending worker{which} on {}", ending.node);
                return Err(EngineError::new(Kind::Unavailable, why)
                    .help("wait until `squeue` shows it no more, then ask again"));
            }
            std::thread::sleep(Duration::from_millis(500));
        }
    }
}

fn submitted(file: &Path, more: &[&str]) -> Result<String, EngineError> {
    let file = file.to_string_lossy();
    let args: Vec<&str> = ["--parsable"].iter().chain(more).copied().chain([&*file]).collect();
    let said = run("sbatch", &args)?;
    // With several clusters the cluster's name follows.
    Ok(said.lines().last().unwrap_or_default().split(';').next().unwrap_or_default().trim().to_string())
}

/// Parses a line of the format in [`Slurm::members`].
fn member(role: Role, line: &str) -> Option<Member> {
    let [index, state, node, reason, start] = line.split('|').collect::<Vec<_>>().try_into().ok()?;
    let why = match state {
        "RUNNING" => format!("since {start}"),
        _ if start == "N/A" => reason.to_string(),
        _ => format!("{reason}, not before {start}"),
    };
    Some(Member { role, index: index.parse().ok(), state: state.into(), node: node.into(), why })
}

/// Quotes a word of a directive. `sbatch` ends a word at a blank and ignores text after a `#`. In
/// double quotes it keeps all characters except quotes and backslashes. Releases before 18.08 honour a
/// `#` even there.
fn word(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+=:,@%".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        return text.to_string();
    }
    let mut quoted = String::from("\"");
    for c in text.chars() {
        if ['"', '\\', '#'].contains(&c) {
            quoted.push('\\');
        }
        quoted.push(c);
    }
    quoted + "\""
}

fn batch(fleet: &Fleet, role: Role, part: &Part) -> String {
    let Fleet { name, run_dir, grace, restarts, .. } = fleet;
    let dir = run_dir.display();
    let mut text = format!(
        "#!/bin/bash\n\
         # One {role} in each element. Slurm requeues an element whose node is lost or that is preempted; the others continue.\n\
         #SBATCH --job-name={name}-{role}s\n\
         #SBATCH --array=0-{last}\n\
         #SBATCH --nodes=1 --ntasks=1 --cpus-per-task={cpus}\n",
        last = part.count - 1,
        cpus = part.cpus,
    );
    let mut add = |line: &str| text.push_str(&format!("#SBATCH {line}\n"));
    if role == Role::Server && fleet.spread {
        // Arrays have no other way to keep two elements off one node.
        add("--exclusive");
    }
    if part.gpus > 0 {
        add(&format!("--gpus={}", part.gpus));
    }
    if let Some(memory) = &part.memory {
        add(&word(&format!("--mem={memory}")));
    }
    if let Some(time) = &fleet.time {
        add(&word(&format!("--time={time}")));
        // Signals the step this long before the limit: it hands over, and the element is requeued.
        add(&format!("--signal=USR1@{}", grace + 30));
    }
    add("--requeue --open-mode=append");
    add(&word(&format!("--output={}/{role}-%a.said", dir.to_string().replace('%', "%%"))));
    add(&word(&format!("--chdir={dir}")));
    fleet.args.iter().for_each(|arg| add(&word(arg)));
    let (run, job) = (run_dir.to_string_lossy(), inside(run_dir, "job.toml"));
    let words = fleet.words(role, &Files { run: &run, job: &job, data: None, certs: "" }, true);
    let command: Vec<_> = [&fleet.program].into_iter().chain(&words).map(|w| quoted(w)).collect();
    let command = command.join(" ");
    text.push_str(&format!(
        "\n\
         # A step of its own: it gets the signals that this script does not.\n\
         srun --ntasks=1 --kill-on-bad-exit=0 {command}\n\
         code=$?\n\
         case $code in\n\
         \x20   69|74|129|1[3-9][0-9]) ;;  # no servers, no room, a signal: again\n\
         \x20   *) exit $code ;;           # done, or the same would fail again\n\
         esac\n\
         # Preempted, out of time, or killed; but one that is being cancelled is not RUNNING any more. Not by $SLURM_JOB_ID:\n\
         # that of the last element is also the array's.\n\
         me=${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID\n\
         if [ \"${{SLURM_RESTART_COUNT:-0}}\" -lt {restarts} ] && [ \"$(squeue -h -j \"$me\" -o %T)\" = RUNNING ]; then\n\
         \x20   scontrol requeue \"$me\" && sleep 60\n\
         fi\n\
         exit $code\n"
    ));
    text
}

#[cfg(test)]
#[path = "slurm_tests.rs"]
mod tests;
