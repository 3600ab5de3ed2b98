//! From named tensors to buckets.
//!
//! A model is one flat vector of `f32`. Its tensors lie in it one after another in the order the model names
//! them. The vector is cut into *buckets* of a fixed length; a tensor may cross a bucket's edge. Parameters
//! and buffers (BatchNorm's running statistics) never share a bucket, since the servers update them by
//! different rules: so all parameters come first, all buffers after them, and last the results that workers write. Parameters may be in *groups*, each with its own
//! rate, decay and optimizer; a bucket is of one group. A model may be cut in *stages*, each a range of the flat vector that some process of a worker
//! holds; a bucket is of one stage. Rows that a constraint holds to a norm are whole in a bucket.
//!
//! ```text
//!  offset 0                                   params_len          len (without results)
//!  | tensor 0 | tensor 1 |  tensor 2 ...     | buffer 0 | buffer 1 |
//!  |  bucket 0   |  bucket 1   |  bucket 2   |      bucket 3       |
//! ```

use crate::{
    constraint::{self, Constraint},
    id::BucketId,
    optim::OptimizerConfig,
    table::TableSpec,
};
use serde::{Deserialize, Serialize};
use std::ops::Range;

mod error;

pub use error::LayoutError;

/// How the servers apply pushes to a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TensorKind {
    /// Trained: the job's optimizer applies its gradient.
    Param,
    /// A running statistic: the servers subtract the pushed value as it is (plain SGD with rate 1, no decay,
    /// no clipping, no schedule). See `docs/consistency.md`, "BatchNorm".
    Buffer,
    /// A result of the workers' own optimizer: one worker writes its value in each step. The parameters of such a
    /// job take the mean of each round's gradients. See `docs/protocol.md`, "Results".
    Result,
    /// No tensor's: a bucket of this kind is a partition of a sparse table, and has no values of the flat vector.
    Rows,
}

impl TensorKind {
    /// Whether the norm of the whole gradient has its gradients, and clipping by the norm scales them.
    pub fn is_in_norm(self) -> bool {
        matches!(self, Self::Param | Self::Rows)
    }
}

/// One tensor of a model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorSpec {
    /// PyTorch's `state_dict` name, for example `0.weight`.
    pub name: String,
    /// PyTorch's shape, for example `[out, in]` for a linear layer's weight.
    pub shape: Vec<usize>,
    /// What it is to the servers.
    pub kind: TensorKind,
}

impl TensorSpec {
    /// A trained tensor.
    pub fn param(name: impl Into<String>, shape: &[usize]) -> Self {
        Self { name: name.into(), shape: shape.to_vec(), kind: TensorKind::Param }
    }

    /// A running statistic.
    pub fn buffer(name: impl Into<String>, shape: &[usize]) -> Self {
        Self { name: name.into(), shape: shape.to_vec(), kind: TensorKind::Buffer }
    }

    /// A result.
    pub fn result(name: impl Into<String>, shape: &[usize]) -> Self {
        Self { name: name.into(), shape: shape.to_vec(), kind: TensorKind::Result }
    }

    /// Number of values.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether it holds no value.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Parameters that lie together and share a rate, a decay and an optimizer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ParamGroup {
    /// Number of values.
    pub values: usize,
    /// Replaces the optimizer's rate.
    pub lr: f64,
    /// Replaces the optimizer's weight decay.
    pub weight_decay: f64,
    /// Whether its optimizer maximizes: it goes along the gradient, not against it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub maximize: bool,
    /// Replaces the job's optimizer, all options but the rate and the weight decay.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub optimizer: Option<OptimizerConfig>,
}

impl ParamGroup {
    /// A group of `values` values whose optimizer is the job's, with this rate and weight decay.
    pub fn new(values: usize, lr: f64, weight_decay: f64) -> Self {
        Self { values, lr, weight_decay, maximize: false, optimizer: None }
    }
}

/// The maximal number of parameter groups.
pub const MAX_GROUPS: usize = 1024;

