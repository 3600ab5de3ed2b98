//! What this process has used, read from /proc; zeros where there is none.

/// CPU time and memory of a process.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Usage {
    /// User and system time of all threads, in seconds.
    pub cpu_seconds: f64,
    /// Peak resident set, in bytes.
    pub peak_rss_bytes: u64,
}

/// Reads this process's usage.
pub fn usage() -> Usage {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // The command's name may hold spaces; fields are counted after its closing parenthesis.
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or("").split_whitespace().collect();
    let ticks = |i: usize| fields.get(i).and_then(|f| f.parse::<f64>().ok()).unwrap_or(0.0);
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let peak = status
        .lines()
        .find_map(|l| l.strip_prefix("VmHWM:"))
        .and_then(|l| l.split_whitespace().next())
        .and_then(|kb| kb.parse::<u64>().ok())
        .unwrap_or(0);
    // USER_HZ is 100 on every Linux that /proc/self/stat is read on.
    Usage { cpu_seconds: (ticks(11) + ticks(12)) / 100.0, peak_rss_bytes: peak * 1024 }
}

/// This host's name; empty where it has none.
pub fn name() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default().trim().to_string()
}

/// Of the file system under a path: bytes that this process may still write, and its size. `None`: it cannot be asked.
pub fn storage(path: &std::path::Path) -> Option<(u64, u64)> {
    let of = rustix::fs::statvfs(path).ok()?;
    Some((of.f_bavail.saturating_mul(of.f_frsize), of.f_blocks.saturating_mul(of.f_frsize)))
}

/// CPU time that a process of this host has used so far, user and system, of all its threads, in seconds: to the
/// microsecond or better, where [`usage`] counts in hundredths. `None` when there is no such process, or no such clock.
pub fn cpu_seconds_of(pid: u32) -> Option<f64> {
    #[cfg(target_os = "linux")]
    {
        let pid = nix::unistd::Pid::from_raw(i32::try_from(pid).ok()?);
        let now = nix::time::clock_getcpuclockid(pid).ok()?.now().ok()?;
        Some(now.tv_sec() as f64 + now.tv_nsec() as f64 * 1e-9)
    }
    #[cfg(not(target_os = "linux"))]
    {
        let _ = pid;
        None
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn the_cpu_clock_of_a_process_counts_what_its_threads_use() {
        let own = std::process::id();
        let clock = move || cpu_seconds_of(own).expect("a clock");
        let before = clock();
        // A clock that leaves the thread out never gets there.
        std::thread::spawn(move || while clock() < before + 0.01 {}).join().expect("thread");
        assert_eq!(cpu_seconds_of(u32::MAX), None);
    }
}
