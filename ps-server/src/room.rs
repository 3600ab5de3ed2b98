//! Room for shards in this server's memory. What each local replica may need is reserved before any of it is
//! allocated. So the replicas of one server together stay below the limits of the host, its cgroup and the
//! process. A replica without room stops alone; those with room continue.
//!
//! ```text
//! free now │ ── reserved for replicas here, and not taken yet ── │ reserve │ what a new one may need
//! ```
//!
//! Taken is what a replica has of its state, and its log. A log that was read from the disk before its job
//! was known must not count twice, as used and as promised.
//!
//! This is the second check. The first asks every server before a job is proposed ([`crate::admission`]).

use crate::raft::ApplyError;
use paraft_common::{
    JobShard,
    need::{Bytes, Need},
};
use paraft_host::memory::{self, Memory};
use parking_lot::Mutex;
use std::{
    collections::BTreeMap,
    sync::{Arc, Weak},
    time::{Duration, Instant},
};

/// The reservations of one server.
pub struct Room {
    look: Box<dyn Fn() -> Memory + Send + Sync>,
    inner: Mutex<Inner>,
}

/// What takes reserved memory.
pub trait Allocated: Send + Sync {
    /// Its allocated bytes.
    fn held(&self) -> u64;
}

/// Gives the bytes of a replica's log in memory.
type LogBytes = Box<dyn Fn() -> u64 + Send + Sync>;

#[derive(Default)]
struct Inner {
    next: u64,
    aside: BTreeMap<u64, Aside>,
    logs: BTreeMap<JobShard, LogBytes>,
    /// Time and amount of the last measurement of free memory, less what was taken since.
    seen: Option<(Instant, u64)>,
    taken: u64,
}

struct Aside {
    shard: JobShard,
    need: Need,
    /// What has been allocated of it; none yet.
    holds: Option<Weak<dyn Allocated>>,
    /// Its job has ended: nothing more is taken of it.
    over: bool,
}

/// A reservation; dropping it ends it.
pub struct Reserved {
    room: Arc<Room>,
    number: u64,
}

impl std::fmt::Debug for Room {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Room")
    }
}

impl std::fmt::Debug for Reserved {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Reserved({})", self.number)
    }
}

/// Interval of memory measurements, unless this many bytes are taken before.
const MEASURE_INTERVAL: Duration = Duration::from_millis(100);
const MEASURE_BYTES: u64 = 32 << 20;

impl Room {
    /// The room of this host.
    pub fn of_host() -> Arc<Self> {
        Self::with(memory::memory)
    }

    /// Unlimited: for tests, simulations, and replays of what has fitted once.
    pub fn unlimited() -> Arc<Self> {
        Self::with(Memory::default)
    }

    /// The room that `look` measures.
    pub fn with(look: impl Fn() -> Memory + Send + Sync + 'static) -> Arc<Self> {
        Arc::new(Self { look: Box::new(look), inner: Mutex::default() })
    }

    /// The memory at present.
    pub fn memory(&self) -> Memory {
        (self.look)()
    }

    /// Bytes that are reserved for these replicas, and not allocated yet.
    pub fn promised_to(&self, which: impl Fn(JobShard) -> bool) -> u64 {
        // Dropped after the lock.
        let _in_use;
        let inner = self.inner.lock();
        let promised = inner.promised_to(which);
        _in_use = promised.in_use;
        promised.bytes
    }

    /// From now on `bytes` gives the part of a replica's log in memory.
    pub fn log_of(&self, shard: JobShard, bytes: impl Fn() -> u64 + Send + Sync + 'static) {
        self.inner.lock().logs.insert(shard, Box::new(bytes));
    }

    /// Sets whether a replica's job has ended: it then keeps its memory, and needs no more.
    pub fn over(&self, shard: JobShard, over: bool) {
        self.inner.lock().aside.values_mut().filter(|a| a.shard == shard).for_each(|a| a.over = over);
    }

    /// Forgets a replica that is gone.
    pub fn forget(&self, shard: JobShard) {
        self.inner.lock().logs.remove(&shard);
    }

