//! Tests of one replica of a group.

use super::*;
use crate::{
    types::{SnapshotMeta, Types, Vote},
    wire::{self, SnapshotPiece, WireError},
};
use paraft_changes::ReplicaId;
use paraft_proto::{PeerCall, PeerRequest, WithBulk};
use std::collections::BTreeSet;

use crate::testing::{Parts, group as name, write};
use openraft::raft::{VoteRequest, VoteResponse};
use paraft_common::ServerId;

/// A single replica, which leads.
async fn alone() -> (Group, ReplicaId) {
    let me = ReplicaId::new_incarnation(ServerId(0));
    let options = GroupOptions {
        group: name(),
        me,
        folder: None,
        election: Duration::from_millis(100),
        check_every: None,
    };
    let group = Group::start(options, Arc::new(Parts::default()), Arc::default())
        .await
        .expect("a replica alone starts");
    group.found(&BTreeMap::from([(me, "127.0.0.1:1".into())])).await.expect("it is new");
    group.leadership().wait_for(|l| l.leads).await.expect("it leads");
    (group, me)
}

/// Whether the replica votes for `candidate` in `term`; an error if it does not accept the name.
async fn asked(group: &Group, name: ReplicaId, term: u64, candidate: ReplicaId) -> Result<bool, WireError> {
    let ask = VoteRequest::<Types>::new(Vote::new(term, candidate.0), None);
    let request = PeerRequest {
        fleet: 0,
        group: 0,
        from: candidate.0,
        to: name.0,
        call: PeerCall::Vote as i32,
        header: wire::encode(&ask).expect("encodes"),
        payloads: Vec::new(),
    };
    let reply = group.answer(request.into()).await?;
    Ok(wire::decode::<VoteResponse<Types>>(&reply)?.vote_granted)
}

