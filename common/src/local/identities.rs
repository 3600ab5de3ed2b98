//! What proves the rules: closed forms on the quadratic `f = h w^2 / 2`, with the servers' optimizers as they are.

use super::*;
use crate::{
    encoding::Encoding,
    optim::{Adam, ClipConfig, Gradient, Nesterov, OptimizerConfig, ScheduleConfig, Shape},
    payload::Payload,
};

/// The servers, with one bucket: the mean of a round of pushes is one update.
struct Servers {
    descent: Descent,
    weights: Vec<f32>,
    slots: Vec<Vec<f32>>,
    t: u64,
}

impl Servers {
    fn new(config: &LocalConfig, job: &Descent, weights: &[f32]) -> Self {
        let descent = config.on_servers(job);
        let slots = descent.optimizer.new_slots(weights.len());
        Self { descent, weights: weights.to_vec(), slots, t: 0 }
    }

    fn round(&mut self, pushes: &[Vec<f32>]) {
        let n = pushes.len();
        let sum: Vec<f32> = (0..self.weights.len()).map(|i| pushes.iter().map(|p| p[i]).sum()).collect();
        self.t += 1;
        let lr = self.descent.optimizer.lr() * self.descent.schedule.factor(self.t as f64 - 1.0, n);
        let hyper = crate::optim::Hyper { lr: lr as f32, t: self.t, clip_value: self.descent.clip.value };
        let payload = Payload::from(le(&sum));
        let gradient = Gradient { payload: &payload, encoding: Encoding::F32, scale: 1.0 / n as f32 };
        self.descent.optimizer.apply(&hyper, &mut self.weights, &mut self.slots, gradient);
    }
}

fn le(values: &[f32]) -> bytes::Bytes {
    values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>().into()
}

fn job(optimizer: OptimizerConfig) -> Descent {
    Descent { optimizer, schedule: ScheduleConfig::default(), clip: ClipConfig::default() }
}

fn local_weights(config: &LocalConfig, job: &Descent, weights: &[f32]) -> LocalWeights {
    let mut local_weights =
        LocalWeights::new(config, job, weights.len(), weights.len()).expect("local weights");
    local_weights.begin(weights);
    local_weights
}

/// The minibatches of a step with the gradient `h w`.
fn minibatches(local_weights: &mut LocalWeights, steps: u64, h: f32) {
    for i in 0..steps {
        let gradient: Vec<f32> = local_weights.weights().iter().map(|w| h * w).collect();
        local_weights.step(i, &gradient).expect("finite");
    }
}

fn diloco(steps: u64, outer: OptimizerConfig) -> LocalConfig {
    LocalConfig(Some(Diloco { steps, outer, ..Diloco::default() }))
}

fn outer_nesterov() -> OptimizerConfig {
    OptimizerConfig::Nesterov(Nesterov { lr: 0.7, momentum: 0.9, weight_decay: 0.0 })
}

#[test]
fn outer_sgd_shrinks_a_quadratic_by_its_inner_factor() {
    for (h, eta, steps, a) in
        [(1.0f32, 0.1f64, 1u64, 1.0f64), (1.0, 0.1, 20, 1.0), (0.5, 0.2, 7, 0.7), (2.0, 0.3, 50, 1.5)]
    {
        let config = diloco(steps, OptimizerConfig::sgd(a));
        let job = job(OptimizerConfig::sgd(eta));
        let mut servers = Servers::new(&config, &job, &[1.0]);
        let mut worker = local_weights(&config, &job, &[1.0]);
        let inner = (1.0 - eta * f64::from(h)).powi(steps as i32);
        let factor = 1.0 - a * (1.0 - inner);
        let mut expected = 1.0;
        for round in 0..5 {
            minibatches(&mut worker, steps, h);
            let push = worker.push(&servers.weights).to_vec();
            servers.round(&[push]);
            worker.pulled(&servers.weights);
            expected *= factor;
            // Each step rounds at the size of the weights of its beginning.
            let apart = (f64::from(servers.weights[0]) - expected).abs();
            assert!(
                apart < 1e-6 * (round + 1) as f64,
                "{steps} steps: {} is not {expected}",
                servers.weights[0]
            );
        }
    }
}

/// The larger root of the characteristic polynomial of one round with outer Nesterov, by q = 1 - (1 - eta h)^H.
fn radius(q: f64, lr: f64, mu: f64) -> f64 {
    // b <- mu b + q w, w <- w - lr (q w + mu b): trace and determinant of that matrix over (w, b).
    let (trace, det) = (1.0 - lr * q * (1.0 + mu) + mu, mu * (1.0 - lr * q));
    let disc = trace * trace - 4.0 * det;
    match disc >= 0.0 {
        true => ((trace.abs() + disc.sqrt()) / 2.0).abs(),
        false => det.sqrt(),
    }
}

