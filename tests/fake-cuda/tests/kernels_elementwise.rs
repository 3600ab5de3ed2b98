//! Elementwise kernels, losses and statistics against plain loops in f64.

mod support;
use support::*;

const SIZES: [usize; 6] = [1, 3, 8, 257, 2050, 9001];

fn gelu(x: f64) -> f64 {
    0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x)).tanh())
}

fn gelu_slope(x: f64) -> f64 {
    let root = (2.0 / std::f64::consts::PI).sqrt();
    let t = (root * (x + 0.044715 * x * x * x)).tanh();
    0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * root * (1.0 + 3.0 * 0.044715 * x * x)
}

fn act(x: f64, kind: i32) -> f64 {
    match kind {
        1 => x.max(0.0),
        2 => gelu(x),
        _ => x,
    }
}

fn bias_act<T: Type>() {
    let mut random = Random::new(1);
    for (rows, cols) in [(1, 1), (3, 5), (7, 16), (129, 10), (5, 1000), (64, 24)] {
        for kind in 0..3 {
            for (with_bias, with_pre, offset) in [(true, true, 0), (true, false, 1), (false, true, 0)] {
                let n = rows * cols;
                let x: Vec<T> = random.values(n + offset, 4.0);
                let bias: Vec<f32> = random.values(cols, 1.0);
                let out = in_every_schedule("bias_act", |s| {
                    let (mut y, mut pre) = (x.clone(), poisoned::<T>(n));
                    let args = args![
                        &mut y[offset..],
                        with_bias.then_some(&bias),
                        with_pre.then_some(&mut pre),
                        rows as i64,
                        cols as i32,
                        kind
                    ];
                    launch_flat(s, &T::kernel("bias_act"), n, args);
                    outputs![y[offset..], pre]
                });
                let sums: Vec<f64> = (0..n)
                    .map(|i| x[offset + i].wide() + if with_bias { f64::from(bias[i % cols]) } else { 0.0 })
                    .collect();
                let want: Vec<f64> = sums.iter().map(|v| act(*v, kind)).collect();
                close("bias_act", &out[0], &want, T::EPSILON + 2e-6, 1e-6);
                if with_pre {
                    close("pre", &out[1], &sums, T::EPSILON, 1e-7);
                }
            }
        }
    }
}

#[test]
fn bias_and_activation() {
    if skipped() {
        return;
    }
    bias_act::<f32>();
    bias_act::<bf16>();
    bias_act::<f16>();
}

fn act_backward<T: Type>() {
    let mut random = Random::new(2);
    for n in SIZES {
        for kind in 0..3 {
            let (dy, saved): (Vec<T>, Vec<T>) = (random.values(n, 2.0), random.values(n, 5.0));
            let out = in_every_schedule("act_backward", |s| {
                let mut d = dy.clone();
                launch_flat(s, &T::kernel("act_backward"), n, args![&mut d, &saved, n as i64, kind]);
                outputs![d]
            });
            let slope = |x: f64| match kind {
                1 => f64::from(x > 0.0),
                2 => gelu_slope(x),
                _ => 1.0,
            };
            let want: Vec<f64> = dy.iter().zip(&saved).map(|(d, x)| d.wide() * slope(x.wide())).collect();
            close("act_backward", &out[0], &want, T::EPSILON + 1e-5, 2e-6);
        }
    }
}

#[test]
fn gradient_of_an_activation() {
    if skipped() {
        return;
    }
    act_backward::<f32>();
    act_backward::<bf16>();
    act_backward::<f16>();
}