async fn votes(group: &Group, term: u64, candidate: ReplicaId) -> bool {
    asked(group, group.me, term, candidate).await.expect("an answer")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_snapshot_that_does_not_fit_is_refused_with_its_first_piece() {
    let me = ReplicaId::new_incarnation(ServerId(0));
    let (group, folder, election) = (name(), None, Duration::from_millis(100));
    let options = GroupOptions { group, me, folder, election, check_every: None };
    let state = Arc::new(Parts::default());
    state.full.store(true, Relaxed);
    let group = Group::start(options, state, Arc::default()).await.expect("it starts");
    let leader = ReplicaId::new_incarnation(ServerId(1));
    let (meta, head): (SnapshotMeta, Vec<u8>) = (SnapshotMeta::default(), vec![1, 2, 3]);
    let payload: paraft_common::Payload = wire::encode(&(meta, head)).expect("encodes").into();
    let piece = SnapshotPiece { image: 1, index: 0, last: false, crc: wire::checksum(&payload) };
    let request = PeerRequest {
        fleet: 0,
        group: 0,
        from: leader.0,
        to: me.0,
        call: PeerCall::Snapshot as i32,
        header: wire::encode(&(Vote::new(1, leader.0), piece)).expect("encodes"),
        payloads: Vec::new(),
    };
    let answer = group.answer(WithBulk { message: request, bulk: vec![payload] }).await;
    let why = answer.expect_err("there is no room").to_string();
    assert!(why.contains("needs 96 GiB, 4 free"), "{why}");
    assert!(group.incoming.lock().await.is_none(), "nothing of it is kept");
    assert_eq!(group.trouble(), None, "what it has it keeps");
}

/// Starts a replica; the tasks of one that was shut down may hold its log for a moment longer.
async fn start_when_free(options: GroupOptions) -> Group {
    let began = Instant::now();
    loop {
        match Group::start(options.clone(), Arc::new(Parts::default()), Arc::default()).await {
            Err(e) if e.to_string().contains("in use") && began.elapsed() < Duration::from_secs(60) => {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            started => return started.expect("a replica starts"),
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replica_without_its_log_does_not_vote_under_old_name() {
    let (group, me) = alone().await;
    let (before, candidate) = (ReplicaId(me.0 ^ 1), ReplicaId::new_incarnation(ServerId(1)));
    assert_eq!(before.server(), me.server());
    let error = asked(&group, before, 100, candidate).await.expect_err("that one is dead");
    assert!(error.to_string().contains("has lost its log"), "{error}");
    assert!(asked(&group, me, 100, candidate).await.is_ok());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn restarted_replica_does_not_vote_twice_in_a_term() {
    let dir = tempfile::tempdir().expect("a folder");
    let me = ReplicaId::new_incarnation(ServerId(0));
    let [a, b] = [1, 2].map(|s| ReplicaId::new_incarnation(ServerId(s)));
    // Until the previous process's threads release the log.
    let start = || async {
        let folder = Folder::new(Arc::new(paraft_store::RealDisk), dir.path().join("replica"));
        let options = GroupOptions {
            group: name(),
            me,
            folder: Some(folder),
            election: Duration::from_secs(10),
            check_every: None,
        };
        start_when_free(options).await
    };
    let group = start().await;
    assert!(votes(&group, 7, a).await, "the first who asks");
    group.shutdown().await;
    drop(group);
    let group = start().await;
    assert!(!votes(&group, 7, b).await, "it has voted in this term");
    assert!(!votes(&group, 6, b).await, "that term is over");
    assert!(votes(&group, 8, b).await, "another term");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_learner_that_nobody_waits_for_leaves_the_group() {
    let (group, me) = alone().await;
    let learner = ReplicaId::new_incarnation(ServerId(1));
    group.barrier().await.expect("it leads"); // earlier, its first membership may not be committed
    group.add_learner(learner, "127.0.0.1:1").await.expect("nobody needs to answer for that");
    assert!(group.membership().members.contains_key(&learner));
    let voters = BTreeSet::from([me]);
    group.set_voters(&voters).await.expect("it leads");
    assert!(group.membership().members.contains_key(&learner), "the control group's learners stay");
    group.set_members(&voters).await.expect("it leads");
    assert_eq!(group.membership().members.keys().copied().collect::<BTreeSet<_>>(), voters);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn log_is_purged_by_entries_and_its_memory_is_bounded() {
    let (group, _) = alone().await;
    for _ in 0..5000u32 {
        let write = write(0, Vec::new());
        group.propose(write).await.expect("taken").await.expect("committed");
    }
    let mut metrics = group.raft.metrics();
    let cut = async {
        loop {
            let (snapshot, purged) = {
                let m = metrics.borrow_watched();
                (m.snapshot.as_ref().map(|l| l.index), m.purged.as_ref().map(|l| l.index))
            };
            if snapshot.is_some_and(|s| s > 4000) && purged.is_some_and(|p| p > 4000) {
                return;
            }
            metrics.changed().await.expect("the replica lives");
        }
    };
    tokio::time::timeout(Duration::from_secs(60), cut).await.expect("a snapshot, and the log before it gone");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leader_restarted_from_disk_is_elected_before_it_leads() {
    let dir = tempfile::tempdir().expect("a folder");
    let me = ReplicaId::new_incarnation(ServerId(0));
    let start = || async {
        let options = GroupOptions {
            group: name(),
            me,
            folder: Some(Folder::new(Arc::new(paraft_store::RealDisk), dir.path().join("shard-0"))),
            election: Duration::from_millis(100),
            check_every: None,
        };
        start_when_free(options).await
    };
    let group = start().await;
    group.found(&BTreeMap::from([(me, "127.0.0.1:1".into())])).await.expect("it is new");
    let before = group.leadership().wait_for(|l| l.leads).await.expect("it leads").term;
    group.shutdown().await;
    drop(group);
    let group = start().await;
    let after = group.leadership().wait_for(|l| l.leads).await.expect("it leads again").term;
    assert!(after > before, "term {after} after {before}: entries of the old term could have two contents");
}

/// A vote without its log is that of a replica that has forgotten its promises; so is a log without its vote. A
/// purged log must start where its snapshot ends.
async fn does_not_start_without(lost: &[&str], why: &str) {
    let dir = tempfile::tempdir().expect("a folder");
    let me = ReplicaId::new_incarnation(ServerId(0));
    let folder = dir.path().join("shard-0");
    let options = || GroupOptions {
        group: name(),
        me,
        folder: Some(Folder::new(Arc::new(paraft_store::RealDisk), &folder)),
        election: Duration::from_millis(100),
        check_every: None,
    };
    let group = start_when_free(options()).await;
    group.found(&BTreeMap::from([(me, "127.0.0.1:1".into())])).await.expect("it is new");
    group.leadership().wait_for(|l| l.leads).await.expect("it leads");
    if lost.contains(&"snapshot") {
        cut(&group).await;
    }
    group.shutdown().await;
    drop(group);
    start_when_free(options()).await.shutdown().await; // as it was, it starts
    for place in [&folder, &dir.path().join("log")] {
        for file in std::fs::read_dir(place).expect("a folder").flatten().map(|f| f.path()) {
            let name = file.file_name().and_then(|n| n.to_str()).expect("a name");
            if lost.iter().any(|l| name == *l || l.starts_with('.') && name.ends_with(l)) {
                std::fs::remove_file(&file).expect("it is lost");
            }
        }
    }
    let began = Instant::now();
    let refused = loop {
        match Group::start(options(), Arc::new(Parts::default()), Arc::default()).await {
            Ok(_) => panic!("it starts without {lost:?}, and would vote"),
            Err(e) if e.to_string().contains("in use") && began.elapsed() < Duration::from_secs(60) => {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            Err(e) => break e,
        }
    };
    assert!(refused.to_string().contains(why) && refused.to_string().contains("shard-0"), "{refused}");
}

/// Takes a snapshot and purges the log before it.
async fn cut(group: &Group) {
    let last = || group.raft.metrics().borrow_watched().last_applied.as_ref().map_or(0, |l| l.index);
    let applied = async {
        while last() == 0 {
            tokio::time::sleep(Duration::from_millis(5)).await
        }
    };
    tokio::time::timeout(Duration::from_secs(60), applied).await.expect("its first entry is applied");
    group.raft.trigger().snapshot().await.expect("it runs");
    let reached = async |what: &str, of: &dyn Fn() -> bool| {
        let began = Instant::now();
        while !of() {
            assert!(began.elapsed() < Duration::from_secs(60), "no {what}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let upto = last();
    reached("snapshot", &|| group.raft.metrics().borrow_watched().snapshot.is_some()).await;
    group.raft.trigger().purge_log(upto).await.expect("it runs");
    reached("purge", &|| group.raft.metrics().borrow_watched().purged.is_some()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replica_whose_log_was_lost_does_not_start() {
    does_not_start_without(&[".log"], "a lost log must not vote").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replica_whose_vote_was_lost_does_not_start() {
    does_not_start_without(&["vote"], "forgot its vote must not vote").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replica_whose_snapshot_was_lost_does_not_start() {
    does_not_start_without(&["snapshot"], "snapshot: it is gone, and the log begins after").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_message_moves_a_term_out_of_reach() {
    let (group, me) = alone().await;
    let member = ReplicaId::new_incarnation(ServerId(1));
    let jump = crate::answers::MAX_TERM_JUMP;
    let own = group.leadership().borrow().term;
    for term in [u64::MAX, 1 << 62, own + jump + 1] {
        let refused = asked(&group, me, term, member).await.expect_err("out of reach");
        assert!(refused.to_string().contains("no election leads so far"), "{refused}");
        for (call, header, bulk) in crate::stranger::forged(term, member) {
            let message =
                PeerRequest { from: member.0, to: me.0, call: call as i32, header, ..PeerRequest::default() };
            let refused = group.answer(paraft_proto::WithBulk { message, bulk }).await;
            assert!(refused.is_err(), "{call:?} of term {term}");
        }
    }
    assert_eq!(group.leadership().borrow().term, own, "nothing has moved it");
    assert!(asked(&group, me, own + jump, member).await.is_ok(), "within reach it is answered");
}
