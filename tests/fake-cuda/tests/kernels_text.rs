//! Embeddings and attention against plain loops in f64.

mod support;
use support::*;

fn embeddings<T: Type>() {
    let mut random = Random::new(30);
    for (batch, time, cols, vocab, offset) in
        [(1, 1, 1, 1, 0), (3, 5, 7, 4, 0), (2, 33, 264, 11, 0), (2, 9, 512, 3, 1), (1, 100, 12, 50, 0)]
    {
        let (rows, n) = (batch * time, batch * time * cols);
        let table: Vec<f32> = random.values(vocab * cols + offset, 1.0);
        let positions: Vec<f32> = random.values((time + 3) * cols, 1.0);
        let mut tokens: Vec<u32> = (0..rows).map(|_| random.below(vocab) as u32).collect();
        let dy: Vec<T> = random.values(n + offset, 1.0);
        // Rows by token, as the host sorts them.
        let mut order: Vec<u32> = (0..rows as u32).collect();
        order.sort_by_key(|r| tokens[*r as usize]);
        let mut ids: Vec<u32> = order.iter().map(|r| tokens[*r as usize]).collect();
        let mut starts: Vec<u32> =
            (0..rows as u32).filter(|i| *i == 0 || ids[*i as usize] != ids[*i as usize - 1]).collect();
        ids.dedup();
        starts.push(rows as u32);
        let before: Vec<f32> = random.values(vocab * cols, 1.0);
        let start: Vec<f32> = random.values(time * cols, 1.0);
        let good = tokens.clone();
        tokens[rows / 2] = vocab as u32; // outside
        for (with_positions, accumulate) in [(true, 0), (false, 1)] {
            let out = in_every_schedule("embedding", |s| {
                let mut y = poisoned::<T>(n);
                let place = with_positions.then_some(&positions);
                let [r, c, t, v] = [rows, cols, time, vocab].map(|v| v as i32);
                let args = args![&tokens, &table[offset..], place, &mut y, r, c, t, v];
                launch(s, &T::kernel("embedding"), (rows.div_ceil(8), 1, 1), 256, 0, args);
                let (mut dtable, mut dpositions) = (before.clone(), start.clone());
                let grid = (ids.len(), cols.div_ceil(256), 1);
                let args =
                    args![&dy[offset..], &order, &starts, &ids, &mut dtable, ids.len() as i32, c, accumulate];
                launch(s, &T::kernel("embedding_backward"), grid, 256, 0, args);
                let args = args![&dy[offset..], &mut dpositions, batch as i32, t, c, accumulate];
                launch_flat(s, &T::kernel("position_backward"), time * cols, args);
                outputs![y, dtable, dpositions]
            });
            let mut y = vec![f64::NAN; n];
            let (mut dtable, mut dpositions) = (wide(&before), wide(&start));
            if accumulate == 0 {
                ids.iter().for_each(|id| dtable[*id as usize * cols..][..cols].fill(0.0));
                dpositions.fill(0.0);
            }
            for i in 0..n {
                let (row, c) = (i / cols, i % cols);
                if row != rows / 2 {
                    let place =
                        if with_positions { f64::from(positions[row % time * cols + c]) } else { 0.0 };
                    y[i] = f64::from(table[offset + tokens[row] as usize * cols + c]) + place;
                }
                dtable[good[row] as usize * cols + c] += dy[offset + i].wide();
                dpositions[row % time * cols + c] += dy[offset + i].wide();
            }
            close("y", &out[0], &y, T::EPSILON, 1e-7);
            close("dtable", &out[1], &dtable, 1e-6, 1e-5);
            close("dpositions", &out[2], &dpositions, 1e-6, 1e-5);
        }
    }
}

#[test]
fn embedding_of_tokens_and_positions() {
    if skipped() {
        return;
    }
    embeddings::<f32>();
    embeddings::<bf16>();
    embeddings::<f16>();
}

/// Attention's sizes and what belongs to them.
#[derive(Clone, Copy)]
struct Shape {
    batch: usize,
    time: usize,
    heads: usize,
    hd: usize,
}

impl Shape {
    /// Of element d of q, k or v (0, 1, 2).
    fn at(self, b: usize, t: usize, which: usize, h: usize, d: usize) -> usize {
        (((b * self.time + t) * 3 + which) * self.heads + h) * self.hd + d
    }

    fn out(self, b: usize, t: usize, h: usize, d: usize) -> usize {
        ((b * self.time + t) * self.heads + h) * self.hd + d
    }
}

struct Attention {
    out: Vec<f64>,
    lse: Vec<f64>,
    dqkv: Vec<f64>,
}

