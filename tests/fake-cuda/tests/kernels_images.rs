//! BatchNorm with pooling and convolution of images against plain loops in f64.

mod support;
use support::*;

const EPS: f32 = 1e-5;
const MOMENTUM: f32 = 0.1;

/// n, c, h, w: odd sides lose their last row or column to the pooling; 4 divides some widths and areas and
/// not others.
const PLANES: [[usize; 4]; 6] =
    [[1, 1, 2, 2], [3, 2, 5, 7], [4, 3, 6, 4], [2, 5, 3, 8], [7, 2, 14, 14], [2, 2, 9, 12]];

struct Norm {
    mean: Vec<f64>,
    inv: Vec<f64>,
    /// Of y after the norm.
    z: Vec<f64>,
}

fn images_per_chunk(n: usize, c: usize) -> usize {
    n.div_ceil(n.min(2048usize.div_ceil(c)))
}

fn batchnorm<T: Type>(shape: [usize; 4], offset: usize, one_chunk: bool) {
    let [n, c, h, w] = shape;
    let (hw, oh, ow) = (h * w, h / 2, w / 2);
    let mut random = Random::new((n * c * hw) as u64);
    // A mean that is large against the spread.
    let mean_of = |c: usize| if T::NAME == "f32" { 1000.0 * c as f32 } else { c as f32 };
    let y: Vec<T> = (0..offset + n * c * hw)
        .map(|i| T::narrow(mean_of(i.saturating_sub(offset) / hw % c) + random.unit()))
        .collect();
    let pooled_len = n * c * oh * ow;
    let dpooled: Vec<T> = random.values(pooled_len, 1.0);
    let gamma: Vec<f32> = (0..c).map(|_| 1.0 + random.unit() * 0.5).collect();
    let beta: Vec<f32> = random.values(c, 0.5);
    let running: Vec<Vec<f32>> = vec![random.values(c, 1.0), (0..c).map(|_| 1.5 + random.unit()).collect()];
    let count = (n * hw) as f64;
    let each = if one_chunk { n } else { images_per_chunk(n, c) };
    let chunks = n.div_ceil(each);
    let [ni, ci, hi, wi, hwi, each] = [n, c, h, w, hw, each].map(|v| v as i32);
    let out = in_every_schedule("batchnorm", |s| {
        let m = 2 * c;
        let (mut partial, mut sums) = (poisoned::<f64>(chunks * m), poisoned::<f64>(m + 1));
        let [mut scale, mut shift, mut mean, mut inv] = [(); 4].map(|()| poisoned::<f32>(c));
        let [mut dmean, mut dvar, mut dgamma, mut dbeta] = [(); 4].map(|()| poisoned::<f32>(c));
        let (mut pooled, mut pick) = (poisoned::<T>(pooled_len), poisoned::<u8>(pooled_len));
        let yo = &y[offset..];
        let (over, bn) = ((c, chunks, 1), (c.div_ceil(256), 1, 1));
        launch(s, &T::kernel("bn_stats_partial"), over, 256, 0, args![yo, &mut partial, ni, ci, hwi, each]);
        let sum_grid = (m.div_ceil(8), 1, 1);
        launch(s, "bn_sum", sum_grid, 256, 0, args![&partial, &mut sums, chunks as i32, m as i32, count]);
        let args = args![
            &sums,
            &gamma,
            &beta,
            &running[0],
            &running[1],
            &mut scale,
            &mut shift,
            &mut mean,
            &mut inv,
            &mut dmean,
            &mut dvar,
            ci,
            EPS,
            MOMENTUM
        ];
        launch(s, "bn_finalize", bn, 256, 0, args);
        if pooled_len > 0 {
            let args = args![yo, &scale, &shift, &mut pooled, &mut pick, ni, ci, hi, wi];
            launch_flat(s, &T::kernel("bn_relu_pool"), 4 * pooled_len, args);
        }
        let [mut backward, mut bsums] = [poisoned::<f64>(chunks * m), poisoned::<f64>(m + 1)];
        let args = args![&dpooled, &pick, yo, &mean, &inv, &mut backward, ni, ci, hi, wi, each];
        launch(s, &T::kernel("bn_pool_backward_partial"), over, 256, 0, args);
        launch(s, "bn_sum", sum_grid, 256, 0, args![&backward, &mut bsums, chunks as i32, m as i32, count]);
        let mut slopes = poisoned::<f32>(m);
        launch(s, "bn_backward_slopes", bn, 256, 0, args![&bsums, &scale, &inv, &mut slopes, ci]);
        let windows = n * c * h.div_ceil(2) * w.div_ceil(2);
        let mut dy = poisoned::<T>(offset + n * c * hw);
        let name = T::kernel("bn_relu_pool_backward");
        let args = args![&dpooled, &pick, yo, &scale, &mean, &slopes, &mut dy[offset..], ni, ci, hi, wi];
        launch_flat(s, &name, 8 * windows, args);
        let mut over_y = y.clone();
        let args = args![
            &dpooled,
            &pick,
            &over_y[offset..],
            &scale,
            &mean,
            &slopes,
            &mut over_y[offset..],
            ni,
            ci,
            hi,
            wi
        ];
        launch_flat(s, &name, 8 * windows, args);
        launch(s, "bn_write_grads", bn, 256, 0, args![&bsums, &mut dgamma, &mut dbeta, ci]);
        outputs![
            mean,
            inv,
            dmean,
            dvar,
            pooled,
            pick,
            dy[offset..],
            dgamma,
            dbeta,
            over_y[offset..],
            scale,
            shift
        ]
    });
    let norm = reference_norm(&wide(&y[offset..]), shape, &gamma, &beta);
    close("mean", &out[0], &norm.mean, 1e-6, 1e-6);
    close("inv", &out[1], &norm.inv, 1e-4, 0.0);
    for k in 0..c {
        let variance = 1.0 / norm.inv[k].powi(2) - f64::from(EPS);
        let unbiased = variance * count / (count - 1.0).max(1.0);
        let m = f64::from(MOMENTUM);
        let want = [m * (f64::from(running[0][k]) - norm.mean[k]), m * (f64::from(running[1][k]) - unbiased)];
        close("d_running", &[out[2][k], out[3][k]], &want, 1e-4, 1e-5);
    }
    // From here on with the kernels' own statistics: which of two near values is larger must not depend on
    // rounding.
    let [scale, shift, mean, inv] = [10, 11, 0, 1].map(|i| &out[i]);
    check_pool::<T>(&y[offset..], shape, scale, shift, &out[4], &out[5]);
    let picks: Vec<u8> = out[5].iter().map(|p| *p as u8).collect();
    let (dy, dgamma, dbeta) =
        reference_backward(&wide(&y[offset..]), &wide(&dpooled), &picks, shape, mean, inv, scale);
    // In f32 xhat of a value near 1000 c has an absolute error of 1000 c * 2^-24.
    close("dgamma", &out[7], &dgamma, 1e-4, 2e-4);
    close("dbeta", &out[8], &dbeta, 1e-5, 1e-5);
    close(
        "dy",
        &out[6],
        &dy,
        T::EPSILON + 1e-4,
        1e-3 * norm.inv.iter().fold(0.0f64, |a, b| a.max(*b)) * 0.05,
    );
    assert_eq!(out[6], out[9], "over y");
    assert_eq!(norm.z.len(), n * c * hw);
}

