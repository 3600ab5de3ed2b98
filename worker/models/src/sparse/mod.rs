//! Models whose parameters are mostly rows of sparse tables, by id: recommenders.
//!
//! ```text
//!  the loop                                    the model
//!  ids of a minibatch ─▶ unique, sorted ─▶ rows ─┐
//!  places of each id in the rows ────────────────┼▶ loss, gradient of the tensors, a gradient for each row
//!  tensors (bias, layers) ───────────────────────┘
//! ```
//!
//! | model | file | tables | tensors |
//! |---|---|---|---|
//! | logistic regression | `logistic.rs` | `weights` | `bias`, `dense.weight` |
//! | matrix factorisation | `factors.rs` | `users`, `items` | `bias` |
//! | factorisation machine | `machine.rs` | `weights`, `factors` | `bias`, `dense.weight` |
//! | two towers | `towers.rs` | `users`, `items` | `scale` |
//! | wide and deep | `wide_deep.rs` | `wide`, `deep` | `bias`, `dense.weight`, `deep.0.weight`, ... |
//! | DLRM | `dlrm.rs` | `embeddings` | `bot_l.0.weight`, ..., `top_l.0.weight`, ... |
//!
//! A model sees no id: rows come in the order of the sorted ids, and fields name places among them. A row's gradient is
//! the sum over its uses, in the order of fields and samples, so that the same minibatch gives the same bits.

mod dlrm;
mod factors;
mod linear;
mod logistic;
mod loss;
mod machine;
mod mlp;
mod tables;
mod towers;
mod wide_deep;

pub use tables::{SPARSE_KINDS, SparseTable, check_tables};

use crate::{ModelConfig, ModelError};
use paraft_common::{TableSpec, TensorSpec};

/// Samples of one field, in compressed sparse rows: sample i uses `places[offsets[i]..offsets[i + 1]]`.
#[derive(Clone, Debug, PartialEq)]
pub struct Lookups {
    /// `[n + 1]` places in `places`, rising from 0.
    pub offsets: Vec<u32>,
    /// Places of rows among the pulled rows of the field's group.
    pub places: Vec<u32>,
    /// The factor of each use; empty if all are 1.
    pub weights: Vec<f32>,
}

impl Default for Lookups {
    fn default() -> Self {
        Self { offsets: vec![0], places: Vec::new(), weights: Vec::new() }
    }
}

impl Lookups {
    /// Sample i's places, each with its factor.
    pub(crate) fn of(&self, i: usize) -> impl Iterator<Item = (usize, f32)> {
        let range = self.offsets[i] as usize..self.offsets[i + 1] as usize;
        range.map(|at| (self.places[at] as usize, self.weights.get(at).copied().unwrap_or(1.0)))
    }
}

/// Some samples, for a model of tables.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SparseInput {
    /// `[n]` numbers to predict; 0 and 1 for classes.
    pub labels: Vec<f32>,
    /// `[n]` factors of the samples' losses; empty if all are 1.
    pub importance: Vec<f32>,
    /// `[n, dense]` row-major plain values.
    pub dense: Vec<f32>,
    /// The fields, each with all samples.
    pub fields: Vec<Lookups>,
}

impl SparseInput {
    /// Number of samples.
    pub fn len(&self) -> usize {
        self.labels.len()
    }

    /// Whether there is no sample.
    pub fn is_empty(&self) -> bool {
        self.labels.is_empty()
    }

    /// The factor of sample i's loss in the mean over the minibatch.
    pub(crate) fn share(&self, i: usize) -> f32 {
        self.importance.get(i).copied().unwrap_or(1.0) / self.len() as f32
    }
}

/// What a model predicts, and how that is judged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Predicts {
    /// The log odds of label 1: log loss, AUC.
    Clicks,
    /// A number: mean squared error.
    Numbers,
    /// Which item of the minibatch belongs to which user: softmax cross-entropy.
    Pairs,
}

