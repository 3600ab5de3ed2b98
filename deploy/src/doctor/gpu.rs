//! What `doctor` says of GPUs: the libraries, the devices, and whether they compute what they should.

use super::row::{Row, Verdict, row};
use paraft_compute::cuda::{
    self, Context,
    library::{self, Part},
};
use paraft_models::{CudaOptions, Precision, selftest};

/// The libraries, with what is disabled where one is missing; then the devices.
pub fn rows() -> Vec<Row> {
    // A machine without a GPU is complete; one with a driver and without the rest is not.
    let no_gpu = library::find(Part::Driver).is_err();
    let missing = if no_gpu { Verdict::Absent } else { Verdict::Warn };
    let library = |part: Part| match library::find(part) {
        Err(why) => row(part.name(), missing, why, part.without()),
        Ok(found) => row(part.name(), Verdict::Ok, version(part, &found.file), ""),
    };
    let mut rows: Vec<Row> = Part::ALL.into_iter().map(library).collect();
    if no_gpu {
        return rows;
    }
    match cuda::count() {
        Err(e) => rows.push(row("GPUs", Verdict::Warn, e, "no GPU can be used; workers compute on the CPU")),
        Ok(0) => {
            let means = "workers compute on the CPU; in a container, start it with --gpus all";
            rows.push(row("GPUs", Verdict::Warn, "the driver sees none", means));
        }
        Ok(n) => rows.extend((0..n).map(device)),
    }
    rows
}

fn version(part: Part, file: &str) -> String {
    let version = match part {
        Part::Driver => cuda::version().map(|v| format!("for CUDA {}.{}", v / 1000, v % 1000 / 10)),
        Part::Nvrtc => cuda::nvrtc_version().map(|(a, b)| format!("{a}.{b}")),
        Part::Cublas | Part::CublasLt => Ok(String::new()),
        Part::Nccl => cuda::nccl_version().map(|(a, b, c)| format!("{a}.{b}.{c}")),
    };
    match version {
        Ok(v) if v.is_empty() => file.to_string(),
        Ok(v) => format!("{v} ({file})"),
        Err(e) => e.to_string(),
    }
}

fn device(ordinal: u32) -> Row {
    let what = format!("cuda:{ordinal}");
    let look = || {
        let context = Context::new(ordinal)?;
        let (free, total) = context.memory()?;
        let (major, minor) = context.compute();
        let gb = |bytes: u64| bytes as f64 / 1e9;
        Ok(format!(
            "{}, compute capability {major}.{minor}, {:.1} of {:.1} GB free",
            context.model(),
            gb(free),
            gb(total)
        ))
    };
    match look() {
        Ok(found) => row(what, Verdict::Ok, found, ""),
        Err::<String, paraft_compute::DeviceError>(e) => {
            row(what, Verdict::Fail, e, "this GPU cannot be used")
        }
    }
}

/// The devices in one line.
pub fn devices() -> String {
    let count = library::find(Part::Driver).map_err(|_| ()).and_then(|_| cuda::count().map_err(|_| ()));
    let names = (0..count.unwrap_or(0))
        .map(|i| Context::new(i).map_or_else(|e| e.to_string(), |c| c.name().to_string()));
    std::iter::once("cpu".to_string()).chain(names).collect::<Vec<_>>().join(", ")
}

/// Every case on every device in every precision.
pub fn selftest() -> Vec<Row> {
    const SEED: u64 = 1;
    let count = cuda::count().unwrap_or(0);
    if count == 0 {
        return vec![row("selftest", Verdict::Absent, "nothing to test: there is no GPU", "")];
    }
    let precisions = [
        ("f32", Precision::F32),
        ("tf32", Precision::Tf32),
        ("bf16", Precision::Bf16),
        ("f16", Precision::F16),
    ];
    let all = (0..count).flat_map(|ordinal| precisions.map(|(name, precision)| (ordinal, name, precision)));
    all.flat_map(|(ordinal, name, precision)| {
        let what = format!("cuda:{ordinal} {name}");
        match selftest::run(CudaOptions { ordinal, precision, ..CudaOptions::default() }, SEED) {
            Err(e) => vec![row(what, Verdict::Fail, e, "train on another device or in another precision")],
            Ok(cases) => {
                let wrong: Vec<_> = cases.iter().filter(|c| !c.holds()).collect();
                if wrong.is_empty() {
                    return vec![row(
                        what,
                        Verdict::Ok,
                        format!("{} cases agree with the CPU", cases.len()),
                        "",
                    )];
                }
                let means = "what this device computes is wrong: please report it with this output";
                wrong
                    .iter()
                    .map(|c| {
                        let found = format!("{}: {:.1e} apart, {:.1e} allowed", c.what, c.error, c.allowed);
                        row(&what, Verdict::Fail, found, means)
                    })
                    .collect()
            }
        }
    })
    .collect()
}