fn reference_norm(y: &[f64], [n, c, h, w]: [usize; 4], gamma: &[f32], beta: &[f32]) -> Norm {
    let (hw, count) = (h * w, (n * h * w) as f64);
    let channel = |i: usize| i / hw % c;
    let mut mean = vec![0.0; c];
    y.iter().enumerate().for_each(|(i, v)| mean[channel(i)] += v / count);
    let mut variance = vec![0.0; c];
    y.iter().enumerate().for_each(|(i, v)| variance[channel(i)] += (v - mean[channel(i)]).powi(2) / count);
    let inv: Vec<f64> = variance.iter().map(|v| 1.0 / (v + f64::from(EPS)).sqrt()).collect();
    let z = y
        .iter()
        .enumerate()
        .map(|(i, v)| {
            let k = channel(i);
            (v - mean[k]) * inv[k] * f64::from(gamma[k]) + f64::from(beta[k])
        })
        .collect();
    Norm { mean, inv, z }
}

/// The pooled values, and that each pick is the first of the largest, as f32 computes them.
fn check_pool<T: Type>(
    y: &[T],
    [n, c, h, w]: [usize; 4],
    scale: &[f64],
    shift: &[f64],
    pooled: &[f64],
    pick: &[f64],
) {
    let (oh, ow) = (h / 2, w / 2);
    for i in 0..n * c * oh * ow {
        let (plane, row, col) = (i / (oh * ow), i / ow % oh, i % ow);
        let z: Vec<f32> = (0..4)
            .map(|k| {
                let v = y[(plane * h + 2 * row + k / 2) * w + 2 * col + k % 2].wide() as f32;
                scale[plane % c] as f32 * v + shift[plane % c] as f32
            })
            .collect();
        let max = z.iter().copied().fold(f32::MIN, f32::max);
        let first = z.iter().position(|v| *v == max).expect("there is a largest");
        close("pooled", &pooled[i..=i], &[T::narrow(max.max(0.0)).wide()], 0.0, 0.0);
        assert_eq!(pick[i], if max > 0.0 { first as f64 } else { 4.0 }, "pick at {i}");
    }
}

