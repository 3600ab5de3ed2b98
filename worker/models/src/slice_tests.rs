//! Tests of `slice`.

use super::*;
use crate::{
    Batch, DataShape, Evaluation, Forward, ModelConfig, Pass, Sample,
    net::{WholeParams, WholeVectors},
};
use std::{
    sync::{Barrier, Mutex},
    thread,
};

/// Ranks as threads.
#[derive(Debug)]
struct Table {
    parts: Mutex<Vec<Vec<f32>>>,
    meets: Barrier,
}

#[derive(Debug)]
struct ThreadRank(Arc<Table>, usize);

impl SliceRanks for ThreadRank {
    fn gather(&self, own: &[f32]) -> Result<Vec<Vec<f32>>, DeviceError> {
        let Self(table, at) = self;
        table.parts.lock().expect("no panic")[*at] = own.to_vec();
        table.meets.wait();
        let all = table.parts.lock().expect("no panic").clone();
        table.meets.wait();
        Ok(all)
    }
}

fn seats(of: usize) -> Vec<Arc<dyn SliceRanks>> {
    let table = Arc::new(Table { parts: Mutex::new(vec![Vec::new(); of]), meets: Barrier::new(of) });
    (0..of).map(|at| Arc::new(ThreadRank(table.clone(), at)) as Arc<dyn SliceRanks>).collect()
}

fn tokens(n: usize, time: usize, vocab: usize) -> Batch {
    let number = |i: usize| ((i * 7919 + i * i * 31) % vocab) as u32;
    let all: Vec<u32> = (0..n * time + 1).map(number).collect();
    Batch { tokens: all[..n * time].to_vec(), labels: all[1..].to_vec(), n, ..Batch::default() }
}

fn values(n: usize, inputs: usize, classes: usize) -> Batch {
    let value = |i: usize| ((i * 37 + 11) % 101) as f32 / 50.0 - 1.0;
    let labels = (0..n).map(|i| ((i * 5 + 2) % classes) as u32).collect();
    Batch { inputs: (0..n * inputs).map(value).collect(), labels, n, ..Batch::default() }
}

fn model(text: &str, data: DataShape) -> Box<dyn Model> {
    toml::from_str::<ModelConfig>(text).expect("a model").build(data).expect("fits")
}

/// A slice's result: loss, gradient in the model's vector, evaluation. With `cut` each layer is its own pass.
fn of_slice(
    whole: &dyn Model,
    params: &[f32],
    batch: &Batch,
    (slice, ranks): (Slice, Arc<dyn SliceRanks>),
    cut: bool,
) -> (f32, Vec<f32>, Evaluation) {
    let mut sliced = whole.slice(slice, ranks).expect("slices");
    let (mut local, mut grads) = (vec![0.0; sliced.len], vec![0.0; sliced.len]);
    sliced.cut(params, &mut local);
    let layers = sliced.model.layers();
    let cuts: Vec<Range<usize>> = match cut {
        true => (0..layers.len()).map(|l| l..l + 1).collect(),
        false => std::iter::once(0..layers.len()).collect(),
    };
    let forward = |model: &mut dyn Model, evaluates: bool| {
        let mut edge = None;
        for layers in &cuts {
            let pass = Pass { layers: layers.clone(), slot: 0, n: batch.n, evaluates };
            match model
                .forward_pass(&mut WholeParams(&local[..]), &pass, batch, edge.as_deref())
                .expect("forward")
            {
                Forward::Edge(values) => edge = Some(values),
                end => return end,
            }
        }
        panic!("no end")
    };
    let Forward::Evaluated(evaluation) = forward(&mut *sliced.model, true) else { panic!("it trains") };
    let Forward::Loss(loss) = forward(&mut *sliced.model, false) else { panic!("it evaluates") };
    let mut edge = None;
    for layers in cuts.iter().rev() {
        let pass = Pass { layers: layers.clone(), slot: 0, n: batch.n, evaluates: false };
        let mut ready = |_: usize, _: &[f32]| Ok(());
        let mut flat = WholeVectors { params: &local[..], grads: &mut grads[..], ready: &mut ready };
        edge = sliced.model.backward_pass(&mut flat, &pass, edge.as_deref()).expect("back");
    }
    // The evaluation's sums must not include the step.
    let again = forward(&mut *sliced.model, true);
    assert_eq!(again, Forward::Evaluated(evaluation), "{slice:?} behind a step");
    let mut joined = vec![f32::NAN; params.len()];
    sliced.join(slice, &grads, &mut joined);
    (loss, joined, evaluation)
}

