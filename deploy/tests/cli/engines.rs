//! A job on an engine, as far as can be seen without one: what is printed is what is submitted, and by which commands.

use crate::common::*;
use std::os::unix::fs::{MetadataExt, PermissionsExt};

/// A folder of programs that precedes all others in the PATH, with a log of their arguments.
pub struct Tools {
    scratch: tempfile::TempDir,
}

impl Tools {
    /// With a program of this name, which notes its arguments in `told` and then does this.
    pub fn new(name: &str, then: &str) -> Self {
        let scratch = tempfile::tempdir().expect("scratch");
        let tools = Self { scratch };
        fs::create_dir(tools.path("bin")).expect("a folder");
        let path = tools.path("bin").join(name);
        let told = tools.path("told");
        fs::write(&path, format!("#!/bin/sh\necho \"$*\" >>{}\n{then}\n", told.display()))
            .expect("a program");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("a program");
        tools
    }

    fn path(&self, name: &str) -> PathBuf {
        self.scratch.path().join(name)
    }

    /// The search path on which they stand before all others.
    pub fn first_in_path(&self) -> String {
        format!("{}:{}", self.path("bin").display(), std::env::var("PATH").unwrap_or_default())
    }

    fn paraft(&self, args: &[&str]) -> Output {
        let mut command = paraft();
        command.current_dir(self.scratch.path()).args(args);
        command.env("PATH", self.first_in_path()).output().expect("paraft starts")
    }

    /// What it prints, if it ends well.
    fn prints(&self, args: &[&str]) -> String {
        let out = self.paraft(args);
        assert!(out.status.success(), "{args:?}: {}", text(&out.stderr));
        text(&out.stdout)
    }

    /// What the programs were told since last asked.
    pub fn told(&self) -> String {
        let told = fs::read_to_string(self.path("told")).unwrap_or_default();
        let _ = fs::remove_file(self.path("told"));
        told.replace(&*self.scratch.path().to_string_lossy(), "")
    }

    /// Whether each file of this folder was printed as it is.
    fn all_printed(&self, run: &str, printed: &str, names: &[&str]) {
        for name in names {
            let text = fs::read_to_string(self.path(run).join(name)).expect("a file");
            assert!(printed.contains(&text), "{name} was not printed as it is:\n{printed}");
        }
    }
}

const PODS: &str = r#"case "$*" in
*"get pods"*) cat <<'JSON'
{"items": [
 {"metadata": {"name": "t-servers-0", "labels": {"app.kubernetes.io/component": "server", "apps.kubernetes.io/pod-index": "0"}},
  "spec": {"nodeName": "n1"}, "status": {"phase": "Running", "startTime": "then", "containerStatuses": [{"restartCount": 0, "state": {"running": {}}}]}},
 {"metadata": {"name": "t-workers-1-abc", "labels": {"app.kubernetes.io/component": "worker", "batch.kubernetes.io/job-completion-index": "1"}},
  "spec": {}, "status": {"phase": "Pending"}}]}
JSON
;;
*"logs "*) printf 'first\nlast\n' ;;
esac"#;

#[test]
fn a_kubernetes_job_is_applied_by_the_users_kubectl() {
    let tools = Tools::new("kubectl", PODS);
    job(tools.scratch.path(), &digits("bsp", 3, 1));
    let flags = ["--on", "kubernetes", "--image", "x:1", "--arg=--namespace=ml", "--run-dir", "run"];
    let printed = tools.prints(&[&["submit", "job.toml", "--dry-run"][..], &flags].concat());
    assert!(!tools.path("run").exists() && tools.told().is_empty(), "--dry-run has done something");

    let said = tools.prints(&[&["submit", "job.toml"][..], &flags].concat());
    assert!(said.contains("kubernetes statefulset/t-servers"), "{said}");
    let told = "--namespace=ml create -k /run --dry-run=server\n--namespace=ml create -k /run\n";
    assert_eq!(tools.told(), told);
    tools.all_printed("run", &printed, &["kustomization.yaml", "job.yaml", "servers.yaml", "workers.yaml"]);

    let status = tools.prints(&["fleet", "status", "run"]);
    assert!(status.contains("kubernetes: Running on n1, since then"), "{status}");
    assert!(status.contains("worker 1: kubernetes: Pending"), "{status}");
    assert_eq!(tools.prints(&["fleet", "logs", "run", "--lines", "1"]), "server-0  last\nworker-1  last\n");
    tools.told();
    tools.prints(&["fleet", "scale", "run", "--workers", "1"]);
    tools.prints(&["fleet", "down", "run"]);
    let told = "--namespace=ml patch job/t-workers --type=merge --patch {\"spec\":{\"completions\":1,\"parallelism\":1}}\n\
                --namespace=ml delete --ignore-not-found -k run\n";
    assert_eq!(tools.told(), told);
}

