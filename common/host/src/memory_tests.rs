//! Tests of `memory`.

use super::*;

const MEMINFO: &str =
    "MemTotal:       24684084 kB\nMemFree:        14005240 kB\nMemAvailable:   23659000 kB\n";

#[test]
fn the_host_has_what_the_kernel_says_is_available() {
    assert_eq!(host_pool(MEMINFO), Some((23_659_000 << 10, 24_684_084 << 10)));
    assert_eq!(host_pool("MemTotal: 1 kB\n"), None, "an old kernel");
    assert_eq!(host_pool(""), None);
}

#[test]
fn cgroup_page_cache_is_free_and_no_limit_is_none() {
    let stat = "anon 100\nfile 900\ninactive_file 300\nactive_file 200\nslab 7\n";
    assert_eq!(cgroup_pool("4096\n", "1024\n", stat), Some((4096 - 524, 4096)));
    let kernels = "inactive_file 100\nslab_reclaimable 50\nslab_unreclaimable 9\n";
    assert_eq!(cgroup_pool("4096", "1024", kernels), Some((4096 - 874, 4096)), "what can go");
    assert_eq!(cgroup_pool("4096", "8192", ""), Some((0, 4096)), "beyond its limit");
    assert_eq!(cgroup_pool("max\n", "1024\n", stat), None);
    assert_eq!(cgroup_pool("9223372036854771712\n", "1024\n", stat), None, "v1 without a limit");
    let v1 = "inactive_file 1\nactive_file 1\ntotal_inactive_file 30\ntotal_active_file 20\n";
    assert_eq!(cgroup_pool("4096", "1024", v1), Some((4096 - 974, 4096)));
}

#[test]
fn the_path_of_a_process_is_found_in_both_kinds_of_hierarchy() {
    let v1 = "9:name=systemd:/\n4:cpu,memory:/a/b\n0::/c:d\n";
    assert_eq!(cgroups_of(v1), [(false, "/a/b"), (true, "/c:d")]);
    assert_eq!(cgroups_of("0::/x.slice\n"), [(true, "/x.slice")]);
    assert!(cgroups_of("nothing\n").is_empty());
}

#[test]
fn a_processs_own_limits_are_read() {
    let text = "Limit                     Soft Limit           Hard Limit           Units     \n\
                Max data size             unlimited            unlimited            bytes     \n\
                Max address space         1073741824           unlimited            bytes     \n";
    assert_eq!(rlimit(text, "Max address space"), Some(1 << 30));
    assert_eq!(rlimit(text, "Max data size"), None);
}

#[test]
fn the_tightest_bound_counts() {
    let pool = |what: &str, free, limit| Pool { id: what.into(), what: what.into(), free, limit };
    let memory = Memory { pools: vec![pool("host", 100, 1000), pool("cgroup", 40, 64 << 30)] };
    assert_eq!((memory.free(), memory.limit(), memory.reserve()), (40, 64 << 30, 256 << 20));
    assert_eq!(Memory::default().free(), u64::MAX);
}

#[cfg(target_os = "linux")]
#[test]
fn this_host_has_memory() {
    let now = memory();
    assert!(now.free() > 0 && now.free() <= now.limit(), "{now:?}");
}
