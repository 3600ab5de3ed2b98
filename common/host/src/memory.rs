//! The memory that this process may still use: that of the host, of each cgroup above the process, and
//! of the process's own limits, from /proc and /sys. A file that cannot be read sets no limit.
//!
//! Pure functions parse the texts; [`memory`] only reads the files.

use cached::Cached;
use std::{
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    time::Duration,
};

/// A limit on memory, and its free rest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pool {
    /// Its identity: processes of one host that share a pool use the same id.
    pub id: String,
    /// Its name for people: `the host`, `cgroup /a/b`, `ulimit -v`.
    pub what: String,
    /// Free bytes.
    pub free: u64,
    /// Total bytes.
    pub limit: u64,
}

/// All limits on this process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// At most one for the host, one for each cgroup with a limit, and one for each rlimit.
    pub pools: Vec<Pool>,
}

impl Memory {
    /// The pool with the least free bytes; `None` without any.
    pub fn tightest(&self) -> Option<&Pool> {
        self.pools.iter().min_by_key(|p| p.free)
    }

    /// Free bytes; unlimited without a known limit.
    pub fn free(&self) -> u64 {
        self.tightest().map_or(u64::MAX, |p| p.free)
    }

    /// The limit of the tightest pool.
    pub fn limit(&self) -> u64 {
        self.tightest().map_or(u64::MAX, |p| p.limit)
    }

    /// Whether a limit is so low that an allocator's caches matter.
    pub fn is_scarce(&self) -> bool {
        self.pools.iter().any(|p| p.limit < SCARCE)
    }

    /// Bytes to keep free for unplanned use: a thirty-second of the limit, from 64 to 256 MiB.
    pub fn reserve(&self) -> u64 {
        self.tightest().map_or(0, |p| (p.limit / 32).clamp(MIN_RESERVE, MAX_RESERVE))
    }
}

/// The pool of a limited address space.
pub const ADDRESS_SPACE: &str = "ulimit -v";

const SCARCE: u64 = 2 << 30;
/// For messages in flight and the allocator's caches: more than a thirty-second of a small limit.
const MIN_RESERVE: u64 = 64 << 20;
const MAX_RESERVE: u64 = 256 << 20;

/// A cgroup without a limit contains `max` (v2) or a number near 2^63 (v1).
const NO_LIMIT: u64 = 1 << 60;

/// Reads a line `Name:   123 kB` of /proc/meminfo or /proc/self/status, in bytes.
pub fn kilobytes(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(':'))?;
    line.split_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1024)
}

/// Total and free memory of the host, from /proc/meminfo.
pub fn host_pool(meminfo: &str) -> Option<(u64, u64)> {
    Some((kilobytes(meminfo, "MemAvailable")?, kilobytes(meminfo, "MemTotal")?))
}

/// Free bytes and limit of a cgroup, from its limit, its usage and its `memory.stat`. Page cache counts
/// as free, since the kernel reclaims it, as in `MemAvailable`. `None`: no limit.
pub fn cgroup_pool(limit: &str, used: &str, stat: &str) -> Option<(u64, u64)> {
    let limit = limit.trim().parse::<u64>().ok().filter(|l| *l < NO_LIMIT)?;
    let used = used.trim().parse::<u64>().ok()?;
    let of = |name: &str| {
        let line = stat.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(' '));
        line.and_then(|n| n.trim().parse::<u64>().ok())
    };
    // In v1, a value without `total_` excludes the levels below, which `used` includes.
    let either = |name: &str| of(&format!("total_{name}")).or_else(|| of(name)).unwrap_or(0);
    // Only v2 also counts kernel objects; most reclaimable ones are file names.
    let cache = either("inactive_file") + either("active_file") + either("slab_reclaimable");
    Some((limit.saturating_sub(used.saturating_sub(cache)), limit))
}

/// A limit of /proc/self/limits, soft, in bytes; `None`: unlimited.
pub fn rlimit(limits: &str, name: &str) -> Option<u64> {
    limits.lines().find_map(|l| l.strip_prefix(name))?.split_whitespace().next()?.parse().ok()
}