    /// Reserves what a replica may need. This replaces an earlier reservation of the shard, which does not
    /// count. An equal one of which nothing is allocated was for this replica: it is not requested twice.
    ///
    /// # Errors
    /// [`ApplyError::NoRoom`] with the numbers.
    pub fn reserve(self: &Arc<Self>, shard: JobShard, need: &Need) -> Result<Reserved, ApplyError> {
        // Dropped after the lock.
        let _in_use;
        let mut inner = self.inner.lock();
        if inner.is_expected(shard, need) {
            return Ok(self.set_aside(&mut inner, shard, need));
        }
        let now = (self.look)();
        let Promised { bytes: promised, in_use } = inner.promised_to(|other| other != shard);
        _in_use = in_use;
        let left = now.free().saturating_sub(now.reserve()).saturating_sub(promised);
        if need.total() - inner.log_in_memory(shard, need) > left {
            let what = now.tightest().map(|p| p.what.as_str()).unwrap_or_default();
            let mut why = format!(
                "{shard} needs {need}, and this server has {} free of {} ({what})",
                Bytes(now.free()),
                Bytes(now.limit())
            );
            if promised > 0 {
                why.push_str(&format!(", {} of it promised to its other replicas", Bytes(promised)));
            }
            return Err(ApplyError::NoRoom(why));
        }
        Ok(self.set_aside(&mut inner, shard, need))
    }

    fn set_aside(self: &Arc<Self>, inner: &mut Inner, shard: JobShard, need: &Need) -> Reserved {
        paraft_host::allocator::use_huge_pages();
        inner.next += 1;
        let number = inner.next;
        inner.aside.insert(number, Aside { shard, need: *need, holds: None, over: false });
        Reserved { room: self.clone(), number }
    }

    /// Measures once more before this many reserved bytes are allocated, since other processes on the host
    /// may have taken memory since.
    ///
    /// # Errors
    /// [`ApplyError::NoRoom`] where it would leave less than half the reserve: an admitted replica may use the rest.
    pub fn take(&self, bytes: u64) -> Result<(), ApplyError> {
        let mut inner = self.inner.lock();
        inner.taken = inner.taken.saturating_add(bytes);
        let fresh =
            inner.seen.filter(|(at, _)| at.elapsed() < MEASURE_INTERVAL && inner.taken < MEASURE_BYTES);
        let spare = match fresh {
            Some((_, spare)) => spare,
            None => {
                let now = (self.look)();
                let spare = now.free().saturating_sub(now.reserve() / 2);
                inner.taken = bytes;
                inner.seen = Some((Instant::now(), spare));
                spare
            }
        };
        if inner.taken <= spare {
            return Ok(());
        }
        inner.seen = None;
        let now = (self.look)();
        Err(ApplyError::NoRoom(format!(
            "{} more are needed, and this server has {} free of {}: others have taken what was there",
            Bytes(bytes),
            Bytes(now.free()),
            Bytes(now.limit())
        )))
    }
}

/// What is reserved, and not allocated yet.
struct Promised {
    bytes: u64,
    /// The last owner of one of these ends its reservation, for which it locks the room.
    in_use: Vec<Arc<dyn Allocated>>,
}

impl Inner {
    fn promised_to(&self, which: impl Fn(JobShard) -> bool) -> Promised {
        let mut promised = Promised { bytes: 0, in_use: Vec::new() };
        for aside in self.aside.values().filter(|a| which(a.shard) && !a.over) {
            let user = aside.holds.as_ref().and_then(Weak::upgrade);
            let state = user.as_ref().map_or(0, |user| user.held());
            let held = state.saturating_add(self.log_in_memory(aside.shard, &aside.need));
            promised.bytes = promised.bytes.saturating_add(aside.need.total().saturating_sub(held));
            promised.in_use.extend(user);
        }
        promised
    }

    /// The taken bytes of this need's part for the log.
    fn log_in_memory(&self, shard: JobShard, need: &Need) -> u64 {
        self.logs.get(&shard).map_or(0, |bytes| bytes()).min(need.log)
    }

    fn is_expected(&self, shard: JobShard, need: &Need) -> bool {
        let unused = |a: &Aside| a.holds.as_ref().is_none_or(|holds| holds.strong_count() == 0);
        let as_much = |a: &Aside| a.need.total() >= need.total() && unused(a);
        self.aside.values().any(|a| a.shard == shard && as_much(a))
    }
}

impl Reserved {
    /// From now on it is allocated there.
    pub fn for_use_by<T: Allocated + 'static>(&self, user: &Arc<T>) {
        let user: Weak<T> = Arc::downgrade(user);
        if let Some(aside) = self.room.inner.lock().aside.get_mut(&self.number) {
            aside.holds = Some(user);
        }
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        self.room.inner.lock().aside.remove(&self.number);
    }
}

#[cfg(test)]
#[path = "room_tests.rs"]
mod tests;