type Gradients = (Vec<f64>, Vec<f64>, Vec<f64>);

fn reference_backward(
    y: &[f64],
    dpooled: &[f64],
    picks: &[u8],
    [n, c, h, w]: [usize; 4],
    mean: &[f64],
    inv: &[f64],
    scale: &[f64],
) -> Gradients {
    let (oh, ow, hw) = (h / 2, w / 2, h * w);
    let mut dz = vec![0.0; y.len()];
    for (i, pick) in picks.iter().enumerate().filter(|(_, p)| **p < 4) {
        let (plane, row, col, k) = (i / (oh * ow), i / ow % oh, i % ow, usize::from(*pick));
        dz[(plane * h + 2 * row + k / 2) * w + 2 * col + k % 2] = dpooled[i];
    }
    let count = (n * hw) as f64;
    let (mut dgamma, mut dbeta) = (vec![0.0; c], vec![0.0; c]);
    let xhat = |i: usize| (y[i] - mean[i / hw % c]) * inv[i / hw % c];
    for (i, d) in dz.iter().enumerate() {
        dbeta[i / hw % c] += d;
        dgamma[i / hw % c] += d * xhat(i);
    }
    let dy = (0..y.len())
        .map(|i| {
            let k = i / hw % c;
            scale[k] * (dz[i] - dbeta[k] / count - xhat(i) * dgamma[k] / count)
        })
        .collect();
    (dy, dgamma, dbeta)
}

fn all_planes<T: Type>() {
    for shape in PLANES {
        batchnorm::<T>(shape, 0, false);
        batchnorm::<T>(shape, 1, true);
    }
}

#[test]
fn batchnorm_and_pooling() {
    if skipped() {
        return;
    }
    all_planes::<f32>();
    all_planes::<bf16>();
    all_planes::<f16>();
}

#[test]
fn pooling_lets_a_nan_through_and_picks_the_first_of_equals() {
    if skipped() {
        return;
    }
    // Windows: all equal; the third largest; all negative; one NaN.
    let y = [2.0, 2.0, 1.0, 0.0, -1.0, -2.0, 1.0, 5.0, 2.0, 2.0, 3.0, 3.0, -1.0, -1.0, f32::NAN, 9.0];
    let out = in_every_schedule("pool", |s| {
        let (mut pooled, mut pick, mut plain) = (poisoned::<f32>(4), poisoned::<u8>(4), poisoned::<f32>(4));
        let args = args![&y[..], &[1.0f32][..], &[0.0f32][..], &mut pooled, &mut pick, 1, 1, 2, 8];
        launch_flat(s, "bn_relu_pool_f32", 32, args);
        let args = args![&y[..], &[1.0f32][..], &[0.0f32][..], &mut plain, Null, 1, 1, 2, 8];
        launch_flat(s, "bn_relu_pool_f32", 32, args);
        outputs![pooled, pick, plain]
    });
    close("pooled", &out[0], &[2.0, 3.0, 0.0, f64::NAN], 0.0, 0.0);
    close("pooled", &out[2], &[2.0, 3.0, 0.0, f64::NAN], 0.0, 0.0);
    assert_eq!(out[1], [0.0, 2.0, 4.0, 4.0]);
}

