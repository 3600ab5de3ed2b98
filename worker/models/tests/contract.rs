//! Every model's contract: `ready` covers the vector once, equal inputs give equal bits, wrong inputs are errors,
//! evaluations add up, configurations report errors.

mod support;

use paraft_common::layout::TensorKind;
use paraft_models::{Batch, DataShape, Model, ModelConfig, Sample};
use support::{batch, layout, params, step};

const INPUTS: usize = 64;

fn all() -> Vec<(ModelConfig, Box<dyn Model>)> {
    let configs = [
        ModelConfig::LogisticRegression,
        ModelConfig::Mlp { hidden: vec![20, 15] },
        ModelConfig::Autoencoder { hidden: vec![20, 15] },
        ModelConfig::Convnet,
    ];
    let build = |c: ModelConfig| {
        (c.clone(), c.build(DataShape { sample: Sample::Values(INPUTS), classes: Some(10) }).expect("valid"))
    };
    configs.into_iter().map(build).collect()
}

#[test]
fn ready_covers_vector_once_with_falling_final_offsets() {
    for (config, mut model) in all() {
        let b = batch(1, 19, INPUTS, Some(10));
        let p = params(model.as_ref(), 2);
        let layout = layout(model.as_ref());
        let mut grads = vec![f32::NAN; p.len()];
        let (mut end, mut calls, mut seen) = (p.len(), 0, vec![f32::NAN; p.len()]);
        let mut ready = |offset: usize, now: &[f32]| {
            assert!(offset < end, "{}: offset {offset} after {end}", config.name());
            assert_eq!(now.len(), seen.len());
            seen[offset..end].copy_from_slice(&now[offset..end]);
            (end, calls) = (offset, calls + 1);
        };
        model.step(&p, &mut grads, &b, &mut ready).expect("a valid step");
        assert_eq!(end, 0, "{}: the last call must pass 0", config.name());
        assert_eq!(seen, grads, "{}: a value changed after it was called ready", config.name());
        let starts: Vec<usize> = (0..layout.tensors().len()).map(|i| layout.tensor_range(i).start).collect();
        assert!(starts.contains(&end));
        let least = match config {
            ModelConfig::LogisticRegression => 1,
            ModelConfig::Convnet => 5,
            _ => 3,
        };
        assert!(calls >= least, "{}: {calls} calls overlap nothing", config.name());
    }
}

#[test]
fn the_same_inputs_give_the_same_bits_whatever_came_before() {
    for (config, mut model) in all() {
        let p = params(model.as_ref(), 3);
        let (small, large) = (batch(4, 5, INPUTS, Some(10)), batch(5, 50, INPUTS, Some(10)));
        let first = step(model.as_mut(), &p, &small);
        step(model.as_mut(), &p, &large);
        model.evaluate(&p, &large).expect("a valid evaluation");
        // Data of the larger batch left in the workspaces must not matter.
        assert_eq!(step(model.as_mut(), &p, &small), first, "{}", config.name());
        let mut fresh =
            config.build(DataShape { sample: Sample::Values(INPUTS), classes: Some(10) }).expect("valid");
        assert_eq!(step(fresh.as_mut(), &p, &small), first, "{}", config.name());
    }
}

#[test]
fn the_number_of_threads_changes_no_bit() {
    let transformer =
        ModelConfig::Transformer { layers: 2, heads: 2, width: 64, checkpoint_activations: false };
    let images = DataShape { sample: Sample::Values(784), classes: Some(10) };
    let text = DataShape { sample: Sample::Tokens { time: 70, vocab: 50 }, classes: Some(50) };
    let tokens = |seed: u32| (0..5 * 70u32).map(|i| (i * seed + i / 7) % 50).collect();
    let of_text = Batch { tokens: tokens(11), labels: tokens(13), n: 5, ..Batch::default() };
    let cases = [
        (ModelConfig::LogisticRegression, images, batch(1, 150, 784, Some(10))),
        (ModelConfig::Mlp { hidden: vec![256, 100] }, images, batch(1, 150, 784, Some(10))),
        (ModelConfig::Autoencoder { hidden: vec![128] }, images, batch(1, 150, 784, None)),
        (
            ModelConfig::Mlp { hidden: vec![100] },
            DataShape { classes: None, ..images },
            batch(1, 150, 784, None),
        ),
        (ModelConfig::Convnet, images, batch(1, 37, 784, Some(10))),
        (transformer, text, of_text),
    ];
    for (config, shape, batch) in cases {
        let mut one = config.build(shape).expect("valid");
        let p = params(one.as_ref(), 2);
        let want = step(one.as_mut(), &p, &batch);
        for threads in [2, 5] {
            let mut several = config.build_with(threads, shape).expect("starts");
            assert_eq!(step(several.as_mut(), &p, &batch), want, "{} on {threads} threads", config.name());
        }
    }
}

#[test]
fn initial_weights_depend_only_on_seed_and_buffers_come_last() {
    for (config, model) in all() {
        assert_eq!(params(model.as_ref(), 1), params(model.as_ref(), 1), "{}", config.name());
        assert_ne!(params(model.as_ref(), 1), params(model.as_ref(), 2), "{}", config.name());
        let (layout, p) = (layout(model.as_ref()), params(model.as_ref(), 1));
        for (i, t) in layout.tensors().iter().enumerate() {
            let values = &p[layout.tensor_range(i)];
            assert_eq!(t.kind == TensorKind::Buffer, t.name.contains("running"), "{}", t.name);
            if t.name.ends_with("running_var") || t.name == "2.weight" && config == ModelConfig::Convnet {
                assert!(values.iter().all(|v| *v == 1.0), "{}", t.name);
            } else if t.name.ends_with("running_mean") {
                assert!(values.iter().all(|v| *v == 0.0), "{}", t.name);
            }
        }
    }
}

