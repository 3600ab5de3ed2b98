//! The models' gradients against double-precision versions, and those against finite differences.

mod support;

use paraft_compute::{Cpu, CpuDevice};
use paraft_models::{Batch, Classifier, ConvNet, Model, OnCpu, Regressor};
use support::{batch, close, convnet, dense, layout, params, step, wide};

/// Rounding of f32 sums over some thousand terms, relative to each tensor's largest value. 1e-6 is for tensors
/// whose true gradient is zero (a convolution's bias before a norm).
const TOLERANCE: f64 = 2e-5;
const FLOOR: f64 = 2e-6;
const SIZES: [usize; 5] = [1, 7, 16, 33, 100];

fn same_gradient(model: &dyn Model, what: &str, got: (f32, &[f32]), want: (f64, &[f64])) {
    close(&format!("{what}: loss"), &[got.0], &[want.0], 1e-5, 0.0);
    let layout = layout(model);
    for (i, t) in layout.tensors().iter().enumerate() {
        let r = layout.tensor_range(i);
        if r.end <= want.1.len() {
            close(&format!("{what}: {}", t.name), &got.1[r.clone()], &want.1[r], TOLERANCE, FLOOR);
        }
    }
}

/// Compares the gradient with central differences of `loss` along some coordinates.
fn differences(what: &str, at: &[f64], loss: impl Fn(&[f64]) -> f64, grads: &[f64]) {
    // In double precision a step of 1e-5 leaves errors near 1e-10; a kink (ReLU, pooling) within the step
    // would show, but is unlikely, and the seed is fixed.
    let (h, largest) = (1e-5, grads.iter().fold(0.0f64, |m, g| m.max(g.abs())));
    let stride = (at.len() / 60).max(1);
    for i in (0..at.len()).step_by(stride) {
        let mut p = at.to_vec();
        p[i] = at[i] + h;
        let up = loss(&p);
        p[i] = at[i] - h;
        let slope = (up - loss(&p)) / (2.0 * h);
        assert!(
            (slope - grads[i]).abs() < 1e-5 * largest,
            "{what}[{i}]: slope {slope}, gradient {}",
            grads[i]
        );
    }
}

#[test]
fn the_plain_models_gradients_are_their_finite_differences() {
    let n = 5;
    let labels = batch(1, n, 1, Some(4)).labels;
    let mlp = OnCpu::new(Classifier::mlp(12, &[9, 7], 4).expect("valid"));
    let x = wide(&batch(2, n, 12, None).inputs);
    let p = wide(&params(&mlp, 3));
    let loss = |p: &[f64]| dense(&[12, 9, 7, 4], p, &x, n, &labels).0;
    differences("mlp", &p, loss, &dense(&[12, 9, 7, 4], &p, &x, n, &labels).1);

    let auto = OnCpu::new(Regressor::autoencoder(12, &[9, 7]).expect("valid"));
    let p = wide(&params(&auto, 4));
    let loss = |p: &[f64]| dense(&[12, 9, 7, 12], p, &x, n, &[]).0;
    differences("autoencoder", &p, loss, &dense(&[12, 9, 7, 12], &p, &x, n, &[]).1);

    let conv = on(Cpu::detect(), 64, 4);
    let x = wide(&batch(5, n, 64, None).inputs);
    let mut p = wide(&params(&conv, 6));
    p.truncate(layout(&conv).params_len());
    let loss = |p: &[f64]| convnet(8, 4, p, &x, &labels).0;
    differences("convnet", &p, loss, &convnet(8, 4, &p, &x, &labels).1);
}

/// A model, its widths, and its labels.
type Case<'a> = (Box<dyn Model>, Vec<usize>, &'a [u32]);

#[test]
fn dense_models_have_the_plain_gradient_at_every_batch_size() {
    for n in SIZES {
        let b = batch(7, n, 50, Some(10));
        let x = wide(&b.inputs);
        let mut cases: Vec<Case> = vec![
            (Box::new(OnCpu::new(Classifier::linear(50, 10).expect("valid"))), vec![50, 10], &b.labels),
            (
                Box::new(OnCpu::new(Classifier::mlp(50, &[33, 20], 10).expect("valid"))),
                vec![50, 33, 20, 10],
                &b.labels,
            ),
            (Box::new(OnCpu::new(Classifier::mlp(50, &[], 10).expect("valid"))), vec![50, 10], &b.labels),
            (
                Box::new(OnCpu::new(Regressor::autoencoder(50, &[17, 9]).expect("valid"))),
                vec![50, 17, 9, 50],
                &[],
            ),
        ];
        for (model, widths, labels) in &mut cases {
            let p = params(model.as_ref(), 8);
            let (loss, grads) = step(model.as_mut(), &p, &b);
            let want = dense(widths, &wide(&p), &x, n, labels);
            same_gradient(model.as_ref(), &format!("{widths:?} n={n}"), (loss, &grads), (want.0, &want.1));
        }
    }
}

fn on(cpu: Cpu, input_len: usize, classes: usize) -> OnCpu {
    let device = CpuDevice::on(cpu);
    OnCpu::on(Box::new(ConvNet::new(&device, input_len, classes).expect("valid")), device)
}

