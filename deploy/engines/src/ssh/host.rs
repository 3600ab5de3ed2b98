//! The files for a host, and the script that runs one process there.

use super::{addresses, placed, unreadable};
use crate::{
    certs::FILES,
    error::EngineError,
    fleet::{Files, Fleet, inside, quoted},
    place::Role,
};
use std::{fs, path::Path};

/// The script on a host, in the run's folder.
pub(super) const SCRIPT: &str = "start.sh";

/// The folder of a role's certificates, in the run's folder.
fn certs(role: Role) -> String {
    format!("certs-{role}")
}

/// The files that each host needs; some for one role only.
pub(super) fn carried(fleet: &Fleet) -> Result<Vec<(Option<Role>, String, String)>, EngineError> {
    let mut files =
        vec![(None, "job.toml".to_string(), fleet.job.clone()), (None, SCRIPT.into(), script(fleet)?)];
    for role in fleet.roles() {
        for (own, file) in fleet.certs.of(role).into_iter().flat_map(|own| FILES.map(|file| (own, file))) {
            let path = Path::new(own).join(file);
            let text = fs::read_to_string(&path).map_err(|e| unreadable(&path, &e))?;
            files.push((Some(role), format!("{}/{file}", certs(role)), text));
        }
    }
    Ok(files)
}

/// The line that ends a file in the input of a host's shell.
const END_OF_FILE: &str = "=== end of a file of paraft ===";

/// Copies the files, atomically and readable only by the user.
pub(super) fn put(
    fleet: &Fleet,
    parts: &super::Parts,
    files: &[(Option<Role>, String, String)],
) -> Result<String, EngineError> {
    let dir = quoted(&fleet.run_dir.to_string_lossy());
    let program = quoted(&fleet.program);
    let mut text = format!(
        "umask 077\nmkdir -p {dir} && cd {dir} || exit 74\n\
         command -v {program} >/dev/null || {{ echo there is no {program}: name it with --program >&2; exit 78; }}\n"
    );
    for (role, name, what) in files {
        if role.is_some_and(|role| parts.iter().all(|(r, _)| *r != role)) {
            continue;
        }
        if what.contains(END_OF_FILE) {
            return Err(
                EngineError::usage(format!("{name} has the line `{END_OF_FILE}`")).help("take it out")
            );
        }
        if let Some((folder, _)) = name.split_once('/') {
            text.push_str(&format!("mkdir -p {folder} && chmod 700 {folder} || exit 74\n"));
        }
        let what = what.strip_suffix('\n').unwrap_or(what);
        text.push_str(&format!(
            "cat >{name}.part <<'{END_OF_FILE}' && mv {name}.part {name} || exit 74\n{what}\n{END_OF_FILE}\n"
        ));
    }
    Ok(text)
}

/// Starts a process; its script keeps running after the connection ends.
pub(super) fn start(dir: &Path, role: Role, index: u32) -> String {
    let said = quoted(&inside(dir, &format!("{role}-{index}.said")));
    let script = quoted(&inside(dir, SCRIPT));
    format!("setsid sh {script} {role} {index} >>{said} 2>&1 </dev/null &\n")
}

/// The script that runs one process and restarts it.
pub(super) fn script(fleet: &Fleet) -> Result<String, EngineError> {
    let parts = placed(fleet)?;
    let run = fleet.run_dir.to_string_lossy();
    let job = inside(&fleet.run_dir, "job.toml");
    let command = |role: Role| {
        let folder = inside(&fleet.run_dir, &certs(role));
        let words = fleet.words(role, &Files { run: &run, job: &job, data: None, certs: &folder }, true);
        let all: Vec<_> = [&fleet.program].into_iter().chain(&words).map(|word| quoted(word)).collect();
        all.join(" ")
    };
    Ok(format!(
        "#!/bin/sh\n\
         # One process of a run on this host: start.sh ROLE N. It is started again while its exit code says that the same may work.\n\
         umask 077\n\
         cd {dir} || exit 74\n\
         name=$1-$2\n\
         export PARAFT_INDEX=\"$2\" PARAFT_SERVERS={servers}\n\
         echo $$ >\"$name.pid\"\n\
         rm -f \"$name.code\"\n\
         stopped= child= tries=0 code=143\n\
         trap 'stopped=1; [ -z \"$child\" ] || kill -TERM \"$child\"' TERM INT HUP\n\
         while [ -z \"$stopped\" ]; do\n\
         \x20   case $1 in\n\
         \x20   server) {server} & ;;\n\
         \x20   worker) {worker} & ;;\n\
         \x20   esac\n\
         \x20   child=$!\n\
         \x20   wait \"$child\"; code=$?\n\
         \x20   # A signal to this script ends `wait` before the process has ended.\n\
         \x20   while kill -0 \"$child\" 2>/dev/null; do wait \"$child\"; code=$?; done\n\
         \x20   child=\n\
         \x20   case $code in\n\
         \x20   69|74|129|1[3-9][0-9]) ;;  # no servers, no room, a signal: again\n\
         \x20   *) break ;;                # done, or the same would fail again\n\
         \x20   esac\n\
         \x20   [ \"$tries\" -lt {restarts} ] || break\n\
         \x20   tries=$((tries + 1))\n\
         \x20   export PARAFT_ATTEMPT=$tries\n\
         \x20   sleep 1\n\
         done\n\
         echo \"$code\" >\"$name.code\"\n\
         rm -f \"$name.pid\"\n\
         exit \"$code\"\n",
        dir = quoted(&run),
        servers = quoted(&addresses(fleet, &parts).join(",")),
        server = command(Role::Server),
        worker = command(Role::Worker),
        restarts = fleet.restarts,
    ))
}

#[cfg(test)]
#[path = "host_tests.rs"]
mod tests;
