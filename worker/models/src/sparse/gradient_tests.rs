//! Gradients of the models of tables, against finite differences; predictions of some, by hand.

use super::*;
use paraft_common::TableSpec;

const SHAPE: SparseShape = SparseShape { fields: 2, dense: 3, classes: true, mean: 0.25 };

fn spec(name: &str, dim: usize) -> TableSpec {
    TableSpec::new(name, dim, 100)
}

/// A number from -0.5 to 0.5.
fn number(at: usize) -> f32 {
    (at.wrapping_mul(2_654_435_761) >> 7 & 0xffff) as f32 / 65_536.0 - 0.5
}

/// Four samples of two fields with one id or several, some twice.
fn bags(classes: bool) -> SparseInput {
    let label =
        |i: usize| if classes { f32::from(u8::from(i.is_multiple_of(2))) } else { number(i + 77) * 3.0 };
    SparseInput {
        labels: (0..4).map(label).collect(),
        importance: vec![1.0, 2.0, 0.5, 1.0],
        dense: (0..12).map(|i| number(i + 500)).collect(),
        fields: vec![
            Lookups {
                offsets: vec![0, 1, 3, 3, 5],
                places: vec![0, 2, 2, 1, 0],
                weights: vec![0.5, 1.0, 2.0, 1.0, -1.0],
            },
            Lookups { offsets: vec![0, 1, 2, 3, 4], places: vec![3, 4, 3, 1], weights: Vec::new() },
        ],
    }
}

fn ratings() -> SparseInput {
    let field = |places: [u32; 4]| Lookups {
        offsets: vec![0, 1, 2, 3, 4],
        places: places.into(),
        weights: Vec::new(),
    };
    SparseInput {
        labels: vec![4.0, 1.5, 3.0, 5.0],
        fields: vec![field([0, 1, 0, 2]), field([1, 1, 0, 2])],
        ..SparseInput::default()
    }
}

struct Case {
    model: Box<dyn SparseModel>,
    params: Vec<f32>,
    rows: Vec<Vec<f32>>,
    input: SparseInput,
}

fn case(config: &ModelConfig, shape: SparseShape, dims: &[usize], input: SparseInput) -> Case {
    let tables: Vec<TableSpec> = dims.iter().map(|dim| spec("t", *dim)).collect();
    let model = config.build_sparse(1, shape, &tables).expect("fits");
    let len = model.tensors().iter().map(TensorSpec::len).sum();
    // Not the initial values, at which some gradients are zero.
    let params = (0..len).map(|i| number(i + 3) + 0.6 * f32::from(u8::from(len == 1))).collect();
    let rows =
        dims.iter().enumerate().map(|(t, dim)| (0..5 * dim).map(|i| number(i + 1000 * (t + 1))).collect());
    Case { model, params, rows: rows.collect(), input }
}

impl Case {
    fn gradients(&mut self) -> (f32, Vec<f32>, Vec<Vec<f32>>) {
        let mut grads = vec![f32::NAN; self.params.len()];
        let mut of_rows: Vec<Vec<f32>> = self.rows.iter().map(|r| vec![0.0; r.len()]).collect();
        let loss =
            self.model.step(&self.params, &self.rows, &self.input, &mut grads, &mut of_rows).expect("a step");
        (loss, grads, of_rows)
    }

    /// Compares with the slope over a short way, for each value.
    fn check(&mut self, name: &str) {
        const STEP: f32 = 1.0 / 512.0;
        let (_, grads, of_rows) = self.gradients();
        let close = |got: f32, slope: f32, at: String| {
            assert!(
                (got - slope).abs() < 3e-3 * (1.0 + slope.abs()),
                "{name} {at}: {got}, and the slope is {slope}"
            );
        };
        for i in 0..self.params.len() {
            let at = self.params[i];
            let [up, down] = [STEP, -STEP].map(|by| {
                self.params[i] = at + by;
                self.gradients().0
            });
            self.params[i] = at;
            close(grads[i], (up - down) / (2.0 * STEP), format!("tensor value {i}"));
        }
        for (t, of_table) in of_rows.iter().enumerate() {
            assert!(of_table.iter().any(|g| *g != 0.0), "{name}: table {t} has gradients");
            for (i, got) in of_table.iter().enumerate() {
                let at = self.rows[t][i];
                let [up, down] = [STEP, -STEP].map(|by| {
                    self.rows[t][i] = at + by;
                    self.gradients().0
                });
                self.rows[t][i] = at;
                close(*got, (up - down) / (2.0 * STEP), format!("table {t} value {i}"));
            }
        }
    }
}

