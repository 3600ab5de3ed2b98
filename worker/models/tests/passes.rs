//! A model computed stage by stage, micro-batch by micro-batch, gives the results of the whole model.

use paraft_models::{
    Batch, CpuDevice, DataShape, Flat, Forward, Model, ModelConfig, NetResult, Pass, Sample, Stages, Weights,
};
use std::ops::Range;

/// The flat vectors of a stage, in memory.
struct Host<'a> {
    weights: &'a [f32],
    gradient: Vec<f32>,
    ready: Vec<usize>,
}

impl Weights<CpuDevice> for Host<'_> {
    fn params(&mut self, _: usize) -> NetResult<&[f32]> {
        Ok(self.weights)
    }
}

impl Flat<CpuDevice> for Host<'_> {
    fn layer(&mut self, _: usize) -> NetResult<(&[f32], &mut [f32])> {
        Ok((self.weights, &mut self.gradient))
    }

    fn ready(&mut self, offset: usize) -> NetResult {
        self.ready.push(offset);
        Ok(())
    }
}

const MODELS: [(&str, DataShape); 5] = [
    ("kind = \"mlp\"\nhidden = [7, 9, 5, 6]", values(Some(3))),
    ("kind = \"autoencoder\"\nhidden = [6, 3, 6]", values(None)),
    ("kind = \"mlp\"\nhidden = [7, 9]", values(None)),
    ("kind = \"transformer\"\nlayers = 3\nheads = 1\nwidth = 16", tokens()),
    ("kind = \"transformer\"\nlayers = 3\nheads = 1\nwidth = 16\ncheckpoint_activations = true", tokens()),
];

const fn values(classes: Option<usize>) -> DataShape {
    DataShape { sample: Sample::Values(8), classes }
}

const fn tokens() -> DataShape {
    DataShape { sample: Sample::Tokens { time: 5, vocab: 11 }, classes: Some(11) }
}

/// Distinct samples.
fn batch(shape: DataShape, n: usize, seed: usize) -> Batch {
    let number = |i: usize| (i * 2_654_435_761 + seed * 40_503) % 1009;
    let ids = |n: usize, below: usize| (0..n).map(|i| (number(i) % below) as u32).collect();
    match shape.sample {
        Sample::Tokens { time, vocab } => Batch {
            tokens: ids(n * time, vocab),
            labels: ids(n * time + 1, vocab)[1..].to_vec(),
            n,
            ..Batch::default()
        },
        Sample::Values(len) => Batch {
            inputs: (0..n * len).map(|i| number(i) as f32 / 1009.0).collect(),
            labels: ids(n, shape.classes.unwrap_or(1)),
            targets: (0..n).map(|i| number(i + 7) as f32 / 100.0).collect(),
            n,
            ..Batch::default()
        },
    }
}

fn build(text: &str, shape: DataShape) -> Box<dyn Model> {
    toml::from_str::<ModelConfig>(text).expect("a model").build(shape).expect("it builds")
}

/// Forward and backward through all stages, all micro-batches forward first. Returns the losses, and the gradient
/// of each micro-batch including loans.
fn staged(
    text: &str,
    shape: DataShape,
    weights: &[f32],
    stages: &Stages,
    batches: &[Batch],
) -> (Vec<f32>, Vec<Vec<f32>>) {
    // One model per process.
    let mut models: Vec<_> = (0..stages.len()).map(|_| build(text, shape)).collect();
    let pass = |stage: usize, slot: usize| Pass {
        layers: stages.layers()[stage].clone(),
        slot,
        n: batches[slot].n,
        evaluates: false,
    };
    let mut losses = Vec::new();
    for (slot, batch) in batches.iter().enumerate() {
        let mut edge: Option<Vec<f32>> = None;
        for (stage, model) in models.iter_mut().enumerate() {
            let mut host = Host { weights, gradient: Vec::new(), ready: Vec::new() };
            match model.forward_pass(&mut host, &pass(stage, slot), batch, edge.as_deref()).expect("forward")
            {
                Forward::Edge(values) => edge = Some(values),
                Forward::Loss(loss) => losses.push(loss),
                Forward::Evaluated(_) => panic!("it trains"),
            }
        }
    }
    let mut gradients = Vec::new();
    for slot in 0..batches.len() {
        let (mut sum, mut edge): (Vec<f32>, Option<Vec<f32>>) = (vec![0.0; weights.len()], None);
        for (stage, model) in models.iter_mut().enumerate().rev() {
            let mut host = Host { weights, gradient: vec![0.0; weights.len()], ready: Vec::new() };
            edge = model.backward_pass(&mut host, &pass(stage, slot), edge.as_deref()).expect("backward");
            let own = stages.own()[stage].clone();
            assert_eq!(host.ready.last(), Some(&own.start), "its own gradient is ready");
            assert!(host.ready.is_sorted_by(|a, b| a > b), "{:?}", host.ready);
            let lent = stages.loans().iter().filter(|l| l.user == stage).map(|l| l.range.clone());
            for range in std::iter::once(own).chain(lent) {
                sum[range.clone()].iter_mut().zip(&host.gradient[range]).for_each(|(s, g)| *s += g);
            }
        }
        assert_eq!(edge, None, "nobody asks for the gradient of the data");
        gradients.push(sum);
    }
    (losses, gradients)
}

