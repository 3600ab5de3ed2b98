//! Sections with types of other crates: their compatibility within a job.

use crate::{
    DeviceConfig, Exchange, Job,
    check::{Check, bad},
};
use paraft_common::algorithm::{AlgorithmConfig, AlgorithmError};
use paraft_data::{DataConfig, LabelColumn, Task};
use paraft_models::ModelConfig;

/// Layers of a model that is a list of widths.
const MAX_LAYERS: usize = 1024;
const SEE: &str = "see docs/configuration.md";

/// `[model]`
pub(crate) fn model(job: &Job) -> Check {
    match &job.model {
        Some(ModelConfig::Mlp { hidden } | ModelConfig::Autoencoder { hidden })
            if hidden.len() > MAX_LAYERS =>
        {
            let remedy = "use at most 1024 layers: each costs a step of every pass";
            bad("model.hidden", format!("{} layers", hidden.len()), remedy)
        }
        Some(ModelConfig::WideDeep { hidden }) => widths("model.hidden", hidden),
        Some(ModelConfig::Dlrm { bottom, top }) => {
            widths("model.bottom", bottom)?;
            widths("model.top", top)
        }
        Some(ModelConfig::Mf { l2 } | ModelConfig::Fm { l2 }) if !(l2.is_finite() && *l2 >= 0.0) => {
            bad("model.l2", format!("{l2}"), "use a number from 0")
        }
        Some(ModelConfig::TwoTower { scale }) if !(scale.is_finite() && *scale > 0.0) => {
            bad("model.scale", format!("{scale}"), "use a number above 0")
        }
        _ => Ok(()),
    }
}

/// Widths of hidden layers of a model of tables.
fn widths(key: &'static str, widths: &[usize]) -> Check {
    let most = 1 << 16;
    match widths.iter().find(|w| !(1..=most).contains(*w)) {
        Some(width) => bad(key, format!("a layer of {width}"), "use widths from 1 to 65536"),
        None if widths.len() > MAX_LAYERS => {
            bad(key, format!("{} layers", widths.len()), "use at most 1024 layers")
        }
        None => Ok(()),
    }
}

/// `[data]`: whether its labels are those that the model learns.
pub(crate) fn data(job: &Job) -> Check {
    let (Some(model), Some(DataConfig::Csv { label, task, .. })) = (&job.model, &job.data) else {
        return Ok(());
    };
    match model {
        ModelConfig::Autoencoder { .. } | ModelConfig::Transformer { .. } => Ok(()),
        _ if *label == LabelColumn::None => {
            let why = format!("{} learns labels, and \"none\" says that there are none", model.name());
            bad("data.label", why, "name the label's column, or set model.kind = \"autoencoder\"")
        }
        ModelConfig::Mlp { .. } => Ok(()),
        _ if *task == Task::Regression => {
            let why = format!("{} learns classes, and regression has none", model.name());
            bad("data.task", why, "set model.kind = \"mlp\"; with model.hidden = [] it is linear regression")
        }
        _ => Ok(()),
    }
}

/// `[optimizer]`
pub(crate) fn optimizer(job: &Job) -> Check {
    job.optimizer.validate().or_else(|e| bad("optimizer.kind", e.to_string(), SEE))
}

/// `[algorithm]`, and its compatible optimizers.
pub(crate) fn algorithm(job: &Job) -> Check {
    job.algorithm.algorithm().validate(&job.optimizer).or_else(|e| match e {
        AlgorithmError::Option(e) => bad("algorithm.kind", e.to_string(), SEE),
        AlgorithmError::Optimizer { .. } => {
            bad("optimizer.kind", e.to_string(), "change optimizer.kind, or algorithm.kind")
        }
    })?;
    let (kind, keeps) = (job.algorithm.kind(), job.algorithm.algorithm().keeps());
    if keeps.of_workers() && job.cluster.durability.is_leader() {
        let why = format!(
            "{kind} keeps something of each worker on the shards, which replicas do not get at durability leader"
        );
        return bad("algorithm.kind", why, "use a quorum durability, or another algorithm");
    }
    if job.train.exchange == Exchange::AllReduce {
        if job.algorithm != AlgorithmConfig::default() {
            let why = "with train.exchange = \"all-reduce\" no gradient comes late";
            return bad("algorithm.kind", why, "take [algorithm] out");
        }
        if !job.optimizer.has_kernel() && job.train.device != DeviceConfig::Cpu {
            let why = format!(
                "a GPU has no kernel of {}, and in an all-reduce job it needs one",
                job.optimizer.kind()
            );
            return bad("optimizer.kind", why, "set train.device = \"cpu\", or train.exchange = \"servers\"");
        }
    }
    Ok(())
}

/// `[schedule]` and `[clip]`
pub(crate) fn schedule_and_clip(job: &Job) -> Check {
    job.schedule.validate().or_else(|e| bad("schedule.kind", e.to_string(), SEE))?;
    job.clip.validate().or_else(|e| bad("clip.norm", e.to_string(), SEE))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn labels_that_the_model_does_not_learn_are_refused() {
        let check = |model: &str, data: &str| {
            let text = format!("[model]\nkind = {model}\n[data]\nkind = \"csv\"\npath = \"a.csv\"\n{data}\n");
            Job::parse(&text, Path::new("test.toml"), &[])
                .map(|job| job.classifies())
                .map_err(|e| e.to_string())
        };
        let (mlp, autoencoder) = ("\"mlp\"\nhidden = []", "\"autoencoder\"\nhidden = [2]");
        let regression = "label = \"price\"\ntask = \"regression\"";
        let target = |data: &str| format!("{data}\n[eval]\ntarget_accuracy = 0.5");
        assert_eq!(check(mlp, &target("label = \"kind\"")), Ok(true));
        assert_eq!((check(mlp, regression), check(autoencoder, "label = \"none\"")), (Ok(false), Ok(false)));
        for (model, data, key) in [
            (mlp, "label = \"none\"", "data.label"),
            ("\"convnet\"", "label = \"none\"", "data.label"),
            ("\"logistic-regression\"", regression, "data.task"),
            ("\"convnet\"", regression, "data.task"),
            (mlp, &target(regression), "eval.target_accuracy"),
            (autoencoder, &target(""), "eval.target_accuracy"),
        ] {
            let error = check(model, data).expect_err(key);
            assert!(error.contains(key), "{error}\nlacks: {key}");
        }
    }

    #[test]
    fn all_reduce_refuses_what_gpus_have_no_kernel_for() {
        let parse = |optimizer: &str, set: &[&str]| {
            let text = format!(
                "[model]\nkind = \"mlp\"\nhidden = [8]\n[data]\nkind = \"digits\"\n[optimizer]\nkind = \"{optimizer}\"\n"
            );
            let set: Vec<String> = set.iter().map(ToString::to_string).collect();
            Job::parse(&text, Path::new("test.toml"), &set).map_err(|e| e.to_string())
        };
        let alone = ["train.exchange=all-reduce", "train.workers=1"];
        for optimizer in ["adadelta", "adamax", "nadam", "radam"] {
            let error = parse(optimizer, &alone).expect_err("refused");
            assert!(error.contains("optimizer.kind") && error.contains("no kernel of"), "{error}");
            parse(optimizer, &[&alone[..], &["train.device=cpu"]].concat()).expect("on the CPU");
            parse(optimizer, &[]).expect("with servers");
        }
        parse("adamw", &alone).expect("it has one");
    }
}
