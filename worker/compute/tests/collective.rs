//! Groups of ranks, one per thread, over real sockets.

use paraft_compute::collective::{Group, GroupError, Listener, Peer, Rendezvous, Ring, Tag};
use paraft_tls::{Access, Credentials, authority::Authority};
use std::{
    io::Write,
    net::TcpStream,
    sync::{Arc, Barrier, Once},
    thread,
    time::{Duration, Instant},
};

const TEST_TIMEOUT: Duration = Duration::from_secs(20);

/// The ranks use TLS with one certificate, as in production.
fn closed() {
    static CLOSED: Once = Once::new();
    CLOSED.call_once(|| {
        let authority = Authority::new("test").expect("made");
        let worker = "worker:t".parse().expect("a role");
        let issued = authority.issue("test", &[worker], Duration::from_secs(3600)).expect("issued");
        Access::Certificates(Credentials::of_issued(&issued).expect("good")).set();
    });
}

fn listener() -> Listener {
    closed();
    Listener::towards("127.0.0.1:1").expect("loopback")
}

fn assigns(listeners: &[Listener]) -> Vec<Rendezvous> {
    let at = |(rank, l): (usize, &Listener)| Peer { rank: rank as u32, address: l.address().to_string() };
    let ranks: Vec<Peer> = listeners.iter().enumerate().map(at).collect();
    (0..ranks.len())
        .map(|place| Rendezvous { generation: 3, secret: 99, job: "t".into(), place, ranks: ranks.clone() })
        .collect()
}

/// Runs each rank's work on its own thread; returns the results by place.
fn each<T: Send + 'static>(
    size: usize,
    work: impl Fn(usize, Group, Ring) -> T + Send + Sync + 'static,
) -> Vec<T> {
    let listeners: Vec<Listener> = (0..size).map(|_| listener()).collect();
    let work = Arc::new(work);
    let start = |(rendezvous, mut l): (Rendezvous, Listener)| {
        let work = work.clone();
        thread::spawn(move || {
            let place = rendezvous.place;
            let (group, ring) = Group::form(rendezvous, &mut l, TEST_TIMEOUT).expect("all are there");
            work(place, group, ring)
        })
    };
    let threads: Vec<_> = assigns(&listeners).into_iter().zip(listeners).map(start).collect();
    threads.into_iter().map(|t| t.join().expect("no panic")).collect()
}

/// Numbers with exact sums, different on every rank.
fn values(place: usize, n: usize) -> Vec<f32> {
    (0..n).map(|i| ((i * 7 + place * 31) % 1000) as f32 - 500.0).collect()
}

#[test]
fn sums_are_exact_at_every_size() {
    for size in [1, 2, 3, 5] {
        // Fewer values than ranks, parts of uneven lengths, and more than sockets hold.
        for n in [0, 1, 2, 17, 1000, 700_001] {
            let all = each(size, move |place, _group, mut ring| {
                let mut v = values(place, n);
                ring.all_reduce(&mut v).expect("all are there");
                v
            });
            let sum = |i| (0..size).map(|place| values(place, n)[i]).sum::<f32>();
            let step = (n / 50).max(1);
            for v in &all {
                assert_eq!(v.len(), n);
                assert!((0..n).step_by(step).all(|i| v[i] == sum(i)), "{size} ranks, {n} values");
                assert_eq!(v, &all[0]);
            }
        }
    }
}

#[test]
fn inexact_sums_have_the_same_bits_on_all_ranks_and_each_time() {
    let once = || {
        each(3, |place, _group, mut ring| {
            let mut v: Vec<f32> = (0..1001).map(|i| 0.1 * (i + 1) as f32 / (place + 3) as f32).collect();
            ring.all_reduce(&mut v).expect("all are there");
            v.iter().map(|x| x.to_bits()).collect::<Vec<_>>()
        })
    };
    let first = once();
    assert!(first.iter().all(|v| v == &first[0]));
    assert_eq!(first, once());
}

