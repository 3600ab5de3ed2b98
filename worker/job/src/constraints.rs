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

/// Whether a pattern matches a name.
fn matches(pattern: &str, name: &str) -> bool {
    let Some((before, after)) = pattern.split_once('*') else { return pattern == name };
    let Some(rest) = name.strip_prefix(before) else { return false };
    let starts = rest.char_indices().map(|(at, _)| at).chain([rest.len()]);
    starts.into_iter().any(|at| matches(after, &rest[at..]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    const BASE: &str = "[model]\nkind = \"mlp\"\nhidden = [8]\n[data]\nkind = \"digits\"\n";

    fn job(more: &str, set: &[&str]) -> Result<Job, String> {
        let set: Vec<String> = set.iter().map(ToString::to_string).collect();
        Job::parse(&format!("{BASE}{more}"), Path::new("job.toml"), &set).map_err(|e| e.to_string())
    }

    fn tensors() -> Vec<TensorSpec> {
        vec![
            TensorSpec::param("a.weight", &[4, 2, 3]),
            TensorSpec::param("a.bias", &[4]),
            TensorSpec::param("scale", &[]),
            TensorSpec::buffer("mean", &[4]),
        ]
    }

    #[test]
    fn constraints_are_found_by_name() {
        let job = job(
            "[constraints]\n\"*\" = { clamp = [-0.5, inf] }\n\"a.weight\" = { unit_norm = true }\n\"*.bias\" = { max_norm = 2 }\n",
            &[],
        )
        .expect("a job");
        let of = job.server_job(&tensors()).constraints;
        let clamp =
            |offset, values| Constraint { offset, values, rule: Rule::Clamp { min: Some(-0.5), max: None } };
        let bias = Constraint { offset: 24, values: 4, rule: Rule::MaxNorm { row: 4, max: 2.0 } };
        let rows = Constraint { offset: 0, values: 24, rule: Rule::UnitNorm { row: 6 } };
        assert_eq!(of, [clamp(0, 24), rows, clamp(24, 4), bias, clamp(28, 1)]);
        // In the form of the run's folder and the wire.
        let again = Job::parse(&job.to_toml(), Path::new("job.toml"), &[]).expect("its own");
        assert_eq!(again.constraints, job.constraints);
        let text = job.server_job(&tensors()).to_toml().expect("written");
        assert_eq!(paraft_common::config::ServerJob::from_toml(&text).expect("read").constraints, of);
        let layout = job.layout(tensors()).expect("a layout");
        assert_eq!(layout.buckets(), job.server_job(&tensors()).layout().buckets());
    }

    #[test]
    fn neighbours_with_the_same_bounds_are_one_constraint() {
        let job = job("[constraints]\n\"*\" = { clamp = [-1, 1] }\n", &[]).expect("a job");
        let tensors: Vec<_> =
            (0..3000).map(|i| TensorSpec::param(format!("layers.{i}.weight"), &[4, 2])).collect();
        let whole =
            Constraint { offset: 0, values: 24_000, rule: Rule::Clamp { min: Some(-1.0), max: Some(1.0) } };
        assert_eq!(job.server_job(&tensors).constraints, [whole]);
    }

    #[test]
    fn constraints_of_a_flag_take_the_place_of_the_file_s() {
        let set = ["constraints={ \"a.bias\" = { clamp = [0, 1] } }"];
        let job = job("[constraints]\n\"a.weight\" = { unit_norm = true }\n", &set).expect("a job");
        assert_eq!(job.constraints.keys().collect::<Vec<_>>(), ["a.bias"]);
    }

    #[test]
    fn wrong_constraint_is_refused_with_its_name() {
        for (more, word) in [
            ("\"a\" = { clamp = [1, 0] }", "`a`: clamp [1, 0] holds no value"),
            ("\"a\" = { max_norm = 0 }", "max_norm 0"),
            ("\"a\" = { unit-norm = true }", "did you mean `constraints.a.unit_norm`"),
            ("\"a\" = {}", "write clamp"),
            ("\"a\" = { max_norm = 1, unit_norm = true }", "keep one"),
            ("\"a\" = { clamp = [1] }", "constraints.a"),
            ("\"a\" = { clamp = [-1e300, 1] }", "write inf"),
            ("\"a\" = 3", "constraints.a"),
        ] {
            let why = job(&format!("[constraints]\n{more}\n"), &[]).expect_err(more);
            assert!(why.contains(word), "{why}");
        }
        let alone = ["train.exchange=all-reduce", "train.workers=1"];
        let why = job("[constraints]\n\"a\" = { unit_norm = true }\n", &alone).expect_err("refused");
        assert!(why.contains("take [constraints] out"), "{why}");
        for (more, word) in [
            ("\"a.wieght\" = { unit_norm = true }", "did you mean `a.weight`?"),
            ("\"b*\" = { unit_norm = true }", "no tensor of the model"),
            ("\"mean\" = { clamp = [0, 1] }", "running statistic"),
            (
                "\"a*\" = { unit_norm = true }\n\"a.bias\" = { max_norm = 1 }",
                "two norms for the rows of `a.bias`",
            ),
        ] {
            let job = job(&format!("[constraints]\n{more}\n"), &[]).expect("the model is not known");
            let why = job.layout(tensors()).expect_err(more).to_string();
            assert!(why.contains(word), "{why}");
        }
    }

    #[test]
    fn star_stands_for_any_characters() {
        for (pattern, name, is) in [
            ("*", "a.b", true),
            ("a.*", "a.b", true),
            ("a.*", "b.a.b", false),
            ("*.b", "a.b", true),
            ("*.b", "a.bb", false),
            ("a*c*e", "abcde", true),
            ("a*c*e", "abde", false),
            ("ü*", "üa", true),
            ("", "a", false),
        ] {
            assert_eq!(matches(pattern, name), is, "{pattern} {name}");
        }
    }
}
