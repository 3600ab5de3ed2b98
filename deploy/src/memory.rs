//! Memory in `paraft status`: what servers have, and what their replicas take, by what it is for.

use paraft_fleet::{failure::Failure, table};
use paraft_proto::{ShardStatus, StatusReply};
use paraft_worker::exit;
use serde_json::{Value, json};

/// What a replica takes, by kind, in the order of docs/configuration.md.
fn kinds(s: &ShardStatus) -> [(&'static str, u64); 7] {
    [
        ("state", s.memory_allocated.saturating_sub(s.memory_kept)),
        ("kept", s.memory_kept),
        ("log", s.log_memory_bytes),
        ("copies", s.memory_copies),
        ("staged", s.memory_staged),
        ("queued", s.memory_queued),
        ("staleness", s.memory_staleness),
    ]
}

/// A server needs so much address space before it has any job: its allocator takes it by the gigabyte.
const LEAST_ADDRESS_SPACE: u64 = 1 << 30;

/// Refuses to start where an allocation would soon fail, which ends a process without a word.
pub fn enough_to_start() -> Result<(), Failure> {
    let pools = paraft_host::memory::memory().pools;
    match pools.iter().find(|p| p.what == paraft_host::memory::ADDRESS_SPACE && p.limit < LEAST_ADDRESS_SPACE)
    {
        None => Ok(()),
        Some(pool) => Err(Failure::new(
            exit::CONFIG,
            format!(
                "ulimit -v leaves this process {} of address space, and a server needs at least {}",
                table::bytes(pool.limit),
                table::bytes(LEAST_ADDRESS_SPACE)
            ),
        )
        .help("bound memory by a cgroup (memory.max) instead: address space is not memory")),
    }
}

/// One line: what the server has, and what its replicas take together. `None`: it is of a release that does not say.
pub fn line(r: &StatusReply) -> Option<String> {
    let m = r.memory.as_ref()?;
    let sum = |i: usize| r.shards.iter().map(|s| kinds(s)[i].1).sum::<u64>();
    let names = kinds(&ShardStatus::default()).map(|(name, _)| name);
    let taken: Vec<String> = (0..names.len())
        .filter(|i| sum(*i) > 0)
        .map(|i| format!("{} {}", names[i], table::bytes(sum(i))))
        .collect();
    let free = format!("memory: {} free of {} ({})", table::bytes(m.free), table::bytes(m.limit), m.what);
    let promised = match m.promised {
        0 => String::new(),
        bytes => format!(", {} promised to its replicas", table::bytes(bytes)),
    };
    let taken = if taken.is_empty() { String::new() } else { format!("; replicas: {}", taken.join(", ")) };
    Some(format!("{free}{promised}{taken}"))
}

/// For `--json`.
pub fn server_as_json(r: &StatusReply) -> Value {
    r.memory.as_ref().map_or(
        Value::Null,
        |m| json!({"free": m.free, "limit": m.limit, "what": m.what, "promised": m.promised}),
    )
}

/// For `--json`: bytes by kind, and what the replica may come to need.
pub fn shard_as_json(s: &ShardStatus) -> Value {
    let mut all: serde_json::Map<String, Value> =
        kinds(s).into_iter().map(|(name, bytes)| (name.into(), bytes.into())).collect();
    all.insert("need".into(), s.memory_need.into());
    all.into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use paraft_proto::ServerMemory;

    #[test]
    fn a_line_says_what_a_server_has_and_what_its_replicas_take() {
        let shard = ShardStatus {
            memory_allocated: 5 << 20,
            memory_kept: 2 << 20,
            log_memory_bytes: 1 << 20,
            ..ShardStatus::default()
        };
        let memory =
            ServerMemory { free: 4 << 30, limit: 24 << 30, what: "the host".into(), promised: 1 << 30 };
        let reply = StatusReply { memory: Some(memory), shards: vec![shard; 2], ..StatusReply::default() };
        let line = line(&reply).expect("it says");
        for word in [
            "4.0 GiB free of 24.0 GiB (the host)",
            "1.0 GiB promised",
            "state 6.0 MiB",
            "kept 4.0 MiB",
            "log 2.0 MiB",
        ] {
            assert!(line.contains(word), "`{word}` is not in: {line}");
        }
        assert!(!line.contains("queued"), "what is nothing is not listed: {line}");
    }
}