#[test]
fn the_first_ranks_values_reach_all() {
    for size in [1, 2, 4] {
        for n in [0, 1, 3, 500_000] {
            let all = each(size, move |place, group, mut ring| {
                let mut v = values(place, n);
                ring.broadcast(&mut v).expect("all are there");
                let mut words = [place as u64 + 7, u64::MAX - place as u64];
                group.words(&mut words).expect("all are there");
                let mut sums = [place as f64, 0.5];
                group.sum(&mut sums).expect("all are there");
                (v, words, sums)
            });
            let sums = [(0..size).sum::<usize>() as f64, 0.5 * size as f64];
            for (v, words, s) in all {
                assert!(v == values(0, n), "{size} ranks, {n} values");
                assert_eq!((words, s), ([7, u64::MAX], sums));
            }
        }
    }
}

#[test]
fn what_is_small_goes_on_beside_what_is_large() {
    // In another order on each rank: the ranks have separate connections.
    let all = each(2, |place, group, mut ring| {
        let sums = group.sums();
        let large = thread::spawn(move || {
            let mut v = values(place, 2_000_000);
            ring.all_reduce(&mut v).expect("all are there");
            v[1_999_999]
        });
        let mut small = [1.0 + place as f64];
        for _ in 0..100 {
            sums.sum(&mut small).expect("all are there");
        }
        (large.join().expect("no panic"), small[0])
    });
    let last = |place| values(place, 2_000_000)[1_999_999];
    assert!(all.iter().all(|r| *r == (last(0) + last(1), 3.0 * 2f64.powi(99))));
}

#[test]
fn a_rank_that_leaves_ends_every_wait_and_its_name_is_known() {
    let began = Instant::now();
    let together = Barrier::new(3);
    let all = each(3, move |place, group, mut ring| {
        let mut v = values(place, 300_000);
        ring.all_reduce(&mut v).expect("all are there");
        together.wait();
        if place == 1 {
            // As when its process dies: the connections end without a message.
            group.watch().break_up("the test says so");
            return None;
        }
        Some((ring.all_reduce(&mut v).expect_err("one is gone"), group.sum(&mut [1.0]).is_err()))
    });
    for error in [&all[0], &all[2]] {
        let (error, small) = error.as_ref().expect("it stayed");
        assert!(matches!(error, GroupError::Broken(_) | GroupError::Lost { rank: 1, .. }), "{error}");
        assert!(small);
    }
    assert!(began.elapsed() < Duration::from_secs(10));
}

#[test]
fn who_leaves_in_order_is_not_missed_until_it_is_waited_for() {
    let began = Instant::now();
    let stay = Barrier::new(2);
    let all = each(3, move |place, group, mut ring| {
        let mut v = values(place, 1000);
        ring.all_reduce(&mut v).expect("all are there");
        if place == 2 {
            return None;
        }
        thread::sleep(Duration::from_millis(200));
        assert_eq!(group.watch().broken(), None);
        // The first call that waits for the departed rank breaks the group for the other.
        stay.wait();
        Some(ring.all_reduce(&mut v).expect_err("one has left"))
    });
    for error in all.iter().flatten() {
        assert!(matches!(error, GroupError::Lost { rank: 2, .. }), "{error}");
    }
    assert!(began.elapsed() < Duration::from_secs(10));
}

#[test]
fn when_broken_callbacks_run_once_when_group_breaks() {
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
    let ends = Arc::new(AtomicUsize::new(0));
    let (counted, together) = (ends.clone(), Arc::new(Barrier::new(2)));
    each(2, move |place, group, _ring| {
        let count = |ends: &Arc<AtomicUsize>| {
            let ends = ends.clone();
            group.watch().when_broken(move || {
                ends.fetch_add(1, Relaxed);
            });
        };
        count(&counted);
        together.wait();
        if place == 0 {
            group.watch().break_up("enough");
        }
        while group.watch().broken().is_none() {
            thread::sleep(Duration::from_millis(1));
        }
        // The group is already broken, so this is called at once.
        count(&counted);
        together.wait();
    });
    assert_eq!(ends.load(Relaxed), 4);
}

