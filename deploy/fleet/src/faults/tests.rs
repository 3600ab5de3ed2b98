//! Tests of `faults`.

use super::*;

#[test]
fn what_was_put_is_on_until_it_is_taken_back() {
    use Fault::{DiskFull, Eio, Partition, Readonly, SlowDisk, SlowLink};
    let all = [Partition, SlowLink, DiskFull, SlowDisk, Eio, Readonly];
    let mut faults = Faults::default();
    all.iter().for_each(|f| faults.put(*f, 1, 50));
    faults.cut.insert((2, 0));
    assert_eq!(faults.on(), all.iter().map(|f| (1, *f)).chain([(2, Partition)]).collect());
    assert_eq!((faults.slow_link_ms[&1], faults.slow_disk_ms[&1]), (50, 50));
    all.iter().for_each(|f| faults.heal(*f, 1));
    assert_eq!(faults.on(), BTreeSet::from([(2, Partition)]));
    faults.heal(Partition, 2);
    assert_eq!(faults, Faults::default());
}

#[test]
fn a_cut_pair_is_reachable_and_an_isolated_server_is_not() {
    let faults = Faults { isolated: BTreeSet::from([2]), cut: BTreeSet::from([(0, 1)]), ..Faults::default() };
    for (from, to, blocked) in [
        (Some(0), 1, true),
        (Some(1), 0, true),
        (None, 0, false),
        (None, 1, false),
        (None, 2, true),
        (Some(2), 0, true),
        (Some(0), 2, true),
        (Some(3), 1, false),
    ] {
        assert_eq!(faults.blocks(from, to), blocked, "{from:?} {to}");
    }
}

#[test]
fn the_fault_file_round_trips_and_a_missing_one_is_empty() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join(FAULTS_FILE);
    assert_eq!(Faults::read(&path).expect("missing"), Faults::default());
    let faults = Faults {
        isolated: BTreeSet::from([1]),
        cut: BTreeSet::from([(0, 2)]),
        slow_link_ms: BTreeMap::from([(0, 20)]),
        resets: BTreeMap::from([(2, 7)]),
        refused: BTreeSet::from([1]),
        full_disk: BTreeSet::from([0]),
        slow_disk_ms: BTreeMap::from([(1, 5)]),
        failing_reads: BTreeSet::from([1]),
        failing_writes: BTreeSet::from([2]),
        read_only: BTreeSet::from([0, 1]),
        full_votes: BTreeSet::from([2]),
        clock_s: BTreeMap::from([(2, -3600)]),
    };
    faults.write(&path).expect("written");
    assert_eq!(Faults::read(&path).expect("read"), faults);
    std::fs::write(&path, "{\"isolate\": [1]}").expect("written");
    assert!(Faults::read(&path).is_err(), "a misspelt fault is said, not ignored");
}
