//! Workers on a GPU, which is a test double of CUDA's libraries: everything but the silicon is as it is there.

use crate::common::*;

/// The environment of a machine with GPUs; `None`: skipped, for want of a C++ compiler.
struct Gpus {
    libraries: PathBuf,
    scratch: tempfile::TempDir,
    settings: Vec<(String, String)>,
}

impl Gpus {
    fn begin(test: &str) -> Option<Self> {
        if paraft_fake_cuda::skipped(test) {
            return None;
        }
        let libraries = paraft_fake_cuda::library_dir().expect("not skipped");
        let scratch = tempfile::tempdir().expect("scratch");
        Some(Self { libraries, scratch, settings: Vec::new() })
    }

    fn with(mut self, name: &str, value: &str) -> Self {
        self.settings.push((format!("PARAFT_FAKE_CUDA_{name}"), value.into()));
        self
    }

    fn paraft(&self, args: &[&str]) -> Command {
        let mut c = paraft();
        c.args(args)
            .env("LD_LIBRARY_PATH", &self.libraries)
            .env("PARAFT_CACHE", self.scratch.path().join("cache"))
            .envs(self.settings.iter().map(|(k, v)| (k, v)));
        if args.first() == Some(&"worker") {
            c.env("PARAFT_INSECURE", "1"); // as the servers that are started by hand here
        }
        c
    }

    fn train(&self, body: &str, name: &str, more: &[&str]) -> Output {
        let job = job(self.scratch.path(), body);
        let dir = self.dir(name);
        let args =
            ["train", job.to_str().expect("utf-8"), "--json", "--run-dir", dir.to_str().expect("utf-8")];
        self.paraft(&[&args[..], more].concat()).output().expect("paraft starts")
    }

    fn dir(&self, name: &str) -> PathBuf {
        self.scratch.path().join(name)
    }
}

fn summary(out: &Output) -> Value {
    assert!(out.status.success(), "{}", text(&out.stderr));
    serde_json::from_slice(&out.stdout).expect("one object")
}

#[test]
fn a_fleet_on_gpus_learns_what_one_on_cpus_does() {
    let Some(gpus) = Gpus::begin("a_fleet_on_gpus_learns_what_one_on_cpus_does") else { return };
    let gpus = gpus.with("DEVICES", "2");
    let body = digits("bsp", 3, 3);
    let on = |device: &str, precision: &str| {
        let precision = format!("train.precision={precision}");
        summary(&gpus.train(
            &body,
            &format!("{device}-{precision}"),
            &["--device", device, "--set", &precision],
        ))
    };
    let cpu = on("cpu", "f32");
    let loss = |s: &Value| s["final_loss"].as_f64().expect("a loss");
    // Other roundings, the same training.
    for (precision, allowed) in [("f32", 1e-3), ("bf16", 0.05), ("f16", 0.05)] {
        let gpu = on("cuda", precision);
        assert_eq!(gpu["samples"], cpu["samples"]);
        assert!((loss(&gpu) - loss(&cpu)).abs() < allowed, "{precision}: {gpu} and {cpu}");
    }
    // Both workers, one device each.
    let used: Vec<bool> = (0..2)
        .map(|rank| {
            let log = gpus.dir("cuda-train.precision=f32").join(format!("worker-{rank}.log"));
            fs::read_to_string(log).expect("log").contains(&format!("cuda:{rank}"))
        })
        .collect();
    assert_eq!(used, [true, true]);
}

