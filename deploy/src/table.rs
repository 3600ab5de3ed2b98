//! The table at the end of a run: one row for each mode, every figure from the record.

use comfy_table::{CellAlignment, Table, presets};
use paraft_record::Summary;
use paraft_sim::calibrate::Row;

/// Renders summaries as a table.
pub fn modes(summaries: &[Summary]) -> String {
    let target = summaries.iter().find_map(|s| s.target_accuracy);
    let time_to = target.map_or("to target".into(), |t| format!("to {:.0}%", t * 100.0));
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header(vec![
        "mode".to_string(),
        time_to,
        "final loss".into(),
        "accuracy".into(),
        "samples/s".into(),
        "delay p50/p99".into(),
        "waited".into(),
        "pushed".into(),
        "pulled".into(),
        "lost".into(),
    ]);
    for s in summaries {
        let delay = match (s.delay_p50, s.delay_p99) {
            (Some(a), Some(b)) => format!("{a} / {b}"),
            _ => "-".into(),
        };
        table.add_row(vec![
            s.mode.clone(),
            s.seconds_to_target.map_or("-".into(), |t| format!("{t:.2} s")),
            s.final_loss.map_or("-".into(), |l| format!("{l:.4}")),
            s.final_accuracy.map_or("-".into(), |a| format!("{:.2}%", a * 100.0)),
            format!("{:.0}", s.samples_per_s),
            delay,
            format!("{:.2} s", s.wait_seconds),
            bytes(s.bytes_pushed),
            bytes(s.bytes_pulled),
            lost(s),
        ]);
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table.to_string()
}

/// Renders what was predicted beside what was measured.
pub fn prediction(rows: &[Row]) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header(["", "predicted", "measured", "error"]);
    for r in rows {
        let error = r.error_percent.map_or("-".into(), |e| format!("{e:+.1} %"));
        table.add_row([r.figure.into(), format!("{:.3}", r.predicted), format!("{:.3}", r.measured), error]);
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table.to_string()
}

fn lost(s: &Summary) -> String {
    let some = |n: u64, what: &str| match n {
        0 => None,
        1 => Some(format!("1 {what}")),
        n => Some(format!("{n} {what}{}", if what.ends_with("sh") { "es" } else { "s" })),
    };
    let all = [
        some(s.workers_lost.into(), "worker"),
        some(s.ranks_lost.into(), "rank"),
        some(s.pushes_lost, "push"),
    ];
    let text = all.into_iter().flatten().collect::<Vec<_>>().join(", ");
    if text.is_empty() { "-".into() } else { text }
}

/// Bytes for people: 1.5 MiB.
pub fn bytes(n: u64) -> String {
    let mut value = n as f64;
    for unit in ["B", "KiB", "MiB", "GiB"] {
        if value < 1024.0 {
            return if unit == "B" { format!("{n} B") } else { format!("{value:.1} {unit}") };
        }
        value /= 1024.0;
    }
    format!("{value:.1} TiB")
}
