//! `[[table]]`: the sparse tables of a built-in model, and what goes with them.

use crate::{
    DeviceConfig, Exchange, Job,
    check::{Check, bad},
};
use paraft_common::{TableSpec, algorithm::AlgorithmConfig, optim::ClipConfig};
use paraft_models::{ModelConfig, check_tables};
use std::borrow::Cow;
use toml::{Table, Value};

/// The key of the entries.
pub(crate) const TABLE: &str = "table";
const SEE: &str = "see docs/tables.md";

/// The names of the entries of a job's table, as far as they have any; for errors.
pub(crate) fn names(job: &Table) -> Vec<String> {
    let entries = job.get(TABLE).and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    let name = |e: &Value| e.get("name").and_then(Value::as_str).unwrap_or_default().to_string();
    entries.iter().map(name).collect()
}

/// A key of an entry with its name in place of its number, as `--set` has it; any other key as it is.
pub(crate) fn named(key: &str, names: &[String]) -> String {
    let entry = key.strip_prefix(TABLE).and_then(|rest| rest.strip_prefix('.'));
    let (at, rest) = entry.map_or(("", ""), |entry| entry.split_once('.').unwrap_or((entry, "")));
    match at.parse::<usize>().ok().and_then(|at| names.get(at)) {
        Some(name) if rest.is_empty() => format!("{TABLE}.{name}"),
        Some(name) => format!("{TABLE}.{name}.{rest}"),
        None => key.into(),
    }
}

/// A key as it is shown: without the number of an entry, which is named.
pub(crate) fn shown(key: &str) -> Cow<'_, str> {
    let entry = key.strip_prefix(TABLE).and_then(|rest| rest.strip_prefix('.'));
    match entry.map(|entry| entry.split_once('.')) {
        Some(Some((_, key))) => format!("{TABLE}.{key}").into(),
        Some(None) => TABLE.into(),
        None => key.into(),
    }
}

impl Job {
    /// Whether its model's parameters are rows of sparse tables.
    pub fn is_sparse(&self) -> bool {
        self.model.as_ref().is_some_and(ModelConfig::is_sparse)
    }

    /// The tables in the model's order ([`ModelConfig::tables`]).
    pub fn tables_of_model(&self) -> Vec<TableSpec> {
        let takes = self.model.as_ref().map_or(&[][..], ModelConfig::tables);
        let find = |name| self.tables.iter().find(|t| t.name == name).cloned();
        takes.iter().filter_map(|t| find(t.name)).collect()
    }
}

pub(crate) fn check(job: &Job) -> Check {
    for (i, table) in job.tables.iter().enumerate() {
        let key = || format!("{TABLE}.{i}");
        table.check().or_else(|e| bad(key(), e.to_string(), SEE))?;
        if job.tables[..i].iter().any(|other| other.name == table.name) {
            return bad(key(), format!("two tables are named `{}`", table.name), "take one out");
        }
    }
    let own = job.model.is_none() || job.cluster.own_program();
    if let Some(table) = job.tables.first().filter(|_| own) {
        let why = format!("table `{}`: only a built-in model takes tables of the job file", table.name);
        return bad(TABLE, why, "name the tables in the program or script that has the model");
    }
    let Some(model) = job.model.as_ref().filter(|_| !own) else { return Ok(()) };
    check_tables(model, &job.tables).or_else(|why| bad(TABLE, why, SEE))?;
    if let Some(data) = &job.data
        && data.is_sparse() != model.is_sparse()
    {
        let (kind, model) = (data.name(), model.name());
        return match data.is_sparse() {
            true => {
                let remedy = "set model.kind to logistic, mf, fm, two-tower, wide-deep or dlrm, with [[table]] entries";
                bad(
                    "model.kind",
                    format!("{model} has no tables, and the ids of {kind} are for tables"),
                    remedy,
                )
            }
            false => {
                let remedy = "set data.kind to libsvm, vw, criteo, ratings or clicks";
                bad("data.kind", format!("{kind} has no ids, and {model} looks rows up by ids"), remedy)
            }
        };
    }
    if job.is_sparse() { goes_with_tables(job) } else { Ok(()) }
}

/// Refuses what cannot be had with tables.
fn goes_with_tables(job: &Job) -> Check {
    let cut = if job.parallel.pipeline > 1 { "parallel.pipeline" } else { "parallel.tensor" };
    for (set, key, why) in [
        (
            matches!(job.train.device, DeviceConfig::Cuda(_)),
            "train.device",
            "a model of tables computes on the CPU",
        ),
        (job.train.exchange == Exchange::AllReduce, "train.exchange", "rows are on the servers"),
        (job.train.group_size > 1, "train.group_size", "the ranks of a group push one dense gradient"),
        (job.train.init.is_some(), "train.init", "a model file has no rows"),
        (job.local.is_local(), "local.steps", "a worker has no rows of its own"),
        (job.memory.resident.is_some(), "memory.resident", "a worker holds all layers beside the rows"),
        (job.parallel.is_cut(), cut, "a worker holds all layers beside the rows"),
        (job.algorithm != AlgorithmConfig::default(), "algorithm.kind", "it would leave the rows out"),
        (job.clip != ClipConfig::default(), "clip.norm", "clipping would leave the rows out"),
        (job.cluster.durability.is_leader(), "cluster.durability", "rows are replicated with each push"),
    ] {
        if set {
            let model = job.model.as_ref().map_or("", ModelConfig::name);
            return bad(key, format!("not with the tables of {model}: {why}"), "take it out");
        }
    }
    Ok(())
}

#[cfg(test)]
#[path = "tables_tests.rs"]
mod tests;
