//! From named tensors to buckets.
//!
//! A model is one flat vector of `f32`. Its tensors lie in it one after another in the order the model names
//! them. The vector is cut into *buckets* of a fixed length; a tensor may cross a bucket's edge. Parameters
//! and buffers (BatchNorm's running statistics) never share a bucket, since the servers update them by
//! different rules: so all parameters come first and all buffers after them. Parameters may be in *groups*, each with its own
//! rate and decay; a bucket is of one group.
//!
//! ```text
//!  offset 0                                   params_len          len
//!  | tensor 0 | tensor 1 |  tensor 2 ...     | buffer 0 | buffer 1 |
//!  |  bucket 0   |  bucket 1   |  bucket 2   |      bucket 3       |
//! ```

use crate::id::BucketId;
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// What the servers do with a tensor's pushes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TensorKind {
    /// Trained: the job's optimizer applies its gradient.
    Param,
    /// A running statistic: the servers subtract the pushed value as it is (plain SGD with rate 1, no decay,
    /// no clipping, no schedule). See `docs/consistency.md`, "BatchNorm".
    Buffer,
}

/// One tensor of a model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorSpec {
    /// PyTorch's `state_dict` name, for example `0.weight`.
    pub name: String,
    /// PyTorch's shape, for example `[out, in]` for a linear layer's weight.
    pub shape: Vec<usize>,
    /// Parameter or buffer.
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

    /// Number of values.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether it holds no value.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Parameters that lie together and have a rate and a decay of their own; all else of the job's optimizer is theirs too.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ParamGroup {
    /// How many values they are.
    pub values: usize,
    /// In the place of the optimizer's.
    pub lr: f64,
    /// In the place of the optimizer's.
    pub weight_decay: f64,
}

/// The most groups of parameters.
pub const MAX_GROUPS: usize = 1024;

/// One bucket: a range of the flat vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BucketSpec {
    /// First value, counted from the start of the flat vector.
    pub offset: usize,
    /// Number of values.
    pub len: usize,
    /// Parameters or buffers; never both.
    pub kind: TensorKind,
    /// Of the parameters' groups the one that it is of; 0 where there are none, and of buffers.
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
    params_len: usize,
    len: usize,
}

/// Why a list of tensors is no layout.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// The list holds no parameter.
    #[error("the model has no parameters")]
    Empty,
    /// A dimension is zero, or the product overflows.
    #[error("tensor `{0}` has shape {1:?}, which holds no value or too many")]
    BadShape(String, Vec<usize>),
    /// Two tensors of one name.
    #[error("two tensors are named `{0}`")]
    DuplicateName(String),
    /// A parameter after a buffer.
    #[error("parameter `{0}` comes after a buffer; name all parameters first, then the buffers")]
    BufferBeforeParam(String),
    /// More buckets than [`MAX_BUCKETS`].
    #[error("{0} buckets; a layout has at most {MAX_BUCKETS}: make them longer (cluster.bucket_bytes)")]
    TooManyBuckets(usize),
    /// More groups than [`MAX_GROUPS`].
    #[error("{0} groups of parameters; there are at most {MAX_GROUPS}")]
    TooManyGroups(usize),
    /// A group of parameters holds no value.
    #[error("group {0} of the parameters holds no value")]
    EmptyGroup(usize),
    /// The groups are not all parameters.
    #[error("the groups hold {groups} values, and the model has {params} parameters")]
    GroupsLength {
        /// Values of all groups.
        groups: u128,
        /// Values of all parameters.
        params: usize,
    },
    /// The bucket length is zero.
    #[error("a bucket must hold at least one value")]
    EmptyBucket,
}

/// The most buckets. A pull of a shard names the version that the worker has of each, in up to eight bytes: 1 MiB of
/// them, as many as a message holds.
pub const MAX_BUCKETS: usize = 1 << 17;

/// The parts of the flat vector whose edges no bucket crosses: the groups of parameters, or all of them, then the buffers.
pub(crate) fn parts(
    params_len: usize,
    buffers_len: usize,
    groups: &[ParamGroup],
) -> impl Iterator<Item = (usize, TensorKind)> {
    let all = groups.is_empty().then_some(params_len);
    let params = all.into_iter().chain(groups.iter().map(|g| g.values)).map(|n| (n, TensorKind::Param));
    params.chain(Some((buffers_len, TensorKind::Buffer)))
}

/// How many buckets that gives; the error says why it gives none. Lengths and groups may come from anyone.
pub(crate) fn count(
    params_len: usize,
    buffers_len: usize,
    groups: &[ParamGroup],
    bucket_len: usize,
) -> Result<usize, LayoutError> {
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
    let count = parts(params_len, buffers_len, groups).map(|(n, _)| n.div_ceil(bucket_len)).sum();
    if count > MAX_BUCKETS { Err(LayoutError::TooManyBuckets(count)) } else { Ok(count) }
}

