//! Tests of `admission`.

use super::*;

fn pool(id: &str, free: u64, limit: u64) -> Pool {
    Pool { id: id.into(), what: id.into(), free: free << 20, limit: limit << 20 }
}

fn answer(server: u64, wanted: u64, pools: &[Pool]) -> Answer {
    let need = Need { weights: wanted << 20, ..Need::default() };
    Answer {
        server: ServerId(server),
        need,
        wanted: wanted << 20,
        promised: 0,
        memory: Memory { pools: pools.to_vec() },
        quota: None,
    }
}

#[test]
fn server_without_room_for_its_part_is_named_with_numbers() {
    let hosts = [pool("host a", 4000, 8000), pool("host b", 4000, 8000), pool("host c", 500, 8000)];
    let fleet = |bytes| {
        let all: Vec<_> =
            hosts.iter().enumerate().map(|(i, p)| answer(i as u64, bytes, std::slice::from_ref(p))).collect();
        judge(&all)
    };
    fleet(200).expect("there is room");
    let why = fleet(300).expect_err("a thirty-second of the host stays free");
    for word in ["needs 300.0 MiB (weights 300.0 MiB) on server 2", "500.0 MiB free of 7.8 GiB (host c)"] {
        assert!(why.contains(word), "`{word}` is not in: {why}");
    }
}

#[test]
fn servers_of_one_host_draw_on_the_same_memory() {
    let host = pool("the host", 1000, 3200);
    let all: Vec<_> = (0..3).map(|i| answer(i, 320, std::slice::from_ref(&host))).collect();
    let why = judge(&all).expect_err("960 of 900");
    assert!(why.contains("960.0 MiB") && why.contains("server 0, server 1, server 2, which share"), "{why}");
    judge(&all[..2]).expect("two fit");
}

#[test]
fn what_other_jobs_were_promised_is_not_free() {
    let host = pool("the host", 1000, 3200);
    let ask = |wanted, promised: u64| {
        judge(&[Answer { promised: promised << 20, ..answer(0, wanted, std::slice::from_ref(&host)) }])
    };
    ask(600, 300).expect("900 of 900");
    let why = ask(600, 301).expect_err("one more than there is");
    assert!(why.contains("301.0 MiB of it promised to other jobs"), "{why}");
}

#[test]
fn job_gets_at_most_its_quota_of_each_server() {
    let ask =
        |wanted| judge(&[answer(0, 1, &[]), Answer { quota: Some(100 << 20), ..answer(1, wanted, &[]) }]);
    ask(100).expect("all of it");
    let why = ask(101).expect_err("one more");
    for word in ["needs 101.0 MiB", "on server 1", "may have 100.0 MiB (--job-memory)"] {
        assert!(why.contains(word), "`{word}` is not in: {why}");
    }
}

#[test]
fn a_cgroup_counts_beside_its_host() {
    let host = pool("the host", 10_000, 20_000);
    let all = [answer(0, 700, &[host.clone(), pool("cgroup /a", 600, 640)]), answer(1, 700, &[host])];
    let why = judge(&all).expect_err("the cgroup is too small");
    assert!(why.contains("server 0, and it has 600.0 MiB free of 640.0 MiB (cgroup /a)"), "{why}");
}

#[test]
fn a_server_that_knows_no_bound_has_none() {
    judge(&[answer(0, 1 << 40, &[])]).expect("nothing is known");
    judge(&[]).expect("nobody answered");
}
