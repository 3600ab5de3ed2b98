//! Two towers: the score of a user and an item is the product of their rows, times a scale, which is learned. A minibatch's items are each
//! other's negatives: softmax cross-entropy of the own item among them. (Yi et al., "Sampling-Bias-Corrected Neural
//! Modeling for Large Corpus Item Recommendations", RecSys 2019, without its correction by item frequency.)
//!
//! Labels are not used: each sample is a pair that occurred. A sample with the same item as another is not its negative.

use super::{Predicts, SparseInput, SparseModel, factors::pairs, factors::row};
use crate::ModelError;
use paraft_common::{
    TensorSpec,
    optim::exact::{exp, ln},
};

pub struct Towers {
    dim: usize,
    /// The scale before training.
    scale: f32,
    /// `[n, n]` chances of each item for each user.
    chances: Vec<f32>,
    places: Vec<(usize, usize)>,
}

impl Towers {
    pub fn new(dim: usize, scale: f32) -> Self {
        Self { dim, scale, chances: Vec::new(), places: Vec::new() }
    }
}

impl SparseModel for Towers {
    fn predicts(&self) -> Predicts {
        Predicts::Pairs
    }

    fn tensors(&self) -> Vec<TensorSpec> {
        vec![TensorSpec::param("scale", &[1])]
    }

    fn init(&self, _seed: u64, params: &mut [f32]) {
        params.fill(self.scale);
    }

    fn step(
        &mut self,
        params: &[f32],
        rows: &[Vec<f32>],
        input: &SparseInput,
        grads: &mut [f32],
        row_grads: &mut [Vec<f32>],
    ) -> Result<f32, ModelError> {
        let mut losses = Vec::new();
        self.scores(params, rows, input, &mut losses)?;
        let [of_users, of_items] = row_grads else {
            return Err(ModelError::new("it takes two tables"));
        };
        let (n, dim) = (self.places.len(), self.dim);
        let (mut loss, mut of_scale) = (0.0, 0.0);
        for (i, chances) in self.chances.chunks_exact(n.max(1)).enumerate() {
            let ((user, _), share) = (self.places[i], input.share(i));
            loss += f64::from(losses[i]) * f64::from(share);
            let p = row(&rows[0], user, dim);
            for (j, chance) in chances.iter().enumerate() {
                let item = self.places[j].1;
                let slope = share * (chance - f32::from(u8::from(i == j)));
                let q = row(&rows[1], item, dim);
                let (dp, dq) = (&mut of_users[user * dim..][..dim], &mut of_items[item * dim..][..dim]);
                let mut product = 0.0;
                for f in 0..dim {
                    product += p[f] * q[f];
                    dp[f] += slope * params[0] * q[f];
                    dq[f] += slope * params[0] * p[f];
                }
                of_scale += slope * product;
            }
        }
        grads[0] = of_scale;
        Ok(loss as f32)
    }

    /// Computes the chances; writes each sample's loss.
    fn scores(
        &mut self,
        params: &[f32],
        rows: &[Vec<f32>],
        input: &SparseInput,
        scores: &mut Vec<f32>,
    ) -> Result<(), ModelError> {
        scores.clear();
        self.places.clear();
        for (user, item) in pairs(input) {
            self.places.push((user?, item?));
        }
        let n = self.places.len();
        self.chances.resize(n * n, 0.0);
        for (i, chances) in self.chances.chunks_exact_mut(n.max(1)).enumerate() {
            let (user, own) = self.places[i];
            let p = row(&rows[0], user, self.dim);
            for (j, (chance, (_, item))) in chances.iter_mut().zip(&self.places).enumerate() {
                let q = row(&rows[1], *item, self.dim);
                let product: f32 = p.iter().zip(q).map(|(p, q)| p * q).sum();
                *chance = match j != i && *item == own {
                    true => f32::NEG_INFINITY,
                    false => params[0] * product,
                };
            }
            let most = chances.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let weight = |c: f32| exp(f64::from(c - most));
            let sum: f64 = chances.iter().map(|c| weight(*c)).sum();
            scores.push((ln(sum) - f64::from(chances[i] - most)) as f32);
            chances.iter_mut().for_each(|c| *c = (weight(*c) / sum) as f32);
        }
        Ok(())
    }
}