#[test]
fn outer_nesterov_has_the_spectral_radius_of_its_matrix() {
    for (q, published) in [(0.1, 0.915), (0.5, 0.765), (0.9, 0.577), (1.0, 0.520)] {
        let expected = radius(q, 0.7, 0.9);
        assert!((expected - published).abs() < 6e-4, "{q}: {expected}");
        // One local step at rate q on a curvature of 1 leaves 1 - q of the weights.
        let config = diloco(1, outer_nesterov());
        let job = job(OptimizerConfig::sgd(q));
        let mut servers = Servers::new(&config, &job, &[1.0]);
        let mut worker = local_weights(&config, &job, &[1.0]);
        // The state of two rounds is the matrix's action: its powers grow as its radius, whatever it begins with.
        let mut states = Vec::new();
        for _ in 0..3 {
            minibatches(&mut worker, 1, 1.0);
            let push = worker.push(&servers.weights).to_vec();
            let before = [f64::from(servers.weights[0]), f64::from(servers.slots[0][0])];
            servers.round(&[push]);
            worker.pulled(&servers.weights);
            states.push((before, [f64::from(servers.weights[0]), f64::from(servers.slots[0][0])]));
        }
        // The matrix from two of its images: M [s1 s2] = [t1 t2].
        let ([a, c], [b, d]) = (states[1].0, states[2].0);
        let ([e, g], [f, k]) = (states[1].1, states[2].1);
        let det_s = a * d - b * c;
        let m = [
            [(e * d - f * c) / det_s, (f * a - e * b) / det_s],
            [(g * d - k * c) / det_s, (k * a - g * b) / det_s],
        ];
        let (trace, det) = (m[0][0] + m[1][1], m[0][0] * m[1][1] - m[0][1] * m[1][0]);
        let disc = trace * trace - 4.0 * det;
        let measured = if disc >= 0.0 { (trace.abs() + disc.sqrt()) / 2.0 } else { det.abs().sqrt() };
        assert!((measured - expected).abs() < 1e-3, "{q}: {measured}, not {expected}");
    }
}

#[test]
fn one_local_step_with_outer_sgd_equals_a_lock_step_round() {
    let start: Vec<f32> = (0..50).map(|i| (i as f32 - 20.0) / 7.0).collect();
    let config = diloco(1, OptimizerConfig::sgd(1.0));
    let job = job(OptimizerConfig::sgd(0.1));
    let mut servers = Servers::new(&config, &job, &start);
    let mut plain = Servers::new(&LocalConfig::default(), &job, &start);
    let mut workers: Vec<LocalWeights> = (0..3).map(|_| local_weights(&config, &job, &start)).collect();
    for _ in 0..20 {
        let gradient = |w: usize, at: &[f32]| -> Vec<f32> {
            at.iter().enumerate().map(|(i, x)| x * (1.0 + (i + w) as f32 / 30.0)).collect()
        };
        let mut pushes = Vec::new();
        for (w, worker) in workers.iter_mut().enumerate() {
            let g = gradient(w, worker.weights());
            worker.step(0, &g).expect("finite");
            pushes.push(worker.push(&servers.weights).to_vec());
        }
        servers.round(&pushes);
        let gradients: Vec<Vec<f32>> = (0..3).map(|w| gradient(w, &plain.weights)).collect();
        plain.round(&gradients);
        workers.iter_mut().for_each(|w| w.pulled(&servers.weights));
        for (a, b) in servers.weights.iter().zip(&plain.weights) {
            // c - (c - lr g) rounds where lr g does not: some units in the last place of a weight near 4.
            assert!((a - b).abs() < 4e-6, "{a} is not {b}");
        }
    }
    assert!(servers.weights[0].abs() < 1.0, "nothing was trained");
}

#[test]
fn the_inner_state_and_clock_persist_between_pushes() {
    let schedule =
        ScheduleConfig { shape: Shape::Step { steps: 3, gamma: 0.5 }, ..ScheduleConfig::default() };
    let adam = OptimizerConfig::Adam(Adam { lr: 0.05, ..Adam::default() });
    let job = Descent { schedule, ..job(adam) };
    // The servers take what comes as it is: the worker is alone, and so is Adam.
    let config = diloco(2, OptimizerConfig::sgd(1.0));
    let start = [1.0, -2.0, 0.5];
    let mut servers = Servers::new(&config, &job, &start);
    let mut worker = local_weights(&config, &job, &start);
    let (mut alone, mut slots) = (start.to_vec(), job.optimizer.new_slots(3));
    for k in 0..8u64 {
        let g: Vec<f32> = worker.weights().iter().map(|w| w * 1.5).collect();
        worker.step(k, &g).expect("finite");
        if k % 2 == 1 {
            let push = worker.push(&servers.weights).to_vec();
            servers.round(&[push]);
            worker.pulled(&servers.weights);
        }
        let g: Vec<f32> = alone.iter().map(|w| w * 1.5).collect();
        job.apply(&job.hyper(k, k + 1), 3, &mut alone, &mut slots, &le(&g)).expect("finite");
    }
    for (a, b) in servers.weights.iter().zip(&alone) {
        assert!((a - b).abs() < 2e-6, "{a} is not {b}");
    }
}

#[test]
fn options_outside_their_range_are_refused_by_name() {
    for (text, said) in [
        ("steps = 0", "[local] steps"),
        ("steps = 1000001", "[local] steps"),
        ("steps = 4\nfragments = 5", "[local] fragments"),
        ("outer = { kind = \"nesterov\", lr = -1.0 }", "[local.outer] lr"),
    ] {
        let config = LocalConfig(Some(toml::from_str(text).expect("it can be read")));
        let error = config.validate().expect_err(text).to_string();
        assert!(error.starts_with(said), "{text}: {error}");
    }
    assert!(toml::from_str::<Diloco>("alpha = 0.3").is_err());
    let whole: Diloco = toml::from_str("").expect("defaults");
    assert_eq!(toml::from_str::<Diloco>(&toml::to_string(&whole).expect("text")).expect("same"), whole);
    for config in [LocalConfig::default(), LocalConfig(Some(whole))] {
        config.validate().expect("defaults are valid");
    }
}

#[test]
fn a_gradient_that_is_not_finite_moves_nothing() {
    let config = diloco(2, outer_nesterov());
    let mut worker = local_weights(&config, &job(OptimizerConfig::sgd(0.1)), &[1.0, 2.0]);
    assert!(worker.step(0, &[0.0, f32::NAN]).is_err());
    assert_eq!(worker.weights(), [1.0, 2.0]);
    worker.step(0, &[1.0, 1.0]).expect("finite");
}
