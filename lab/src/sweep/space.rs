//! The space file: which keys of a job vary, their values, and the metric.
//!
//! ```toml
//! metric = "accuracy"                                      # or "loss", "auc"; of the held-out samples
//! [space]
//! "optimizer.lr" = { min = 0.001, max = 1.0, log = true }  # a range; for a grid with points = 4
//! "train.batch" = [32, 64, 128]                            # one of these
//! ```

use paraft_fleet::failure::Failure;
use paraft_worker::{exit, job::paths};
use rand_chacha::{
    ChaCha8Rng,
    rand_core::{Rng, SeedableRng},
};
use std::path::Path;
use toml::{Table, Value};

/// The metric of the search.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Metric {
    /// The share of held-out samples classified correctly; higher is better.
    Accuracy,
    /// The mean held-out loss; lower is better.
    Loss,
    /// The area under the ROC curve, of models that predict clicks; higher is better.
    Auc,
}

impl Metric {
    /// The name in the space file.
    pub fn name(self) -> &'static str {
        match self {
            Self::Accuracy => "accuracy",
            Self::Loss => "loss",
            Self::Auc => "auc",
        }
    }

    /// A score of the metric: higher is better for all.
    pub fn score(self, value: f64) -> f64 {
        match self {
            Self::Accuracy | Self::Auc => value,
            Self::Loss => -value,
        }
    }
}

/// A key with its values.
#[derive(Clone, Debug, PartialEq)]
pub struct Axis {
    /// A key of the job file, as in `--set`.
    pub key: String,
    values: Values,
}

#[derive(Clone, Debug, PartialEq)]
enum Values {
    OneOf(Vec<Value>),
    Range { min: f64, max: f64, log: bool, whole: bool, points: Option<usize> },
}

/// The search space.
#[derive(Clone, Debug, PartialEq)]
pub struct Space {
    pub metric: Metric,
    /// Sorted by key.
    pub axes: Vec<Axis>,
}

/// The setting of a trial: a value for each axis.
pub type Point = Vec<Value>;

/// The maximal number of grid points.
const MAX_GRID_POINTS: usize = 100_000;

impl Space {
    /// Reads a space file.
    ///
    /// # Errors
    ///
    /// The file and the key of the error.
    pub fn load(path: &Path) -> Result<Self, Failure> {
        let text = std::fs::read_to_string(path);
        let text = text.map_err(|e| Failure::new(exit::CONFIG, format!("{}: {e}", path.display())))?;
        Self::parse(&text).and_then(|space| space.below(path)).map_err(|why| {
            Failure::new(exit::CONFIG, format!("{}: {why}", path.display()))
                .help("a space file has a line for each key: \"optimizer.lr\" = { min = 0.001, max = 1.0, log = true }, or \"train.batch\" = [32, 64]")
        })
    }

    /// With absolute paths: relative ones start in the folder of this space file.
    fn below(mut self, file: &Path) -> Result<Self, String> {
        let file = std::path::absolute(file).map_err(|e| e.to_string())?;
        let folder = file.parent().unwrap_or(&file);
        for axis in &mut self.axes {
            let Values::OneOf(values) = &mut axis.values else { continue };
            values.iter_mut().try_for_each(|value| paths::rebase(&axis.key, value, folder))?;
        }
        Ok(self)
    }

    fn parse(text: &str) -> Result<Self, String> {
        let mut file: Table = text.parse().map_err(|e: toml::de::Error| e.message().to_string())?;
        let metric = match file.remove("metric") {
            None => Metric::Accuracy,
            Some(Value::String(s)) if s == "accuracy" => Metric::Accuracy,
            Some(Value::String(s)) if s == "loss" => Metric::Loss,
            Some(Value::String(s)) if s == "auc" => Metric::Auc,
            Some(other) => {
                return Err(format!("metric = {other}: it is \"accuracy\", \"loss\" or \"auc\""));
            }
        };
        let Some(Value::Table(space)) = file.remove("space") else { return Err("it has no [space]".into()) };
        if let Some(key) = file.keys().next() {
            return Err(format!("`{key}` is neither metric nor [space]"));
        }
        let mut axes = Vec::new();
        collect(&mut axes, "", space)?;
        if axes.is_empty() {
            return Err("[space] is empty".into());
        }
        for axis in &axes {
            let n = axis.points().unwrap_or(1);
            if let Some(i) = (1..n.min(MAX_GRID_POINTS)).find(|i| axis.at(*i, n) == axis.at(i - 1, n)) {
                let value = axis.at(i, n);
                return Err(format!(
                    "`{}`: of points = {n} two are {value}: take fewer, or a list of values",
                    axis.key
                ));
            }
        }
        Ok(Self { metric, axes })
    }

    /// The number of points in the grid; the first axis varies slowest.
    ///
    /// # Errors
    ///
    /// The key of a range without a number of points, or too many points.
    pub fn grid(&self) -> Result<usize, String> {
        let mut all = 1_usize;
        for axis in &self.axes {
            let n = axis.points().ok_or_else(|| {
                format!("`{}` is a range: a grid needs `points = N` with it, or a list of values", axis.key)
            })?;
            all = all.checked_mul(n).filter(|n| *n <= MAX_GRID_POINTS).ok_or_else(|| {
                format!(
                    "the grid has more than {MAX_GRID_POINTS} points: take fewer values, or --search random"
                )
            })?;
        }
        Ok(all)
    }

    /// A point of the grid, by number.
    pub fn of_grid(&self, mut at: usize) -> Point {
        let mut point = Vec::with_capacity(self.axes.len());
        for axis in self.axes.iter().rev() {
            let n = axis.points().unwrap_or(1);
            point.push(axis.at(at % n, n));
            at /= n;
        }
        point.reverse();
        point
    }

