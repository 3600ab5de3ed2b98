//! `[constraints]`: constraints on parameters after each update, by name.
//!
//! ```toml
//! [constraints]
//! "critic.*" = { clamp = [-0.01, 0.01] }
//! "embed.weight" = { max_norm = 1.0 }
//! "head.weight" = { unit_norm = true }
//! ```

use crate::{
    Exchange, Job,
    check::{Check, bad},
    is_default,
};
use paraft_common::{
    TensorKind, TensorSpec,
    constraint::{Constraint, Rule},
    layout::LayoutError,
};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// By tensor name; `*` matches any characters.
pub type Constraints = BTreeMap<String, ConstraintConfig>;

/// A tensor's constraints: bounds, one norm, or both, bounds first. Rows are those of its first dimension; a
/// one-dimensional tensor is one row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ConstraintConfig {
    /// Each value lies within these bounds; `-inf` and `inf` mean no bound.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clamp: Option<[f64; 2]>,
    /// Each row's Euclidean norm is at most this, above 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_norm: Option<f64>,
    /// Each row's Euclidean norm is 1.
    #[serde(default, skip_serializing_if = "is_default")]
    pub unit_norm: bool,
}

impl ConstraintConfig {
    /// The rules, for rows of this many values.
    fn rules(self, row: usize) -> impl Iterator<Item = Rule> {
        let clamp = self.clamp.map(|[min, max]| {
            let min = (min != f64::NEG_INFINITY).then_some(min as f32);
            Rule::Clamp { min, max: (max != f64::INFINITY).then_some(max as f32) }
        });
        let max = self.max_norm.map(|max| Rule::MaxNorm { row, max: max as f32 });
        let unit = self.unit_norm.then_some(Rule::UnitNorm { row });
        [clamp, max, unit].into_iter().flatten()
    }

    fn validate(self) -> Result<(), String> {
        match (self.max_norm, self.unit_norm) {
            _ if self == Self::default() => {
                Err("write clamp = [min, max], max_norm = m or unit_norm = true".into())
            }
            _ if self
                .clamp
                .is_some_and(|bounds| bounds.iter().any(|b| b.is_finite() && !(*b as f32).is_finite())) =>
            {
                Err("a bound of clamp is larger than a weight can be: write inf for no bound".into())
            }
            (Some(_), true) => Err("max_norm and unit_norm are two norms: keep one".into()),
            _ => self.rules(1).try_for_each(|rule| rule.validate()),
        }
    }
}

/// Checks everything that does not need the model.
pub(crate) fn check(job: &Job) -> Check {
    if let Some(why) = job.constraints.iter().find_map(|(name, c)| {
        let why = c.validate().err()?;
        Some(format!("`{name}`: {why}"))
    }) {
        return bad("constraints", why, "see docs/configuration.md#constraints");
    }
    if job.train.exchange == Exchange::AllReduce && !job.constraints.is_empty() {
        let why = "with train.exchange = \"all-reduce\" the ranks apply their gradients themselves, and the servers hold weights to nothing";
        return bad("constraints", why, "set train.exchange = \"servers\", or take [constraints] out");
    }
    Ok(())
}

/// The rules of a model with these tensors, in the order of the flat vector; for one tensor in the order of the
/// entries' names.
///
/// # Errors
/// A name matches no parameter, or a tensor has two rules for rows.
pub(crate) fn of(constraints: &Constraints, tensors: &[TensorSpec]) -> Result<Vec<Constraint>, LayoutError> {
    let bad = |why: String| Err(LayoutError::Constraint(format!("[constraints] {why}")));
    for name in constraints.keys() {
        let named: Vec<_> = tensors.iter().filter(|t| matches(name, &t.name)).collect();
        if named.is_empty() {
            let near = tensors.iter().map(|t| (strsim::levenshtein(name, &t.name), &t.name)).min();
            let near = near.map(|(_, near)| format!("; did you mean `{near}`?")).unwrap_or_default();
            return bad(format!("`{name}` is no tensor of the model{near}"));
        }
        if named.iter().all(|t| t.kind == TensorKind::Buffer) {
            return bad(format!(
                "`{name}` is a running statistic, which the servers average; constraints are for parameters"
            ));
        }
    }
    let (mut all, mut offset) = (Vec::<Constraint>::new(), 0);
    for t in tensors.iter().filter(|t| t.kind == TensorKind::Param) {
        let row = match t.shape.as_slice() {
            [_, row @ ..] if !row.is_empty() => row.iter().product(),
            _ => t.len(),
        };
        let rules = constraints.iter().filter(|(name, _)| matches(name, &t.name));
        let rules: Vec<Rule> = rules.flat_map(|(_, c)| c.rules(row)).collect();
        if rules.iter().filter(|rule| !matches!(rule, Rule::Clamp { .. })).count() > 1 {
            return bad(format!("has two norms for the rows of `{}`: keep one", t.name));
        }
        for rule in rules {
            match all.last_mut() {
                // A model with equal bounds for adjacent tensors has one rule.
                Some(Constraint { offset: at, values, rule: last })
                    if *last == rule && rule.row() == 1 && *at + *values == offset =>
                {
                    *values += t.len();
                }
                _ => all.push(Constraint { offset, values: t.len(), rule }),
            }
        }
        offset += t.len();
    }
    Ok(all)
}

/// Whether a pattern matches a name; `*` stands for any text.
pub fn matches(pattern: &str, name: &str) -> bool {
    let Some((before, after)) = pattern.split_once('*') else { return pattern == name };
    let Some(rest) = name.strip_prefix(before) else { return false };
    let starts = rest.char_indices().map(|(at, _)| at).chain([rest.len()]);
    starts.into_iter().any(|at| matches(after, &rest[at..]))
}

#[cfg(test)]
#[path = "constraints_tests.rs"]
mod tests;
