//! Where relative paths start: on the command line in the shell's working directory, in a job file in its folder.

use crate::common::*;

const ROWS: &str = "[model]\nkind = \"logistic-regression\"\n[data]\nkind = \"csv\"\npath = \"rows.csv\"\n[train]\nworkers = 1\nbatch = 4\n\
                    [cluster]\nservers = 1\nreplicas = 1\nelection_ms = 200\n";

/// A folder for job files, and one for the shell.
fn folders() -> (tempfile::TempDir, PathBuf, PathBuf) {
    let scratch = tempfile::tempdir().expect("scratch");
    let whole = scratch.path().canonicalize().expect("it is there");
    let [jobs, shell] = ["jobs", "shell"].map(|name| whole.join(name));
    [&jobs, &shell].iter().for_each(|folder| fs::create_dir(folder).expect("a folder"));
    job(&jobs, ROWS);
    (scratch, jobs, shell)
}

fn rows(file: &Path) {
    let rows: String = (0..40).map(|i| format!("0.{},0.{i:02},{}\n", i % 7, i % 2)).collect();
    fs::write(file, rows).expect("a file");
}

fn in_shell(shell: &Path, args: &[&str]) -> Output {
    paraft().current_dir(shell).args(args).output().expect("paraft starts")
}

/// The data's path in a resolved job.
fn data_path(file: &Path) -> PathBuf {
    let job: toml::Table = fs::read_to_string(file).expect("a resolved job").parse().expect("TOML");
    job["data"]["path"].as_str().expect("a path").into()
}

#[test]
fn a_set_path_is_the_shells_for_train_and_for_sweep() {
    let (_scratch, _jobs, shell) = folders();
    rows(&shell.join("own.csv"));
    let job = "../jobs/job.toml";
    let set = ["--set", "data.path=own.csv", "--json"];
    let train = [&["train", job, "--run-dir", "run", "--no-dashboard"][..], &set[..]].concat();
    let out = in_shell(&shell, &train);
    assert!(out.status.success(), "{}", text(&out.stderr));
    assert_eq!(data_path(&shell.join("run/job.toml")), shell.join("own.csv"));

    fs::write(shell.join("space.toml"), "[space]\n\"train.batch\" = [2, 4]\n").expect("a file");
    let space = ["--space", "space.toml", "--search", "grid", "--parallel", "1", "--run-dir", "sweep"];
    let out = in_shell(&shell, &[&["sweep", job][..], &space[..], &set[..]].concat());
    assert!(out.status.success(), "{}", text(&out.stderr));
    assert_eq!(data_path(&shell.join("sweep/best.toml")), shell.join("own.csv"));
}

#[test]
fn a_path_in_a_job_file_is_relative_to_the_files_folder() {
    let (_scratch, jobs, shell) = folders();
    rows(&jobs.join("rows.csv"));
    let out =
        in_shell(&shell, &["train", "../jobs/job.toml", "--run-dir", "run", "--no-dashboard", "--json"]);
    assert!(out.status.success(), "{}", text(&out.stderr));
    assert_eq!(data_path(&shell.join("run/job.toml")), jobs.join("rows.csv"));
    let wrong = ["train", "../jobs/job.toml", "--set", "data.path=rows.csv", "--no-dashboard"];
    let out = in_shell(&shell, &wrong);
    assert_eq!(out.status.code(), Some(65), "{}", text(&out.stderr));
    let missing = shell.join("rows.csv").display().to_string();
    contains(&text(&out.stderr), &[&missing]);
}
