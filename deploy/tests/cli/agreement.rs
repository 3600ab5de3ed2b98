//! Workers that must not train together are told so, and which of what they read differs.

use crate::common::*;

/// Twelve rows of two values and a class; `odd` is a value of the seventh.
fn table(folder: &Path, name: &str, odd: &str) -> PathBuf {
    let row = |i: usize| format!("{}.5,{},{}\n", i, if i == 6 { odd } else { "3" }, i % 2);
    let path = folder.join(name);
    fs::write(&path, (0..12).map(row).collect::<String>()).expect("data");
    path
}

/// How the second of two workers ends that differ by what `other` gives for its command.
fn second_of_two(body: &str, other: impl Fn(&Fleet, &mut Command)) -> (Option<i32>, String) {
    let scratch = tempfile::tempdir().expect("scratch");
    let data = table(scratch.path(), "data.csv", "7");
    let body = body.replace("DATA", &data.to_string_lossy());
    let fleet = Fleet::start(scratch.path(), Some(&body));
    fleet.all("serving");
    let worker = |rank: u32| {
        let run_dir = scratch.path().join(format!("run-{rank}"));
        fs::create_dir(&run_dir).expect("run folder");
        fleet.worker(rank, &run_dir)
    };
    let first = worker(0).stderr(Stdio::null()).spawn().expect("worker");
    let _first = Held(first);
    wait("the first worker to join", || {
        let out = text(&fleet.ask(&["status", "--json"]).stdout);
        let joined = |l: &str| {
            let line: Option<Value> = serde_json::from_str(l).ok();
            line.is_some_and(|l| l.to_string().contains("\"worker\":0"))
        };
        if out.lines().any(joined) { Ok(()) } else { Err(out) }
    });
    let mut second = worker(1);
    other(&fleet, &mut second);
    let out = second.output().expect("worker");
    (out.status.code(), text(&out.stderr))
}

const BODY: &str = "name = \"t\"
[model]
kind = \"logistic-regression\"
[data]
kind = \"csv\"
path = \"DATA\"
[train]
batch = 2
epochs = 3
[optimizer]
kind = \"momentum\"
lr = 0.25
[cluster]
election_ms = 200
";

#[test]
fn workers_with_different_data_do_not_train_together() {
    let (code, said) = second_of_two(BODY, |fleet, second| {
        let data = table(&fleet.folder, "other.csv", "8");
        second.args(["--set", &format!("data.path={}", data.display())]);
    });
    assert_eq!(code, Some(78), "{said}");
    contains(
        &said,
        &[
            "the same job file, model and data",
            "there `data 10+2 samples of 2",
            "here `data 10+2 samples of 2",
        ],
    );
}

#[test]
fn a_worker_with_half_a_job_file_learns_what_it_lacks() {
    let (code, said) = second_of_two(BODY, |fleet, second| {
        let whole = fs::read_to_string(fleet.job.as_ref().expect("a job file")).expect("job file");
        let half = whole.split("epochs").next().expect("the first half");
        let path = fleet.folder.join("half.toml");
        fs::write(&path, half).expect("job file");
        let list = fleet.list();
        *second = paraft();
        second.arg("worker").arg(&path).args(["--rank", "1", "--fleet", &list, "--set", "name=t"]);
    });
    assert_eq!(code, Some(78), "{said}");
    contains(&said, &["use the same job file", "there `", "epochs 3", "here `", "epochs 1"]);
}

#[test]
fn a_worker_with_another_model_learns_which_tensors_differ() {
    let (code, said) = second_of_two(BODY, |_, second| {
        second.args(["--set", "model.kind=mlp", "--set", "model.hidden=[5]"]);
    });
    assert_eq!(code, Some(78), "{said}");
    contains(&said, &["there `", "tensor 1 ", "2x2", "here `", "2x5", "5x2"]);
}