fn reference(s: Shape, qkv: &[f64], dout: &[f64], scale: f64) -> Attention {
    let Shape { batch, time, heads, hd } = s;
    let (mut out, mut dqkv) = (vec![0.0; dout.len()], vec![0.0; qkv.len()]);
    let mut lse = vec![0.0; batch * heads * time];
    for (b, h) in (0..batch * heads).map(|i| (i / heads, i % heads)) {
        for t in 0..time {
            let dot =
                |u| (0..hd).map(|d| qkv[s.at(b, t, 0, h, d)] * qkv[s.at(b, u, 1, h, d)]).sum::<f64>() * scale;
            let scores: Vec<f64> = (0..=t).map(dot).collect();
            let max = scores.iter().copied().fold(f64::MIN, f64::max);
            let sum: f64 = scores.iter().map(|v| (v - max).exp()).sum();
            lse[(b * heads + h) * time + t] = max + sum.ln();
            let p: Vec<f64> = scores.iter().map(|v| (v - max).exp() / sum).collect();
            for d in 0..hd {
                out[s.out(b, t, h, d)] =
                    p.iter().enumerate().map(|(u, p)| p * qkv[s.at(b, u, 2, h, d)]).sum();
            }
            let g = |d| dout[s.out(b, t, h, d)];
            let dp: Vec<f64> =
                (0..=t).map(|u| (0..hd).map(|d| g(d) * qkv[s.at(b, u, 2, h, d)]).sum()).collect();
            let delta: f64 = p.iter().zip(&dp).map(|(p, dp)| p * dp).sum();
            for u in 0..=t {
                let ds = p[u] * (dp[u] - delta) * scale;
                for d in 0..hd {
                    dqkv[s.at(b, u, 2, h, d)] += p[u] * g(d);
                    dqkv[s.at(b, t, 0, h, d)] += ds * qkv[s.at(b, u, 1, h, d)];
                    dqkv[s.at(b, u, 1, h, d)] += ds * qkv[s.at(b, t, 0, h, d)];
                }
            }
        }
    }
    Attention { out, lse, dqkv }
}

fn attention<T: Type>(s: Shape, size: f32) {
    let Shape { batch, time, heads, hd } = s;
    let n = batch * time * heads * hd;
    let mut random = Random::new((n * 7 + hd) as u64);
    let qkv: Vec<T> = random.values(3 * n, size);
    let dout: Vec<T> = random.values(n, 1.0);
    let scale = 1.0 / (hd as f32).sqrt();
    let exact = T::NAME == "f32";
    let tiles = (time.div_ceil(if exact { 32 } else { 64 }), heads, batch);
    let other = if hd <= 64 { 64 } else { 32 };
    let (shared, shared_back) = if exact {
        (384 * (hd + 4) + 4608, 512 * (hd + 4) + 9472)
    } else {
        (640 * (hd + 8), (256 + 8 * other) * (hd + 8) + 16 * other)
    };
    let rows = batch * heads * time;
    let out = in_every_schedule("attention", |s| {
        let (mut out, mut lse, mut delta) = (poisoned::<T>(n), poisoned::<f32>(rows), poisoned::<f32>(rows));
        let mut dqkv = poisoned::<T>(3 * n);
        let [b, t, h, d] = [batch, time, heads, hd].map(|v| v as i32);
        let name = |stem: &str| format!("{}_{hd}", T::kernel(stem));
        launch(s, &name("attention"), tiles, 128, shared, args![&qkv, &mut out, &mut lse, b, t, h, scale]);
        let args = args![&dout, &out, &mut delta, b, t, h, d];
        launch(s, &T::kernel("attention_delta"), (rows.div_ceil(8), 1, 1), 256, 0, args);
        for part in ["attention_backward_kv", "attention_backward_q"] {
            let args = args![&qkv, &dout, &lse, &delta, &mut dqkv, b, t, h, scale];
            launch(s, &name(part), tiles, 128, shared_back, args);
        }
        outputs![out, lse, dqkv, delta]
    });
    let want = reference(s, &wide(&qkv), &wide(&dout), scale.into());
    // Probabilities and their gradients are rounded to T before they are multiplied.
    let (relative, absolute) =
        if exact { (2e-5, 2e-5) } else { (T::EPSILON * 2.0, T::EPSILON * f64::from(size)) };
    close("out", &out[0], &want.out, relative, absolute);
    close("lse", &out[1], &want.lse, 1e-5, 1e-5);
    let largest = want.dqkv.iter().fold(0.0f64, |m, v| m.max(v.abs()));
    close("dqkv", &out[2], &want.dqkv, relative * 2.0, absolute * largest.max(1.0) * 2.0);
}

/// Times around the sides of the tiles (32 and 64).
fn heads_of<T: Type>(hd: usize) {
    for (batch, time, heads) in [(1, 1, 1), (2, 17, 3), (1, 64, 1), (1, 65, 2), (1, 150, 1)] {
        attention::<T>(Shape { batch, time, heads, hd }, 1.0);
    }
    // Large scores: the maximum moves, probabilities are near 0 and 1.
    attention::<T>(Shape { batch: 1, time: 130, heads: 1, hd }, 4.0);
}

#[test]
fn attention_of_f32() {
    if skipped() {
        return;
    }
    [16, 32, 64, 128].into_iter().for_each(heads_of::<f32>);
}

#[test]
fn attention_of_bf16() {
    if skipped() {
        return;
    }
    [16, 32, 64, 128].into_iter().for_each(heads_of::<bf16>);
}

#[test]
fn attention_of_f16() {
    if skipped() {
        return;
    }
    [16, 32, 64, 128].into_iter().for_each(heads_of::<f16>);
}
