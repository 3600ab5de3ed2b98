//! `paraft bench train`.

use super::{
    figure::{self, Figure},
    flags::repeats,
    peers, plain, scratch,
};
use crate::statistics::median;
use clap::Args;
use paraft_common::Mode;
use paraft_fleet::{failure::Failure, launch};
use paraft_record::RunRecord;
use paraft_worker::{Job, cli, exit};
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

#[derive(Args)]
pub struct TrainBenchArgs {
    /// A folder with MNIST's four IDX files, plain or gzip. Default: the embedded digits.
    #[arg(long)]
    pub data: Option<PathBuf>,
    /// Models, comma-separated: logreg, mlp, autoencoder, convnet.
    #[arg(long, value_delimiter = ',', default_value = "logreg,mlp,autoencoder,convnet")]
    pub models: Vec<String>,
    /// Modes, comma-separated.
    #[arg(long, value_delimiter = ',', default_value = "bsp,asp")]
    pub modes: Vec<Mode>,
    /// Runs of each case, interleaved; the median counts.
    #[arg(long, default_value_t = 3, value_parser = repeats)]
    pub repeats: usize,
    /// Passes over the data in each run.
    #[arg(long, default_value_t = 2)]
    pub epochs: u64,
    /// Worker processes.
    #[arg(long, default_value_t = 2)]
    pub workers: u32,
    /// A folder with train_ddp.py, train_hogwild.py and train_rpc_ps.py, to run side by side.
    #[arg(long)]
    pub peers: Option<PathBuf>,
    /// The Python that has torch.
    #[arg(long, default_value = "python3")]
    pub python: String,
    /// Overrides a key of the jobs; may be given often.
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// One JSON object for each figure.
    #[arg(long)]
    pub json: bool,
}

/// Model, its table in the job file, optimizer, rate, minibatch: the settings of the peers' scripts.
const MODELS: [(&str, &str, &str, f64, usize); 4] = [
    ("logreg", "kind = \"logistic-regression\"", "sgd", 0.1, 64),
    ("mlp", "kind = \"mlp\"\nhidden = [256, 128]", "sgd", 0.1, 64),
    ("autoencoder", "kind = \"autoencoder\"\nhidden = [128, 128, 128]", "adam", 1e-3, 128),
    ("convnet", "kind = \"convnet\"", "sgd", 0.05, 100),
];

/// All figures of one case: a way to train one model.
#[derive(Default)]
struct Case {
    samples_per_s: Vec<f64>,
    cpu: Vec<f64>,
    rss_mib: Vec<f64>,
    accuracy: Vec<Vec<f64>>,
    loss: Vec<f64>,
}

pub fn run(args: &TrainBenchArgs) -> Result<i32, Failure> {
    let scratch = scratch::folder()?;
    let interrupted = launch::interrupts();
    args.peers.as_deref().map_or(Ok(()), peers::check)?;
    let (mut lines, mut without) = (Vec::new(), 0);
    for name in &args.models {
        let Some(m) = MODELS.iter().find(|m| m.0 == name) else {
            let known: Vec<_> = MODELS.iter().map(|m| m.0).collect();
            return Err(Failure::new(exit::USAGE, format!("no model `{name}`"))
                .help(format!("use {}", known.join(", "))));
        };
        let job = job(args, m)?;
        let mut cases: BTreeMap<String, Case> = BTreeMap::new();
        for repeat in 0..args.repeats {
            let (mut model, data) = cli::on_device(&job)?;
            let plain = plain::samples_per_s(&job, model.as_mut(), &data, 1)
                .map_err(|e| Failure::new(exit::FAILED, e))?;
            cases.entry("plain".into()).or_default().samples_per_s.push(plain);
            drop((model, data));
            for mode in &args.modes {
                let mut job = job.clone();
                job.train.mode = (*mode).into();
                let dir = scratch.path().join(format!("{name}-{mode}-{repeat}"));
                std::fs::create_dir_all(&dir).map_err(|e| scratch::write(&dir, e))?;
                let record = launch::launch(&job, &dir, None, true, &interrupted)?;
                cases.entry(mode.to_string()).or_default().add(&record);
            }
            for way in peers::WAYS {
                let Some(folder) = &args.peers else { break };
                match peers::run(&way, &args.python, folder, name, args.workers, args.epochs) {
                    Ok(p) => cases.entry(way.name.into()).or_default().add_peer(&p),
                    Err(why) => {
                        eprintln!("{}: {why}", way.name);
                        without += 1;
                    }
                }
            }
        }
        report(name, &cases, args, &mut lines);
    }
    if !args.json {
        figure::print(&lines);
    }
    if without > 0 {
        return Err(Failure::new(exit::FAILED, format!("{without} runs of peers gave no figure")));
    }
    Ok(exit::OK)
}

