//! Each algorithm against what theory says of it, on quadratics `h w^2 / 2`, whose gradient is `h w`.

use super::*;
use crate::optim::{Momentum, Nesterov, Sgd};
use std::{collections::VecDeque, f64::consts::PI};

const ASGD: AlgorithmConfig = AlgorithmConfig::Asgd(Asgd {});

/// A bucket on a shard, and the workers that push to it.
struct World {
    algorithm: AlgorithmConfig,
    optimizer: OptimizerConfig,
    weights: Vec<f32>,
    slots: Vec<Vec<f32>>,
    own: Vec<Vec<Vec<f32>>>,
    counts: Vec<u64>,
    pulled: Vec<(u64, Vec<f32>)>,
    version: u64,
}

impl World {
    fn new(algorithm: AlgorithmConfig, optimizer: OptimizerConfig, weights: &[f32], workers: usize) -> Self {
        algorithm.algorithm().validate(&optimizer).expect("they go together");
        let (keeps, len) = (algorithm.algorithm().keeps(), weights.len());
        let on_shard = algorithm.algorithm().on_shard(&optimizer);
        let mut slots = if keeps.own_slots { Vec::new() } else { on_shard.new_slots(len) };
        slots.extend(keeps.slots.iter().map(|_| vec![0.0; len]));
        Self {
            own: vec![on_shard.new_slots(len); workers],
            counts: vec![0; workers],
            pulled: vec![(0, weights.to_vec()); workers],
            weights: weights.to_vec(),
            version: 0,
            slots,
            algorithm,
            optimizer,
        }
    }

    fn lr(&self) -> f32 {
        self.optimizer.lr() as f32
    }

    fn pull(&mut self, worker: usize) -> Vec<f32> {
        let mut out = self.weights.clone();
        let algorithm = self.algorithm.algorithm();
        if algorithm.looks_ahead() {
            algorithm.look_ahead(&self.optimizer, self.lr(), &self.weights, &self.slots, &mut out);
        }
        self.pulled[worker] = (self.version, out.clone());
        out
    }

    fn push(&mut self, worker: usize, gradient: &[f32]) {
        let (keeps, mut bytes) = (self.algorithm.algorithm().keeps(), Vec::new());
        crate::codec::put_f32_le(gradient, &mut bytes);
        self.counts[worker] += 1;
        let t = if keeps.own_slots { self.counts[worker] } else { self.version + 1 };
        let lr = self.lr();
        let update = Update {
            hyper: Hyper { lr, t, clip_value: None },
            base_lr: lr,
            t: self.version + 1,
            delay: self.version - self.pulled[worker].0,
        };
        let state = State {
            weights: &mut self.weights,
            slots: &mut self.slots,
            own: keeps.own_slots.then_some(self.own[worker].as_mut_slice()),
            pulled: keeps.pulled.then_some(self.pulled[worker].1.as_slice()),
        };
        let gradient = Gradient { payload: &bytes.into(), encoding: Encoding::F32, scale: 1.0 };
        self.algorithm.apply(&self.optimizer, &update, state, gradient);
        self.version += 1;
    }

    /// `steps` of `workers` in turn, which gives each push a delay of `workers - 1`.
    fn in_turn(&mut self, workers: usize, steps: usize, h: &[f32]) -> Vec<Vec<f32>> {
        let gradient = |w: &[f32]| w.iter().zip(h).map(|(w, h)| w * h).collect::<Vec<_>>();
        let mut waiting: VecDeque<_> = (0..workers).map(|m| gradient(&self.pull(m))).collect();
        let mut trajectory = Vec::new();
        for step in 0..steps {
            let worker = step % workers;
            let g = waiting.pop_front().expect("one of each worker");
            self.push(worker, &g);
            trajectory.push(self.weights.clone());
            waiting.push_back(gradient(&self.pull(worker)));
        }
        trajectory
    }
}

fn sgd(lr: f64) -> OptimizerConfig {
    OptimizerConfig::Sgd(Sgd { lr, weight_decay: 0.0 })
}

fn nesterov(lr: f64) -> OptimizerConfig {
    OptimizerConfig::Nesterov(Nesterov { lr, momentum: 0.9, weight_decay: 0.0 })
}

fn bits(trajectory: &[Vec<f32>]) -> Vec<u32> {
    trajectory.iter().flatten().map(|w| w.to_bits()).collect()
}

/// Whether a fixed delay lets `w` grow: the largest weight of the last steps against that of as many before.
fn grows(algorithm: AlgorithmConfig, rate: f64, delay: usize) -> bool {
    let mut world = World::new(algorithm, sgd(rate), &[1.0], delay + 1);
    let window = 40 * (delay + 1);
    let trajectory = world.in_turn(delay + 1, 30 * window, &[1.0]);
    let largest = |part: &[Vec<f32>]| {
        part.iter().fold(0f32, |m, w| if w[0].is_nan() { f32::INFINITY } else { m.max(w[0].abs()) })
    };
    let at = trajectory.len() - window;
    let (last, before) = (largest(&trajectory[at..]), largest(&trajectory[at - window..at]));
    !last.is_finite() || last > before
}

