//! One training step and one evaluation of each model against PyTorch's results, made by
//! `tools/golden/models.py`.
//!
//! Tolerance: 1e-5 of a tensor's largest value. PyTorch's own f32 results are within 2e-6 of its double ones here;
//! the rest allows another order of summation. If the true gradient is zero (a bias before a BatchNorm), only
//! rounding remains, below 1e-6.

mod support;

use paraft_models::{Batch, DataShape, ModelConfig, Sample};
use serde_json::Value;
use support::{Stream, batch, close, layout, step, wide};

fn numbers(hex: &Value) -> Vec<f64> {
    let text = hex.as_str().expect("hex text");
    assert!(text.len().is_multiple_of(8));
    let one = |i: usize| {
        let bits = u32::from_str_radix(&text[i * 8..i * 8 + 8], 16).expect("hex digits");
        f64::from(f32::from_bits(bits))
    };
    (0..text.len() / 8).map(one).collect()
}

fn agrees_with_pytorch(text: &str) {
    let case: Value = serde_json::from_str(text).expect("JSON");
    let size = |key: &str| case[key].as_u64().expect(key) as usize;
    let config: ModelConfig = serde_json::from_value(case["config"].clone()).expect("a model");
    let classes = case["classes"].as_u64().map(|c| c as usize);
    let sample = match (&config, classes) {
        (ModelConfig::Transformer { .. }, Some(vocab)) => Sample::Tokens { time: size("inputs"), vocab },
        _ => Sample::Values(size("inputs")),
    };
    let mut model = config.build(DataShape { sample, classes }).expect("a model");
    let layout = layout(model.as_ref());

    // The same stream as the script's: all tensors in order, then the inputs.
    let mut stream = Stream(size("seed") as u32);
    let mut params = Vec::new();
    let tensors = case["tensors"].as_array().expect("tensors");
    assert_eq!(tensors.len(), layout.tensors().len());
    for (want, ours) in tensors.iter().zip(layout.tensors()) {
        assert_eq!(want["name"], ours.name.as_str());
        assert_eq!(want["shape"], serde_json::json!(ours.shape));
        let [scale, shift] = ["scale", "shift"].map(|k| want[k].as_f64().expect(k) as f32);
        params.extend(stream.fill(ours.len(), scale, shift));
    }
    let batch = match sample {
        Sample::Values(len) => batch(stream.0, size("n"), len, classes),
        Sample::Tokens { time, vocab } => {
            let ids = |step: usize| (0..size("n") * time).map(|i| (i * step % vocab) as u32).collect();
            Batch { tokens: ids(5), labels: ids(7), n: size("n"), ..Batch::default() }
        }
    };

    let (loss, grads) = step(model.as_mut(), &params, &batch);
    close("loss", &[loss], &[case["loss"].as_f64().expect("loss")], 1e-5, 0.0);
    let mut after = params.clone();
    for (i, t) in layout.tensors().iter().enumerate() {
        let range = layout.tensor_range(i);
        if let Some(want) = case["grads"].get(&t.name) {
            close(&t.name, &grads[range], &numbers(want), 1e-5, 1e-6);
        } else {
            for (p, g) in after[range.clone()].iter_mut().zip(&grads[range.clone()]) {
                *p -= g;
            }
            close(&t.name, &after[range], &numbers(&case["buffers"][&t.name]), 1e-5, 0.0);
        }
    }
    let e = model.evaluate(&after, &batch).expect("a valid evaluation");
    // A language model counts tokens.
    assert_eq!(e.count, batch.labels.len().max(batch.n) as u64);
    assert_eq!(e.correct, case["eval_correct"].as_u64().expect("count"));
    let mean = e.loss_sum / e.count as f64;
    close("evaluation", &[mean as f32], &[case["eval_loss"].as_f64().expect("loss")], 1e-5, 0.0);
    assert!(wide(&after).iter().all(|v| v.is_finite()));
}

#[test]
fn linear_agrees_with_pytorch() {
    agrees_with_pytorch(include_str!("golden/linear.json"));
}

#[test]
fn mlp_agrees_with_pytorch() {
    agrees_with_pytorch(include_str!("golden/mlp.json"));
}

#[test]
fn autoencoder_agrees_with_pytorch() {
    agrees_with_pytorch(include_str!("golden/autoencoder.json"));
}

#[test]
fn convnet_agrees_with_pytorch() {
    agrees_with_pytorch(include_str!("golden/convnet.json"));
}

#[test]
fn transformer_agrees_with_pytorch() {
    agrees_with_pytorch(include_str!("golden/transformer.json"));
}

#[test]
fn a_transformer_that_keeps_only_inputs_has_the_same_gradient() {
    let case: Value = serde_json::from_str(include_str!("golden/transformer.json")).expect("JSON");
    let mut config = case["config"].clone();
    config["checkpoint_activations"] = true.into();
    let mut case = case;
    case["config"] = config;
    agrees_with_pytorch(&case.to_string());
}
