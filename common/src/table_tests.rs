//! Tests of tables: ids, written rows, initial values, optimizers.

use super::*;
use crate::{
    Encoding,
    optim::{Gradient, Hyper, OptimizerConfig},
    payload::Payload,
};

fn table(dim: usize) -> TableSpec {
    TableSpec::new("t", dim, 1000)
}

#[test]
fn partitions_share_the_ids_evenly_and_fit_them() {
    let spec = TableSpec { partitions: 16, max_rows: 160_000, ..table(4) };
    let mut counts = [0u64; 16];
    (0..160_000u64).for_each(|id| counts[spec.partition_of(id) as usize] += 1);
    let most = counts.iter().max().copied().unwrap_or_default();
    assert!(most <= spec.partition_rows(), "{counts:?} of {}", spec.partition_rows());
    assert!(spec.partition_rows() < 11_000);
}

#[test]
fn rows_are_read_as_written_and_others_refused() {
    let spec = TableSpec { partitions: 1, ..table(2) };
    let written = put_rows(&[3, 900, u64::MAX], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 2);
    // In pieces, as it may arrive.
    let bytes = written.to_bytes();
    let pieces = Payload::from_pieces(vec![bytes.slice(..13), bytes.slice(13..)]);
    let rows = Rows::read(&pieces, &spec, 0).expect("three rows");
    assert_eq!(rows.ids().collect::<Vec<_>>(), [3, 900, u64::MAX]);
    assert_eq!(rows.values().nth(1), Some(&[3f32.to_le_bytes(), 4f32.to_le_bytes()][..]));
    assert_eq!(rows.sum_of_squares(), 91.0);
    assert!(Rows::read(&Payload::EMPTY, &spec, 0).expect("no row").is_empty());
    for (ids, error) in
        [(&[3, 3][..], RowsError::Order { at: 1, id: 3 }), (&[4, 3], RowsError::Order { at: 1, id: 3 })]
    {
        assert_eq!(Rows::read(&put_rows(ids, &[0.0; 4], 2), &spec, 0), Err(error));
    }
    let cut = Payload::from(bytes.slice(..bytes.len() - 1));
    assert_eq!(Rows::read(&cut, &spec, 0), Err(RowsError::Length { got: 47, dim: 2 }));
    let several = TableSpec { partitions: 16, ..spec };
    let of = several.partition_of(3);
    let partition = (of + 1) % 16;
    let wrong = Rows::read(&put_rows(&[3], &[0.0; 2], 2), &several, partition);
    assert_eq!(wrong, Err(RowsError::Partition { id: 3, of, partition }));
}

#[test]
fn sum_adds_rows_of_one_id_in_the_pushes_order() {
    let push = |ids: &[u64], values: &[f32]| Rows::of(&put_rows(ids, values, 1), 1).expect("rows");
    // Not associative in f32: 1e8 - 1e8 + 1 is 1, and 1 - 1e8 + 1e8 is 0.
    let sum = Rows::sum(&[
        push(&[1, 5], &[1e8, 7.0]),
        push(&[5], &[1.0]),
        push(&[1, 9], &[-1e8, 3.0]),
        push(&[1], &[1.0]),
    ]);
    assert_eq!(sum, put_rows(&[1, 5, 9], &[1.0, 8.0, 3.0], 1));
    assert_eq!(Rows::sum(&[]), Payload::EMPTY);
}

#[test]
fn initial_values_depend_on_seed_table_and_id_alone() {
    let kinds = [RowInit::Uniform { range: 0.5 }, RowInit::Normal { std: 2.0 }];
    for init in kinds {
        let row = |seed, id| {
            let mut values = [0f32; 8];
            TableSpec { init, seed, ..table(8) }.initial(id, &mut values);
            values
        };
        assert_eq!(row(1, 7), row(1, 7));
        assert!(row(1, 7) != row(2, 7) && row(1, 7) != row(1, 8));
        let (mut here, mut there) = ([0f32; 8], [0f32; 8]);
        let other = TableSpec { name: "other".into(), init, ..table(8) };
        TableSpec { init, ..table(8) }.initial(7, &mut here);
        other.initial(7, &mut there);
        assert!(here != there, "the table counts");
        let all: Vec<f64> = (0..20_000).flat_map(|id| row(3, id)).map(f64::from).collect();
        let n = all.len() as f64;
        let mean = all.iter().sum::<f64>() / n;
        let std = (all.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / n).sqrt();
        let expected = match init {
            RowInit::Uniform { range } => f64::from(range) / 3f64.sqrt(),
            RowInit::Normal { std } => f64::from(std),
            RowInit::Zeros => 0.0,
        };
        assert!(mean.abs() < 5.0 * expected / n.sqrt(), "{init:?}: mean {mean}");
        assert!((std / expected - 1.0).abs() < 0.01, "{init:?}: deviation {std} of {expected}");
    }
}

/// One row after these gradients.
fn trained(optimizer: RowOptimizer, first: &[f32], gradients: &[Vec<f32>]) -> Vec<f32> {
    let dim = first.len();
    let mut row = first.to_vec();
    row.resize(dim + optimizer.slots(dim), 0.0);
    let rate = RowRate { factor: 1.0, set: None };
    for (t, gradient) in (1..).zip(gradients) {
        let bytes: Vec<[u8; 4]> = gradient.iter().map(|g| g.to_le_bytes()).collect();
        optimizer.update(rate, t, 1.0, &mut row, &bytes);
    }
    row
}