#[test]
fn what_is_not_finite_stays_so_in_an_activation() {
    if skipped() {
        return;
    }
    let special = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e30, -1e30, -0.0];
    let out = in_every_schedule("special", |s| {
        let (mut relu, mut gelu, mut slope) = (special.to_vec(), special.to_vec(), vec![1.0f32; 6]);
        launch_flat(s, "bias_act_f32", 6, args![&mut relu, Null, Null, 1i64, 6, 1]);
        launch_flat(s, "bias_act_f32", 6, args![&mut gelu, Null, Null, 1i64, 6, 2]);
        launch_flat(s, "act_backward_f32", 6, args![&mut slope, &special[..], 6i64, 2]);
        outputs![relu, gelu, slope]
    });
    close("relu", &out[0], &[f64::NAN, f64::INFINITY, 0.0, f64::from(1e30f32), 0.0, 0.0], 0.0, 0.0);
    assert!(
        out[1][0].is_nan()
            && out[1][1] == f64::INFINITY
            && out[1][3] == f64::from(1e30f32)
            && out[1][4] == 0.0
    );
    assert!(out[2][0].is_nan());
    close("slope", &out[2][1..], &[1.0, 0.0, 1.0, 0.0, 0.5], 0.0, 0.0);
}

fn sums<T: Type>() {
    let mut random = Random::new(3);
    for n in SIZES {
        let (a, b): (Vec<T>, Vec<T>) = (random.values(n, 2.0), random.values(n, 2.0));
        let out = in_every_schedule("add", |s| {
            let mut y = poisoned::<T>(n);
            launch_flat(s, &T::kernel("add"), n, args![&mut y, &a, &b, n as i64]);
            outputs![y]
        });
        let want: Vec<f64> = a.iter().zip(&b).map(|(a, b)| a.wide() + b.wide()).collect();
        close("add", &out[0], &want, T::EPSILON, 1e-7);
    }
    for (rows, cols) in [(1, 1), (65, 3), (200, 256), (130, 264), (513, 10)] {
        let x: Vec<T> = random.values(rows * cols, 1.0);
        let start: Vec<f32> = random.values(cols, 1.0);
        for accumulate in [0, 1] {
            let out = in_every_schedule("col_sum", |s| {
                let each = chunk(rows);
                let chunks = rows.div_ceil(each);
                let (mut partial, mut out) = (poisoned::<f32>(chunks * cols), start.clone());
                let args = args![&x, &mut partial, rows as i32, cols as i32, each as i32];
                launch(s, &T::kernel("col_sum_partial"), (cols.div_ceil(256), chunks, 1), 256, 0, args);
                let args = args![&partial, &mut out, chunks as i32, cols as i32, accumulate];
                launch(s, "col_sum_final", (cols.div_ceil(32), 1, 1), 256, 0, args);
                outputs![out]
            });
            let want: Vec<f64> = (0..cols)
                .map(|c| {
                    let sum: f64 = (0..rows).map(|r| x[r * cols + c].wide()).sum();
                    sum + f64::from(start[c]) * f64::from(accumulate)
                })
                .collect();
            close("col_sum", &out[0], &want, 1e-5, 2e-5);
        }
    }
}

#[test]
fn additions_and_sums_of_columns() {
    if skipped() {
        return;
    }
    sums::<f32>();
    sums::<bf16>();
    sums::<f16>();
}

#[test]
fn fill_sets_every_value() {
    if skipped() {
        return;
    }
    for n in SIZES {
        for offset in [0, 1] {
            let out = in_every_schedule("flat", |s| {
                let mut f = poisoned::<f32>(n + offset);
                launch_flat(s, "fill_f32", n, args![&mut f[offset..], 2.5f32, n as i64]);
                outputs![f[offset..]]
            });
            assert!(out[0].iter().all(|v| *v == 2.5));
        }
    }
}

