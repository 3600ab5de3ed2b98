//! May a job begin? The leader of a shard asks before it proposes one. Every server compares what the job
//! needs there, for all its shards, with what it has, and refuses with the numbers.
//!
//! Servers on one host, or in one container, share its memory: their needs are added up. A server that does
//! not answer is not waited for; if its memory is too small, its replicas stop by themselves
//! ([`crate::room`]).
//!
//! [`judge`] decides from the answers; [`Agent::admit`](crate::control::Agent::admit) collects them.

use paraft_common::{
    ServerId,
    need::{Bytes, Need},
};
use paraft_host::memory::{Memory, Pool};
use std::collections::BTreeMap;

/// One server's answer about a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// The server.
    pub server: ServerId,
    /// The job's need there: for all shards that are or will be on it.
    pub need: Need,
    /// Bytes of it that are not allocated there yet.
    pub wanted: u64,
    /// Bytes that are reserved there for replicas of other jobs, and not allocated yet.
    pub promised: u64,
    /// The server's memory.
    pub memory: Memory,
    /// The most that any job may need there, if configured.
    pub quota: Option<u64>,
}

/// Decides. The error names the servers with too little memory, and the numbers.
pub fn judge(answers: &[Answer]) -> Result<(), String> {
    let over = |a: &&Answer| a.quota.is_some_and(|quota| a.need.total() > quota);
    if let Some(Answer { server, need, quota, .. }) = answers.iter().find(over) {
        return Err(format!(
            "the job needs {need} on server {}, where a job may have {} (--job-memory). Make the job smaller, or ask the fleet's \
             administrator; more servers than replicas share it among them",
            server.0,
            Bytes(quota.unwrap_or_default()),
        ));
    }
    let mut pools: BTreeMap<&str, (&Pool, Vec<&Answer>)> = BTreeMap::new();
    for answer in answers {
        for pool in &answer.memory.pools {
            let (least, of) = pools.entry(&pool.id).or_insert_with(|| (pool, Vec::new()));
            of.push(answer);
            if pool.free < least.free {
                *least = pool;
            }
        }
    }
    let short = pools.values().filter_map(|(pool, of)| {
        let wanted = of.iter().fold(0u64, |sum, a| sum.saturating_add(a.wanted));
        let promised = of.iter().fold(0u64, |sum, a| sum.saturating_add(a.promised));
        let spare = pool.free.saturating_sub(Memory { pools: vec![(*pool).clone()] }.reserve());
        let spare = spare.saturating_sub(promised);
        (wanted > spare).then(|| (wanted - spare, *pool, of, (wanted, promised)))
    });
    // The pool that lacks most.
    let Some((_, pool, of, (wanted, promised))) = short.max_by_key(|(missing, ..)| *missing) else {
        return Ok(());
    };
    let need: Need = of.iter().map(|a| a.need).sum();
    let names: Vec<String> = of.iter().map(|a| format!("server {}", a.server.0)).collect();
    let (on, has) = match names.as_slice() {
        [one] => (one.clone(), "it has"),
        all => (format!("{}, which share their memory", all.join(", ")), "together they have"),
    };
    let already = match need.total().saturating_sub(wanted) {
        0 => String::new(),
        bytes => format!(", {} of it allocated already", Bytes(bytes)),
    };
    let others = match promised {
        0 => String::new(),
        bytes => format!(", {} of it promised to other jobs", Bytes(bytes)),
    };
    Err(format!(
        "the job is too large for this fleet: it needs {need} on {on}{already}, and {has} {} free of {} ({}){others}. Make the job \
         smaller, or start servers with more memory; more servers than replicas share it among them",
        Bytes(pool.free),
        Bytes(pool.limit),
        pool.what
    ))
}

#[cfg(test)]
#[path = "admission_tests.rs"]
mod tests;