#[test]
fn inference_uses_the_running_statistics() {
    if skipped() {
        return;
    }
    let mut random = Random::new(20);
    let c = 300;
    let [gamma, beta, mean]: [Vec<f32>; 3] = [(); 3].map(|()| random.values(c, 2.0));
    let var: Vec<f32> = (0..c).map(|_| 1.5 + random.unit()).collect();
    let out = in_every_schedule("inference", |s| {
        let (mut scale, mut shift) = (poisoned::<f32>(c), poisoned::<f32>(c));
        let args = args![&gamma, &beta, &mean, &var, &mut scale, &mut shift, c as i32, EPS];
        launch(s, "bn_inference", (2, 1, 1), 256, 0, args);
        outputs![scale, shift]
    });
    let scale: Vec<f64> =
        (0..c).map(|i| f64::from(gamma[i]) / (f64::from(var[i]) + f64::from(EPS)).sqrt()).collect();
    let shift: Vec<f64> = (0..c).map(|i| f64::from(beta[i]) - f64::from(mean[i]) * scale[i]).collect();
    close("scale", &out[0], &scale, 1e-6, 0.0);
    close("shift", &out[1], &shift, 1e-6, 1e-6);
}

// ----------------------------------------------------------------------------------------------- convolution

/// n, cin, h, w, cout, k, pad.
const CONVOLUTIONS: [[usize; 7]; 9] = [
    [1, 1, 1, 1, 1, 1, 0],
    [2, 1, 28, 28, 16, 5, 2],
    [1, 16, 14, 14, 32, 5, 2],
    [3, 3, 7, 5, 17, 3, 1],
    [2, 5, 9, 8, 33, 2, 1],
    [1, 2, 8, 11, 70, 7, 3],
    [2, 4, 6, 6, 3, 3, 0],
    [5, 2, 3, 3, 4, 3, 2],
    [9, 3, 5, 5, 16, 1, 0],
];

struct Conv {
    n: usize,
    cin: usize,
    h: usize,
    w: usize,
    cout: usize,
    k: usize,
    pad: usize,
    oh: usize,
    ow: usize,
}

impl Conv {
    /// Calls each(x index, weight index, y index) for every product.
    fn products(&self, mut each: impl FnMut(usize, usize, usize)) {
        let Self { n, cin, h, w, cout, k, pad, oh, ow } = *self;
        for (image, o, r, c) in itertools(n, cout, oh, ow) {
            let y = ((image * cout + o) * oh + r) * ow + c;
            for (i, kr, kc) in (0..cin).flat_map(|i| (0..k * k).map(move |p| (i, p / k, p % k))) {
                let (row, col) = (r + kr, c + kc);
                if (pad..h + pad).contains(&row) && (pad..w + pad).contains(&col) {
                    each(
                        ((image * cin + i) * h + row - pad) * w + col - pad,
                        ((o * cin + i) * k + kr) * k + kc,
                        y,
                    );
                }
            }
        }
    }
}

fn itertools(a: usize, b: usize, c: usize, d: usize) -> impl Iterator<Item = (usize, usize, usize, usize)> {
    (0..a * b * c * d).map(move |i| (i / d / c / b, i / d / c % b, i / d % c, i % d))
}