#[test]
fn wrong_inputs_are_errors() {
    for (config, mut model) in all() {
        let p = params(model.as_ref(), 1);
        let good = batch(1, 4, INPUTS, Some(10));
        let mut grads = vec![0.0; p.len()];
        let mut fails = |params: &[f32], grads: &mut [f32], b: &Batch| {
            model.step(params, grads, b, &mut |_, _| {}).expect_err("must fail").to_string()
        };
        assert!(fails(&p[1..], &mut grads, &good).contains("parameter buffer"));
        assert!(fails(&p, &mut grads[1..], &good).contains("gradient buffer"));
        assert!(fails(&p, &mut grads, &Batch::default()).contains("at least one"));
        let short = Batch { inputs: good.inputs[1..].to_vec(), ..good.clone() };
        assert!(fails(&p, &mut grads, &short).contains("64"));
        if !matches!(config, ModelConfig::Autoencoder { .. }) {
            let unlabelled = Batch { labels: Vec::new(), ..good.clone() };
            assert!(fails(&p, &mut grads, &unlabelled).contains("label"));
            let beyond = Batch { labels: vec![0, 9, 10, 0], ..good.clone() };
            assert!(fails(&p, &mut grads, &beyond).contains("label 10 of sample 2"));
            assert!(model.evaluate(&p, &beyond).is_err());
        }
        assert!(model.evaluate(&p[1..], &good).is_err());
    }
}

#[test]
fn evaluation_adds_up_over_parts() {
    for (config, mut model) in all() {
        let p = params(model.as_ref(), 6);
        let whole = batch(7, 600, INPUTS, Some(10));
        let part = |from: usize, to: usize| Batch {
            inputs: whole.inputs[from * INPUTS..to * INPUTS].to_vec(),
            labels: whole.labels[from..to].to_vec(),
            n: to - from,
            ..Batch::default()
        };
        let all = model.evaluate(&p, &whole).expect("valid");
        let parts =
            [(0, 1), (1, 300), (300, 600)].map(|(a, b)| model.evaluate(&p, &part(a, b)).expect("valid"));
        assert_eq!(all.count, 600);
        assert_eq!(all.correct, parts.iter().map(|e| e.correct).sum::<u64>(), "{}", config.name());
        let sum: f64 = parts.iter().map(|e| e.loss_sum).sum();
        assert!((all.loss_sum - sum).abs() < 1e-4 * sum, "{}: {} and {sum}", config.name(), all.loss_sum);
        assert_eq!(model.evaluate(&p, &Batch::default()).expect("no samples is fine").count, 0);
    }
}

#[test]
fn configuration_reads_as_job_file_and_refuses_unknown_keys() {
    let read = serde_json::from_str::<ModelConfig>;
    assert_eq!(read(r#"{"kind":"logistic-regression"}"#).expect("valid"), ModelConfig::LogisticRegression);
    let mlp = read(r#"{"kind":"mlp","hidden":[256,128]}"#).expect("valid");
    assert_eq!(mlp, ModelConfig::Mlp { hidden: vec![256, 128] });
    let written = serde_json::to_string(&mlp).expect("JSON");
    assert_eq!(serde_json::from_str::<ModelConfig>(&written).expect("valid"), mlp);
    assert!(read(r#"{"kind":"mlp"}"#).is_err());
    assert!(read(r#"{"kind":"mlp","hidden":[1],"depth":2}"#).is_err());
    assert!(read(r#"{"kind":"diffusion"}"#).is_err());
    let small = ModelConfig::Transformer { layers: 4, heads: 4, width: 128, checkpoint_activations: false };
    assert_eq!(read(r#"{"kind":"transformer"}"#).expect("valid"), small);
}

#[test]
fn a_model_that_does_not_fit_the_data_says_why() {
    let fails = |c: ModelConfig, inputs, classes| match c
        .build(DataShape { sample: Sample::Values(inputs), classes })
    {
        Ok(_) => panic!("{c:?} must not fit"),
        Err(e) => e.to_string(),
    };
    assert!(fails(ModelConfig::Convnet, 784, None).contains("no labels"));
    assert!(fails(ModelConfig::LogisticRegression, 784, None).contains("mlp for numbers to predict"));
    assert!(fails(ModelConfig::Convnet, 100, Some(10)).contains("side 10"));
    assert!(fails(ModelConfig::Convnet, 123, Some(10)).contains("123 values"));
    assert!(fails(ModelConfig::Mlp { hidden: vec![3, 0] }, 10, Some(2)).contains("zero"));
    assert!(fails(ModelConfig::Autoencoder { hidden: vec![0] }, 10, None).contains("zero"));
    assert!(fails(ModelConfig::LogisticRegression, 10, Some(1)).contains("two classes"));
    let transformer =
        |heads, width| ModelConfig::Transformer { layers: 1, heads, width, checkpoint_activations: false };
    assert!(fails(transformer(2, 32), 10, Some(10)).contains("kind = \"text\""));
    let text = DataShape { sample: Sample::Tokens { time: 8, vocab: 9 }, classes: Some(9) };
    let of_text = |c: ModelConfig| c.build(text).err().map(|e| e.to_string()).unwrap_or_default();
    assert!(of_text(ModelConfig::Convnet).contains("kind = \"transformer\""));
    assert!(of_text(transformer(3, 32)).contains("16, 32, 64 or 128 times the heads"));
    assert!(of_text(transformer(0, 32)).contains("zero"));
    assert!(fails(ModelConfig::LogisticRegression, 0, Some(2)).contains("no values"));
}
