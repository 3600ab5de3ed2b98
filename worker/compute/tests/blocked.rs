//! The blocked operators against the plain ones, for sizes that are multiples of nothing, with every
//! instruction set of this machine.
//!
//! Tolerance: 1e-5 of the largest value, for f32 sums of up to some thousand terms.

mod common;

use common::{close, noise, wide};
use paraft_compute::cpu::blocked::{Geometry, Planes, blocks};
use paraft_compute::cpu::conv::{ConvWeights, forward_block};
use paraft_compute::cpu::conv_grad::ConvGradient;
use paraft_compute::cpu::head;
use paraft_compute::cpu::norm::{BlockStats, ChannelNorm, ChannelStats, block_stats, norm_relu_pool};
use paraft_compute::cpu::norm_grad::NormSums;
use paraft_compute::reference::{self as plain, Images};
use paraft_compute::shape::ConvShape;
use paraft_compute::{Cpu, Lane, Threads};

fn packed(g: Geometry, values: &[f32], n: usize) -> Planes {
    let mut p = Planes::new(g);
    p.pack(&Threads::one(Cpu::detect()), values, n);
    p
}

#[test]
fn convolution_and_its_gradients_are_the_plain_ones() {
    // (inputs, outputs, kernel, padding, height, width, samples)
    let cases = [
        (1, 16, 5, 2, 8, 8, 17),
        (3, 5, 3, 1, 6, 9, 7),
        (2, 7, 5, 0, 9, 7, 16),
        (4, 3, 1, 0, 5, 5, 33),
        (5, 2, 4, 1, 6, 7, 3),
        (2, 4, 7, 3, 7, 14, 5),
        (1, 1, 3, 2, 4, 3, 1),
        (1, 1, 1, 0, 3, 1, 20),
        (3, 16, 3, 1, 5, 6, 24),
        (16, 17, 3, 1, 4, 5, 9),
        (17, 3, 5, 2, 6, 10, 25),
        (16, 16, 5, 2, 7, 4, 31),
        (2, 3, 6, 2, 8, 8, 4),
    ];
    // Every width of a tile, and every remainder.
    let widths = (1..=16).map(|width| (2, 6, 3, 1, 2, width, 19));
    for (inputs, outputs, kernel, pad, height, width, n) in cases.into_iter().chain(widths) {
        let s = ConvShape { inputs, outputs, kernel, pad };
        let sizes = Images { n, channels: inputs, height, width };
        let (x, w, b) = (noise(1, sizes.len()), noise(2, s.weight_len()), noise(3, outputs));
        let out = sizes.after(s);
        let dy = noise(4, out.len());
        let want = plain::conv_forward(s, sizes, &wide(&x), &wide(&w), &wide(&b));
        let (dx_want, dw_want, _) = plain::conv_backward(s, sizes, &wide(&x), &wide(&w), &wide(&dy));
        for cpu in Cpu::every() {
            let what = format!("{s:?} {height}x{width} n={n} {:?}", cpu.isa());
            let mut weights = ConvWeights::new(s);
            weights.set(&w, &b);
            // The same weights for inputs with another border.
            let bordered = |border| packed(Geometry::new(inputs, height, width, border), &x, n);
            for xs in [pad, pad + 1].map(bordered) {
                let from = xs.geometry();
                let mut y = Planes::new(s.output(from, 2));
                y.reserve(n);
                weights.lay(from);
                y.blocks_mut(n).for_each(|mut y| forward_block(cpu, &weights, &xs, &mut y, n));
                close(&format!("{what}: y"), &y.unpack(n), &want);
            }

            let xs = bordered(pad + 1);
            let turned = s.transposed();
            let dys = packed(Geometry::new(outputs, out.height, out.width, turned.pad), &dy, n);
            let mut weights = ConvWeights::new(turned);
            weights.set_transposed(&w);
            let mut dx = Planes::new(Geometry::new(inputs, height, width, 0));
            dx.reserve(n);
            weights.lay(dys.geometry());
            dx.blocks_mut(n).for_each(|mut dx| forward_block(cpu, &weights, &dys, &mut dx, n));
            close(&format!("{what}: dx"), &dx.unpack(n), &dx_want);

            let (mut grad, mut dw) = (ConvGradient::new(s), vec![f32::NAN; w.len()]);
            grad.add(&Threads::one(cpu), &xs, &dys, 0..blocks(n), n);
            grad.write(cpu, &mut dw);
            close(&format!("{what}: dw"), &dw, &dw_want);
        }
    }
}