fn convolution<T: Type>([n, cin, h, w, cout, k, pad]: [usize; 7]) {
    let conv = Conv { n, cin, h, w, cout, k, pad, oh: h + 2 * pad + 1 - k, ow: w + 2 * pad + 1 - k };
    let depth = cin * k * k;
    let mut random = Random::new((n * cin * h * w * cout * k) as u64);
    let (x_len, y_len) = (n * cin * h * w, n * cout * conv.oh * conv.ow);
    let x: Vec<T> = random.values(x_len, 1.0);
    let weight: Vec<T> = random.values(cout * depth, 1.0);
    let dy: Vec<T> = random.values(y_len, 1.0);
    let bias: Vec<f32> = random.values(cout, 1.0);
    let per_block = if T::NAME == "f32" { 256 } else { 128 };
    let pixels = n * conv.oh * conv.ow;
    let tiles = (depth + 1).div_ceil(64) * cout.div_ceil(32);
    let chunks = 1024usize.div_ceil(tiles).clamp(1, pixels.div_ceil(256));
    let each = pixels.div_ceil(chunks).div_ceil(32) * 32;
    let chunks = pixels.div_ceil(each);
    let [ni, ci, hi, wi, oi, ki, pi] = [n, cin, h, w, cout, k, pad].map(|v| v as i32);
    let out = in_every_schedule("convolution", |s| {
        let (mut y, mut dx) = (poisoned::<T>(y_len), poisoned::<T>(x_len));
        let args = args![&x, &weight, &bias, &mut y, ni, ci, hi, wi, oi, ki, pi];
        let grid = (pixels.div_ceil(per_block), cout.div_ceil(32), 1);
        launch(s, &T::kernel("conv_forward"), grid, 128, 0, args);
        let args = args![&dy, &weight, &mut dx, ni, ci, hi, wi, oi, ki, pi];
        let grid = ((n * h * w).div_ceil(per_block), cin.div_ceil(32), 1);
        launch(s, &T::kernel("conv_backward_input"), grid, 128, 0, args);
        let mut partial = poisoned::<f32>(chunks * cout * (depth + 1));
        let args = args![&x, &dy, &mut partial, ni, ci, hi, wi, oi, ki, pi, each as i32];
        let grid = ((depth + 1).div_ceil(64), cout.div_ceil(32), chunks);
        launch(s, &T::kernel("conv_backward_weight_partial"), grid, 128, 0, args);
        let (mut dweight, mut dbias) = (poisoned::<f32>(cout * depth), poisoned::<f32>(cout));
        let grid = ((cout * (depth + 1)).div_ceil(32), 1, 1);
        let (c, o, d) = (chunks as i32, cout as i32, depth as i32);
        let args = args![&partial, &mut dweight, &mut dbias, c, o, d, 0];
        launch(s, "conv_backward_weight_final", grid, 256, 0, args);
        let mut twice = dweight.clone();
        launch(s, "conv_backward_weight_final", grid, 256, 0, args![&partial, &mut twice, Null, c, o, d, 1]);
        outputs![y, dx, dweight, dbias, twice]
    });
    let (xs, ws, ds) = (wide(&x), wide(&weight), wide(&dy));
    let area = conv.oh * conv.ow;
    let mut y: Vec<f64> = (0..y_len).map(|i| f64::from(bias[i / area % cout])).collect();
    let (mut dx, mut dweight, mut dbias) = (vec![0.0; x_len], vec![0.0; cout * depth], vec![0.0; cout]);
    conv.products(|a, b, c| {
        y[c] += xs[a] * ws[b];
        dx[a] += ds[c] * ws[b];
        dweight[b] += ds[c] * xs[a];
    });
    ds.iter().enumerate().for_each(|(i, d)| dbias[i / area % cout] += d);
    // Sums of up to 800 products of about a third, in f32.
    close("y", &out[0], &y, T::EPSILON, 2e-4);
    close("dx", &out[1], &dx, T::EPSILON, 2e-4);
    close("dweight", &out[2], &dweight, 1e-5, 1e-4);
    close("dbias", &out[3], &dbias, 1e-5, 1e-4);
    let twice: Vec<f64> = dweight.iter().map(|d| 2.0 * d).collect();
    close("accumulated", &out[4], &twice, 1e-5, 2e-4);
}

#[test]
fn convolution_of_f32() {
    if skipped() {
        return;
    }
    CONVOLUTIONS.into_iter().for_each(convolution::<f32>);
}

#[test]
fn convolution_of_bf16() {
    if skipped() {
        return;
    }
    CONVOLUTIONS.into_iter().for_each(convolution::<bf16>);
}

#[test]
fn convolution_of_f16() {
    if skipped() {
        return;
    }
    CONVOLUTIONS.into_iter().for_each(convolution::<f16>);
}

#[test]
fn convolution_of_tf32() {
    if skipped() {
        return;
    }
    CONVOLUTIONS.into_iter().for_each(convolution::<Tf32>);
}
