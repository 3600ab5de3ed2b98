//! LayerNorm against plain loops in f64.

mod support;
use support::*;

const EPS: f32 = 1e-5;

/// Rows and columns; the offset of every buffer in elements.
const SHAPES: [(usize, usize, usize); 9] = [
    (1, 1, 0),
    (9, 7, 0),
    (11, 64, 0),
    (5, 768, 0),
    (3, 1024, 1),
    (4, 1032, 0),
    (2, 1100, 1),
    (2, 4104, 0),
    (1, 8200, 0),
];

fn grid(rows: usize, cols: usize) -> (usize, usize, usize) {
    (if cols <= 1024 { rows.div_ceil(8) } else { rows }, 1, 1)
}

struct Case<T> {
    x: Vec<T>,
    residual: Vec<T>,
    dy: Vec<T>,
    gamma: Vec<f32>,
    beta: Vec<f32>,
}

impl<T: Type> Case<T> {
    fn new((rows, cols, offset): (usize, usize, usize)) -> Self {
        let mut random = Random::new((rows * cols) as u64);
        let n = rows * cols + offset;
        // A mean that is large against the spread: the square of the mean must not enter the variance.
        let x: Vec<T> = (0..n).map(|_| T::narrow(20.0 + random.unit())).collect();
        let (residual, dy) = (random.values(n, 1.0), random.values(n, 1.0));
        let gamma: Vec<f32> = (0..cols + offset).map(|_| 1.0 + random.unit() * 0.5).collect();
        Self { x, residual, dy, gamma, beta: random.values(cols + offset, 1.0) }
    }

    /// Mean and reciprocal deviation of a row.
    fn stats(&self, row: &[f64]) -> (f64, f64) {
        let n = row.len() as f64;
        let mean = row.iter().sum::<f64>() / n;
        let variance = row.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / n;
        (mean, 1.0 / (variance + f64::from(EPS)).sqrt())
    }
}

fn forward<T: Type>(with_residual: bool, shape: (usize, usize, usize)) {
    let case = Case::<T>::new(shape);
    let (rows, cols, o) = shape;
    let n = rows * cols;
    let out = in_every_schedule("layernorm", |s| {
        let (mut y, mut sum) = (poisoned::<T>(n + o), poisoned::<T>(n + o));
        let (mut mean, mut rstd) = (poisoned::<f32>(rows), poisoned::<f32>(rows));
        let residual = with_residual.then_some(&case.residual[o..]);
        let to = with_residual.then_some(&mut sum[o..]);
        let (gamma, beta, r, c) = (&case.gamma[o..], &case.beta[o..], rows as i32, cols as i32);
        let args =
            args![&case.x[o..], residual, to, gamma, beta, &mut y[o..], &mut mean, &mut rstd, r, c, EPS];
        launch(s, &T::kernel("layernorm"), grid(rows, cols), 256, 0, args);
        outputs![y[o..], sum[o..], mean, rstd]
    });
    let x: Vec<f64> = (o..n + o)
        .map(|i| {
            let r = if with_residual { case.residual[i].wide() } else { 0.0 };
            T::narrow((case.x[i].wide() + r) as f32).wide()
        })
        .collect();
    if with_residual {
        close("sum", &out[1], &x, 0.0, 0.0);
    }
    let tolerance = T::EPSILON + 2e-5;
    for (i, row) in x.chunks(cols).enumerate() {
        let (mean, rstd) = case.stats(row);
        close("mean", &out[2][i..=i], &[mean], 1e-6, 0.0);
        close("rstd", &out[3][i..=i], &[rstd], 2e-5, 0.0);
        let want: Vec<f64> = row
            .iter()
            .enumerate()
            .map(|(c, v)| (v - mean) * rstd * f64::from(case.gamma[o + c]) + f64::from(case.beta[o + c]))
            .collect();
        close("y", &out[0][i * cols..][..cols], &want, tolerance, 4e-5);
    }
}

