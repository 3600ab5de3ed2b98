//! The row-major operators against the plain ones and against finite differences, with every instruction set of
//! this machine and with one thread and several.

mod common;

use common::{close, noise, wide};
use paraft_compute::cpu::{activation, linear, loss};
use paraft_compute::reference as plain;
use paraft_compute::shape::{Activation, LinearShape};
use paraft_compute::{Cpu, Threads};

/// On one thread and on three.
fn all() -> impl Iterator<Item = Threads> {
    Cpu::every().flat_map(|cpu| [1, 3].map(|count| Threads::new(cpu, count).expect("starts")))
}

#[test]
fn a_linear_layer_and_its_gradients_are_the_plain_ones() {
    // One row or term more and less than tiles and blocks, up to sizes whose parts go to several threads.
    let cases =
        [(1, 1, 1), (7, 33, 5), (64, 100, 10), (3, 5, 130), (13, 1030, 33), (6, 2050, 17), (150, 1040, 15)];
    for (on, (n, inputs, outputs)) in all().flat_map(|on| cases.map(|c| (on.clone(), c))) {
        let what =
            |name| format!("{name} of {n}x{inputs}x{outputs}, {:?}, {} threads", on.cpu().isa(), on.count());
        let shape = LinearShape { n, inputs, outputs };
        let (x, w, b) = (noise(1, n * inputs), noise(2, inputs * outputs), noise(3, outputs));
        let mut y = vec![f32::NAN; n * outputs];
        linear::forward(&on, shape, &x, &w, &b, Activation::None, &mut y);
        let want = plain::linear_forward(n, &wide(&x), &wide(&w), &wide(&b));
        close(&what("y"), &y, &want);
        linear::forward(&on, shape, &x, &w, &b, Activation::Relu, &mut y);
        close(&what("relu"), &y, &want.iter().map(|v| v.max(0.0)).collect::<Vec<_>>());

        let mut dy = noise(4, n * outputs);
        let unmasked = dy.clone();
        activation::relu_backward(&on, &y, &mut dy);
        for i in 0..dy.len() {
            assert_eq!(dy[i], if y[i] > 0.0 { unmasked[i] } else { 0.0 });
        }
        let (dx_want, dw_want, db_want) = plain::linear_backward(n, &wide(&x), &wide(&w), &wide(&dy));
        let (mut dw, mut db, mut dx) =
            (vec![f32::NAN; w.len()], vec![f32::NAN; outputs], vec![f32::NAN; x.len()]);
        linear::backward_weight(&on, shape, &x, &dy, &mut dw, &mut db);
        linear::backward_input(&on, shape, &w, &dy, &mut dx);
        close(&what("dw"), &dw, &dw_want);
        close(&what("db"), &db, &db_want);
        close(&what("dx"), &dx, &dx_want);
    }
}

#[test]
fn a_layer_without_a_bias_and_a_relu_over_what_is_no_number() {
    for on in all() {
        let shape = LinearShape { n: 9, inputs: 3, outputs: 18 };
        let (mut x, w, b) = (noise(1, 27), noise(2, 54), noise(3, 18));
        x[4] = f32::NAN;
        let (mut with, mut without) = (vec![0.0; 162], vec![0.0; 162]);
        linear::forward(&on, shape, &x, &w, &b, Activation::Relu, &mut with);
        linear::forward(&on, shape, &x, &w, &[], Activation::Relu, &mut without);
        for y in [with, without] {
            let lost = y.iter().enumerate().filter(|(i, v)| v.is_nan() != (i / 18 == 1));
            assert_eq!(lost.count(), 0, "a diverged run would look healthy: {:?}", on.cpu().isa());
            assert!(y.iter().all(|v| v.is_nan() || *v >= 0.0));
        }
    }
}

