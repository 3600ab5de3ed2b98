//! Memory of servers: wire types.

use crate::admission::Answer;
use paraft_common::{ServerId, need::Need};
use paraft_host::memory::{Memory, Pool};
use paraft_proto::{MemoryNeed, MemoryPool, RoomReply};

/// To the wire.
pub fn to_reply(answer: Answer) -> RoomReply {
    let Answer { server, need, wanted, promised, memory, quota } = answer;
    let Need { weights, slots, kept, staged, log, copies, queued, tables } = need;
    let pool = |p: Pool| MemoryPool { id: p.id, what: p.what, free: p.free, limit: p.limit };
    RoomReply {
        server: server.0,
        why: String::new(),
        need: Some(MemoryNeed { weights, slots, kept, staged, log, copies, queued, tables }),
        wanted,
        promised,
        quota,
        pools: memory.pools.into_iter().map(pool).collect(),
    }
}

/// From the wire; `server` is the server that was asked.
pub fn from_reply(server: ServerId, reply: RoomReply) -> Answer {
    let MemoryNeed { weights, slots, kept, staged, log, copies, queued, tables } =
        reply.need.unwrap_or_default();
    let pool = |p: MemoryPool| Pool { id: p.id, what: p.what, free: p.free, limit: p.limit };
    Answer {
        server,
        need: Need { weights, slots, kept, staged, log, copies, queued, tables },
        wanted: reply.wanted,
        promised: reply.promised,
        memory: Memory { pools: reply.pools.into_iter().map(pool).collect() },
        quota: reply.quota,
    }
}