/// The cgroups of the process: for each hierarchy with a memory controller, whether it is v2, and the
/// path.
pub fn cgroups_of(text: &str) -> Vec<(bool, &str)> {
    let of = |line| {
        let mut parts = str::splitn(line, 3, ':');
        let (_, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
        let v1 = controllers.split(',').any(|c| c == "memory");
        (v1 || controllers.is_empty()).then_some((!v1, path))
    };
    text.lines().filter_map(of).collect()
}

fn cgroup_pools(boot: &str, pools: &mut Vec<Pool>) {
    let Ok(own) = fs::read_to_string("/proc/self/cgroup") else { return };
    for (v2, path) in cgroups_of(&own) {
        let (root, names) = match v2 {
            true => ("/sys/fs/cgroup", ["memory.max", "memory.current"]),
            false => ("/sys/fs/cgroup/memory", ["memory.limit_in_bytes", "memory.usage_in_bytes"]),
        };
        // From the process's own cgroup up to the root: each limits those below. In a container the own
        // cgroup may be the root, and the path may not exist.
        let mut at: PathBuf = Path::new(root).join(path.trim_start_matches('/'));
        loop {
            let read = |name: &str| fs::read_to_string(at.join(name)).ok();
            if let (Some(limit), Some(used)) = (read(names[0]), read(names[1]))
                && let Some((free, limit)) =
                    cgroup_pool(&limit, &used, &read("memory.stat").unwrap_or_default())
            {
                let ino = fs::metadata(&at).map(|m| (m.dev(), m.ino())).unwrap_or_default();
                let id = format!("{boot}:cgroup:{}:{}", ino.0, ino.1);
                let what = format!("cgroup {}", at.strip_prefix(root).unwrap_or(&at).display());
                pools.push(Pool { id, what, free, limit });
            }
            if at == Path::new(root) || !at.pop() {
                break;
            }
        }
    }
}

fn process_pools(boot: &str, pools: &mut Vec<Pool>) {
    let Ok(limits) = fs::read_to_string("/proc/self/limits") else { return };
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let pid = std::process::id();
    for (name, used, what) in
        [("Max address space", "VmSize", ADDRESS_SPACE), ("Max data size", "VmData", "ulimit -d")]
    {
        if let Some(limit) = rlimit(&limits, name) {
            let free = limit.saturating_sub(kilobytes(&status, used).unwrap_or(0));
            pools.push(Pool { id: format!("{boot}:{pid}:{what}"), what: what.into(), free, limit });
        }
    }
}

/// The current memory. Reads some files: tens of microseconds.
pub fn memory() -> Memory {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let boot = boot.trim();
    let mut pools = Vec::new();
    if let Some((free, limit)) = fs::read_to_string("/proc/meminfo").ok().as_deref().and_then(host_pool) {
        pools.push(Pool { id: format!("{boot}:host"), what: "the host".into(), free, limit });
    }
    cgroup_pools(boot, &mut pools);
    process_pools(boot, &mut pools);
    Memory { pools }
}

/// As [`memory`], at most a tenth of a second old.
pub fn memory_lately() -> Memory {
    static LAST: Cached<Memory> = Cached::new(Duration::from_millis(100));
    LAST.get(memory)
}

/// Whether memory is so short that caches should be released.
pub fn is_short() -> bool {
    let now = memory_lately();
    now.free() < now.reserve()
}

/// A value that is refreshed when it is old.
mod cached {
    use std::{
        sync::{Mutex, PoisonError},
        time::{Duration, Instant},
    };

    pub struct Cached<T> {
        last: Mutex<Option<(Instant, T)>>,
        age: Duration,
    }

    impl<T: Clone> Cached<T> {
        pub const fn new(age: Duration) -> Self {
            Self { last: Mutex::new(None), age }
        }

        pub fn get(&self, read: impl FnOnce() -> T) -> T {
            let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some((at, value)) = &*last
                && at.elapsed() < self.age
            {
                return value.clone();
            }
            let value = read();
            *last = Some((Instant::now(), value.clone()));
            value
        }
    }
}

#[cfg(test)]
#[path = "memory_tests.rs"]
mod tests;