#[test]
fn casts_round_to_nearest_even() {
    if skipped() {
        return;
    }
    let mut random = Random::new(5);
    // Random bits: every exponent, and numbers half-way between two of the narrow type.
    let mut x: Vec<f32> = (0..20_000).map(|_| f32::from_bits(random.next() as u32)).collect();
    x.extend((0..20_000).map(|_| f32::from_bits(random.next() as u32 & 0xffff_f000 | 0x8000)));
    x.extend((0..20_000).map(|_| f16::from_bits(random.next() as u16).to_f32() * (1.0 + 1.0 / 2048.0)));
    let n = x.len();
    let out = in_every_schedule("cast", |s| {
        let (mut b, mut h) = (poisoned::<bf16>(n), poisoned::<f16>(n));
        let (mut from_b, mut from_h) = (poisoned::<f32>(n), poisoned::<f32>(n));
        launch_flat(s, "cast_f32_to_bf16", n, args![&x, &mut b, n as i64]);
        launch_flat(s, "cast_f32_to_f16", n, args![&x, &mut h, n as i64]);
        launch_flat(s, "cast_bf16_to_f32", n, args![&b, &mut from_b, n as i64]);
        launch_flat(s, "cast_f16_to_f32", n, args![&h, &mut from_h, n as i64]);
        outputs![b, h, from_b, from_h]
    });
    let b: Vec<f64> = x.iter().map(|v| bf16::from_f32(*v).to_f64()).collect();
    let h: Vec<f64> = x.iter().map(|v| f16::from_f32(*v).to_f64()).collect();
    for (got, want) in [(0, &b), (1, &h), (2, &b), (3, &h)] {
        close("cast", &out[got], want, 0.0, 0.0);
    }
}

fn xent<T: Type>() {
    let mut random = Random::new(6);
    for (rows, cols) in [(1, 1), (9, 10), (5, 333), (3, 1024), (3, 1025), (2, 2048), (1, 9001)] {
        let mut logits: Vec<T> = random.values(rows * cols, 6.0);
        // Ties for the maximum: the first counts.
        if cols > 4 {
            (logits[2], logits[cols / 2]) = (T::narrow(7.0), T::narrow(7.0));
        }
        let mut labels: Vec<u32> = (0..rows).map(|_| random.below(cols) as u32).collect();
        labels[0] = if cols > 4 { 2 } else { 0 };
        if rows > 4 {
            (labels[3], labels[4]) = (u32::MAX, cols as u32);
        }
        let scale = 0.25f32;
        let grid = if cols <= 1024 { rows.div_ceil(8) } else { rows };
        let block = if cols > 8192 { 1024 } else { 256 };
        for few in [false, true] {
            let grid = if few { 1 } else { grid };
            let out = in_every_schedule("xent", |s| {
                let mut d = poisoned::<T>(rows * cols);
                // The same with a gap behind each row, which is left alone.
                let (pitch, gap) = (cols + 3, T::narrow(77.0));
                let mut apart: Vec<T> =
                    logits.chunks(cols).flat_map(|r| r.iter().copied().chain([gap; 3])).collect();
                let (mut losses4, mut losses5) = (poisoned::<f32>(rows), poisoned::<f32>(rows));
                let mut in_place = logits.clone();
                let (mut losses, mut correct) = (poisoned::<f32>(rows), poisoned::<u32>(rows));
                let (mut losses2, mut losses3) = (poisoned::<f32>(rows), poisoned::<f32>(rows));
                let (r, c) = (rows as i32, cols as i32);
                let name = T::kernel("softmax_xent");
                let args = args![&logits, &labels, &mut d, &mut losses, &mut correct, r, c, c, scale];
                launch(s, &name, (grid, 1, 1), block, 0, args);
                let args = args![&in_place, &labels, &mut in_place, &mut losses2, Null, r, c, c, scale];
                launch(s, &name, (grid, 1, 1), block, 0, args);
                let args = args![&logits, &labels, &mut losses3, Null, r, c, c];
                launch(s, &T::kernel("xent"), (grid, 1, 1), block, 0, args);
                let p = pitch as i32;
                let args = args![&apart, &labels, &mut losses5, Null, r, c, p];
                launch(s, &T::kernel("xent"), (grid, 1, 1), block, 0, args);
                let args = args![&apart, &labels, &mut apart, &mut losses4, Null, r, c, p, scale];
                launch(s, &name, (grid, 1, 1), block, 0, args);
                outputs![d, losses, correct, in_place, losses2, losses3, apart, losses4, losses5]
            });
            let (mut d, mut losses, mut correct) = (vec![], vec![], vec![]);
            for (row, label) in logits.chunks(cols).zip(&labels) {
                let row = wide(row);
                let max = row.iter().copied().fold(f64::MIN, f64::max);
                let sum: f64 = row.iter().map(|v| (v - max).exp()).sum();
                let left_out = *label == u32::MAX;
                let inside = (*label as usize) < cols;
                let bad = if inside || left_out { 1.0 } else { f64::NAN };
                losses.push(if left_out {
                    0.0
                } else if inside {
                    sum.ln() + max - row[*label as usize]
                } else {
                    f64::NAN
                });
                let first = row.iter().position(|v| *v == max).expect("there is a largest");
                correct.push(f64::from(u8::from(first == *label as usize)));
                d.extend(row.iter().enumerate().map(|(i, v)| {
                    let hot = f64::from(u8::from(i == *label as usize));
                    if left_out { 0.0 } else { ((v - max).exp() / sum - hot) * f64::from(scale) * bad }
                }));
            }
            close("dlogits", &out[0], &d, T::EPSILON + 1e-5, 1e-7);
            close("losses", &out[1], &losses, 2e-6, 2e-6);
            assert_eq!(out[2], correct, "correct");
            close("dlogits in place", &out[3], &out[0], 0.0, 0.0);
            close("losses again", &out[4], &out[1], 0.0, 0.0);
            close("losses without gradient", &out[5], &out[1], 0.0, 0.0);
            let apart: Vec<f64> =
                out[0].chunks(cols).flat_map(|r| r.iter().copied().chain([77.0; 3])).collect();
            // Vectors begin elsewhere in a row, and so does the sum; both sides were rounded.
            close("dlogits apart", &out[6], &apart, 2.0 * T::EPSILON + 1e-5, 1e-7);
            close("losses apart", &out[7], &out[1], 2e-6, 2e-6);
            close("losses apart without gradient", &out[8], &out[7], 0.0, 0.0);
        }
    }
}

