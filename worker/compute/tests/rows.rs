//! The row-major operators against the plain ones and against finite differences.

mod common;

use common::{close, noise, wide};
use paraft_compute::cpu::{activation, linear, loss};
use paraft_compute::reference as plain;
use paraft_compute::shape::{Activation, LinearShape};

#[test]
fn a_linear_layer_and_its_gradients_are_the_plain_ones() {
    for (n, inputs, outputs) in [(1, 1, 1), (7, 33, 5), (64, 100, 10), (3, 5, 130)] {
        let shape = LinearShape { n, inputs, outputs };
        let (x, w, b) = (noise(1, n * inputs), noise(2, inputs * outputs), noise(3, outputs));
        let mut y = vec![f32::NAN; n * outputs];
        linear::forward(shape, &x, &w, &b, Activation::None, &mut y);
        let want = plain::linear_forward(n, &wide(&x), &wide(&w), &wide(&b));
        close("y", &y, &want);
        linear::forward(shape, &x, &w, &b, Activation::Relu, &mut y);
        close("relu", &y, &want.iter().map(|v| v.max(0.0)).collect::<Vec<_>>());

        let mut dy = noise(4, n * outputs);
        let unmasked = dy.clone();
        activation::relu_backward(&y, &mut dy);
        for i in 0..dy.len() {
            assert_eq!(dy[i], if y[i] > 0.0 { unmasked[i] } else { 0.0 });
        }
        let (dx_want, dw_want, db_want) = plain::linear_backward(n, &wide(&x), &wide(&w), &wide(&dy));
        let (mut dw, mut db, mut dx) =
            (vec![f32::NAN; w.len()], vec![f32::NAN; outputs], vec![f32::NAN; x.len()]);
        linear::backward_weight(shape, &x, &dy, &mut dw, &mut db);
        linear::backward_input(shape, &w, &dy, &mut dx);
        close("dw", &dw, &dw_want);
        close("db", &db, &db_want);
        close("dx", &dx, &dx_want);
    }
}

#[test]
fn cross_entropy_is_the_plain_one_and_its_gradient_the_finite_difference() {
    let (n, classes) = (6, 5);
    let logits: Vec<f32> = noise(5, n * classes).iter().map(|v| v * 4.0).collect();
    let labels: Vec<u32> = (0..n as u32).map(|i| i % classes as u32).collect();
    let mut d = logits.clone();
    let value = loss::softmax_cross_entropy(&mut d, &labels, classes);
    let (want, d_want) = plain::softmax_cross_entropy(&wide(&logits), &labels);
    close("loss", &[value], &[want]);
    close("gradient", &d, &d_want);
    for i in 0..logits.len() {
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

#[test]
fn cross_entropy_bears_huge_logits() {
    let mut d = [3e38, 0.0, -3e38, 0.0, 1e30, 0.0];
    let value = loss::softmax_cross_entropy(&mut d, &[0, 1], 3);
    assert!(value.abs() < 1e-6 && d.iter().all(|v| v.abs() < 1e-6), "{value} {d:?}");
    let (sum, correct) = loss::cross_entropy_sum(&[1000.0, 0.0, 0.0], &[1], 3);
    assert!((sum - 1000.0).abs() < 1e-3 && correct == 0);
}

#[test]
fn mse_is_the_mean_over_all_values() {
    for len in [1, 7, 1024, 5000] {
        let (y, t) = (noise(6, len), noise(7, len));
        let mut d = vec![f32::NAN; len];
        let value = loss::mse(&y, &t, &mut d);
        let gaps: Vec<f64> = wide(&y).iter().zip(wide(&t)).map(|(a, b)| a - b).collect();
        close("mse", &[value], &[gaps.iter().map(|g| g * g).sum::<f64>() / len as f64]);
        // The derivative of a mean of squares, exactly; the finite difference of a parabola is the same.
        close("gradient", &d, &gaps.iter().map(|g| 2.0 * g / len as f64).collect::<Vec<_>>());
    }
}
