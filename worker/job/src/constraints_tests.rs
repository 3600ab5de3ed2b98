//! Tests of `constraints`.

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