fn check(text: &str, data: DataShape, batch: &Batch, of: usize, cut: bool) {
    let mut whole = model(text, data);
    let len = whole.tensors().iter().map(|t| t.len()).sum();
    let mut params = vec![0.0; len];
    whole.init(3, &mut params);
    // Nonzero biases.
    params.iter_mut().enumerate().for_each(|(i, p)| *p += ((i % 13) as f32 - 6.0) * 2e-3);
    let mut want = vec![0.0; len];
    let loss = whole.step(&params, &mut want, batch, &mut |_, _| {}).expect("a step");
    let evaluated = whole.evaluate(&params, batch).expect("an evaluation");
    let parts: Vec<_> = thread::scope(|s| {
        let (whole, params) = (text, &params);
        let all: Vec<_> = (seats(of).into_iter().enumerate())
            .map(|(at, ranks)| {
                s.spawn(move || {
                    let slice = Slice { at, of };
                    of_slice(&*model(whole, data), params, batch, (slice, ranks), cut)
                })
            })
            .collect();
        all.into_iter().map(|t| t.join().expect("no panic")).collect()
    });
    let mut times = vec![0; len];
    let largest = want.iter().fold(0.0f32, |m, v| m.max(v.abs()));
    for (at, (of_slice, grads, e)) in parts.iter().enumerate() {
        assert!((of_slice - loss).abs() < 1e-4 * loss, "{text}, {at} of {of}: loss {of_slice} for {loss}");
        assert_eq!((e.correct, e.count), (evaluated.correct, evaluated.count), "{text}, {at} of {of}");
        assert!((e.loss_sum - evaluated.loss_sum).abs() < 1e-4 * evaluated.loss_sum);
        for (i, (g, w)) in grads.iter().zip(&want).enumerate().filter(|(_, (g, _))| !g.is_nan()) {
            times[i] += 1;
            assert!(
                (g - w).abs() < 2e-5 * largest.max(1e-3) + 1e-4 * w.abs(),
                "{text}, {at} of {of}: value {i} {g} for {w}"
            );
        }
    }
    assert!(times.iter().all(|t| *t == 1), "{text}, {of} slices: values that none or several have");
}

#[test]
fn slices_of_a_transformer_come_to_the_gradient_of_the_whole() {
    let (time, vocab) = (9, 37);
    let data = DataShape { sample: Sample::Tokens { time, vocab }, classes: Some(vocab) };
    let batch = tokens(3, time, vocab);
    for (text, slices) in [
        ("kind = \"transformer\"\nlayers = 2\nheads = 4\nwidth = 64", &[1, 2, 4][..]),
        ("kind = \"transformer\"\nlayers = 3\nheads = 3\nwidth = 48", &[2, 3]),
        ("kind = \"transformer\"\nlayers = 2\nheads = 2\nwidth = 32\ncheckpoint_activations = true", &[2]),
    ] {
        for of in slices {
            check(text, data, &batch, *of, false);
            // A rank recomputes the blocks of one pass, not of several.
            if !text.contains("checkpoint") {
                check(text, data, &batch, *of, true);
            }
        }
    }
}

#[test]
fn slices_of_an_mlp_come_to_the_gradient_of_the_whole() {
    let data = DataShape { sample: Sample::Values(11), classes: Some(7) };
    let batch = values(10, 11, 7);
    for hidden in ["[]", "[9]", "[12, 10]", "[12, 9, 8]", "[5, 6, 7, 8]"] {
        for of in 1..=4 {
            check(&format!("kind = \"mlp\"\nhidden = {hidden}"), data, &batch, of, false);
            check(&format!("kind = \"mlp\"\nhidden = {hidden}"), data, &batch, of, true);
        }
    }
}

#[test]
fn what_cannot_be_cut_so_is_refused_by_name() {
    let text = DataShape { sample: Sample::Tokens { time: 4, vocab: 9 }, classes: Some(9) };
    let images = DataShape { sample: Sample::Values(784), classes: Some(10) };
    for (model_text, data, of, said) in [
        ("kind = \"transformer\"\nheads = 2\nwidth = 32", text, 3, "2 heads"),
        ("kind = \"mlp\"\nhidden = [3]", images, 4, "width 3"),
        ("kind = \"convnet\"", images, 2, "tensor slices"),
    ] {
        let ranks = seats(1).remove(0);
        let refused = model(model_text, data).slice(Slice { at: 0, of }, ranks).err().map(|e| e.to_string());
        assert!(refused.as_ref().is_some_and(|why| why.contains(said)), "{refused:?}");
    }
}