/// One bucket: a range of the flat vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BucketSpec {
    /// First value, counted from the start of the flat vector.
    pub offset: usize,
    /// Number of values.
    pub len: usize,
    /// One kind; never several.
    pub kind: TensorKind,
    /// The parameter group; 0 without groups and for other kinds. Of a partition: the table.
    pub group: u16,
}

impl BucketSpec {
    /// The bucket's place in the flat vector.
    pub fn range(&self) -> Range<usize> {
        self.offset..self.offset + self.len
    }
}

/// The flat vector's tensors and buckets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    tensors: Vec<TensorSpec>,
    offsets: Vec<usize>,
    buckets: Vec<BucketSpec>,
    /// The first bucket of each stage.
    stages: Vec<u32>,
    /// The first bucket of each table, and the end of the last.
    tables: Vec<usize>,
    params_len: usize,
    len: usize,
}

/// The most buckets. A pull of a shard names the version that the worker has of each, in up to eight bytes: 1 MiB of
/// them, as many as a message holds.
pub const MAX_BUCKETS: usize = 1 << 17;

/// Values of the longest bucket: 1 MiB.
pub const MAX_BUCKET_LEN: usize = (1 << 20) / 4;

/// The most stages.
pub const MAX_STAGES: usize = 1024;

/// How the parameters are divided. Groups and stages by their values, in the order of the flat vector; empty: all are one.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cuts<'a> {
    /// With a rate and a decay of their own.
    pub groups: &'a [ParamGroup],
    /// Of a process each; there are no buffers then.
    pub stages: &'a [usize],
    /// Those of rows begin and end a part, whose buckets have whole rows.
    pub constraints: &'a [Constraint],
}

/// The numbers of values of each kind.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Lengths {
    pub params: usize,
    pub buffers: usize,
    pub results: usize,
}

/// A part of the flat vector whose edges no bucket crosses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    pub values: usize,
    pub kind: TensorKind,
    pub group: u16,
    pub stage: usize,
    /// Values that no bucket parts.
    row: usize,
}

impl Part {
    /// The longest bucket of the part, in values, where a job's are so long.
    pub fn bucket_len(&self, bucket_len: usize) -> usize {
        (bucket_len / self.row * self.row).max(self.row)
    }
}

/// All of them, in the order of the flat vector: the groups of parameters, cut where stages end, then the buffers, then
/// the results.
pub(crate) fn parts(lengths: Lengths, cuts: Cuts) -> impl Iterator<Item = Part> {
    let params_len = lengths.params;
    let ends = |of: Vec<usize>| {
        let all = if of.is_empty() { vec![params_len] } else { of };
        let sum = |at: &mut usize, n: usize| {
            *at = at.saturating_add(n);
            Some(*at)
        };
        all.into_iter().scan(0, sum).collect::<Vec<usize>>()
    };
    let (groups, stages) = (ends(cuts.groups.iter().map(|g| g.values).collect()), ends(cuts.stages.to_vec()));
    let rows = constraint::row_ends(cuts.constraints, params_len);
    let (mut at, mut group, mut stage, mut rows_at) = (0, 0, 0, 0);
    let params = std::iter::from_fn(move || {
        let (rows_end, row) = *rows.get(rows_at)?;
        let end = (*groups.get(group)?).min(*stages.get(stage)?).min(rows_end);
        let part = Part { values: end - at, kind: TensorKind::Param, group: group as u16, stage, row };
        at = end;
        group += usize::from(groups[group] == end);
        stage += usize::from(stages[stage] == end);
        rows_at += usize::from(rows_end == end);
        Some(part)
    });
    let others = [(lengths.buffers, TensorKind::Buffer), (lengths.results, TensorKind::Result)];
    let others = others.map(|(values, kind)| Part { values, kind, group: 0, stage: 0, row: 1 });
    params.chain(others)
}