fn backward<T: Type>(with_residual: bool, shape: (usize, usize, usize)) {
    let case = Case::<T>::new(shape);
    let (rows, cols, o) = shape;
    let n = rows * cols;
    let x = wide(&case.x[o..]);
    let stats: Vec<(f64, f64)> = x.chunks(cols).map(|row| case.stats(row)).collect();
    let mean: Vec<f32> = stats.iter().map(|s| s.0 as f32).collect();
    let rstd: Vec<f32> = stats.iter().map(|s| s.1 as f32).collect();
    let each = chunk(rows).min(3); // several chunks
    let chunks = rows.div_ceil(each);
    let params = 2 * cols;
    let out = in_every_schedule("layernorm", |s| {
        let mut dx = poisoned::<T>(n + o);
        let residual = with_residual.then_some(&case.residual[o..]);
        let (dy, xs, gamma) = (&case.dy[o..], &case.x[o..], &case.gamma[o..]);
        let (r, c) = (rows as i32, cols as i32);
        let mut partial = poisoned::<f32>(chunks * params);
        let mut grads = poisoned::<f32>(params);
        let partials = T::kernel("layernorm_params_partial");
        let tiles = (cols.div_ceil(256), chunks, 1);
        let args = args![dy, xs, gamma, &mean, &rstd, residual, &mut dx[o..], r, c];
        launch(s, &T::kernel("layernorm_backward"), grid(rows, cols), 256, 0, args);
        launch(s, &partials, tiles, 256, 0, args![dy, xs, &mean, &rstd, &mut partial, r, c, each as i32]);
        let args = args![&partial, &mut grads, chunks as i32, params as i32, 0];
        launch(s, "col_sum_final", (params.div_ceil(32), 1, 1), 256, 0, args);
        outputs![dx[o..], grads]
    });
    let (mut dgamma, mut dbeta) = (vec![0.0; cols], vec![0.0; cols]);
    for i in 0..rows {
        let (mean, rstd) = (f64::from(mean[i]), f64::from(rstd[i]));
        let h: Vec<f64> = x[i * cols..][..cols].iter().map(|v| (v - mean) * rstd).collect();
        let dy = wide(&case.dy[o + i * cols..][..cols]);
        let g: Vec<f64> = dy.iter().zip(&case.gamma[o..]).map(|(d, g)| d * f64::from(*g)).collect();
        let n = cols as f64;
        let constant = g.iter().sum::<f64>() / n;
        let slope = g.iter().zip(&h).map(|(g, h)| g * h).sum::<f64>() / n;
        let want: Vec<f64> = (0..cols)
            .map(|c| {
                let r = if with_residual { case.residual[o + i * cols + c].wide() } else { 0.0 };
                rstd * (g[c] - constant - h[c] * slope) + r
            })
            .collect();
        close("dx", &out[0][i * cols..][..cols], &want, T::EPSILON + 1e-5, 2e-5 * (1.0 + rstd));
        for c in 0..cols {
            dgamma[c] += dy[c] * h[c];
            dbeta[c] += dy[c];
        }
    }
    close("dgamma", &out[1][..cols], &dgamma, 1e-5, 2e-4);
    close("dbeta", &out[1][cols..], &dbeta, 1e-5, 1e-5);
}

fn all<T: Type>() {
    for shape in SHAPES {
        for with_residual in [false, true] {
            forward::<T>(with_residual, shape);
            backward::<T>(with_residual, shape);
        }
    }
}

#[test]
fn norms_of_f32() {
    if skipped() {
        return;
    }
    all::<f32>();
}

#[test]
fn norms_of_bf16() {
    if skipped() {
        return;
    }
    all::<bf16>();
}

#[test]
fn norms_of_f16() {
    if skipped() {
        return;
    }
    all::<f16>();
}

/// Row loops over a grid that is smaller than the table says, and results over the inputs.
#[test]
fn a_small_grid_and_results_in_place() {
    if skipped() {
        return;
    }
    for cols in [16, 1500, 1504] {
        let rows = 40;
        let case = Case::<f32>::new((rows, cols, 0));
        let run = |s, grid: usize, in_place: bool| {
            let (mut y, mut sum) = (poisoned::<f32>(rows * cols), case.x.clone());
            let (mut mean, mut rstd) = (poisoned::<f32>(rows), poisoned::<f32>(rows));
            let source = if in_place { sum.as_slice() } else { case.x.as_slice() };
            let (r, c) = (rows as i32, cols as i32);
            let args = args![
                source,
                &case.residual,
                &mut sum,
                &case.gamma,
                &case.beta,
                &mut y,
                &mut mean,
                &mut rstd,
                r,
                c,
                EPS
            ];
            launch(s, "layernorm_f32", (grid, 1, 1), 256, 0, args);
            let mut dx = case.dy.clone();
            let source = if in_place { dx.as_slice() } else { case.dy.as_slice() };
            let args = args![source, &sum, &case.gamma, &mean, &rstd, &case.residual, &mut dx, r, c];
            launch(s, "layernorm_backward_f32", (grid, 1, 1), 256, 0, args);
            outputs![y, sum, mean, rstd, dx]
        };
        let whole = in_every_schedule("whole", |s| run(s, grid(rows, cols).0, false));
        let small = in_every_schedule("small", |s| run(s, 2, true));
        assert_eq!(whole, small);
    }
}