fn convnet_case(cpu: Cpu, side: usize, n: usize) {
    let mut model = on(cpu, side * side, 10);
    let b = batch(9, n, side * side, Some(10));
    let mut p = params(&model, 10);
    // Gains of both signs, and shifts, as after some training.
    let layout = layout(&model);
    for (i, t) in layout.tensors().iter().enumerate() {
        if t.shape.len() == 1
            && (t.name.starts_with('2') || t.name.starts_with('6'))
            && !t.name.contains("run")
        {
            let r = layout.tensor_range(i);
            let noise = support::Stream(i as u32).fill(r.len(), 0.5, 0.0);
            p[r].iter_mut()
                .zip(noise)
                .enumerate()
                .for_each(|(i, (v, e))| *v = if i % 5 == 0 { -*v } else { *v } + e);
        }
    }
    let (loss, grads) = step(&mut model, &p, &b);
    let plain = wide(&p[..layout.params_len()]);
    let (want, want_grads, stats) = convnet(side, 10, &plain, &wide(&b.inputs), &b.labels);
    let what = format!("convnet {:?} side {side} n={n}", cpu.isa());
    same_gradient(&model, &what, (loss, &grads), (want, &want_grads));

    // momentum * (running - batch), with the unbiased variance.
    let mut want_buffers = Vec::new();
    for (stage, stats) in stats.iter().enumerate() {
        let pixels = (side >> stage) * (side >> stage);
        let unbias = (n * pixels) as f64 / (n * pixels - 1) as f64;
        want_buffers.extend(stats.iter().map(|s| 0.1 * (0.0 - s.0)));
        want_buffers.extend(stats.iter().map(|s| 0.1 * (1.0 - s.1 * unbias)));
    }
    close(&format!("{what}: buffers"), &grads[layout.params_len()..], &want_buffers, 1e-5, 0.0);
}

#[test]
fn the_convnet_has_the_plain_gradient_at_every_batch_size() {
    for n in SIZES {
        convnet_case(Cpu::detect(), 8, n);
    }
    convnet_case(Cpu::detect(), 28, 18);
}

#[test]
fn convnet_gradient_matches_plain_with_every_instruction_set() {
    for cpu in Cpu::every() {
        convnet_case(cpu, 8, 21);
        convnet_case(cpu, 12, 5);
    }
}

/// `y = 0.5 a - b + 0.25` misses its targets by -2, 2, 0 and -1; the loss is the mean of the squares, and the
/// gradient of a weight is the mean of twice the miss times the input. All of it is exact in f32.
#[test]
fn a_linear_regressions_step_is_torchs_mse_loss() {
    let mut model = OnCpu::new(Regressor::mlp(2, &[]).expect("valid"));
    let inputs = vec![1.0, 2.0, 3.0, -1.0, 0.0, 4.0, -2.0, 2.0];
    let b = Batch { inputs, targets: vec![0.75, 0.75, -3.75, -1.75], n: 4, ..Batch::default() };
    let params = [0.5, -1.0, 0.25];
    assert_eq!(step(&mut model, &params, &b), (2.25, vec![3.0, -4.0, -0.5]));
    let e = model.evaluate(&params, &b).expect("valid");
    assert_eq!((e.loss_sum, e.correct, e.count), (9.0, 0, 4));
    for targets in [vec![], vec![1.0; 3], vec![1.0; 5]] {
        let short = Batch { targets, ..b.clone() };
        let error = model.evaluate(&params, &short).expect_err("another number").to_string();
        assert!(error.contains("a number to predict for each sample: 4 samples"), "{error}");
    }
}

#[test]
fn step_against_gradient_lowers_loss_as_predicted() {
    let mut models: Vec<(&str, Box<dyn Model>)> = vec![
        ("linear", Box::new(OnCpu::new(Classifier::linear(64, 10).expect("valid")))),
        ("mlp", Box::new(OnCpu::new(Classifier::mlp(64, &[32], 10).expect("valid")))),
        ("regression", Box::new(OnCpu::new(Regressor::mlp(64, &[32]).expect("valid")))),
        ("autoencoder", Box::new(OnCpu::new(Regressor::autoencoder(64, &[32]).expect("valid")))),
        ("convnet", Box::new(on(Cpu::detect(), 64, 10))),
    ];
    for (name, model) in &mut models {
        let b = batch(11, 40, 64, Some(10));
        let p = params(model.as_ref(), 12);
        let trained = layout(model.as_ref()).params_len();
        let (_, grads) = step(model.as_mut(), &p, &b);
        let square: f64 = wide(&grads[..trained]).iter().map(|g| g * g).sum();
        // Changes the loss by about 1e-3: far above f32's rounding, far below its curvature.
        let lr = (5e-4 / square) as f32;
        let moved = |sign: f32| {
            let mut q = p.clone();
            q[..trained].iter_mut().zip(&grads).for_each(|(v, g)| *v += sign * lr * g);
            q
        };
        let up = step(model.as_mut(), &moved(1.0), &b).0;
        let down = step(model.as_mut(), &moved(-1.0), &b).0;
        let ratio = f64::from(up - down) / (2.0 * f64::from(lr) * square);
        assert!((ratio - 1.0).abs() < 0.02, "{name}: the loss moved {ratio} of what the gradient says");
    }
}
