//! Numbers with a meaning. `Step(7)` and `Version(7)` do not mix; the compiler keeps them apart.

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
    /// A shard, from 0. One shard is one Raft group.
    ShardId(u32), "shard "
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
    /// One registered stream of a worker to a shard; a worker that comes back gets a new one.
    SessionId(u64), "session "
);

impl SessionId {
    /// Tells it from others where anyone may look: too little of it to take the session over.
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