#[test]
fn gradients_are_the_slopes_of_the_losses() {
    let numbers = SparseShape { classes: false, ..SHAPE };
    let plain = SparseShape { dense: 0, ..numbers };
    let widths = || vec![5, 4];
    for (config, shape, dims, input) in [
        (ModelConfig::Logistic, SHAPE, &[1][..], bags(true)),
        (ModelConfig::Fm { l2: 0.0 }, SHAPE, &[1, 3], bags(true)),
        (ModelConfig::Fm { l2: 0.2 }, numbers, &[1, 3], bags(false)),
        (ModelConfig::Mf { l2: 0.3 }, plain, &[4, 4], ratings()),
        (ModelConfig::TwoTower { scale: 2.0 }, plain, &[3, 3], ratings()),
        (ModelConfig::WideDeep { hidden: widths() }, SHAPE, &[1, 3], bags(true)),
        (ModelConfig::Dlrm { bottom: vec![6], top: widths() }, SHAPE, &[3], bags(true)),
        (
            ModelConfig::Dlrm { bottom: vec![], top: vec![] },
            SparseShape { dense: 0, ..SHAPE },
            &[3],
            SparseInput { dense: vec![], ..bags(true) },
        ),
    ] {
        assert!(config.is_sparse() && SPARSE_KINDS.contains(&config.name()));
        case(&config, shape, dims, input).check(config.name());
    }
}

#[test]
fn a_batch_is_the_mean_of_its_samples() {
    let mut whole = case(&ModelConfig::Fm { l2: 0.0 }, SHAPE, &[1, 3], bags(true));
    let (loss, ..) = whole.gradients();
    let mut scores = Vec::new();
    whole.model.scores(&whole.params, &whole.rows, &whole.input, &mut scores).expect("scores");
    // By the definition: all pairs, one by one.
    for (i, score) in scores.iter().enumerate() {
        let used: Vec<_> = whole.input.fields.iter().flat_map(|f| f.of(i)).collect();
        let mut by_hand = whole.params[0];
        by_hand += (0..3).map(|d| whole.params[1 + d] * whole.input.dense[3 * i + d]).sum::<f32>();
        for (a, (place, x)) in used.iter().enumerate() {
            by_hand += x * whole.rows[0][*place];
            for (other, y) in &used[..a] {
                by_hand += x
                    * y
                    * (0..3)
                        .map(|d| whole.rows[1][3 * place + d] * whole.rows[1][3 * other + d])
                        .sum::<f32>();
            }
        }
        assert!((score - by_hand).abs() < 1e-6, "sample {i}: {score}, by hand {by_hand}");
    }
    let by_hand = (0..4usize).map(|i| {
        let against = f64::from(if i.is_multiple_of(2) { -scores[i] } else { scores[i] });
        (1.0 + against.exp()).ln() * f64::from(whole.input.importance[i]) / 4.0
    });
    assert!((f64::from(loss) - by_hand.sum::<f64>()).abs() < 1e-6);
}

#[test]
fn an_item_of_another_sample_with_the_own_item_is_no_negative() {
    let mut two =
        case(&ModelConfig::TwoTower { scale: 1.0 }, SparseShape { dense: 0, ..SHAPE }, &[2, 2], ratings());
    let mut losses = Vec::new();
    two.model.scores(&two.params, &two.rows, &two.input, &mut losses).expect("losses");
    let score = |user: usize, item: usize| {
        two.params[0] * (0..2).map(|d| two.rows[0][2 * user + d] * two.rows[1][2 * item + d]).sum::<f32>()
    };
    // Sample 0 is user 0 with item 1, which sample 1 has too.
    let among = [1, 0, 2].map(|item| score(0, item).exp());
    assert!((losses[0] + (among[0] / among.iter().sum::<f32>()).ln()).abs() < 1e-5, "{losses:?}");
}

#[test]
fn data_and_tables_that_do_not_fit_are_refused() {
    let fits =
        |config: &ModelConfig, shape| config.build_sparse(1, shape, &[spec("t", 4), spec("u", 4)]).is_ok();
    let one = SparseShape { fields: 1, dense: 0, classes: false, mean: 0.0 };
    assert!(!fits(&ModelConfig::Logistic, one) && fits(&ModelConfig::Fm { l2: 0.0 }, one));
    assert!(!fits(&ModelConfig::Mf { l2: 0.0 }, one) && !fits(&ModelConfig::Mf { l2: 0.0 }, SHAPE));
    let dlrm = ModelConfig::Dlrm { bottom: vec![], top: vec![] };
    assert!(!fits(&dlrm, SparseShape { classes: true, ..one }) && fits(&dlrm, SHAPE));
    assert!(!fits(&ModelConfig::LogisticRegression, SHAPE));
    let mf = ModelConfig::Mf { l2: 0.0 };
    for (tables, words) in [
        (&[spec("users", 4)][..], "table `items` is missing"),
        (&[spec("users", 4), spec("items", 5)], "table `items`: dim 5, and `users` has 4"),
        (&[spec("users", 1), spec("items", 1)], "table `users`: dim 1, and it holds a bias"),
        (
            &[spec("users", 4), spec("items", 4), spec("more", 4)],
            "table `more`: mf takes `users` and `items`",
        ),
    ] {
        let said = check_tables(&mf, tables).expect_err(words);
        assert!(said.contains(words), "{said}");
    }
    check_tables(&mf, &[spec("items", 4), spec("users", 4)]).expect("in any order");
    assert!(check_tables(&ModelConfig::Logistic, &[spec("weights", 2)]).is_err());
    assert!(
        check_tables(&ModelConfig::Convnet, &[spec("weights", 2)]).expect_err("none").contains("takes none")
    );
}
