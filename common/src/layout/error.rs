//! Why a layout is refused.

use super::{MAX_BUCKET_LEN, MAX_BUCKETS, MAX_GROUPS, MAX_STAGES};

/// Why a list of tensors is not a valid layout.
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
    /// A buffer after a result.
    #[error("buffer `{0}` comes after a result; name the results last")]
    ResultBeforeBuffer(String),
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
    /// More stages than [`MAX_STAGES`].
    #[error("{0} stages; there are at most {MAX_STAGES}")]
    TooManyStages(usize),
    /// A stage holds no value.
    #[error("stage {0} holds no value")]
    EmptyStage(usize),
    /// The stages are not all parameters.
    #[error("the stages hold {stages} values, and the model has {params} parameters")]
    StagesLength {
        /// Values of all stages.
        stages: u128,
        /// Values of all parameters.
        params: usize,
    },
    /// Running statistics are of no stage.
    #[error(
        "a model with running statistics (BatchNorm), or with results of the workers' own optimizer, can't be cut in stages"
    )]
    StagedBuffers,
    /// The bucket length is zero.
    #[error("a bucket must hold at least one value")]
    EmptyBucket,
    /// A constraint does not fit the parameters.
    #[error("{0}")]
    Constraint(String),
    /// A group or a stage ends within a row that a constraint holds to a norm.
    #[error(
        "a group of parameters, or a stage, ends within a row of {0} values that a constraint holds to a norm"
    )]
    CutRow(usize),
    /// A row that a constraint holds to a norm is longer than a bucket may be.
    #[error("a constraint holds rows of {0} values to a norm, and a bucket has at most {MAX_BUCKET_LEN}")]
    LongRow(usize),
}
