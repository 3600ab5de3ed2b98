//! One figure of a benchmark, as a line of JSON and as a row of a table.

use comfy_table::{Table, presets};
use serde_json::json;

/// A figure whose repeats differ by more than this share of the median means nothing.
const MAX_SPREAD: f64 = 1.0;

/// A figure.
pub struct Figure {
    /// Which benchmark.
    pub bench: &'static str,
    pub case: String,
    pub what: &'static str,
    /// The median.
    pub value: f64,
    pub unit: &'static str,
    /// What it is compared with, measured in the same run.
    pub reference: String,
    pub ratio: Option<f64>,
    /// (largest - smallest) / median.
    pub spread: f64,
}

/// One JSON object a line.
pub fn print_json(figures: &[Figure]) {
    for f in figures {
        let value = (f.spread <= MAX_SPREAD).then_some(f.value);
        out!(
            "{}",
            json!({
                "bench": format!("{} {}", f.bench, f.what), "case": f.case, "value": value, "unit": f.unit,
                "reference": f.reference, "ratio": f.ratio.filter(|_| value.is_some()), "spread": f.spread,
            })
        );
    }
}

/// A table.
pub fn print(figures: &[Figure]) {
    let mut t = Table::new();
    t.load_style(presets::NOTHING);
    t.set_header(vec!["case", "figure", "value", "unit", "against", "ratio", "spread"]);
    for f in figures {
        let steady = f.spread <= MAX_SPREAD;
        let digits = if f.value.abs() < 10.0 { 4 } else { 0 };
        t.add_row(vec![
            f.case.clone(),
            f.what.into(),
            if steady { format!("{:.digits$}", f.value) } else { "too noisy".into() },
            f.unit.into(),
            f.reference.clone(),
            f.ratio.filter(|_| steady).map_or("-".into(), |r| format!("{r:.2}x")),
            format!("{:.0}%", f.spread * 100.0),
        ]);
    }
    out!("{t}");
}
