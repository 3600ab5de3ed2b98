//! Tests of `room`.

use super::*;
use paraft_host::memory::Pool;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

const MIB: u64 = 1 << 20;

/// In MiB.
fn need(weights: u64) -> Need {
    Need { weights: weights * MIB, ..Need::default() }
}

/// In MiB.
fn set(free: &AtomicU64, mib: u64) {
    free.store(mib * MIB, Relaxed);
}

fn promised(room: &Room, but: Option<JobShard>) -> u64 {
    room.promised_to(|shard| Some(shard) != but) / MIB
}

/// A host with 3200 MiB.
fn host(free: &Arc<AtomicU64>) -> Arc<Room> {
    let free = free.clone();
    Room::with(move || Memory {
        pools: vec![Pool {
            id: "h".into(),
            what: "the host".into(),
            free: free.load(Relaxed),
            limit: 3200 * MIB,
        }],
    })
}

#[test]
fn what_is_set_aside_is_not_given_twice_and_comes_back() {
    let room = host(&Arc::new(AtomicU64::new(1100 * MIB))); // 100 of it stay in reserve
    let first = room.reserve(JobShard::from_number(0), &need(600)).expect("there is room");
    let why = room.reserve(JobShard::from_number(1), &need(600)).expect_err("it is promised").to_string();
    for word in ["600.0 MiB", "1.1 GiB free of 3.1 GiB (the host)", "600.0 MiB of it promised"] {
        assert!(why.contains(word), "`{word}` is not in: {why}");
    }
    let _small = room.reserve(JobShard::from_number(1), &need(400)).expect("there is room");
    drop(first);
    room.reserve(JobShard::from_number(2), &need(600)).expect("it came back");
}

#[test]
fn a_log_in_memory_is_not_counted_as_used_and_as_promised() {
    let free = Arc::new(AtomicU64::new(1100 * MIB));
    let room = host(&free);
    let with_log = |log| Need { weights: 300 * MIB, log: log * MIB, ..Need::default() };
    let logs = [0, 1].map(|_| Arc::new(AtomicU64::new(0)));
    for (shard, log) in (0..).map(JobShard::from_number).zip(&logs) {
        let log = log.clone();
        room.log_of(shard, move || log.load(Relaxed));
    }
    let _first = room.reserve(JobShard::from_number(0), &with_log(200)).expect("there is room");
    assert_eq!(promised(&room, None), 500);
    set(&logs[0], 250); // longer than expected: memory that is promised to others stays theirs
    set(&logs[1], 150);
    set(&free, 700);
    assert_eq!(promised(&room, None), 300);
    room.reserve(JobShard::from_number(1), &with_log(160))
        .expect_err("310 more are needed, and 300 are left");
    let _second = room.reserve(JobShard::from_number(1), &with_log(150)).expect("its log is there already");
    assert_eq!(promised(&room, None), 600);
}

#[test]
fn reservation_before_opening_is_not_requested_twice() {
    let free = Arc::new(AtomicU64::new(1100 * MIB));
    let room = host(&free);
    let expected = room.reserve(JobShard::from_number(0), &need(900)).expect("there is room");
    set(&free, 300); // it has read its files
    room.reserve(JobShard::from_number(0), &need(901)).expect_err("more than was set aside");
    let own = room.reserve(JobShard::from_number(0), &need(900)).expect("it is its own");
    drop(expected);
    assert_eq!(promised(&room, None), 900);
    drop(own);
    room.reserve(JobShard::from_number(0), &need(900)).expect_err("nothing is set aside any more");
}

#[test]
fn a_replica_that_begins_anew_takes_its_own_place() {
    let room = host(&Arc::new(AtomicU64::new(1100 * MIB)));
    let _before = room.reserve(JobShard::from_number(0), &need(900)).expect("there is room");
    let _after = room.reserve(JobShard::from_number(0), &need(1000)).expect("in its own place");
    assert_eq!((promised(&room, Some(JobShard::from_number(0))), promised(&room, None)), (0, 1900));
}

#[test]
fn what_others_took_meanwhile_is_seen_before_it_is_too_late() {
    let free = Arc::new(AtomicU64::new(1100 * MIB));
    let room = host(&free);
    let _aside = room.reserve(JobShard::from_number(0), &need(900)).expect("there is room");
    room.take(400 * MIB).expect("as planned");
    set(&free, 300);
    std::thread::sleep(MEASURE_INTERVAL);
    let why = room.take(400 * MIB).expect_err("others took it").to_string();
    assert!(why.contains("300.0 MiB free"), "{why}");
    set(&free, 1100);
    room.take(400 * MIB).expect("it is there again");
}

#[test]
fn without_an_end_everything_fits() {
    let _all = Room::unlimited()
        .reserve(JobShard::from_number(0), &Need { weights: u64::MAX, ..Need::default() })
        .expect("fits");
    Room::unlimited().take(u64::MAX).expect("fits");
}

/// Something that is released while the room asks what it holds.
#[derive(Default)]
struct Released {
    owner: Mutex<Option<Arc<Released>>>,
    reserved: std::sync::OnceLock<Reserved>,
}

impl Allocated for Released {
    fn held(&self) -> u64 {
        *self.owner.lock() = None;
        0
    }
}

#[test]
fn a_user_that_goes_while_it_is_asked_ends_its_reservation() {
    let room = Room::unlimited();
    let reserved = room.reserve(JobShard::from_number(0), &need(1)).expect("there is room");
    let user = Arc::new(Released::default());
    reserved.for_use_by(&user);
    let _ = user.reserved.set(reserved);
    *user.owner.lock() = Some(user.clone());
    drop(user);
    let (tell, told) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let first = promised(&room, None);
        let _ = tell.send((first, promised(&room, None)));
    });
    let told = told.recv_timeout(Duration::from_secs(60));
    assert_eq!(told.expect("no thread waits for itself"), (1, 0));
}