/// With layers that come and go the weights are those of the whole model, bit for bit; what is cut learns the same up to rounding.
#[test]
#[ignore = "takes minutes: .ci/nightly"]
fn a_model_that_is_not_all_there_learns_the_same_on_gpus() {
    let name = "a_model_that_is_not_all_there_learns_the_same_on_gpus";
    let Some(gpus) = Gpus::begin(name) else { return };
    let gpus = gpus.with("DEVICES", "2");
    let body = digits("bsp", 3, 3);
    let learn = |name: &str, device: &str, sets: &[&str]| {
        let sets = sets.iter().flat_map(|s| ["--set", s]);
        let more: Vec<&str> = ["--device", device].into_iter().chain(sets).collect();
        summary(&gpus.train(&body, name, &more))
    };
    let loss = |s: &Value| s["final_loss"].as_f64().expect("a loss");
    let cpu = learn("cpu", "cpu", &["train.precision=f32"]);
    let whole = learn("whole", "cuda", &["train.precision=bf16"]);
    let streamed = learn("streamed", "cuda", &["train.precision=bf16", "memory.resident=2"]);
    assert_eq!(loss(&streamed), loss(&whole), "{streamed} and {whole}");
    for (name, sets) in [
        ("stages", &["parallel.pipeline=2", "parallel.micro_batches=2"][..]),
        ("slices", &["parallel.tensor=2", "parallel.pipeline=1"]),
    ] {
        let cut = learn(name, "cuda", &[&["train.precision=f32"], sets].concat());
        assert!((loss(&cut) - loss(&cpu)).abs() < 1e-3, "{name}: {cut} and {cpu}");
        let log = gpus.dir(name).join("worker-0-rank-1.log");
        assert!(fs::read_to_string(log).expect("log").contains("cuda:"), "{name}");
    }
    // An update late.
    let late = learn("2bw", "cuda", &["parallel.pipeline=2", "parallel.schedule=\"2bw\""]);
    assert!(late["final_accuracy"].as_f64().expect("accuracy") > 0.5, "{late}");
    let out = gpus.train(
        &body,
        "f16",
        &["--device", "cuda", "--set", "train.precision=f16", "--set", "memory.resident=2"],
    );
    let said = text(&out.stderr);
    assert!(!out.status.success() && said.contains("bf16"), "{said}");
}

#[test]
fn gradients_leave_the_gpu_encoded_in_every_mode() {
    let Some(gpus) = Gpus::begin("gradients_leave_the_gpu_encoded_in_every_mode") else { return };
    for (mode, encoding, sampler) in
        [("asp", "int8", "static"), ("ssp:2", "bf16", "leased"), ("bsp", "f16", "static")]
    {
        let more = ["train.encoding", "train.sampler"];
        let [encoding, sampler] = [encoding, sampler].map(str::to_string);
        let sets = [format!("{}={encoding}", more[0]), format!("{}={sampler}", more[1])];
        let out = gpus.train(
            &digits(mode, 3, 3),
            &format!("{encoding}-{sampler}"),
            &["--device", "cuda", "--set", &sets[0], "--set", &sets[1]],
        );
        let s = summary(&out);
        assert!(s["final_accuracy"].as_f64().expect("accuracy") > 0.5, "{mode} {encoding}: {s}");
    }
}

#[test]
fn a_failed_gpu_ends_its_worker_and_names_the_kernel() {
    let name = "a_failed_gpu_ends_its_worker_and_names_the_kernel";
    let Some(gpus) = Gpus::begin(name) else { return };
    let servers = free_addresses(3);
    let body = digits("asp", 3, 2) + &format!("addresses = {servers:?}\n");
    let path = job(gpus.scratch.path(), &body);
    let _fleet: Vec<_> = (0..3)
        .map(|id| {
            let mut c = paraft();
            c.env("PARAFT_INSECURE", "1")
                .arg("server")
                .arg(&path)
                .args(["--id", &id.to_string()])
                .stderr(Stdio::null());
            Held(c.arg("--data").arg(gpus.dir(&format!("s{id}"))).spawn().expect("server"))
        })
        .collect();
    let worker = |rank: &str, device: &str| {
        let mut c = gpus.paraft(&["worker"]);
        c.arg(&path).args(["--rank", rank, "--device", device]).stderr(Stdio::piped());
        c
    };
    let cpu = worker("0", "cpu").spawn().expect("a worker");
    let fault = "cuLaunchKernel:softmax_xent_f32:1:701";
    let mut broken = worker("1", "cuda");
    // The first step's: later ones launch graphs.
    broken.env("PARAFT_FAKE_CUDA_FAIL", fault);
    let out = broken.output().expect("a worker");
    let error = text(&out.stderr);
    assert!(!out.status.success());
    for part in ["worker w1", "softmax_xent_f32", "rows 16", "cols 10", "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"]
    {
        assert!(error.contains(part), "{part} is missing in: {error}");
    }
    let out = cpu.wait_with_output().expect("a worker");
    assert!(out.status.success(), "the other one goes on: {}", text(&out.stderr));
}

