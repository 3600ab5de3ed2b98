//! Which tables each model takes.

use crate::ModelConfig;
use paraft_common::TableSpec;

/// The kinds of models that take tables.
pub const SPARSE_KINDS: [&str; 6] = ["logistic", "mf", "fm", "two-tower", "wide-deep", "dlrm"];

/// A table that a model needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SparseTable {
    /// Its name in the job.
    pub name: &'static str,
    /// The fields whose ids it holds: one, or all.
    pub field: Option<usize>,
    dim: Dim,
}

/// How long rows are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Dim {
    One,
    From(usize),
}

const fn all(name: &'static str, dim: Dim) -> SparseTable {
    SparseTable { name, field: None, dim }
}

const fn one(name: &'static str, field: usize, dim: Dim) -> SparseTable {
    SparseTable { name, field: Some(field), dim }
}

impl ModelConfig {
    /// The tables that the model takes, in its order; none for models without tables.
    pub fn tables(&self) -> &'static [SparseTable] {
        match self {
            Self::Logistic => const { &[all("weights", Dim::One)] },
            Self::Mf { .. } => const { &[one("users", 0, Dim::From(2)), one("items", 1, Dim::From(2))] },
            Self::Fm { .. } => const { &[all("weights", Dim::One), all("factors", Dim::From(1))] },
            Self::TwoTower { .. } => {
                const { &[one("users", 0, Dim::From(1)), one("items", 1, Dim::From(1))] }
            }
            Self::WideDeep { .. } => const { &[all("wide", Dim::One), all("deep", Dim::From(1))] },
            Self::Dlrm { .. } => const { &[all("embeddings", Dim::From(1))] },
            _ => &[],
        }
    }

    /// Whether the model's parameters are rows of tables.
    pub fn is_sparse(&self) -> bool {
        !self.tables().is_empty()
    }
}

/// Checks that these are the model's tables, in any order.
///
/// # Errors
/// The table that is wrong, missing, or too many, for users.
pub fn check_tables(model: &ModelConfig, tables: &[TableSpec]) -> Result<(), String> {
    let takes = model.tables();
    let names: Vec<String> = takes.iter().map(|t| format!("`{}`", t.name)).collect();
    let names = if names.is_empty() { "none".to_string() } else { names.join(" and ") };
    if let Some(other) = tables.iter().find(|t| takes.iter().all(|takes| takes.name != t.name)) {
        let name = &other.name;
        return Err(format!("table `{name}`: {} takes {names}", model.name()));
    }
    let mut dims = Vec::new();
    for table in takes {
        let Some(spec) = tables.iter().find(|t| t.name == table.name) else {
            return Err(format!("table `{}` is missing: {} takes {names}", table.name, model.name()));
        };
        let dim = spec.dim;
        match table.dim {
            Dim::One if dim != 1 => {
                return Err(format!("table `{}`: dim {dim}, and {} takes 1", table.name, model.name()));
            }
            Dim::From(least) if dim < least => {
                let why = "a bias, then one factor or more";
                return Err(format!(
                    "table `{}`: dim {dim}, and it holds {why}: {least} or more",
                    table.name
                ));
            }
            Dim::One | Dim::From(_) => {}
        }
        if table.field.is_some() {
            dims.push(dim);
        }
    }
    match dims[..] {
        [users, items] if users != items => Err(format!(
            "table `items`: dim {items}, and `users` has {users}; {} multiplies their rows",
            model.name()
        )),
        _ => Ok(()),
    }
}
