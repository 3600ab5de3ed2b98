//! PyTorch's ways to do the same, run as scripts of the user's: one line of `key=value` words each.

use paraft_fleet::failure::Failure;
use paraft_worker::exit;
use std::{path::Path, process::Command};

/// What one script said.
#[derive(Clone, Debug, Default)]
pub struct Peer {
    pub samples_per_s: f64,
    pub cpu_seconds_per_1000_samples: f64,
    pub accuracy: Vec<f64>,
    pub peak_rss_mib: f64,
}

/// A way that is compared.
pub struct Way {
    pub name: &'static str,
    script: &'static str,
    /// The arguments after MODEL WORKERS.
    more: &'static [&'static str],
}

/// The ways that are compared.
pub const WAYS: [Way; 3] = [
    Way { name: "ddp-gloo", script: "train_ddp.py", more: &[] },
    Way { name: "rpc-ps", script: "train_rpc_ps.py", more: &["--tcp", "--fused"] },
    Way { name: "hogwild", script: "train_hogwild.py", more: &[] },
];

/// Whether the folder has every script, before anything is measured.
pub fn check(folder: &Path) -> Result<(), Failure> {
    for way in WAYS {
        let script = folder.join(way.script);
        if !script.is_file() {
            let names: Vec<_> = WAYS.iter().map(|w| w.script).collect();
            return Err(Failure::new(exit::CONFIG, format!("{} is no file", script.display()))
                .help(format!("--peers names a folder with {}", names.join(", "))));
        }
    }
    Ok(())
}

/// Runs one script; `Err` says why it gave no figure.
pub fn run(
    way: &Way,
    python: &str,
    folder: &Path,
    model: &str,
    workers: u32,
    epochs: u64,
) -> Result<Peer, String> {
    let Way { script, more, .. } = *way;
    let mut command = Command::new(python);
    command.arg(folder.join(script)).arg(model).arg(workers.to_string());
    command.args(["--epochs", &epochs.to_string()]).args(more).env("PYTHONDONTWRITEBYTECODE", "1");
    let out = command.output().map_err(|e| format!("{python}: {e}"))?;
    let text = String::from_utf8_lossy(&out.stdout);
    let line = text.lines().find(|l| l.contains("samples/s=")).ok_or_else(|| {
        let err = String::from_utf8_lossy(&out.stderr);
        format!("{script} gave no figure ({}): {}", out.status, err.lines().last().unwrap_or("").trim())
    })?;
    Ok(parse(line))
}

fn parse(line: &str) -> Peer {
    let word = |key: &str| line.split_whitespace().find_map(|w| w.strip_prefix(key)).unwrap_or("");
    let number = |s: &str| s.parse().unwrap_or(f64::NAN);
    Peer {
        samples_per_s: number(word("samples/s=")),
        cpu_seconds_per_1000_samples: number(word("cpu_s_per_1000=")),
        accuracy: word("test_acc=").split(',').filter_map(|a| a.parse().ok()).collect(),
        peak_rss_mib: paraft_record::total(word("rss_mib=").split('/').filter_map(|r| r.parse().ok())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peers_line_is_read() {
        let p = parse(
            "torch x model=mlp steps/s=1.0 samples/s=28868 wall_s=2 cpu_s_per_1000=0.047 rss_mib=900/930 test_acc=0.91,0.94 test_loss=0.3 loss@step=1:2",
        );
        assert_eq!(
            (p.samples_per_s, p.cpu_seconds_per_1000_samples, p.peak_rss_mib),
            (28868.0, 0.047, 1830.0)
        );
        assert_eq!(p.accuracy, [0.91, 0.94]);
    }
}