fn gradients() -> Vec<Vec<f32>> {
    (0..20).map(|t| (0..4).map(|i| ((t * 7 + i * 3) % 11) as f32 / 5.0 - 1.0).collect()).collect()
}

#[test]
fn rows_get_the_bits_of_the_dense_rule() {
    let adagrad = OptimizerConfig::Adagrad(crate::optim::Adagrad { lr: 0.1, ..Default::default() });
    let adam = OptimizerConfig::Adam(crate::optim::Adam { lr: 0.1, ..Default::default() });
    let cases = [
        (RowOptimizer::Sgd { lr: 0.1 }, OptimizerConfig::sgd(0.1), true),
        (RowOptimizer::Adagrad { lr: 0.1, eps: 1e-10 }, adagrad, true),
        (RowOptimizer::Adam { lr: 0.1, beta1: 0.9, beta2: 0.999, eps: 1e-8 }, adam, false),
    ];
    let first = [0.5, -0.25, 1.0, 0.0];
    for (rows, dense, same_bits) in cases {
        let mut weights = first.to_vec();
        let mut slots = dense.new_slots(4);
        for (t, gradient) in (1..).zip(gradients()) {
            let bytes: Vec<u8> = gradient.iter().flat_map(|g| g.to_le_bytes()).collect();
            let payload = Payload::from(bytes);
            let hyper = Hyper { lr: 0.1, t, clip_value: None };
            let gradient = Gradient { payload: &payload, encoding: Encoding::F32, scale: 1.0 };
            dense.apply(&hyper, &mut weights, &mut slots, gradient);
        }
        let row = trained(rows, &first, &gradients());
        match same_bits {
            true => assert_eq!(row[..4], weights, "{rows:?}"),
            false => row
                .iter()
                .zip(&weights)
                .for_each(|(a, b)| assert!((a - b).abs() < 1e-5, "{row:?} {weights:?}")),
        }
    }
}

#[test]
fn rowwise_adagrad_keeps_one_sum_for_a_row() {
    let row = trained(RowOptimizer::RowwiseAdagrad { lr: 0.5, eps: 0.0 }, &[1.0, 1.0], &[vec![3.0, 4.0]]);
    // The mean of 9 and 16; 0.5 / sqrt(12.5) * g.
    assert_eq!(row[2], 12.5);
    assert!((row[0] - (1.0 - 0.5 * 3.0 / 12.5f32.sqrt())).abs() < 1e-6);
    assert!((row[1] - (1.0 - 0.5 * 4.0 / 12.5f32.sqrt())).abs() < 1e-6);
}

/// With constant squares of gradients, no penalties and beta 0, FTRL is gradient descent with the rate alpha / sqrt(sum of
/// squares), as the paper's derivation says.
#[test]
fn ftrl_without_penalties_is_adaptive_descent() {
    let ftrl = RowOptimizer::Ftrl { lr: 0.1, beta: 0.0, l1: 0.0, l2: 0.0 };
    let (mut w, mut n) = (0f64, 0f64);
    let gradients = gradients();
    for gradient in &gradients {
        let g = f64::from(gradient[0]);
        n += g * g;
        w -= if n > 0.0 { 0.1 / n.sqrt() * g } else { 0.0 };
    }
    let row = trained(ftrl, &[0.0; 4], &gradients);
    assert!((f64::from(row[0]) - w).abs() < 1e-4, "{} and {w}", row[0]);
}

#[test]
fn ftrl_with_an_l1_penalty_keeps_small_sums_at_zero() {
    let ftrl = RowOptimizer::Ftrl { lr: 0.1, beta: 1.0, l1: 10.0, l2: 0.0 };
    let row = trained(ftrl, &[0.0], &[vec![0.5], vec![-9.0], vec![-9.0]]);
    // z = 0.5 - 9 - 9, plus sigma * w with w = 0 until |z| passes l1: beyond = 7.5, n = 162.25.
    let expected = 7.5 / ((1.0 + 162.25f64.sqrt()) / 0.1);
    assert!((f64::from(row[0]) - expected).abs() < 1e-6, "{row:?} {expected}");
    assert_eq!(trained(ftrl, &[0.0], &[vec![0.5], vec![-9.0]])[0], 0.0);
}

#[test]
fn impossible_tables_are_refused() {
    let bad = |change: fn(&mut TableSpec)| {
        let mut spec = table(4);
        change(&mut spec);
        spec.check_lengths().and_then(|()| spec.validate()).expect_err("refused").to_string()
    };
    assert_eq!(bad(|t| t.dim = 0), "table `t`: dim 0 is not within 1 to 1024");
    assert_eq!(bad(|t| t.partitions = 5000), "table `t`: partitions 5000 is not within 1 to 1024");
    assert_eq!(bad(|t| t.max_rows = 0), "table `t`: max_rows 0 is not within 1 to 2^36");
    assert!(bad(|t| t.max_rows = 1 << 36).contains("set more partitions"));
    assert!(bad(|t| t.name = "a b".into()).contains("its name is not"));
    assert!(bad(|t| t.init = RowInit::Normal { std: f32::NAN }).contains("init.std NaN"));
    assert!(
        bad(|t| t.optimizer = RowOptimizer::Ftrl { lr: 0.0, beta: 1.0, l1: 0.0, l2: 0.0 })
            .contains("above 0")
    );
    let uniform = |t: &mut TableSpec| {
        t.init = RowInit::default();
        t.optimizer = RowOptimizer::Ftrl { lr: 0.1, beta: 1.0, l1: 0.0, l2: 0.0 };
    };
    assert!(bad(uniform).contains("set init = { kind = \"zeros\" }"));
}