    /// The random point of a trial, independent of the other trials.
    pub fn drawn(&self, seed: u64, trial: usize) -> Point {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        rng.set_stream(trial as u64);
        self.axes.iter().map(|axis| axis.draw((rng.next_u64() >> 11) as f64 / (1_u64 << 53) as f64)).collect()
    }

    /// The assignments that turn the job into this point's job.
    pub fn set(&self, point: &Point) -> Vec<String> {
        self.axes.iter().zip(point).map(|(axis, value)| format!("{}={value}", axis.key)).collect()
    }
}

/// A value in the usual notation.
pub fn shown(value: &Value) -> String {
    match value {
        Value::String(s) => s.clone(),
        other => other.to_string(),
    }
}

/// Keys may be dotted or nested tables.
fn collect(axes: &mut Vec<Axis>, before: &str, table: Table) -> Result<(), String> {
    for (name, value) in table {
        let key = if before.is_empty() { name } else { format!("{before}.{name}") };
        match value {
            Value::Array(values) => {
                if values.is_empty() {
                    return Err(format!("`{key}` has no values"));
                }
                if let Some(twice) = values.iter().enumerate().find(|(i, v)| values[..*i].contains(v)) {
                    return Err(format!("`{key}` has {} twice", twice.1));
                }
                axes.push(Axis { key, values: Values::OneOf(values) });
            }
            Value::Table(t) if t.contains_key("min") || t.contains_key("max") => {
                axes.push(Axis { values: range(&key, t)?, key });
            }
            Value::Table(t) => collect(axes, &key, t)?,
            other => return Err(format!("`{key}` = {other} is neither a list of values nor a range")),
        }
    }
    Ok(())
}

fn range(key: &str, mut table: Table) -> Result<Values, String> {
    let whole = [table.get("min"), table.get("max")].iter().all(|v| matches!(v, Some(Value::Integer(_))));
    let mut number = |name: &str| match table.remove(name) {
        Some(Value::Float(f)) if f.is_finite() => Ok(f),
        Some(Value::Integer(i)) => Ok(i as f64),
        Some(other) => Err(format!("`{key}`: {name} = {other} is no number")),
        None => Err(format!("`{key}`: a range has min and max")),
    };
    let (min, max) = (number("min")?, number("max")?);
    if min >= max {
        return Err(format!("`{key}`: min is not below max"));
    }
    let log = match table.remove("log") {
        None => false,
        Some(Value::Boolean(log)) => log,
        Some(other) => return Err(format!("`{key}`: log = {other} is neither true nor false")),
    };
    if log && min <= 0.0 {
        return Err(format!("`{key}`: a range with log = true is above 0"));
    }
    let points = match table.remove("points") {
        None => None,
        Some(Value::Integer(n)) if n >= 2 => Some(n as usize),
        Some(other) => return Err(format!("`{key}`: points = {other}: take 2 or more")),
    };
    match table.keys().next() {
        Some(other) => Err(format!("`{key}`: a range has min, max, log and points, and no `{other}`")),
        None => Ok(Values::Range { min, max, log, whole, points }),
    }
}

impl Axis {
    /// The number of its grid values; `None` for a range without `points`.
    fn points(&self) -> Option<usize> {
        match &self.values {
            Values::OneOf(values) => Some(values.len()),
            Values::Range { points, .. } => *points,
        }
    }

    fn at(&self, i: usize, of: usize) -> Value {
        match &self.values {
            Values::OneOf(values) => values[i].clone(),
            Values::Range { .. } => self.draw(i as f64 / (of.max(2) - 1) as f64),
        }
    }

    /// The value at a position from 0 to 1.
    fn draw(&self, place: f64) -> Value {
        match &self.values {
            Values::OneOf(values) => {
                values[((place * values.len() as f64) as usize).min(values.len() - 1)].clone()
            }
            Values::Range { min, max, log, whole, .. } => {
                let value = match log {
                    true => (min.ln() + place * (max.ln() - min.ln())).exp(),
                    false => min + place * (max - min),
                };
                match whole {
                    true => Value::Integer(value.round().clamp(*min, *max) as i64),
                    // As few digits as a person would write; the best job's file shows them.
                    false => {
                        Value::Float(format!("{value:.4e}").parse::<f64>().unwrap_or(value).clamp(*min, *max))
                    }
                }
            }
        }
    }

    /// The labels of its axis in a plot, with their positions.
    pub fn ticks(&self) -> Vec<(f64, String)> {
        let tick = |value: Value| (self.place(&value), shown(&value));
        match &self.values {
            Values::OneOf(values) => values.iter().cloned().map(tick).collect(),
            Values::Range { .. } => [0.0, 0.5, 1.0].map(|place| tick(self.draw(place))).to_vec(),
        }
    }

    /// The position of a value, from 0 to 1, in a plot.
    pub fn place(&self, value: &Value) -> f64 {
        match &self.values {
            Values::OneOf(values) => {
                let at = values.iter().position(|v| v == value).unwrap_or(0);
                if values.len() > 1 { at as f64 / (values.len() - 1) as f64 } else { 0.5 }
            }
            Values::Range { min, max, log, .. } => {
                let value = value.as_float().or_else(|| value.as_integer().map(|i| i as f64)).unwrap_or(*min);
                match log {
                    true => (value.ln() - min.ln()) / (max.ln() - min.ln()),
                    false => (value - min) / (max - min),
                }
            }
        }
    }
}

#[cfg(test)]
#[path = "space_tests.rs"]
mod tests;