impl Case {
    fn add(&mut self, record: &RunRecord) {
        let s = record.summarize();
        self.samples_per_s.push(s.samples_per_s);
        self.cpu.extend(s.cpu_seconds_per_1000_samples);
        let rss: u64 = record
            .workers
            .iter()
            .map(|w| w.peak_rss_bytes)
            .chain(record.servers.iter().map(|s| s.peak_rss_bytes))
            .sum();
        self.rss_mib.push(rss as f64 / (1 << 20) as f64);
        self.accuracy.push(record.evals.iter().filter(|e| !e.is_final).filter_map(|e| e.accuracy).collect());
        self.loss.extend(s.final_loss);
    }

    fn add_peer(&mut self, p: &peers::Peer) {
        self.samples_per_s.push(p.samples_per_s);
        self.cpu.push(p.cpu_seconds_per_1000_samples);
        self.rss_mib.push(p.peak_rss_mib);
        self.accuracy.push(p.accuracy.clone());
    }

    fn accuracy_after(&self, epoch: usize) -> Vec<f64> {
        self.accuracy.iter().filter_map(|a| a.get(epoch).copied()).collect()
    }
}

fn job(args: &TrainBenchArgs, m: &(&str, &str, &str, f64, usize)) -> Result<Job, Failure> {
    let (name, model, optimizer, lr, batch) = *m;
    let data = match &args.data {
        None => "kind = \"digits\"".to_string(),
        Some(folder) => {
            let folder = std::fs::canonicalize(folder)
                .map_err(|e| Failure::new(exit::DATA, format!("{}: {e}", folder.display())))?;
            format!("kind = \"idx\"\npath = {:?}", folder.display().to_string())
        }
    };
    let text = format!(
        "name = \"bench-{name}\"\n[model]\n{model}\n[data]\n{data}\n[train]\ndevice = \"cpu\"\nworkers = {}\nbatch = {batch}\nepochs = {}\n[optimizer]\nkind = \"{optimizer}\"\nlr = {lr}\n[cluster]\nservers = 1\nreplicas = 1\nshards = 1\n",
        args.workers, args.epochs
    );
    Ok(Job::parse(&text, Path::new("bench"), &args.set)?)
}

fn report(model: &str, cases: &BTreeMap<String, Case>, args: &TrainBenchArgs, lines: &mut Vec<Figure>) {
    let from = lines.len();
    for (way, case) in cases {
        // Ours are compared with every peer that ran, and with the plain process; a peer with the plain one.
        let ours = args.modes.iter().any(|m| m.to_string() == *way);
        let mut references = vec!["plain"];
        if ours {
            references.extend(peers::WAYS.iter().map(|w| w.name).filter(|w| cases.contains_key(*w)));
        }
        if median(&case.samples_per_s).is_none() {
            continue;
        }
        let name = format!("{model}/{way}");
        for reference in references {
            let base = cases.get(reference).and_then(|c| median(&c.samples_per_s)).map(|b| b.0);
            let figure = Figure::alone("train", &name, "throughput", "samples/s", &case.samples_per_s);
            lines.extend(figure.map(|f| Figure {
                reference: reference.into(),
                ratio: base.map(|b| f.value / b),
                ..f
            }));
        }
        for (what, unit, values) in [
            ("cpu", "s/1000 samples", &case.cpu),
            ("memory", "MiB, all processes", &case.rss_mib),
            ("accuracy after epoch 1", "share", &case.accuracy_after(0)),
            ("accuracy after epoch 2", "share", &case.accuracy_after(1)),
            ("final loss", "held out", &case.loss),
        ] {
            lines.extend(Figure::alone("train", &name, what, unit, values));
        }
    }
    if args.json {
        figure::print_json(&lines[from..]);
    }
}