/// What a model must know of the data.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SparseShape {
    /// Fields of a sample.
    pub fields: usize,
    /// Plain values of a sample.
    pub dense: usize,
    /// Whether labels are the classes 0 and 1.
    pub classes: bool,
    /// The mean of the training labels.
    pub mean: f32,
}

/// A model of sparse tables.
pub trait SparseModel: Send {
    /// What its scores are.
    fn predicts(&self) -> Predicts;

    /// The tensors beside the tables.
    fn tensors(&self) -> Vec<TensorSpec>;

    /// Writes the tensors' initial values for `seed`, the same on every worker. Rows begin as their table says.
    fn init(&self, seed: u64, params: &mut [f32]);

    /// A training step: the mean loss over the minibatch. `rows` has for each table of [`ModelConfig::tables`] the rows
    /// that the minibatch uses, `[rows, dim]`. Overwrites the gradient of the tensors in `grads`, and adds that of each row
    /// to `row_grads`, which are zeros of the same lengths.
    ///
    /// # Errors
    /// The minibatch does not fit the model.
    fn step(
        &mut self,
        params: &[f32],
        rows: &[Vec<f32>],
        input: &SparseInput,
        grads: &mut [f32],
        row_grads: &mut [Vec<f32>],
    ) -> Result<f32, ModelError>;

    /// Replaces the content of `scores` by `[n]` predictions. Of [`Predicts::Pairs`] they are the sample's loss among
    /// these samples.
    ///
    /// # Errors
    /// As in [`Self::step`].
    fn scores(
        &mut self,
        params: &[f32],
        rows: &[Vec<f32>],
        input: &SparseInput,
        scores: &mut Vec<f32>,
    ) -> Result<(), ModelError>;
}

impl ModelConfig {
    /// The model of tables, on this many CPU threads; `tables` in the order of [`ModelConfig::tables`].
    ///
    /// # Errors
    /// The data does not fit the model, the model has no tables, or threads cannot start.
    pub fn build_sparse(
        &self,
        threads: usize,
        shape: SparseShape,
        tables: &[TableSpec],
    ) -> Result<Box<dyn SparseModel>, ModelError> {
        self.fits(&shape)?;
        let dim = |table: usize| tables.get(table).map_or(0, |t| t.dim);
        Ok(match self {
            Self::Logistic => Box::new(logistic::Logistic::new(shape)),
            Self::Mf { l2 } => Box::new(factors::Factors::new(shape, dim(0), *l2)),
            Self::Fm { l2 } => Box::new(machine::Machine::new(shape, dim(1), *l2)),
            Self::TwoTower { scale } => Box::new(towers::Towers::new(dim(0), *scale)),
            Self::WideDeep { hidden } => Box::new(wide_deep::WideDeep::new(threads, shape, dim(1), hidden)?),
            Self::Dlrm { bottom, top } => Box::new(dlrm::Dlrm::new(threads, shape, dim(0), (bottom, top))?),
            _ => return Err(ModelError::new(format!("{} has no tables", self.name()))),
        })
    }

    /// Whether a model of tables can learn this data.
    fn fits(&self, shape: &SparseShape) -> Result<(), ModelError> {
        let no = |why: &str| Err(ModelError::new(why));
        if matches!(self, Self::Mf { .. } | Self::TwoTower { .. }) && shape.fields != 2 {
            return no("it takes two fields, users and items: data.kind = \"ratings\"");
        }
        match self {
            Self::Logistic | Self::WideDeep { .. } | Self::Dlrm { .. } if !shape.classes => {
                no("it learns two classes, and the data has numbers to predict")
            }
            Self::Mf { .. } if shape.classes => no("it learns numbers, and the data has two classes"),
            Self::Dlrm { .. } if shape.fields + usize::from(shape.dense > 0) < 2 => {
                no("it learns products of fields, and the data has one")
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
#[path = "gradient_tests.rs"]
mod tests;
