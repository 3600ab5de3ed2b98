//! The layout of the agreed state in a snapshot, which says its number first: one of another build is refused by name, not
//! misread. What earlier releases have written is read.

use super::{
    jobs::{Job, JobFacts, JobState, Jobs},
    orders::Orders,
    state::{Member, Place, Shape, State},
};
use crate::{
    header::{self, HeaderError},
    raft::Unable,
};
use paraft_common::{JobShard, ServerId, ShardId, checkpoint::KnownCheckpoint};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// Whoever changes the layout of [`State`] raises this.
const FORMAT: u16 = 5;
/// Before orders were kept.
const NO_ORDERS: u16 = 4;
/// Before a fleet had several jobs.
const ONE_JOB: u16 = 3;
/// And before servers were forgotten.
const NONE_FORGOTTEN: u16 = 2;

/// As it was in format 2; format 3 has the servers that were forgotten behind it.
#[derive(Serialize, Deserialize)]
struct Earlier {
    fleet: u64,
    generation: u64,
    shape: Option<Shape>,
    servers: BTreeMap<ServerId, Member>,
    shards: BTreeMap<JobShard, Place>,
    jobs: Vec<EarlierJob>,
}

#[derive(Serialize, Deserialize)]
struct EarlierJob {
    shards: BTreeMap<ShardId, u64>,
    facts: JobFacts,
    state: JobState,
    first_seen_ms: u64,
    checkpoints: Vec<KnownCheckpoint>,
}

impl Earlier {
    /// Its jobs ran one after the other in the same shards: the last one has them.
    fn now(self, forgotten: BTreeSet<ServerId>) -> State {
        let Earlier { fleet, generation, shape, servers, shards, jobs } = self;
        let job = |j: EarlierJob, shape: Shape| Job {
            name: j.facts.name.clone(),
            foundings: j.shards,
            facts: Some(j.facts),
            state: j.state,
            first_seen_ms: j.first_seen_ms,
            checkpoints: j.checkpoints,
            ..Job::with(shape)
        };
        let jobs = shape.map(|shape| Jobs::earlier(jobs.into_iter().map(|j| job(j, shape)).collect(), shape));
        State {
            fleet,
            generation,
            shape,
            servers,
            shards,
            jobs: jobs.unwrap_or_default(),
            forgotten,
            orders: Orders::default(),
        }
    }
}

/// For a snapshot.
pub fn write(state: &State) -> Result<Vec<u8>, HeaderError> {
    header::encode(&(FORMAT, header::encode(&(state, &state.orders))?))
}

/// From one.
pub fn read(head: &[u8]) -> Result<State, Unable> {
    let bad = |e: HeaderError| Unable::Damaged(format!("a snapshot of the control group: {e}"));
    let (format, state): (u16, Vec<u8>) = header::decode(head).map_err(bad)?;
    match format {
        FORMAT => {
            let (state, orders) = header::decode::<(State, Orders)>(&state).map_err(bad)?;
            Ok(State { orders, ..state })
        }
        NO_ORDERS => header::decode(&state).map_err(bad),
        ONE_JOB => {
            let (state, forgotten) = header::decode::<(Earlier, BTreeSet<ServerId>)>(&state).map_err(bad)?;
            Ok(state.now(forgotten))
        }
        NONE_FORGOTTEN => Ok(header::decode::<Earlier>(&state).map_err(bad)?.now(BTreeSet::new())),
        _ => Err(Unable::Newer(format!(
            "this snapshot of the control group has format {format}, this build reads up to {FORMAT}: use the build that \
             wrote it"
        ))),
    }
}
