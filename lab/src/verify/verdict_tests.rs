//! Tests of `verdict`.

use super::*;

fn verdict(tally: Tally, durability: Durability) -> Verdict {
    Verdict {
        tally,
        clients_agree: true,
        replicas: Ok(()),
        counts: Counts::default(),
        seconds: 1.0,
        pushes_per_s: 500.0,
        floor: 100.0,
        unseen: Vec::new(),
        gaps: vec![0.4, 0.2, 0.3],
        mode: Mode::Asp,
        durability,
        seed: 1,
        servers: 3,
        workers: 2,
        per_place: 1,
        reported_lost: 3,
        bound: 256,
    }
}

#[test]
fn a_broken_promise_decides_and_a_slow_run_does_not_count() {
    let good = || verdict(Tally::default(), Durability::QuorumMemory);
    assert_eq!(good().exit_code(), exit::OK);
    assert_eq!(Verdict { floor: 501.0, ..good() }.exit_code(), exit::DOES_NOT_COUNT);
    let bad = [
        Tally { lost: 1, ..Tally::default() },
        Tally { doubled: 1, ..Tally::default() },
        Tally { damaged: 1, ..Tally::default() },
    ];
    for tally in bad {
        let v = Verdict { floor: 501.0, ..verdict(tally, Durability::QuorumDisk) };
        assert_eq!(v.exit_code(), exit::FAILED, "{v:?}");
    }
    assert!(!Verdict { clients_agree: false, ..good() }.held());
    assert!(!Verdict { replicas: Err("differ".into()), ..good() }.held());
}

#[test]
fn the_level_leader_may_lose_what_it_reports_within_its_bound() {
    let lost = |lost| verdict(Tally { lost, ..Tally::default() }, Durability::Leader);
    assert!(lost(3).held());
    assert!(!lost(4).held(), "more than was reported");
    assert!(!Verdict { bound: 2, ..lost(3) }.held(), "more than the bound");
}

#[test]
fn quantiles_are_values_that_were_measured() {
    assert_eq!(verdict(Tally::default(), Durability::Leader).gaps(), [Some(0.3), Some(0.4), Some(0.4)]);
    assert_eq!(quantile(&[], 0.5), None);
}