/// The rate at which a fixed delay becomes unstable.
fn limit(algorithm: AlgorithmConfig, delay: usize) -> f64 {
    let (mut low, mut high) = (0.0, 2.5);
    for _ in 0..14 {
        let middle = (low + high) / 2.0;
        if grows(algorithm, middle, delay) { high = middle } else { low = middle }
    }
    (low + high) / 2.0
}

fn theory(delay: usize) -> f64 {
    2.0 * (PI / (2.0 * (2 * delay + 1) as f64)).sin()
}

const DELAYS: [usize; 7] = [0, 1, 2, 4, 8, 16, 32];

#[test]
fn plain_sgd_is_stable_up_to_the_limit_of_its_delay() {
    for delay in DELAYS {
        let (measured, theory) = (limit(ASGD, delay), theory(delay));
        assert!((measured / theory - 1.0).abs() < 0.01, "delay {delay}: {measured} for {theory}");
    }
}

#[test]
fn a_rate_divided_by_delay_keeps_a_nearly_constant_limit() {
    for delay in DELAYS.into_iter().filter(|d| *d > 0) {
        let measured = limit(AlgorithmConfig::StalenessAware(StalenessAware {}), delay);
        let theory = delay as f64 * theory(delay);
        assert!((measured / theory - 1.0).abs() < 0.01, "delay {delay}: {measured} for {theory}");
        assert!((0.99..PI / 2.0 + 0.02).contains(&measured));
    }
}

#[test]
fn a_delay_of_one_or_none_changes_no_rate() {
    for workers in [1, 2] {
        let run = |a| World::new(a, sgd(0.3), &[1.0, -2.0], workers).in_turn(workers, 50, &[1.0, 0.5]);
        let aware = run(AlgorithmConfig::StalenessAware(StalenessAware {}));
        assert_eq!(bits(&aware), bits(&run(ASGD)));
    }
}

#[test]
fn compensation_of_weight_zero_is_plain_sgd_bit_for_bit() {
    let optimizer =
        OptimizerConfig::Momentum(Momentum { lr: 0.05, momentum: 0.5, dampening: 0.0, weight_decay: 0.01 });
    let run = |a| World::new(a, optimizer.clone(), &[1.0, -2.0, 0.3], 5).in_turn(5, 100, &[1.0, 0.5, 3.0]);
    let plain = bits(&run(ASGD));
    assert_eq!(bits(&run(AlgorithmConfig::DcAsgdC(DcAsgdC { lambda: 0.0 }))), plain);
    assert_eq!(bits(&run(AlgorithmConfig::DcAsgdA(DcAsgdA { lambda: 0.0 }))), plain);
    assert_ne!(
        bits(&run(AlgorithmConfig::DcAsgdC(DcAsgdC { lambda: 0.1 }))),
        plain,
        "weight 0.1 does something"
    );
}

#[test]
fn compensation_of_the_exact_weight_is_sequential_sgd() {
    // lambda = 1 / (h w_pulled^2) makes lambda g g the Hessian.
    let (h, lr, delay) = (0.8f32, 0.3f32, 4);
    let (mut late, mut plain, mut sequential) = (1.0f32, 1.0f32, 1.0f32);
    let mut pulled: VecDeque<f32> = std::iter::repeat_n(1.0, delay).collect();
    let mut plainly = pulled.clone();
    for _ in 0..30 {
        let w_m = pulled.pop_front().expect("as many as the delay");
        let lambda = 1.0 / (h * w_m * w_m);
        pulled.push_back(late);
        late -= lr * dc_asgd::compensated(h * w_m, lambda, late - w_m);
        sequential -= lr * h * sequential;
        plainly.push_back(plain);
        plain -= lr * h * plainly.pop_front().expect("as many as the delay");
    }
    assert!((late - sequential).abs() < 1e-6, "{late} is not {sequential}");
    assert!((plain - sequential).abs() > 0.1, "without compensation it is {plain}");
}

#[test]
fn adaptive_compensation_follows_its_formula() {
    let a = DcAsgdA::default();
    let mut slots = vec![vec![0.01f32]];
    let mut g = vec![0.5f32];
    let push = Late { delay: 3, weights: &[1.0], pulled: Some(&[0.8]), lr: 0.1, base_lr: 0.1, t: 9 };
    a.correct(&push, &mut slots, &mut g);
    let ms = 0.95 * 0.01 + 0.05 * 0.25f64;
    let want = 0.5 + 2.0 / (ms + 1e-7).sqrt() * 0.25 * 0.2;
    assert!(
        (f64::from(slots[0][0]) - ms).abs() < 1e-8 && (f64::from(g[0]) - want).abs() < 1e-6,
        "{g:?} {want}"
    );
}

