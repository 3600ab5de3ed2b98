//! Biased matrix factorisation: `mean + bias of user + bias of item + their factors' product`, with an L2 penalty.
//! (Koren, Bell, Volinsky, "Matrix Factorization Techniques for Recommender Systems", IEEE Computer 2009.)

use super::{Lookups, Predicts, SparseInput, SparseModel, SparseShape, loss};
use crate::ModelError;
use paraft_common::TensorSpec;

/// A row has the bias, then the factors.
pub struct Factors {
    dim: usize,
    l2: f32,
    mean: f32,
    scores: Vec<f32>,
}

impl Factors {
    pub fn new(shape: SparseShape, dim: usize, l2: f32) -> Self {
        Self { dim, l2, mean: shape.mean, scores: Vec::new() }
    }
}

/// The `place`th row.
pub fn row(rows: &[f32], place: usize, dim: usize) -> &[f32] {
    &rows[place * dim..][..dim]
}

/// Each sample's user and item.
pub fn pairs(
    input: &SparseInput,
) -> impl Iterator<Item = (Result<usize, ModelError>, Result<usize, ModelError>)> {
    let only = |field: &Lookups, i: usize| {
        let mut of = field.of(i);
        match (of.next(), of.next()) {
            (Some((place, _)), None) => Ok(place),
            _ => Err(ModelError::new("a sample has one user and one item")),
        }
    };
    (0..input.len()).map(move |i| (only(&input.fields[0], i), only(&input.fields[1], i)))
}

impl SparseModel for Factors {
    fn predicts(&self) -> Predicts {
        Predicts::Numbers
    }

    fn tensors(&self) -> Vec<TensorSpec> {
        vec![TensorSpec::param("bias", &[1])]
    }

    fn init(&self, _seed: u64, params: &mut [f32]) {
        params.fill(self.mean);
    }

    fn step(
        &mut self,
        params: &[f32],
        rows: &[Vec<f32>],
        input: &SparseInput,
        grads: &mut [f32],
        row_grads: &mut [Vec<f32>],
    ) -> Result<f32, ModelError> {
        let mut slopes = std::mem::take(&mut self.scores);
        self.scores(params, rows, input, &mut slopes)?;
        let mut loss = f64::from(loss::mean(Predicts::Numbers, input, &mut slopes));
        grads[0] = slopes.iter().sum();
        let [of_users, of_items] = row_grads else {
            return Err(ModelError::new("it takes two tables"));
        };
        for (i, (user, item)) in pairs(input).enumerate() {
            let (user, item, slope) = (user?, item?, slopes[i]);
            let (p, q) = (row(&rows[0], user, self.dim), row(&rows[1], item, self.dim));
            let share = self.l2 * input.share(i);
            let squares: f32 = p.iter().chain(q).map(|v| v * v).sum();
            loss += f64::from(share) * f64::from(squares);
            let (dp, dq) =
                (&mut of_users[user * self.dim..][..self.dim], &mut of_items[item * self.dim..][..self.dim]);
            for f in 0..self.dim {
                // The bias is multiplied by 1.
                let (by_q, by_p) = if f == 0 { (1.0, 1.0) } else { (q[f], p[f]) };
                dp[f] += slope * by_q + 2.0 * share * p[f];
                dq[f] += slope * by_p + 2.0 * share * q[f];
            }
        }
        self.scores = slopes;
        Ok(loss as f32)
    }

    fn scores(
        &mut self,
        params: &[f32],
        rows: &[Vec<f32>],
        input: &SparseInput,
        scores: &mut Vec<f32>,
    ) -> Result<(), ModelError> {
        scores.clear();
        for (user, item) in pairs(input) {
            let (user, item) = (row(&rows[0], user?, self.dim), row(&rows[1], item?, self.dim));
            let products: f32 = user[1..].iter().zip(&item[1..]).map(|(p, q)| p * q).sum();
            scores.push(params[0] + user[0] + item[0] + products);
        }
        Ok(())
    }
}