#[test]
fn softmax_cross_entropy() {
    if skipped() {
        return;
    }
    xent::<f32>();
    xent::<bf16>();
    xent::<f16>();
}

#[test]
fn cross_entropy_of_large_and_infinite_logits() {
    if skipped() {
        return;
    }
    let inf = f32::INFINITY;
    let logits = [1e30, -1e30, 0.0, -inf, 0.0, 1.0, -inf, -inf, -inf, f32::NAN, 0.0, 0.0];
    let labels = [0u32, 1, 0, 1];
    let out = in_every_schedule("xent", |s| {
        let (mut d, mut losses) = (poisoned::<f32>(12), poisoned::<f32>(4));
        let args = args![&logits[..], &labels[..], &mut d, &mut losses, Null, 4, 3, 3, 1.0f32];
        launch(s, "softmax_xent_f32", (1, 1, 1), 256, 0, args);
        outputs![d, losses]
    });
    assert_eq!(out[1][0], 0.0);
    close("loss", &out[1][1..2], &[(1.0 + 1f64.exp()).ln()], 1e-6, 0.0);
    assert!(out[1][2].is_nan() && out[1][3].is_nan());
    close("d", &out[0][..3], &[0.0, 0.0, 0.0], 0.0, 0.0);
}

fn mse<T: Type>() {
    let mut random = Random::new(7);
    for n in SIZES.into_iter().chain([20_000]) {
        let y: Vec<T> = random.values(n, 2.0);
        let target: Vec<f32> = random.values(n, 2.0);
        let out = in_every_schedule("mse", |s| {
            let blocks = red(n);
            let (mut d, mut partial, mut total) = (poisoned::<T>(n), poisoned::<f64>(blocks), vec![1.0f64]);
            let args = args![&y, &target, &mut d, &mut partial, n as i64, 0.5f32];
            launch(s, &T::kernel("mse"), (blocks, 1, 1), 256, 0, args);
            launch(s, "sum_f64", (1, 1, 1), 1024, 0, args![&partial, &mut total, blocks as i64, 1]);
            let mut only = poisoned::<f64>(blocks);
            let args = args![&y, &target, Null, &mut only, n as i64, 0.5f32];
            launch(s, &T::kernel("mse"), (blocks, 1, 1), 256, 0, args);
            outputs![d, total, partial, only]
        });
        let differences: Vec<f64> = y.iter().zip(&target).map(|(y, t)| y.wide() - f64::from(*t)).collect();
        let want: Vec<f64> = differences.iter().map(|d| d * 0.5).collect();
        close("dy", &out[0], &want, T::EPSILON, 1e-7);
        close("squares", &out[1], &[1.0 + differences.iter().map(|d| d * d).sum::<f64>()], 1e-6, 0.0);
        assert_eq!(out[2], out[3]);
    }
}