impl Layout {
    /// Lays the tensors out one after another and cuts the vector into buckets of at most `bucket_len` values.
    ///
    /// Errors say which tensor is wrong; nothing else can fail.
    pub fn new(tensors: Vec<TensorSpec>, bucket_len: usize) -> Result<Self, LayoutError> {
        Self::in_groups(tensors, &[], bucket_len)
    }

    /// Likewise, with parameters in groups, in the order of the flat vector; none: all are one.
    pub fn in_groups(
        tensors: Vec<TensorSpec>,
        groups: &[ParamGroup],
        bucket_len: usize,
    ) -> Result<Self, LayoutError> {
        let mut names = std::collections::BTreeSet::new();
        let (mut offsets, mut len, mut params_len, mut seen_buffer) = (Vec::new(), 0usize, 0, false);
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
                TensorKind::Param if seen_buffer => {
                    return Err(LayoutError::BufferBeforeParam(t.name.clone()));
                }
                TensorKind::Param => params_len += n,
                TensorKind::Buffer => seen_buffer = true,
            }
            offsets.push(len);
            len += n;
        }
        if params_len == 0 {
            return Err(LayoutError::Empty);
        }
        // Before the list is made: its length may come from anyone.
        let count = count(params_len, len - params_len, groups, bucket_len)?;
        let mut buckets = Vec::with_capacity(count);
        let mut at = 0;
        for (group, part) in (0u16..).zip(parts(params_len, len - params_len, groups)) {
            let (values, kind) = part;
            let group = if kind == TensorKind::Param { group } else { 0 };
            let end = at + values;
            while at < end {
                let len = bucket_len.min(end - at);
                buckets.push(BucketSpec { offset: at, len, kind, group });
                at += len;
            }
        }
        Ok(Self { tensors, offsets, buckets, params_len, len })
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

    /// Values in the flat vector, buffers included.
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
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_cover_the_vector_once_and_never_mix_kinds() {
        let l = Layout::new(
            vec![
                TensorSpec::param("a", &[3, 5]),
                TensorSpec::param("b", &[4]),
                TensorSpec::buffer("m", &[6]),
            ],
            4,
        )
        .expect("valid");
        assert_eq!((l.len(), l.params_len()), (25, 19));
        let mut at = 0;
        for b in l.buckets() {
            assert_eq!(b.offset, at);
            assert_eq!(b.kind == TensorKind::Param, b.offset < 19);
            at += b.len;
        }
        assert_eq!(at, 25);
        assert_eq!(l.tensor_range(1), 15..19);
    }

    fn group(values: usize) -> ParamGroup {
        ParamGroup { values, lr: 0.1, weight_decay: 0.0 }
    }

    #[test]
    fn a_bucket_is_of_one_group_and_one_group_is_as_none() {
        let tensors = || vec![TensorSpec::param("a", &[19]), TensorSpec::buffer("m", &[6])];
        let l = Layout::in_groups(tensors(), &[group(6), group(1), group(12)], 4).expect("valid");
        let cut: Vec<_> = l.buckets().iter().map(|b| (b.offset, b.len, b.group)).collect();
        let params = [(0, 4, 0), (4, 2, 0), (6, 1, 1), (7, 4, 2), (11, 4, 2), (15, 4, 2)];
        assert_eq!(cut[..6], params);
        assert_eq!(cut[6..], [(19, 4, 0), (23, 2, 0)]);
        assert_eq!(Layout::in_groups(tensors(), &[group(19)], 4), Layout::new(tensors(), 4));
    }

    #[test]
    fn wrong_groups_are_named() {
        let with = |groups: &[ParamGroup]| Layout::in_groups(vec![TensorSpec::param("a", &[9])], groups, 1);
        assert_eq!(with(&[group(5), group(0), group(4)]), Err(LayoutError::EmptyGroup(1)));
        assert_eq!(with(&[group(5), group(5)]), Err(LayoutError::GroupsLength { groups: 10, params: 9 }));
        let huge = with(&[group(usize::MAX), group(usize::MAX)]).expect_err("too many").to_string();
        assert!(huge.contains("the model has 9"), "{huge}");
        assert_eq!(with(&vec![group(1); 1025]), Err(LayoutError::TooManyGroups(1025)));
    }

    #[test]
    fn wrong_tensors_are_named() {
        let e = Layout::new(vec![TensorSpec::param("a", &[0])], 4).expect_err("zero");
        assert!(e.to_string().contains("`a`"));
        let two = vec![TensorSpec::param("a", &[1]), TensorSpec::param("a", &[1])];
        assert_eq!(Layout::new(two, 4), Err(LayoutError::DuplicateName("a".into())));
        let many = |n| Layout::new(vec![TensorSpec::param("a", &[n])], 1);
        assert_eq!(many(MAX_BUCKETS).map(|l| l.buckets().len()), Ok(MAX_BUCKETS));
        assert_eq!(many((1 << 40) - 1), Err(LayoutError::TooManyBuckets((1 << 40) - 1)));
        let order = vec![TensorSpec::buffer("m", &[1]), TensorSpec::param("a", &[1])];
        assert_eq!(Layout::new(order, 4), Err(LayoutError::BufferBeforeParam("a".into())));
    }
}
