//! What is shown of a run that has ended: its folder answers for its servers.

use paraft_fleet::{ended::EndedRun, out, table};
use paraft_worker::exit;
use serde_json::{Value, json};
use std::path::PathBuf;

/// `paraft status` of a run that has ended; returns the exit code.
pub fn status(run: &EndedRun, json: bool) -> i32 {
    match json {
        true => out!("{}", as_json(run)),
        false => print(run),
    }
    exit::OK
}

/// For commands that show only live fleets: says that this one has ended, and what shows it; returns the exit code.
pub fn refer(run: &EndedRun) -> i32 {
    let dir = run.dir.display();
    out!("{dir}: this run has ended: {}", run.state.says());
    out!("`paraft status --fleet {dir}` shows what it left");
    if let Some(report) = &run.report {
        out!("report       {}", report.display());
    }
    exit::OK
}

fn print(run: &EndedRun) {
    let line = |what: &str, says: String| out!("{what:12} {says}");
    line("run", run.dir.display().to_string());
    line("job", format!("{}, {} workers, {}", run.run.name, run.run.workers, run.mode));
    line("state", run.state.says());
    line("steps", steps(run));
    if let Some(result) = result(run) {
        line("result", result);
    }
    if let Some(report) = &run.report {
        line("report", report.display().to_string());
    }
    if let Some(model) = &run.model {
        line("model", model.display().to_string());
    }
    if let Some(latest) = run.saved.last() {
        let (n, at) = (run.saved.len(), run.checkpoints.display());
        line(
            "checkpoints",
            format!("{at}: {n}, the latest of step {}, {}", latest.step, table::bytes(latest.bytes)),
        );
    }
    if let Some(command) = run.resume() {
        line("to continue", command);
    }
    line("logs", format!("paraft logs --fleet {}", run.dir.display()));
}

fn steps(run: &EndedRun) -> String {
    match run.total_steps {
        Some(total) => format!("{} of {total}", run.steps),
        None => run.steps.to_string(),
    }
}

/// `None` if nothing was measured.
fn result(run: &EndedRun) -> Option<String> {
    let s = &run.summary;
    let all = [
        s.final_loss.map(|loss| format!("loss {loss:.4}")),
        s.final_accuracy.map(|accuracy| format!("accuracy {:.2}%", accuracy * 100.0)),
        (!s.final_metrics.is_empty()).then(|| {
            let all = s.final_metrics.iter().map(|(name, x)| format!("{} {x:.4}", name.replace('_', " ")));
            all.collect::<Vec<_>>().join(", ")
        }),
        (s.samples > 0).then(|| format!("{} samples in {:.1} s of training", s.samples, s.seconds)),
    ];
    let all: Vec<String> = all.into_iter().flatten().collect();
    (!all.is_empty()).then(|| all.join(", "))
}

fn as_json(run: &EndedRun) -> Value {
    let s = &run.summary;
    let latest = run.saved.last();
    let text = |path: &PathBuf| path.display().to_string();
    json!({
        "state": run.state.name(), "reason": run.state.reason(), "run": text(&run.dir), "job": run.run.name,
        "mode": run.mode, "workers": run.run.workers, "steps": run.steps, "steps_total": run.total_steps,
        "samples": s.samples, "seconds": s.seconds, "final_loss": s.final_loss, "final_accuracy": s.final_accuracy,
        "report": run.report.as_ref().map(text), "model": run.model.as_ref().map(text),
        "checkpoints": latest.map(|_| text(&run.checkpoints)),
        "latest": latest.map(|c| json!({ "step": c.step, "path": c.path, "bytes": c.bytes })),
        "resume": run.resume(),
    })
}