#[test]
fn who_is_not_there_is_named() {
    let mut listeners: Vec<Listener> = (0..2).map(|_| listener()).collect();
    let assigns = assigns(&listeners);
    // The first dials a port without a listener.
    drop(listeners.pop());
    let mut first = listeners.pop().expect("one of two");
    let error = Group::form(assigns[0].clone(), &mut first, TEST_TIMEOUT).expect_err("alone");
    assert!(matches!(error, GroupError::Lost { rank: 1, .. }), "{error}");
}

#[test]
fn strangers_and_earlier_groups_are_not_taken_for_ranks() {
    let (mut a, mut b) = (listener(), listener());
    let ranks = [&a, &b].map(|l| l.address().to_string());
    let rendezvous = |generation, place| Rendezvous {
        generation,
        job: "t".into(),
        secret: 1,
        place,
        ranks: (0..).zip(&ranks).map(|(rank, at)| Peer { rank, address: at.clone() }).collect(),
    };
    // A rank of an earlier generation that has given up, and a peer with an invalid line.
    let early = rendezvous(1, 1);
    let mut c = listener();
    Group::form(early, &mut c, Duration::from_millis(50)).expect_err("nobody answers");
    let mut stranger = TcpStream::connect(&ranks[0]).expect("it listens");
    stranger.write_all(&[7; 100]).expect("it reads");
    let (one, other) = (rendezvous(2, 0), rendezvous(2, 1));
    let second = thread::spawn(move || {
        let (_group, mut ring) = Group::form(other, &mut b, TEST_TIMEOUT).expect("both are there");
        let mut v = [2.0f32];
        ring.all_reduce(&mut v).map(|()| v)
    });
    let (_group, mut ring) = Group::form(one, &mut a, TEST_TIMEOUT).expect("both are there");
    let mut v = [1.0f32];
    ring.all_reduce(&mut v).expect("both are there");
    assert_eq!(v, [3.0]);
    assert_eq!(second.join().expect("no panic"), Ok([3.0]));
}

#[test]
fn line_delivers_by_tag_in_any_order_and_ends_with_its_rank() {
    let mut listeners: Vec<Listener> = (0..3).map(|_| listener()).collect();
    let tag = |kind, number| Tag { kind, number };
    let start = |rendezvous: Rendezvous, mut l: Listener| {
        thread::spawn(move || {
            let place = rendezvous.place;
            let met =
                Group::form_with(rendezvous, &mut l, TEST_TIMEOUT, Some(1 << 20)).expect("all are there");
            let (group, _ring, lines) = met;
            // More than the sockets hold, to both, before any rank receives.
            for to in (0..3).filter(|to| *to != place) {
                lines.send(to, tag(1, 7), values(place, 700_001)).expect("sent");
                lines.send(to, tag(2, to as u64), vec![place as f32; 3]).expect("sent");
                lines.send(to, tag(3, 0), Vec::new()).expect("sent");
            }
            for from in (0..3).filter(|from| *from != place) {
                assert_eq!(lines.receive(from, tag(3, 0)), Ok(Vec::new()));
                assert_eq!(lines.receive(from, tag(2, place as u64)), Ok(vec![from as f32; 3]));
                assert_eq!(lines.receive(from, tag(1, 7)), Ok(values(from, 700_001)));
            }
            if place == 2 {
                // As if it had died: a message longer than allowed ends the line.
                lines.send(0, tag(9, 9), vec![0.0; (1 << 20) + 1]).expect("it is queued");
                let _ = lines.receive(0, tag(8, 8));
                return None;
            }
            let ended = lines.receive(2, tag(9, 9)).expect_err("no message is so long");
            drop(group);
            Some(ended.to_string())
        })
    };
    let threads: Vec<_> =
        assigns(&listeners).into_iter().zip(listeners.drain(..)).map(|(r, l)| start(r, l)).collect();
    let ended: Vec<Option<String>> = threads.into_iter().map(|t| t.join().expect("no panic")).collect();
    let said = ended[0].as_deref().unwrap_or_default();
    assert!(said.contains("1048577 values") || said.contains("gone") || said.contains("left"), "{said}");
    assert!(ended[1].is_some());
}
