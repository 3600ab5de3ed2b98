//! Sparse tables: rows keyed by a 64-bit id, of which a step touches a few. A table is cut into *partitions* by a hash of
//! the id. To the servers a partition is a bucket whose content is rows: it has a version, and a worker pushes it once a
//! step, with the rows that it has gradients for (perhaps none).
//!
//! ```text
//!  id ──▶ partition_of ──▶ bucket ──▶ shard        push: ids, rising, and a gradient for each
//!  id ──▶ RowInit::fill: the row's values before its first push, the same on every host
//! ```
//!
//! Reading never makes a row: until the first push of an id, its values are computed from the id.

mod init;
mod optimizer;
mod rows;
mod values;

pub use init::RowInit;
pub use optimizer::{RowOptimizer, RowRate};
pub use rows::{ID_BYTES, Rows, RowsError, put_rows};
pub use values::{RowType, rounding_key};

use serde::{Deserialize, Serialize};

/// The longest row, in values.
pub const MAX_DIM: usize = 1024;
/// The most partitions of a table.
pub const MAX_PARTITIONS: u32 = 1024;
/// The most tables of a job.
pub const MAX_TABLES: usize = 64;
/// The most rows of a table.
pub const MAX_ROWS: u64 = 1 << 36;

/// A sparse table of a job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TableSpec {
    /// Its name; unique in the job.
    pub name: String,
    /// Values of a row, 1 to [`MAX_DIM`].
    pub dim: usize,
    /// Parts that are pushed, applied and stored by themselves, 1 to [`MAX_PARTITIONS`]. Default 16.
    #[serde(default = "default_partitions")]
    pub partitions: u32,
    /// Rows for which servers reserve memory. A hash spreads rows over partitions; each has room for its even share `s` and
    /// `6 * sqrt(s) + 8` more, the hash's deviations.
    pub max_rows: u64,
    /// What happens when a new id comes to a full partition.
    #[serde(default)]
    pub full: WhenFull,
    /// An id becomes a row at this many updates that name it, 1 to 255; the gradients of those before are dropped and
    /// counted, and reading gives its initial values. Default 1.
    #[serde(default = "one")]
    pub min_count: u32,
    /// The form of the weights in memory.
    #[serde(default)]
    pub dtype: RowType,
    /// The values of a row before its first update.
    #[serde(default)]
    pub init: RowInit,
    /// Seeds `init`, together with the name. Default 0.
    #[serde(default)]
    pub seed: u64,
    /// How a row's gradient changes it.
    pub optimizer: RowOptimizer,
    /// Which rows are removed though there is room. Default: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expire: Option<Expire>,
}

/// Which rows are removed though there is room: those for which all conditions hold. A partition looks at some rows in each
/// update, in a circle, so a row may stay for a while longer.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Expire {
    /// The last this many updates of its partition did not name the row, 1 to 2^31. Each step (in lock-step: each round) is
    /// one update of every partition.
    pub after: u32,
    /// The L2 norm of its weights is below this, above 0. Default: any row.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub norm_below: Option<f32>,
    /// The table keeps this many rows in any case, divided evenly among its partitions. Default 0.
    #[serde(default)]
    pub keep_at_least: u64,
}

/// What happens when a new id comes to a full partition.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WhenFull {
    /// The new row replaces one that no push has touched for long: of the next eight in a circle, the one that was
    /// touched longest ago.
    #[default]
    Evict,
    /// The gradients of new ids are dropped and counted; reading gives their initial values.
    Refuse,
}

/// Why a table cannot be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("table `{table}`: {why}")]
pub struct TableError {
    /// Its name.
    pub table: String,
    /// What is wrong, with the valid range.
    pub why: String,
}

fn default_partitions() -> u32 {
    16
}

fn one() -> u32 {
    1
}

impl TableSpec {
    /// A table of `dim` values a row with plain SGD, whose rows begin as zeros.
    pub fn new(name: &str, dim: usize, max_rows: u64) -> Self {
        Self {
            name: name.into(),
            dim,
            partitions: default_partitions(),
            max_rows,
            full: WhenFull::default(),
            min_count: one(),
            dtype: RowType::default(),
            init: RowInit::Zeros,
            seed: 0,
            optimizer: RowOptimizer::Sgd { lr: 1.0 },
            expire: None,
        }
    }

    /// Whether a job may have it.
    ///
    /// # Errors
    /// A value is out of its range.
    pub fn check(&self) -> Result<(), TableError> {
        self.check_lengths()?;
        self.validate()
    }

    /// Whether its lengths are within their ranges: without that nothing can be computed from them.
    pub(crate) fn check_lengths(&self) -> Result<(), TableError> {
        let bad = |why: String| Err(TableError { table: self.name.chars().take(80).collect(), why });
        if !(1..=MAX_DIM).contains(&self.dim) {
            return bad(format!("dim {} is not within 1 to {MAX_DIM}", self.dim));
        }
        if !(1..=MAX_PARTITIONS).contains(&self.partitions) {
            return bad(format!("partitions {} is not within 1 to {MAX_PARTITIONS}", self.partitions));
        }
        if !(1..=MAX_ROWS).contains(&self.max_rows) {
            return bad(format!("max_rows {} is not within 1 to 2^36", self.max_rows));
        }
        if self.partition_rows() > MAX_PARTITION_ROWS {
            return bad(format!(
                "max_rows {} in {} partitions is more than 2^31 rows a partition: set more partitions",
                self.max_rows, self.partitions
            ));
        }
        Ok(())
    }