#[test]
fn norm_relu_pool_matches_plain_and_first_of_equals_wins() {
    for (n, coarse) in [(1, false), (7, false), (16, false), (33, false), (21, true)] {
        let (channels, height, width) = (5, 6, 8);
        let sizes = Images { n, channels, height, width };
        let mut x = noise(5, sizes.len());
        if coarse {
            // Few distinct values, so that most windows have ties.
            x.iter_mut().for_each(|v| *v = (*v * 2.0).round());
        }
        // A mean far from zero and a negative, a zero and a tiny gain.
        x.iter_mut().for_each(|v| *v += 30.0);
        let (gamma, beta) = (vec![1.5, -0.7, 0.0, 1e-3, 1.0], vec![0.1, 0.2, 0.3, -0.1, 0.0]);
        let half = sizes.halved();
        let dp = noise(6, half.len());

        let (xd, gd) = (wide(&x), wide(&gamma));
        let stats_want = plain::channel_stats(sizes, &xd);
        let z = plain::norm(sizes, &xd, &stats_want, &gd, &wide(&beta));
        let (p_want, places) = plain::relu_pool(sizes, &z);
        let dz = plain::relu_pool_backward(z.len(), &p_want, &places, &wide(&dp));
        let (dx_want, dgamma_want, dbeta_want) = plain::norm_backward(sizes, &xd, &gd, &dz);
        for cpu in Cpu::every() {
            let what = format!("n={n} coarse={coarse} {:?}", cpu.isa());
            let mut y = packed(Geometry::new(channels, height, width, 1), &x, n);
            let pooled = |pad| Geometry::new(channels, height / 2, width / 2, pad);
            let (mut p, mut pick) = (Planes::new(pooled(2)), Planes::new(pooled(0)));
            p.reserve(n);
            pick.reserve(n);
            let mut stats = ChannelStats::new(channels);
            let mut of_block = vec![BlockStats::default(); channels];
            y.blocks_mut(n).for_each(|y| {
                block_stats(cpu, &y, n, &mut of_block);
                stats.add(&of_block);
            });
            let (mean, var): (Vec<f32>, Vec<f32>) =
                (0..channels).map(|c| (stats.mean(c), stats.variance(c))).unzip();
            close(&format!("{what}: mean"), &mean, &stats_want.iter().map(|s| s.0).collect::<Vec<_>>());
            close(&format!("{what}: variance"), &var, &stats_want.iter().map(|s| s.1).collect::<Vec<_>>());
            let norms: Vec<ChannelNorm> =
                (0..channels).map(|c| ChannelNorm::new(mean[c], var[c], gamma[c], beta[c])).collect();
            p.blocks_mut(n).zip(pick.blocks_mut(n)).for_each(|(mut p, mut pick)| {
                norm_relu_pool(cpu, &norms, &y, (&mut p, &mut pick), n);
            });
            close(&format!("{what}: p"), &p.unpack(n), &p_want);

            let dps = packed(pooled(0), &dp, n);
            let mut sums = NormSums::new(channels);
            let one = Threads::one(cpu);
            sums.add(&one, &norms, (&pick, &dps), n);
            let (mut dgamma, mut dbeta) = (vec![f32::NAN; channels], vec![f32::NAN; channels]);
            sums.write(&norms, &mut dgamma, &mut dbeta);
            close(&format!("{what}: dgamma"), &dgamma, &dgamma_want);
            close(&format!("{what}: dbeta"), &dbeta, &dbeta_want);
            sums.apply(&one, &norms, stats.count(), (&pick, &dps), &mut y, (0..blocks(n), n));
            close(&format!("{what}: dy"), &y.unpack(n), &dx_want);
            let mut dbias = vec![f32::NAN; channels];
            sums.write_bias(&mut dbias);
            // Zero in exact arithmetic; the mean of 30 in single precision leaves some of every value's rounding.
            let gross = wide(&y.unpack(n)).iter().map(|v| v.abs()).sum::<f64>();
            assert!(
                dbias.iter().all(|v| f64::from(v.abs()) < 1e-5 * gross),
                "{what}: dbias {dbias:?} of {gross}"
            );
            // Dead lanes and borders must be zero, or they would change a weight's gradient.
            let sum = |v: &[f32]| wide(v).iter().map(|v| v.abs()).sum::<f64>();
            let all: Vec<f32> = y.lanes().iter().flat_map(|l| l.0).collect();
            assert_eq!(sum(&all) as f32, sum(&y.unpack(n)) as f32, "{what}: stray gradient");
        }
    }
}

#[test]
fn the_head_is_a_linear_layer() {
    for (n, outputs) in [(1, 10), (7, 1), (16, 3), (33, 13)] {
        let g = Geometry::new(3, 3, 5, 0);
        let f = g.sample_len();
        let (x, w, b, dy) =
            (noise(7, n * f), noise(8, outputs * f), noise(9, outputs), noise(10, n * outputs));
        let want = plain::linear_forward(n, &wide(&x), &wide(&w), &wide(&b));
        let (dx_want, dw_want, db_want) = plain::linear_backward(n, &wide(&x), &wide(&w), &wide(&dy));
        for cpu in Cpu::every() {
            let what = format!("n={n} outputs={outputs} {:?}", cpu.isa());
            let xs = packed(g, &x, n);
            let mut lanes = vec![Lane::ZERO; blocks(n) * outputs];
            let mut y = vec![f32::NAN; n * outputs];
            for (i, block) in lanes.chunks_exact_mut(outputs).enumerate() {
                head::forward_block(cpu, &xs, i, &w, &b, block);
            }
            head::unpack(&lanes, outputs, &mut y);
            close(&format!("{what}: y"), &y, &want);

            head::pack(&dy, outputs, &mut lanes);
            let mut dx = Planes::new(g);
            dx.reserve(n);
            for (block, mut dx) in lanes.chunks_exact(outputs).zip(dx.blocks_mut(n)) {
                head::backward_block(cpu, block, &w, &mut dx);
            }
            close(&format!("{what}: dx"), &dx.unpack(n), &dx_want);
            let (mut dw, mut db) = (vec![f32::NAN; w.len()], vec![f32::NAN; outputs]);
            head::backward_weight(cpu, n, &xs, &lanes, &mut dw, &mut db);
            close(&format!("{what}: dw"), &dw, &dw_want);
            close(&format!("{what}: db"), &db, &db_want);
        }
    }
}