/// How many buckets that gives; the error says why it gives none. Lengths and groups may come from anyone.
pub(crate) fn count(lengths: Lengths, cuts: Cuts, bucket_len: usize) -> Result<usize, LayoutError> {
    let Cuts { groups, stages, constraints } = cuts;
    let params_len = lengths.params;
    if bucket_len == 0 {
        return Err(LayoutError::EmptyBucket);
    }
    if groups.len() > MAX_GROUPS {
        return Err(LayoutError::TooManyGroups(groups.len()));
    }
    if let Some(empty) = groups.iter().position(|g| g.values == 0) {
        return Err(LayoutError::EmptyGroup(empty));
    }
    let held: u128 = groups.iter().map(|g| g.values as u128).sum();
    if !groups.is_empty() && held != params_len as u128 {
        return Err(LayoutError::GroupsLength { groups: held, params: params_len });
    }
    if stages.len() > MAX_STAGES {
        return Err(LayoutError::TooManyStages(stages.len()));
    }
    if let Some(empty) = stages.iter().position(|values| *values == 0) {
        return Err(LayoutError::EmptyStage(empty));
    }
    let held: u128 = stages.iter().map(|values| *values as u128).sum();
    if !stages.is_empty() && held != params_len as u128 {
        return Err(LayoutError::StagesLength { stages: held, params: params_len });
    }
    if !stages.is_empty() && lengths.buffers + lengths.results > 0 {
        return Err(LayoutError::StagedBuffers);
    }
    constraint::check(constraints, params_len).map_err(LayoutError::Constraint)?;
    if let Some(long) = constraints.iter().map(|c| c.rule.row()).find(|row| *row > MAX_BUCKET_LEN) {
        return Err(LayoutError::LongRow(long));
    }
    if let Some(cut) = parts(lengths, cuts).find(|p| !p.values.is_multiple_of(p.row)) {
        return Err(LayoutError::CutRow(cut.row));
    }
    let count = parts(lengths, cuts).map(|p| p.values.div_ceil(p.bucket_len(bucket_len))).sum();
    if count > MAX_BUCKETS { Err(LayoutError::TooManyBuckets(count)) } else { Ok(count) }
}

impl Layout {
    /// Lays the tensors out one after another and cuts the vector into buckets of at most `bucket_len` values.
    ///
    /// Errors say which tensor is wrong; nothing else can fail.
    pub fn new(tensors: Vec<TensorSpec>, bucket_len: usize) -> Result<Self, LayoutError> {
        Self::cut(tensors, Cuts::default(), bucket_len)
    }

    /// Likewise, with parameters in groups and in stages.
    ///
    /// # Errors
    /// They are not all parameters.
    pub fn cut(tensors: Vec<TensorSpec>, cuts: Cuts, bucket_len: usize) -> Result<Self, LayoutError> {
        let mut names = std::collections::BTreeSet::new();
        let (mut offsets, mut len, mut lengths) = (Vec::new(), 0usize, Lengths::default());
        for t in &tensors {
            let n = t
                .shape
                .iter()
                .try_fold(1usize, |a, &d| a.checked_mul(d))
                .filter(|&n| n > 0 && n < (1 << 40))
                .ok_or_else(|| LayoutError::BadShape(t.name.clone(), t.shape.clone()))?;
            if !names.insert(t.name.as_str()) {
                return Err(LayoutError::DuplicateName(t.name.clone()));
            }
            match t.kind {
                TensorKind::Param if lengths.buffers + lengths.results > 0 => {
                    return Err(LayoutError::BufferBeforeParam(t.name.clone()));
                }
                TensorKind::Buffer if lengths.results > 0 => {
                    return Err(LayoutError::ResultBeforeBuffer(t.name.clone()));
                }
                TensorKind::Param => lengths.params += n,
                TensorKind::Buffer => lengths.buffers += n,
                TensorKind::Result => lengths.results += n,
                TensorKind::Rows => return Err(LayoutError::BadShape(t.name.clone(), t.shape.clone())),
            }
            offsets.push(len);
            len += n;
        }
        let params_len = lengths.params;
        if params_len == 0 {
            return Err(LayoutError::Empty);
        }
        // Before the list is made: its length may come from anyone.
        let count = count(lengths, cuts, bucket_len)?;
        let (mut buckets, mut stages) = (Vec::with_capacity(count), Vec::new());
        let mut at = 0;
        for part in parts(lengths, cuts) {
            let Part { values, kind, group, stage, .. } = part;
            let bucket_len = part.bucket_len(bucket_len);
            if stage == stages.len() {
                stages.push(buckets.len() as u32);
            }
            let end = at + values;
            while at < end {
                let len = bucket_len.min(end - at);
                buckets.push(BucketSpec { offset: at, len, kind, group });
                at += len;
            }
        }
        let tables = vec![buckets.len()];
        Ok(Self { tensors, offsets, buckets, stages, tables, params_len, len })
    }

