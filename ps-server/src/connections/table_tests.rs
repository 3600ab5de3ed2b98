//! The rules of admitting and closing connections, under random histories.

use super::*;
use proptest::prelude::*;

const TEN: Bounds = Bounds { all: 10, for_unknown: 3, of_one: 5 };

fn there(last: u8) -> Origin {
    Origin::of(IpAddr::from([10, 0, 0, last]))
}

fn admit(t: &mut Table) -> (u64, Vec<u64>) {
    t.admit(Origin::Here, 0, TEN).expect("strangers give way")
}

#[test]
fn unknown_connection_displaces_only_oldest_unknown() {
    let mut t = Table::default();
    for _ in 0..10 {
        assert!(admit(&mut t).1.is_empty());
    }
    for (id, rank) in [(1, Rank::Server), (2, Rank::Worker), (3, Rank::Reader)] {
        assert_eq!(t.rank(id, rank, TEN), None);
    }
    for oldest in 4..200 {
        assert_eq!(admit(&mut t).1, [oldest], "1 to 3 have a rank");
        assert_eq!(t.len(), 10);
    }
    assert_eq!(RANKS.map(|r| t.count(r)), [7, 1, 1, 1]);
}

#[test]
fn server_in_a_flood_stays_and_displaces_a_reader() {
    let mut t = Table::default();
    for now in 0..7 {
        let (id, _) = t.admit(Origin::Here, now, TEN).expect("room");
        assert_eq!(t.rank(id, if id <= 2 { Rank::Reader } else { Rank::Worker }, TEN), None);
    }
    t.used(1, 100); // it asked again, so the other one is idle for longer
    let (server, _) = admit(&mut t);
    (0..2).for_each(|_| _ = admit(&mut t)); // the places of strangers are full
    assert_eq!(t.rank(server, Rank::Server, TEN), Some(2));
    let (worker, _) = admit(&mut t);
    assert_eq!(t.rank(worker, Rank::Worker, TEN), Some(1), "the other reader");
    t.used(worker, 50);
    let (worker, _) = admit(&mut t);
    assert_eq!(t.rank(worker, Rank::Worker, TEN), Some(worker), "workers do not displace workers");
    let (server, _) = admit(&mut t);
    assert_eq!(t.rank(server, Rank::Server, TEN), Some(3), "the worker that is idle longest");
    let (reader, _) = admit(&mut t);
    assert_eq!(t.rank(reader, Rank::Reader, TEN), Some(reader), "only higher ones are left");
    assert_eq!(t.rank(4711, Rank::Server, TEN), None, "it was closed meanwhile");
}

#[test]
fn readers_displace_the_reader_that_is_idle_longest() {
    let mut t = Table::default();
    for _ in 0..7 {
        let (id, _) = admit(&mut t);
        assert_eq!(t.rank(id, Rank::Reader, TEN), None);
    }
    t.used(1, 9);
    let (id, _) = admit(&mut t);
    assert_eq!(t.rank(id, Rank::Reader, TEN), Some(2));
}

#[test]
fn one_address_takes_no_more_than_its_share() {
    let mut t = Table::default();
    let mut ids: Vec<u64> = (0..5).map(|_| t.admit(there(1), 0, TEN).expect("room").0).collect();
    let (next, shed) = t.admit(there(1), 0, TEN).expect("its own oldest goes");
    assert_eq!(shed, [ids.remove(0)]);
    ids.push(next);
    assert!(t.admit(there(2), 0, TEN).expect("room").1.is_empty(), "another address has its own");
    ids.iter().for_each(|id| assert_eq!(t.rank(*id, Rank::Worker, TEN), None));
    assert_eq!(t.admit(there(1), 0, TEN), None, "none of its own is a stranger");
    t.closed(ids[0]);
    assert!(t.admit(there(1), 0, TEN).is_some());
}

#[test]
fn a_host_of_ipv6_is_its_network_and_loopback_is_here() {
    let of = |a: &str| Origin::of(a.parse().expect("an address"));
    assert_eq!(of("2001:db8::1"), of("2001:db8::ffff:2"));
    assert_ne!(of("2001:db8::1"), of("2001:db8:0:1::1"));
    assert_eq!(of("::ffff:10.0.0.1"), there(1));
    for here in ["127.0.0.1", "127.3.2.1", "::1", "::ffff:127.0.0.1"] {
        assert_eq!(of(here), Origin::Here, "{here}");
    }
}

proptest! {
    #[test]
    fn the_bounds_hold_whatever_comes(
        steps in prop::collection::vec((0u8..4, 0u8..3, any::<prop::sample::Index>(), 0usize..4), 1..300),
        all in 4usize..20,
    ) {
        let mut t = Table::default();
        let mut open: Vec<u64> = Vec::new();
        for (now, (what, host, which, rank)) in (0..).zip(steps) {
            let bounds = Bounds::of(all);
            let origin = if host == 0 { Origin::Here } else { there(host) };
            let mut gone = Vec::new();
            match what {
                0 | 1 => if let Some((id, shed)) = t.admit(origin, now, bounds) {
                    open.push(id);
                    gone = shed;
                },
                2 if !open.is_empty() => {
                    let id = open[which.index(open.len())];
                    let before = t.entries[&id].rank;
                    gone.extend(t.rank(id, RANKS[rank], bounds));
                    for id in &gone {
                        prop_assert!(*id <= t.last && before <= Rank::Server);
                    }
                }
                _ if !open.is_empty() => {
                    let id = open[which.index(open.len())];
                    t.closed(id);
                    gone.push(id);
                }
                _ => {}
            }
            open.retain(|id| !gone.contains(id));
            prop_assert_eq!(t.len(), open.len());
            prop_assert!(t.len() <= all);
            prop_assert_eq!(RANKS.map(|r| t.count(r)).iter().sum::<usize>(), open.len());
            prop_assert!(t.len() - t.count(Rank::Unknown) <= all - bounds.for_unknown);
            for (origin, from) in &t.from {
                let of = |rank: Option<Rank>| {
                    let is = |e: &&Entry| e.origin == *origin && rank.is_none_or(|r| e.rank == r);
                    t.entries.values().filter(is).count()
                };
                prop_assert_eq!((from.count, from.unknown.len()), (of(None), of(Some(Rank::Unknown))));
                prop_assert!(*origin == Origin::Here || from.count <= bounds.of_one);
            }
        }
    }
}
