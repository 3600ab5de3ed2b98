//! Typed numbers: the compiler does not mix `Step(7)` and `Version(7)`.

use serde::{Deserialize, Serialize};
use std::fmt;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($inner:ty), $prefix:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub $inner);
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($prefix, "{}"), self.0)
            }
        }
        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(self, f)
            }
        }
    };
}

id!(
    /// A worker's rank in its job, from 0.
    WorkerId(u32), "w"
);
id!(
    /// A server of the fleet, from 0. Also its Raft node id.
    ServerId(u64), "s"
);
id!(
    /// A shard of a job, from 0. One shard is one Raft group, which the fleet names by its [`JobShard`].
    ShardId(u32), "shard "
);
id!(
    /// A job of a fleet, in the order of submission. No number is used twice.
    JobId(u32), "job "
);
id!(
    /// A bucket's position in the job's layout, from 0, over all shards.
    BucketId(u32), "bucket "
);
id!(
    /// A worker's local iteration. Step 0 means "nothing done yet"; the first push carries step 1.
    Step(u64), "step "
);
id!(
    /// Number of updates applied (to a bucket, or summed over the buckets of a shard).
    Version(u64), "v"
);
id!(
    /// A session's push counter; the first push carries 1.
    Seq(u64), "seq "
);
id!(
    /// A stream of a worker to a shard; a worker that rejoins gets a new session.
    SessionId(u64), "session "
);

/// A shard among all jobs of a fleet; it identifies a Raft group. As a single number it equals the
/// shard's number for job 0, which a fleet may be started with. Sorted by job, then by shard.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct JobShard(u32);

impl JobShard {
    /// Maximal shards of one job.
    pub const SHARDS: u32 = 64;
    /// Maximal jobs; the number after them identifies the control group.
    pub const JOBS: u32 = u32::MAX / Self::SHARDS;

    /// `None` if the shard or job number is too large.
    pub fn new(job: JobId, shard: ShardId) -> Option<Self> {
        (job.0 < Self::JOBS && shard.0 < Self::SHARDS).then_some(Self(job.0 * Self::SHARDS + shard.0))
    }

    /// The shards of a job with `shards` shards, at most [`Self::SHARDS`].
    pub fn all(job: JobId, shards: u32) -> impl Iterator<Item = Self> {
        (0..shards).filter_map(move |shard| Self::new(job, ShardId(shard)))
    }

    /// The job's first shard, which does the tasks of a single shard.
    pub fn first(job: JobId) -> Self {
        Self(job.0.min(Self::JOBS - 1) * Self::SHARDS)
    }

    /// Its job.
    pub fn job(self) -> JobId {
        JobId(self.0 / Self::SHARDS)
    }

    /// Its shard in the job.
    pub fn shard(self) -> ShardId {
        ShardId(self.0 % Self::SHARDS)
    }

    /// As a single number.
    pub fn number(self) -> u32 {
        self.0
    }

    /// The name for people: `2` of job 0, `7.2` of job 7.
    pub fn name(self) -> ShardName {
        ShardName(self)
    }

    /// From its single number.
    pub const fn from_number(number: u32) -> Self {
        Self(number)
    }
}

/// Parses the name: `2` of job 0, `7.2` of job 7.
impl std::str::FromStr for JobShard {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (job, shard) = text.split_once('.').unwrap_or(("0", text));
        let read = |n: &str| n.parse::<u32>().ok();
        let both = read(job).zip(read(shard)).and_then(|(job, shard)| Self::new(JobId(job), ShardId(shard)));
        both.ok_or_else(|| {
            format!("`{text}` names no shard: write its number, as 2, or with its job's before it, as 7.2")
        })
    }
}

/// Prints a [`JobShard`] without the word "shard".
pub struct ShardName(JobShard);

impl fmt::Display for ShardName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.0.job().0, self.0.shard().0) {
            (0, shard) => write!(f, "{shard}"),
            (job, shard) => write!(f, "{job}.{shard}"),
        }
    }
}

impl fmt::Display for JobShard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "shard {}", self.name())
    }
}

impl fmt::Debug for JobShard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl SessionId {
    /// Identifies the session in public places: it reveals too little to take the session over.
    pub fn tag(self) -> u64 {
        const SECRET_BITS: u32 = 40;
        self.0 >> SECRET_BITS
    }
}

impl Step {
    /// The step after this one.
    pub fn next(self) -> Step {
        Step(self.0 + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_shard_id_round_trips_through_one_number() {
        for (job, shard, number, text) in [(0, 0, 0, "0"), (0, 63, 63, "63"), (7, 2, 450, "7.2")] {
            let named = JobShard::new(JobId(job), ShardId(shard)).expect("a shard");
            assert_eq!((named.number(), named.name().to_string().as_str()), (number, text));
            assert_eq!((named.job(), named.shard()), (JobId(job), ShardId(shard)));
            assert_eq!(text.parse(), Ok(named));
        }
        let last = JobShard::new(JobId(JobShard::JOBS - 1), ShardId(63)).expect("the last one");
        assert!(last.number() < u32::MAX, "that number is the control group's");
        for none in ["", "x", "64", "1.64", "1.2.3", "-1", "67108863.0"] {
            assert!(none.parse::<JobShard>().is_err(), "{none}");
        }
    }
}