    /// Likewise, with the partitions of these tables as buckets behind all others.
    ///
    /// # Errors
    /// There are too many buckets.
    pub fn with_tables(mut self, tables: &[TableSpec]) -> Result<Self, LayoutError> {
        let all = self.buckets.len() + tables.iter().map(|t| t.partitions as usize).sum::<usize>();
        if all > MAX_BUCKETS {
            return Err(LayoutError::TooManyBuckets(all));
        }
        for (table, spec) in (0..).zip(tables) {
            let partition = BucketSpec { offset: self.len, len: 0, kind: TensorKind::Rows, group: table };
            self.buckets.extend(std::iter::repeat_n(partition, spec.partitions as usize));
            self.tables.push(self.buckets.len());
        }
        Ok(self)
    }

    /// The buckets of a table: its partitions, in order. None of one that is not there.
    pub fn partitions(&self, table: usize) -> Range<u32> {
        match self.tables.get(table..table + 2) {
            Some(&[first, end]) => first as u32..end as u32,
            _ => 0..0,
        }
    }

    /// The table and the partition that a bucket is; `None` for values of the flat vector.
    pub fn partition(&self, bucket: BucketId) -> Option<(usize, u32)> {
        let spec = self.bucket(bucket).filter(|spec| spec.kind == TensorKind::Rows)?;
        let table = usize::from(spec.group);
        Some((table, bucket.0 - self.tables[table] as u32))
    }

    /// The buckets of values: all but the partitions of tables.
    pub fn dense(&self) -> Range<u32> {
        0..self.tables[0] as u32
    }

    /// The tensors, in the order of the flat vector.
    pub fn tensors(&self) -> &[TensorSpec] {
        &self.tensors
    }

    /// Where tensor `i` lies in the flat vector.
    pub fn tensor_range(&self, i: usize) -> Range<usize> {
        self.offsets[i]..self.offsets[i] + self.tensors[i].len()
    }

    /// All buckets; a [`BucketId`] is an index into this slice.
    pub fn buckets(&self) -> &[BucketSpec] {
        &self.buckets
    }

    /// The bucket with this id, if there is one.
    pub fn bucket(&self, id: BucketId) -> Option<&BucketSpec> {
        self.buckets.get(id.0 as usize)
    }

    /// How many stages there are; from 1.
    pub fn stages(&self) -> usize {
        self.stages.len()
    }

    /// The buckets of a stage; of one that is not there none.
    pub fn buckets_in(&self, stage: usize) -> Range<u32> {
        let all = self.buckets.len() as u32;
        let first = |stage: usize| self.stages.get(stage).copied().unwrap_or(all);
        first(stage)..first(stage + 1)
    }

    /// The stage of a bucket.
    pub fn stage_of(&self, bucket: BucketId) -> usize {
        self.stages.partition_point(|first| *first <= bucket.0) - 1
    }

    /// Values in the flat vector, of all kinds.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Never true: a layout has at least one parameter.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Values that are trained; the buffers follow them.
    pub fn params_len(&self) -> usize {
        self.params_len
    }

    /// The buckets of results, which come last; none unless the workers run the optimizer on the mean gradient.
    pub fn results(&self) -> Range<usize> {
        self.buckets[..self.tables[0]].partition_point(|b| b.kind != TensorKind::Result)..self.tables[0]
    }
}

#[cfg(test)]
#[path = "layout_tests.rs"]
mod tests;