#[test]
fn squared_difference() {
    if skipped() {
        return;
    }
    mse::<f32>();
    mse::<bf16>();
    mse::<f16>();
}

#[test]
fn sums_of_rows_and_counts() {
    if skipped() {
        return;
    }
    let mut random = Random::new(8);
    for n in SIZES {
        let x: Vec<f32> = random.values(n, 1.0);
        let counts: Vec<u32> = (0..n).map(|_| random.next() as u32).collect();
        let out = in_every_schedule("sum", |s| {
            let (mut sum, mut count) = (poisoned::<f64>(1), vec![5u64]);
            launch(s, "sum_f32", (1, 1, 1), 1024, 0, args![&x, &mut sum, n as i64, 0]);
            launch(s, "sum_u32", (1, 1, 1), 1024, 0, args![&counts, &mut count, n as i64, 1]);
            outputs![sum, count]
        });
        close("sum", &out[0], &[x.iter().map(|v| f64::from(*v)).sum()], 1e-12, 1e-12);
        assert_eq!(out[1][0], (counts.iter().map(|v| u64::from(*v)).sum::<u64>() + 5) as f64);
    }
}

#[test]
fn statistics_of_a_gradient() {
    if skipped() {
        return;
    }
    let mut random = Random::new(9);
    for n in SIZES.into_iter().chain([30_001]) {
        let mut g: Vec<f32> = random.values(n, 1e-3);
        let bad = n / 100;
        for i in 0..bad {
            g[i * 97 % n] = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY][i % 3];
        }
        let out = in_every_schedule("stats", |s| {
            let blocks = red(n);
            let (mut squares, mut counts) = (poisoned::<f64>(blocks), poisoned::<u64>(blocks));
            let (mut square, mut count) = (poisoned::<f64>(2), poisoned::<u64>(2));
            let mut scaled = g.clone();
            launch(s, "grad_stats", (blocks, 1, 1), 256, 0, args![&g, n as i64, &mut squares, &mut counts]);
            let args = args![&squares, &counts, blocks as i32, &mut square, &mut count, 0];
            launch(s, "grad_stats_final", (1, 1, 1), 256, 0, args);
            let args = args![&mut scaled, n as i64, 0.5f32, &mut squares, &mut counts];
            launch(s, "unscale", (blocks, 1, 1), 256, 0, args);
            (square[1], count[1]) = (1.0, 7);
            let args = args![&squares, &counts, blocks as i32, &mut square[1..], &mut count[1..], 1];
            launch(s, "grad_stats_final", (1, 1, 1), 256, 0, args);
            outputs![square, count, scaled]
        });
        let sum: f64 = g.iter().map(|v| f64::from(*v).powi(2)).sum();
        if bad == 0 {
            close("squares", &out[0], &[sum, sum / 4.0 + 1.0], 1e-12, 0.0);
        } else {
            assert!(!out[0][0].is_finite() && !out[0][1].is_finite());
        }
        let bad = g.iter().filter(|v| !v.is_finite()).count() as f64;
        assert_eq!(out[1], [bad, bad + 7.0]);
        let halves: Vec<f64> = g.iter().map(|v| f64::from(v * 0.5)).collect();
        close("unscale", &out[2], &halves, 0.0, 0.0);
    }
}