    /// Whether a job may begin with it.
    pub(crate) fn validate(&self) -> Result<(), TableError> {
        let bad = |why: String| Err(TableError { table: self.name.clone(), why });
        let fine = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
        if self.name.is_empty() || self.name.len() > 100 || !self.name.chars().all(fine) {
            return bad("its name is not 1 to 100 letters, digits, `_`, `-` and `.`".into());
        }
        if self.name.starts_with('.') {
            return bad("its name begins with a dot".into());
        }
        if !(1..=255).contains(&self.min_count) {
            return bad(format!("min_count {} is not within 1 to 255", self.min_count));
        }
        if self.dtype == RowType::F16 && self.init.size() > MAX_F16 {
            return bad(format!(
                "init has values up to {}, and an f16 at most {}",
                self.init.size(),
                MAX_F16
            ));
        }
        if self.dtype != RowType::F32 && !self.dim.is_multiple_of(2) {
            return bad(format!("dim {} is odd; with dtype bf16 or f16 it is even", self.dim));
        }
        if let Some(expire) = self.expire {
            if !(1..=1 << 31).contains(&expire.after) {
                return bad(format!("expire.after {} is not within 1 to 2^31", expire.after));
            }
            if expire.keep_at_least >= self.max_rows {
                return bad(format!(
                    "expire.keep_at_least {} is not below max_rows, {}: no row would ever expire",
                    expire.keep_at_least, self.max_rows
                ));
            }
            if let Some(norm) = expire.norm_below
                && !(norm > 0.0 && norm.is_finite())
            {
                return bad(format!("expire.norm_below {norm} is no finite number above 0"));
            }
        }
        self.init.validate().or_else(bad)?;
        self.optimizer.validate().or_else(bad)?;
        if matches!(self.optimizer, RowOptimizer::Ftrl { .. }) && self.init != RowInit::Zeros {
            return bad(
                "ftrl computes a row from its sums, which begin at zero: set init = { kind = \"zeros\" }"
                    .into(),
            );
        }
        Ok(())
    }

    /// The most rows of one partition: its even share and room for the hash's deviations, six times their size.
    pub fn partition_rows(&self) -> u64 {
        let even = self.max_rows.div_ceil(u64::from(self.partitions.max(1)));
        if self.partitions <= 1 { even } else { even + 6 * even.isqrt() + 8 }
    }

    /// What its rows are, for people: `16 values, bf16, adagrad`. Rows of one kind fit tables of the same.
    pub fn kind_of_rows(&self) -> String {
        format!("{} values, {}, {}", self.dim, self.dtype.name(), self.optimizer.kind())
    }

    /// Whether its partitions count ids and remember removed ones as those of `other` do.
    pub fn counts_like(&self, other: &Self) -> bool {
        let of = |t: &Self| (t.partitions, t.max_rows, t.min_count > 1);
        of(self) == of(other)
    }

    /// State values of a row, behind its weights.
    pub fn slots(&self) -> usize {
        self.optimizer.slots(self.dim)
    }

    /// Words of 4 bytes of a row: its head, weights and state.
    pub fn row_words(&self) -> usize {
        ROW_HEAD_WORDS + self.dtype.words(self.dim) + self.slots()
    }

    /// Bytes of a row in memory: its head, weights and state.
    pub fn row_bytes(&self) -> u64 {
        self.row_words() as u64 * 4
    }

    /// The memory of one full partition: its rows, its index of at least twice as many entries, the counts of ids that are
    /// no rows yet, and what is known of removed rows.
    pub fn partition_bytes(&self) -> u64 {
        let rows = self.partition_rows();
        let counts = if self.min_count > 1 { index_entries(rows) * COUNTS } else { 0 };
        let removed = self.removed_ids() as u64 * REMOVED_BYTES;
        rows * self.row_bytes() + index_entries(rows) * INDEX_ENTRY_BYTES + counts + removed
    }

    /// The ids of removed rows that a partition knows at most.
    pub fn removed_ids(&self) -> usize {
        self.partition_rows() as usize / 16 + 1024
    }

    /// The partition of an id.
    pub fn partition_of(&self, id: u64) -> u32 {
        ((u128::from(hash_id(id)) * u128::from(self.partitions)) >> 64) as u32
    }

    /// The values of a row that no push has touched.
    ///
    /// # Panics
    /// If `values` is not `dim` long.
    pub fn initial(&self, id: u64, values: &mut [f32]) {
        assert_eq!(values.len(), self.dim);
        // Of two tables, equal ids begin with different values.
        let name = self.name.bytes().fold(self.seed, |key, byte| hash_id(key ^ u64::from(byte)));
        self.init.fill(name, id, values);
        self.dtype.nearest(values);
    }
}

/// The longest push of a partition, in bytes of ids and values.
pub const MAX_PUSH_BYTES: usize = 1 << 20;

/// The most ids in a pull from a shard: they are in its header.
pub const MAX_PULLED_IDS: usize = 1 << 14;

/// Words of a row before its values: the id (two), the number of its updates, and the last of them.
pub const ROW_HEAD_WORDS: usize = 4;
/// Bytes of an entry of a partition's index.
pub const INDEX_ENTRY_BYTES: u64 = 8;
/// Counters of an id that is no row yet.
pub const COUNTS: u64 = 4;
/// Bytes of what a partition knows of a removed row.
const REMOVED_BYTES: u64 = 48;
/// The largest f16.
const MAX_F16: f32 = 65_504.0;
const MAX_PARTITION_ROWS: u64 = 1 << 31;

/// Entries of the index of a partition of so many rows: a power of two, at most five eighths full.
pub fn index_entries(rows: u64) -> u64 {
    (rows * 8 / 5 + 8).next_power_of_two()
}

/// Spreads ids. A bijection (the finalizer of SplitMix64), so ids never collide here.
#[inline(always)]
pub fn hash_id(id: u64) -> u64 {
    let z = id.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
#[path = "table_tests.rs"]
mod tests;