#[test]
fn a_missing_gpu_is_an_error_before_the_start() {
    let scratch = tempfile::tempdir().expect("scratch");
    let job = job(scratch.path(), &digits("bsp", 1, 1));
    let job = job.to_str().expect("utf-8");
    let dir = scratch.path().join("run");
    let out = paraft()
        .args(["train", job, "--device", "cuda", "--run-dir", dir.to_str().expect("utf-8")])
        .env("LD_LIBRARY_PATH", scratch.path())
        .output()
        .expect("paraft starts");
    let error = text(&out.stderr);
    // A machine with a driver trains.
    if !out.status.success() {
        assert_eq!(out.status.code(), Some(69), "{error}");
        assert!(error.contains("CUDA driver is not found") && error.contains("--gpus all"), "{error}");
        assert!(!dir.exists(), "nothing was begun");
    }
    let out = run(&["train", job, "--device", "gpu"]);
    assert!(text(&out.stderr).contains("auto, cpu, cuda or cuda:N"), "{}", text(&out.stderr));
}

#[test]
#[ignore = "takes minutes: .ci/nightly"]
fn groups_of_gpus_learn_what_groups_on_cpus_do() {
    let Some(gpus) = Gpus::begin("groups_of_gpus_learn_what_groups_on_cpus_do") else { return };
    let gpus = gpus.with("DEVICES", "2").with("BACKGROUND", "1");
    for (model, epochs) in [("mlp\"\nhidden = [32]", 4), ("convnet\"", 1)] {
        let body = digits("bsp", 3, epochs).replace("mlp\"\nhidden = [32]", model);
        let on = |device: &str| {
            let name = format!("{device}-{epochs}");
            let set = ["--set", "train.workers=1", "--set", "train.precision=f32", "--device", device];
            summary(&gpus.train(&body, &name, &[&set[..], &["--group-size", "2"]].concat()))
        };
        let (gpu, cpu) = (on("cuda"), on("cpu"));
        assert_eq!(gpu["samples"], cpu["samples"]);
        let loss = |s: &Value| s["final_loss"].as_f64().expect("a loss");
        assert!((loss(&gpu) - loss(&cpu)).abs() < 1e-3, "{gpu} and {cpu}");
        for rank in 0..2 {
            let log = gpus.dir(&format!("cuda-{epochs}")).join(format!("worker-0-rank-{rank}.log"));
            assert!(fs::read_to_string(log).expect("log").contains(&format!("cuda:{rank}")));
        }
    }
}

#[test]
fn gpus_without_servers_in_the_step_learn_what_cpus_do() {
    let Some(gpus) = Gpus::begin("gpus_without_servers_in_the_step_learn_what_cpus_do") else { return };
    let gpus = gpus.with("DEVICES", "2").with("BACKGROUND", "1");
    let body = digits("bsp", 3, 4) + "[optimizer]\nkind = \"adam\"\nlr = 0.005\n[checkpoint]\n";
    let on = |device: &str, precision: &str| {
        let precision = format!("train.precision={precision}");
        let set = ["--set", "train.workers=1", "--set", "train.exchange=all-reduce", "--set", &precision];
        let name = format!("{device}-{precision}");
        let s = summary(&gpus.train(
            &body,
            &name,
            &[&set[..], &["--device", device, "--group-size", "2"]].concat(),
        ));
        assert!(gpus.dir(&name).join("checkpoints/latest").exists());
        s
    };
    let cpu = on("cpu", "f32");
    let loss = |s: &Value| s["final_loss"].as_f64().expect("a loss");
    for (precision, allowed) in [("f32", 1e-3), ("bf16", 0.05)] {
        let gpu = on("cuda", precision);
        assert_eq!(gpu["samples"], cpu["samples"]);
        assert!((loss(&gpu) - loss(&cpu)).abs() < allowed, "{precision}: {gpu} and {cpu}");
    }
}

#[test]
#[ignore = "takes minutes: .ci/nightly"]
fn ranks_continue_after_a_gpu_rank_is_killed() {
    let name = "ranks_continue_after_a_gpu_rank_is_killed";
    let Some(gpus) = Gpus::begin(name) else { return };
    let gpus = gpus.with("DEVICES", "3").with("BACKGROUND", "1");
    for exchange in ["servers", "all-reduce"] {
        outlives(&gpus, exchange);
    }
}