#[test]
fn without_delay_the_gap_is_one_and_sgd_stays_as_it_is() {
    let run = |a| World::new(a, sgd(0.3), &[1.0, -2.0], 1).in_turn(1, 60, &[1.0, 0.5]);
    assert_eq!(bits(&run(AlgorithmConfig::GapAware(GapAware {}))), bits(&run(ASGD)));
    assert_eq!(gap_aware::gap(0.0, 0.1), 1.0);
}

#[test]
fn the_gap_beyond_one_is_proportional_to_the_rate() {
    // The same gradients at a tenth of the rate: the way is a tenth, the average step is one at the base rate.
    let beyond = |lr: f32| {
        let a = GapAware {};
        let (mut slots, mut w, base_lr) = (vec![vec![0.0f32]], 1.0f32, 1.0);
        let mut t = 0;
        for _ in 0..20 {
            let before = [w];
            w -= lr * 0.5;
            t += 1;
            a.moved(&Late { delay: 0, weights: &before, pulled: None, lr, base_lr, t }, &[w], &mut slots);
        }
        let mut g = [1.0f32];
        let late = Late { delay: 4, weights: &[w], pulled: Some(&[w + lr * 2.0]), lr, base_lr, t: t + 1 };
        a.correct(&late, &mut slots, &mut g);
        1.0 / g[0] - 1.0
    };
    let (whole, tenth) = (beyond(1.0), beyond(0.1));
    assert!((whole - 4.0).abs() < 1e-2, "four average steps are {whole}");
    assert!((whole / tenth - 10.0).abs() < 0.1, "{whole} {tenth}");
}

#[test]
fn one_worker_with_dana_is_nesterov() {
    let h = [1.0, 0.3];
    let mut plain = World::new(ASGD, nesterov(0.05), &[1.0, -2.0], 1);
    let want = plain.in_turn(1, 80, &h);
    let mut zero = World::new(AlgorithmConfig::DanaZero(DanaZero {}), nesterov(0.05), &[1.0, -2.0], 1);
    // PyTorch's weights of Nesterov are those that a pull gets.
    for (step, want) in want.iter().enumerate() {
        zero.in_turn(1, 1, &h);
        let got = zero.pull(0);
        let near = got.iter().zip(want).all(|(g, w)| (g - w).abs() < 2e-6);
        assert!(near, "step {step}: {got:?} is not {want:?}");
    }
}

/// The same in other variables: each worker keeps its momentum, pushes `mu * v + g`, and the shard's weights are those
/// that a pull of dana-zero gets (the paper's DANA-Slim).
#[test]
fn dana_pulls_equal_plain_steps_of_momentum_pushes() {
    let schedule = [0, 1, 2, 2, 0, 2, 1, 2, 0, 0, 2, 1, 1, 2, 2, 2, 0, 1];
    let (h, lr, mu) = (0.3f32, 0.03f32, 0.9f32);
    let mut zero = World::new(AlgorithmConfig::DanaZero(DanaZero {}), nesterov(f64::from(lr)), &[1.0], 3);
    let mut have: Vec<f32> = (0..3).map(|m| zero.pull(m)[0]).collect();
    let (mut slim, mut momenta, mut pulled) = (1.0f32, [0f32; 3], [1.0f32; 3]);
    for worker in schedule.into_iter().cycle().take(200) {
        zero.push(worker, &[h * have[worker]]);
        have[worker] = zero.pull(worker)[0];
        let g = h * pulled[worker];
        momenta[worker] = mu * momenta[worker] + g;
        slim -= lr * (g + mu * momenta[worker]);
        pulled[worker] = slim;
        assert!((have[worker] - slim).abs() < 1e-5, "{} is not {slim}", have[worker]);
    }
}

#[test]
fn a_momentum_of_its_own_is_built_up_by_a_workers_own_pushes() {
    let optimizer =
        OptimizerConfig::Momentum(Momentum { lr: 1.0, momentum: 0.5, dampening: 0.0, weight_decay: 0.0 });
    let mut world = World::new(AlgorithmConfig::MultiAsgd(MultiAsgd {}), optimizer, &[0.0], 2);
    world.push(0, &[1.0]); // v0 = 1
    world.push(1, &[1.0]); // v1 = 1
    world.push(0, &[0.0]); // v0 = 0.5
    assert_eq!(world.weights, [-2.5]);
    assert_eq!((&world.own[0][0], &world.own[1][0]), (&vec![0.5], &vec![1.0]));
}

#[test]
fn what_does_not_go_together_is_refused_by_name() {
    let refused =
        |a: AlgorithmConfig, o: &OptimizerConfig| a.algorithm().validate(o).expect_err("refused").to_string();
    assert!(refused(AlgorithmConfig::DanaZero(DanaZero {}), &sgd(0.1)).contains("optimizer.kind = \"sgd\""));
    assert!(refused(AlgorithmConfig::MultiAsgd(MultiAsgd {}), &sgd(0.1)).contains("multi-asgd"));
    let bad = AlgorithmConfig::DcAsgdA(DcAsgdA { lambda: -1.0 });
    assert!(refused(bad, &sgd(0.1)).contains("[algorithm] lambda = -1"));
}