#[test]
fn stages_make_the_gradient_of_the_whole_model() {
    for (text, shape) in MODELS {
        let mut whole = build(text, shape);
        let len: usize = whole.tensors().iter().map(paraft_common::TensorSpec::len).sum();
        let mut weights = vec![0.0; len];
        whole.init(7, &mut weights);
        let batches: Vec<Batch> = [3, 4, 2].iter().enumerate().map(|(i, n)| batch(shape, *n, i)).collect();
        let mut want = Vec::new();
        for batch in &batches {
            let mut gradient = vec![0.0; len];
            let loss = whole.step(&weights, &mut gradient, batch, &mut |_, _| {}).expect("a step");
            want.push((loss, gradient));
        }
        for n in 1..=whole.layers().len() {
            let stages = Stages::even(&whole.layers(), n).expect("it can be cut");
            let (losses, gradients) = staged(text, shape, &weights, &stages, &batches);
            let lent: Vec<Range<usize>> = stages.loans().iter().map(|l| l.range.clone()).collect();
            for ((loss, gradient), (want_loss, want)) in losses.iter().zip(&gradients).zip(&want) {
                assert_eq!(loss, want_loss, "{text}, {n} stages");
                for (i, (got, want)) in gradient.iter().zip(want).enumerate() {
                    // Loans are summed in another order.
                    let near = lent.iter().any(|r| r.contains(&i))
                        && (got - want).abs() <= 1e-5 * (1e-2 + want.abs());
                    assert!(got == want || near, "{text}, {n} stages, value {i}: {got} for {want}");
                }
            }
        }
    }
}

#[test]
fn stages_make_the_evaluation_of_the_whole_model() {
    for (text, shape) in MODELS {
        let mut whole = build(text, shape);
        let len: usize = whole.tensors().iter().map(paraft_common::TensorSpec::len).sum();
        let mut weights = vec![0.0; len];
        whole.init(3, &mut weights);
        let batch = batch(shape, 6, 5);
        let want = whole.evaluate(&weights, &batch).expect("an evaluation");
        for n in 1..=whole.layers().len() {
            let stages = Stages::even(&whole.layers(), n).expect("it can be cut");
            let mut edge: Option<Vec<f32>> = None;
            for layers in stages.layers() {
                let pass = Pass { layers: layers.clone(), slot: 0, n: 6, evaluates: true };
                let mut host = Host { weights: &weights, gradient: Vec::new(), ready: Vec::new() };
                match build(text, shape)
                    .forward_pass(&mut host, &pass, &batch, edge.as_deref())
                    .expect("forward")
                {
                    Forward::Edge(values) => edge = Some(values),
                    Forward::Evaluated(e) => assert_eq!(e, want, "{text}, {n} stages"),
                    Forward::Loss(_) => panic!("it evaluates"),
                }
            }
        }
    }
}

#[test]
fn foreign_edges_of_wrong_length_are_refused() {
    let (text, shape) = MODELS[0];
    let mut model = build(text, shape);
    let weights = vec![0.1; model.tensors().iter().map(paraft_common::TensorSpec::len).sum()];
    let pass = Pass { layers: 1..3, slot: 0, n: 2, evaluates: false };
    let batch = batch(shape, 2, 1);
    let mut host = Host { weights: &weights, gradient: vec![0.0; weights.len()], ready: Vec::new() };
    for input in [None, Some(&[0.0; 13][..]), Some(&[])] {
        let why = model.forward_pass(&mut host, &pass, &batch, input).expect_err("refused").to_string();
        assert!(why.contains("14"), "{why}");
    }
    model.forward_pass(&mut host, &pass, &batch, Some(&[0.5; 14])).expect("it fits");
    assert!(model.backward_pass(&mut host, &pass, Some(&[0.0; 3])).is_err());
}