#[test]
fn products_have_the_same_bits_on_any_number_of_threads() {
    let (n, inputs, outputs) = (128, 300, 70);
    let shape = LinearShape { n, inputs, outputs };
    let (x, w, dy) = (noise(1, n * inputs), noise(2, inputs * outputs), noise(3, n * outputs));
    for cpu in Cpu::every() {
        let results = |count| {
            let on = Threads::new(cpu, count).expect("starts");
            assert_eq!(on.count(), count);
            let (mut y, mut dw, mut dx) = (vec![0.0; n * outputs], vec![0.0; w.len()], vec![0.0; x.len()]);
            linear::forward(&on, shape, &x, &w, &[], Activation::None, &mut y);
            linear::backward_weight(&on, shape, &x, &dy, &mut dw, &mut []);
            linear::backward_input(&on, shape, &w, &dy, &mut dx);
            [y, dw, dx].map(|v| v.iter().map(|v| v.to_bits()).collect::<Vec<_>>())
        };
        let one = results(1);
        for count in [2, 3, 7] {
            assert_eq!(results(count), one, "{:?}, {count} threads", cpu.isa());
        }
    }
}

#[test]
fn cross_entropy_matches_plain_and_finite_difference() {
    for (on, (n, classes)) in all().flat_map(|on| [(6, 5), (130, 10), (65, 33)].map(|c| (on.clone(), c))) {
        let logits: Vec<f32> = noise(5, n * classes).iter().map(|v| v * 4.0).collect();
        let labels: Vec<u32> = (0..n as u32).map(|i| i % classes as u32).collect();
        let mut d = logits.clone();
        let value = loss::softmax_cross_entropy(&on, &mut d, &labels, classes, &mut Vec::new());
        let (want, d_want) = plain::softmax_cross_entropy(&wide(&logits), &labels);
        close("loss", &[value], &[want]);
        close("gradient", &d, &d_want);
        for i in (0..logits.len()).step_by(n) {
            let at = |h: f64| {
                let mut l = wide(&logits);
                l[i] += h;
                plain::softmax_cross_entropy(&l, &labels).0
            };
            let slope = (at(1e-5) - at(-1e-5)) / 2e-5;
            assert!((slope - f64::from(d[i])).abs() < 1e-6, "logit {i}: slope {slope}, gradient {}", d[i]);
        }
        let (sum, correct) = loss::cross_entropy_sum(&logits, &labels, classes);
        assert!((sum / n as f64 - want).abs() < 1e-5 && correct <= n as u64);
    }
}

#[test]
fn cross_entropy_bears_huge_logits_and_keeps_what_is_no_number() {
    for on in all() {
        let mut d = [3e38, 0.0, -3e38, 0.0, 1e30, 0.0, 0.0, f32::NAN, 1.0];
        let value = loss::softmax_cross_entropy(&on, &mut d[..6], &[0, 1], 3, &mut Vec::new());
        assert!(value.abs() < 1e-6 && d[..6].iter().all(|v| v.abs() < 1e-6), "{value} {d:?}");
        let value = loss::softmax_cross_entropy(&on, &mut d[6..], &[0], 3, &mut Vec::new());
        assert!(value.is_nan() && d[6..].iter().all(|v| v.is_nan()), "{value} {d:?}");
    }
    let (sum, correct) = loss::cross_entropy_sum(&[1000.0, 0.0, 0.0], &[1], 3);
    assert!((sum - 1000.0).abs() < 1e-3 && correct == 0);
}

#[test]
fn mse_is_the_mean_over_all_values() {
    for (on, len) in all().flat_map(|on| [1, 7, 1024, 5000, 40_000].map(|len| (on.clone(), len))) {
        let (y, t) = (noise(6, len), noise(7, len));
        let mut d = vec![f32::NAN; len];
        let value = loss::mse(&on, &y, &t, &mut d, &mut Vec::new());
        let gaps: Vec<f64> = wide(&y).iter().zip(wide(&t)).map(|(a, b)| a - b).collect();
        close("mse", &[value], &[gaps.iter().map(|g| g * g).sum::<f64>() / len as f64]);
        // The exact derivative of a mean of squares; a parabola's finite difference equals it.
        close("gradient", &d, &gaps.iter().map(|g| 2.0 * g / len as f64).collect::<Vec<_>>());
    }
}
