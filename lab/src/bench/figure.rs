//! One figure of a benchmark, as a line of JSON and as a row of a table.

use crate::statistics::median;
use paraft_fleet::table;
use serde_json::json;

/// A figure means nothing where the middle half of its repeats differ by more than this share of the median. Of three
/// repeats that is their whole range over the median; of more, one moment of another load does not count.
const MAX_SPREAD: f64 = 0.5;

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
    /// Of the repeats ([`median`]); unknown of a single one.
    pub spread: Option<f64>,
}

impl Figure {
    /// A figure by itself: the median of its repeats. `None` when nothing was measured.
    pub fn alone(
        bench: &'static str,
        case: &str,
        what: &'static str,
        unit: &'static str,
        values: &[f64],
    ) -> Option<Self> {
        let (value, spread) = median(values)?;
        Some(Self { bench, case: case.into(), what, value, unit, reference: "-".into(), ratio: None, spread })
    }

    /// The same beside what was measured just before or after it: the ratio is the median of the repeats' ratios, and
    /// the spread is theirs, since a slow minute of the machine slows both.
    pub fn against(self, reference: &str, values: &[f64], theirs: &[f64]) -> Self {
        let ratios: Vec<f64> = values.iter().zip(theirs).map(|(v, t)| v / t).collect();
        let Some((ratio, spread)) = median(&ratios) else { return self };
        Self { reference: reference.into(), ratio: Some(ratio), spread, ..self }
    }

    /// What others are compared with: its ratio is 1, and its spread its own.
    pub fn itself(self, reference: &str) -> Self {
        Self { reference: reference.into(), ratio: Some(1.0), ..self }
    }

    /// Whether its repeats are near enough to each other for it to mean something.
    fn steady(&self) -> bool {
        self.spread.is_none_or(|s| s <= MAX_SPREAD)
    }
}

/// Prints them, for people or for programs.
pub fn show(figures: &[Figure], json: bool) {
    if json { print_json(figures) } else { print(figures) }
}

/// One JSON object a line.
pub fn print_json(figures: &[Figure]) {
    for f in figures {
        let value = f.steady().then_some(f.value);
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
    let mut t = table::plain(vec!["case", "figure", "value", "unit", "against", "ratio", "spread"]);
    for f in figures {
        let steady = f.steady();
        let digits = if f.value.abs() < 10.0 { 4 } else { 0 };
        t.add_row(vec![
            f.case.clone(),
            f.what.into(),
            if steady { format!("{:.digits$}", f.value) } else { "too noisy".into() },
            f.unit.into(),
            f.reference.clone(),
            f.ratio.filter(|_| steady).map_or("-".into(), |r| format!("{r:.2}x")),
            f.spread.map_or("-".into(), |s| format!("{:.0}%", s * 100.0)),
        ]);
    }
    out!("{t}");
}