/// A group of three, of which one after the other is killed.
fn outlives(gpus: &Gpus, exchange: &str) {
    let epochs = if exchange == "servers" { 60 } else { 200 };
    let path = job(gpus.scratch.path(), &digits("bsp", 3, epochs));
    let dir = gpus.dir(exchange);
    let mut train = gpus.paraft(&["train"]);
    train.arg(&path).arg("--run-dir").arg(&dir).args(["--json", "--device", "cuda", "--group-size", "3"]);
    train.args(["--set", "train.workers=1", "--set", &format!("train.exchange={exchange}")]);
    train.stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = train.spawn().expect("paraft starts");
    let steps = || Launcher::metrics_in(&dir).iter().filter(|e| e["event"] == "train").count();
    for (rank, left) in [(1, "[0, 2]"), (0, "[2]")] {
        let before = steps();
        wait("training to go on", || match steps() {
            n if n > before + 2 => Ok(()),
            n => Err(format!("{n} training lines after {before}")),
        });
        kill(pid_of(&dir, &format!("--rank {rank}")), Signal::SIGKILL).expect("SIGKILL");
        wait("the others to stand", || {
            let log = fs::read_to_string(dir.join("worker-0-rank-2.log")).unwrap_or_default();
            let stands = |l: &str| l.contains("the group stands") && l.contains(left);
            if log.lines().any(stands) { Ok(()) } else { Err(log) }
        });
    }
    let out = child.wait_with_output().expect("output");
    let s = summary(&out);
    assert_eq!(s["ranks_lost"], 2, "{s}");
    assert!(s["final_accuracy"].as_f64().expect("accuracy") > 0.9, "{s}");
}

#[test]
fn ranks_on_cpus_and_on_gpus_make_no_group() {
    let Some(gpus) = Gpus::begin("ranks_on_cpus_and_on_gpus_make_no_group") else { return };
    let servers = free_addresses(1);
    let body = digits("bsp", 1, 2) + &format!("addresses = {servers:?}\n");
    let path = job(gpus.scratch.path(), &body);
    let mut c = paraft();
    c.env("PARAFT_INSECURE", "1")
        .arg("server")
        .arg(&path)
        .args(["--id", "0", "--data"])
        .arg(gpus.dir("s0"))
        .stderr(Stdio::null());
    let _server = Held(c.spawn().expect("server"));
    let rank = |rank: &str, device: &str| {
        let mut c = gpus.paraft(&["worker"]);
        c.arg(&path).args(["--rank", rank, "--group-size", "2", "--device", device]);
        c.stderr(Stdio::piped()).spawn().expect("a rank")
    };
    let both = [rank("0", "cpu"), rank("1", "cuda")];
    for one in both {
        let out = one.wait_with_output().expect("output");
        let error = text(&out.stderr);
        assert_eq!(out.status.code(), Some(78), "{error}");
        contains(&error, &["1 of 2 ranks", "compute on a GPU", "train.device"]);
    }
}

#[test]
#[ignore = "takes minutes: .ci/nightly"]
fn bench_gpu_measures_steps_and_kernels() {
    let Some(gpus) = Gpus::begin("bench_gpu_measures_steps_and_kernels") else { return };
    let few = ["--tiny", "--rows", "3", "--steps", "2", "--repeats", "1", "--json"];
    let out = gpus.paraft(&[&["bench", "gpu"], &few[..]].concat()).output().expect("paraft starts");
    let figures: Vec<Value> =
        text(&out.stdout).lines().map(|l| serde_json::from_str(l).expect("one object a line")).collect();
    assert!(out.status.success(), "{}", text(&out.stderr));
    let of = |what: &str| figures.iter().filter(|f| f["bench"] == format!("gpu {what}")).count();
    // Each kernel in two precisions; three models.
    assert_eq!((of("copy"), of("LayerNorm"), of("encode int8"), of("step")), (2, 2, 2, 3), "{figures:#?}");
    assert!(figures.iter().all(|f| f["value"].as_f64().is_some_and(|v| v > 0.0)), "{figures:#?}");
}

#[test]
#[ignore = "takes minutes: .ci/nightly"]
fn doctor_names_libraries_and_devices_and_tests_them() {
    let Some(gpus) = Gpus::begin("doctor_names_libraries_and_devices_and_tests_them") else { return };
    let out = gpus.paraft(&["doctor", "--json"]).output().expect("paraft starts");
    let said = text(&out.stdout);
    for part in ["CUDA 13.0", "libnvrtc.so", "libcublas.so", "cuda:0", "compute capability 9.0"] {
        assert!(said.contains(part), "{part} is missing in: {said}");
    }
    let broken = gpus.with("FAIL", "cuLaunchKernel:layernorm_f32:1:701");
    let out = broken.paraft(&["doctor", "--selftest"]).output().expect("paraft starts");
    let said = text(&out.stdout);
    assert!(
        !out.status.success() && said.contains("[FAIL] cuda:0 f32") && said.contains("layernorm_f32"),
        "{said}"
    );
    assert!(said.contains("[ OK ] cuda:0 bf16"), "{said}");
}
