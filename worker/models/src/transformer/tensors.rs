//! The transformer's tensors and their initial values.

use super::TransformerShape;
use crate::init::Init;
use paraft_common::layout::TensorSpec;

/// The tensors, with nanoGPT's names and shapes.
pub(super) fn tensors(s: TransformerShape) -> Vec<TensorSpec> {
    let mut all = vec![
        TensorSpec::param("transformer.wte.weight", &[s.vocab, s.width]),
        TensorSpec::param("transformer.wpe.weight", &[s.time, s.width]),
    ];
    let norm =
        |name: String| ["weight", "bias"].map(|part| TensorSpec::param(format!("{name}.{part}"), &[s.width]));
    let linear = |name: String, inputs: usize, outputs: usize| {
        vec![
            TensorSpec::param(format!("{name}.weight"), &[outputs * s.width, inputs * s.width]),
            TensorSpec::param(format!("{name}.bias"), &[outputs * s.width]),
        ]
    };
    for i in 0..s.layers {
        let p = format!("transformer.h.{i}");
        all.extend(norm(format!("{p}.ln_1")));
        all.extend(linear(format!("{p}.attn.c_attn"), 1, 3));
        all.extend(linear(format!("{p}.attn.c_proj"), 1, 1));
        all.extend(norm(format!("{p}.ln_2")));
        all.extend(linear(format!("{p}.mlp.c_fc"), 1, 4));
        all.extend(linear(format!("{p}.mlp.c_proj"), 4, 1));
    }
    all.extend(norm("transformer.ln_f".into()));
    all
}

/// As in GPT-2: normal with a deviation of 0.02, divided by √(2 layers) for what is added to the residual
/// stream; zero biases; identity norms.
pub(super) fn init(s: TransformerShape, seed: u64, params: &mut [f32]) {
    const DEVIATION: f32 = 0.02;
    let residual = DEVIATION / ((2 * s.layers) as f32).sqrt();
    let mut init = Init::new(seed);
    let mut at = 0;
    for t in tensors(s) {
        let tensor = &mut params[at..at + t.len()];
        at += t.len();
        match t.shape.len() {
            1 if t.name.contains("ln_") && t.name.ends_with("weight") => tensor.fill(1.0),
            1 => tensor.fill(0.0),
            _ if t.name.ends_with("c_proj.weight") => init.normal(residual, tensor),
            _ => init.normal(DEVIATION, tensor),
        }
    }
}