#[test]
fn what_the_cluster_does_not_admit_is_said_and_starts_nothing() {
    let tools = Tools::new("kubectl", "echo 'Error from server (AlreadyExists): jobs \"t\"' >&2; exit 1");
    job(tools.scratch.path(), &digits("bsp", 3, 1));
    let out = tools.paraft(&["submit", "job.toml", "--on", "jobset", "--image", "x:1", "--run-dir", "run"]);
    assert_eq!(out.status.code(), Some(78), "{}", text(&out.stderr));
    let said = text(&out.stderr);
    assert!(said.contains("AlreadyExists") && said.contains("--set name=t-2"), "{said}");
    assert_eq!(tools.told(), "create -k /run --dry-run=server\n");
    for (more, why) in [
        (&["--time", "1h"][..], "--time"),
        (&["--resume"], "--set train.init"),
        (&["--server-disk", "1Gi"], "--on kubernetes"),
    ] {
        let base = ["submit", "job.toml", "--on", "jobset", "--image", "x:1", "--dry-run"];
        let out = tools.paraft(&[&base[..], more].concat());
        assert_eq!(out.status.code(), Some(2), "{}", text(&out.stderr));
        assert!(text(&out.stderr).contains(why), "{}", text(&out.stderr));
    }
}

#[test]
fn units_are_linked_enabled_asked_for_and_disabled() {
    let show = r#"case "$*" in *show*)
printf 'Id=paraft-t-server@1.service\nActiveState=active\nSubState=running\nStateChangeTimestamp=then\nNRestarts=1\nExecMainStatus=0\n';;
esac"#;
    let tools = Tools::new("systemctl", show);
    job(tools.scratch.path(), &digits("bsp", 3, 1));
    let printed =
        tools.prints(&["fleet", "up", "job.toml", "--on", "systemd", "--run-dir", "run", "--dry-run"]);
    tools.prints(&["fleet", "up", "job.toml", "--on", "systemd", "--run-dir", "run"]);
    tools.all_printed("run", &printed, &["paraft-t-server@.service"]);
    let root = fs::metadata("/proc/self").expect("it runs").uid() == 0;
    let mine = if root { "" } else { "--user " };
    let all = [0, 1, 2].map(|n| format!("paraft-t-server@{n}.service")).join(" ");
    let told = format!("{mine}link /run/paraft-t-server@.service\n{mine}enable --now {all}\n");
    assert_eq!(tools.told(), told);
    let status = tools.prints(&["fleet", "status", "run"]);
    assert!(
        status.contains("server 1: systemd: active (running), since then, started again 1 times"),
        "{status}"
    );
    tools.told();
    tools.prints(&["fleet", "down", "run"]);
    assert_eq!(tools.told(), format!("{mine}disable --now {all}\n"));
}

#[test]
fn hosts_are_named_or_it_is_refused_before_anything_is_done() {
    let tools = Tools::new("ssh", "exit 1");
    job(tools.scratch.path(), &digits("bsp", 3, 1));
    fs::write(tools.path("hosts"), "a\nb\n").expect("a file");
    for (flags, code, why) in [
        (&[][..], 2, "--hosts"),
        (&["--hosts", "none"], 2, "--hosts none"),
        (&["--hosts", "hosts"], 2, "3 servers, and 2 hosts"),
        (&["--hosts", "hosts", "--together", "--resume"], 2, "--resume"),
        (&["--hosts", "hosts", "--together"], 78, "a: ssh"),
    ] {
        let out = tools.paraft(&[&["submit", "job.toml", "--on", "ssh"][..], flags].concat());
        assert_eq!(out.status.code(), Some(code), "{flags:?}: {}", text(&out.stderr));
        assert!(text(&out.stderr).contains(why), "{why}: {}", text(&out.stderr));
        assert_eq!(tools.told().is_empty(), code == 2, "{flags:?}");
    }
}
