//! The leader of the control group under many reports.

use super::{planner::PLAN_PAUSE, *};
use crate::{
    admission::Answer,
    control::{
        calls::{Hello, ReportAnswer, SentReport},
        membership,
        plan::{ReplicaReport, Report},
    },
    raft::{Digest, GroupOptions, Peers, Replicated},
    replicas::ReplicasOptions,
    replicated::GroupId,
    rpc::control::GrpcCalls,
};
use futures::future::BoxFuture;
use paraft_common::{Durability, JobId};
use paraft_store::RealDisk;
use std::collections::BTreeMap;

/// Server 0 of a fleet of one, whose control group is not founded yet. It lives as long as the folder.
pub(crate) async fn an_agent(
    scratch: &std::path::Path,
    (election, calls): (Duration, Box<dyn Calls>),
    agreed: Arc<Agreed>,
) -> Arc<Agent> {
    let (server, address) = (ServerId(0), "127.0.0.1:1".to_string());
    let peers = Arc::new(Peers::new(paraft_tls::Access::Insecure));
    let me = ReplicaId::new_incarnation(server);
    let options =
        GroupOptions { group: GroupId::Control.into(), me, folder: None, election, check_every: None };
    let control = ControlReplica::start(options, agreed.clone(), peers.clone()).await.expect("it starts");
    let data = scratch.to_path_buf();
    let logs = crate::raft::Logs::new(Arc::new(RealDisk), &data);
    let options = ReplicasOptions { server, data, logs, election, check_every: None };
    let replicas = Arc::new(Replicas::new(options, peers));
    let options = AgentOptions {
        job_memory: None,
        server,
        address: address.clone(),
        servers: vec![address],
        shape: Some(SHAPE),
        election,
        timeouts: Timeouts::new(election, Duration::from_secs(3)),
    };
    Arc::new(Agent::new(options, Arc::new(control), agreed, replicas, calls, 0, Box::new(|_| Ok(()))))
}

const SHAPE: Shape = Shape { shards: 1, replicas: 1, durability: Durability::QuorumMemory };

/// A leader that has applied this much of the agreed state, and has no directives.
struct At(Arc<AtomicU64>);

impl Calls for At {
    fn hello<'a>(&'a self, _: &'a str) -> BoxFuture<'a, Result<Hello, String>> {
        Box::pin(async { Err("it is not asked".into()) })
    }

    fn report<'a>(
        &'a self,
        _: &'a str,
        _: u64,
        told: &'a SentReport,
    ) -> BoxFuture<'a, Result<ReportAnswer, String>> {
        let (number, generation) = (told.number, self.0.load(Relaxed));
        Box::pin(
            async move { Ok(ReportAnswer { accepted: true, number, generation, ..ReportAnswer::default() }) },
        )
    }

    fn room<'a>(&'a self, _: &'a str, _: ServerId, _: &'a str) -> BoxFuture<'a, Result<Answer, String>> {
        Box::pin(async { Err("it is not asked".into()) })
    }
}

#[tokio::test]
async fn leader_behind_its_reporter_is_asked_again() {
    let scratch = tempfile::tempdir().expect("a folder");
    let (agreed, applied) = (Arc::new(Agreed::default()), Arc::new(AtomicU64::new(0)));
    let calls = Box::new(At(applied.clone()));
    let agent = an_agent(scratch.path(), (Duration::from_secs(10), calls), agreed.clone()).await;
    let servers =
        BTreeMap::from([(ServerId(0), "127.0.0.1:1".to_string()), (ServerId(1), "127.0.0.1:2".to_string())]);
    agreed.apply(&Command::Found { fleet: 7, shape: SHAPE, servers }).expect("it is new");
    let generation = agreed.read(|s| s.generation);
    assert!(generation > 0);
    assert_eq!(agent.report().await, Ok(ReportOutcome::Early));
    assert_eq!(agent.report().await, Ok(ReportOutcome::Early), "until it has");
    applied.store(generation, Relaxed);
    assert_eq!(agent.report().await, Ok(ReportOutcome::Nothing));
}

#[tokio::test(flavor = "multi_thread")]
async fn thousands_of_reports_have_the_leader_plan_a_few_times() {
    let scratch = tempfile::tempdir().expect("a folder");
    let server = ServerId(0);
    let calls = Box::new(GrpcCalls::new(paraft_tls::Access::Insecure));
    let agent = an_agent(scratch.path(), (Duration::from_millis(200), calls), Arc::default()).await;
    tokio::spawn(agent.clone().run());
    let began = Instant::now();
    while !agent.leads() || agent.fleet() == 0 {
        assert!(began.elapsed() < Duration::from_secs(60), "nobody leads");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let began = Instant::now();
    let (mut plans, mut last) = (0u128, None);
    for i in 0..20_000 {
        // Each has something new.
        let report = Report { control_trouble: i.to_string(), ..agent.own_report(None) };
        let taken = agent.take_report(SentReport { server, number: 1, report, ..SentReport::default() });
        assert!(taken.is_ok(), "it leads");
        let at = agent.leading.lock().planned.as_ref().map(|p| p.at);
        plans += u128::from(at != last);
        last = at;
    }
    // One for the reports and one of its own in each pause, and those at both ends.
    let most = 2 * (began.elapsed().as_millis() / PLAN_PAUSE.as_millis()) + 4;
    assert!(plans <= most, "{plans} plans in {:?}", began.elapsed());
}

#[test]
fn report_with_only_applied_indices_starts_no_plan() {
    let replica = ReplicaReport { applied: 7, bytes: 100, leads: true, ..ReplicaReport::default() };
    let before = Report {
        replicas: BTreeMap::from([(JobShard::from_number(0), replica.clone().into())]),
        ..Report::default()
    };
    let now = |replica: ReplicaReport| Report {
        replicas: BTreeMap::from([(JobShard::from_number(0), replica.into())]),
        ..Report::default()
    };
    let digests = vec![Digest { index: 8, digest: 1 }];
    assert!(before.is_equivalent(&before));
    assert!(
        now(ReplicaReport { applied: 900, bytes: 200, digests, ..replica.clone() }).is_equivalent(&before)
    );
    let trouble = || "its disk".to_string();
    for other in [
        now(ReplicaReport { leads: false, ..replica.clone() }),
        now(ReplicaReport { trouble: trouble(), ..replica.clone() }),
        now(ReplicaReport { caught_up: BTreeSet::from([ReplicaId(1)]), ..replica.clone() }),
        Report {
            replicas: BTreeMap::from([(JobShard::from_number(1), replica.into())]),
            ..Report::default()
        },
        Report { control_trouble: trouble(), ..before.clone() },
        Report { reached: BTreeSet::from([ServerId(1)]), ..before.clone() },
        Report::default(),
    ] {
        assert!(!other.is_equivalent(&before) && !before.is_equivalent(&other), "{other:?}");
    }
}

#[test]
fn server_with_anothers_id_is_kept_out_while_that_one_lives() {
    let (server, silent) = (ServerId(0), Duration::from_millis(200));
    let (ours, theirs) = (ReplicaId::new_incarnation(server), ReplicaId::new_incarnation(server));
    let report = |node, address: &str| Report { node, address: address.into(), ..Report::default() };
    let (right, stray) = (report(ours, "a:1"), report(theirs, "x:1"));
    let moved = report(ours, "b:1");
    let members = BTreeMap::from([(ours, "a:1".to_string())]);
    let (now, before) = (Instant::now(), Instant::now() - silent * 2);
    let heard = |report: &Report, at| LastReport { number: 0, report: report.clone(), at };
    let out = |who: &Report, heard: Option<&LastReport>, members: &BTreeMap<_, _>, since| {
        membership::holder(server, who, heard, members, since, silent)
    };
    let kept_out = |of: &str| Some(of.to_string());
    let none = BTreeMap::new();
    // While the right server runs, under another replica or at another address.
    for who in [&stray, &moved] {
        assert_eq!(out(who, Some(&heard(&right, now)), &members, before), kept_out("a:1"));
        assert_eq!(out(who, Some(&heard(&right, before)), &members, before), None, "it is silent");
        // A new leader gives the member time to report.
        assert_eq!(out(who, None, &members, now), kept_out("a:1"));
        assert_eq!(out(who, None, &members, before), None);
        assert_eq!(out(who, None, &none, now), None, "nobody has the number");
    }
    assert_eq!(out(&stray, Some(&heard(&stray, now)), &members, before), None, "it was let in");
    assert_eq!(out(&right, Some(&heard(&stray, now)), &members, now), None, "the member goes first");
    assert_eq!(out(&stray, Some(&heard(&right, now)), &none, before), kept_out("a:1"));
}

#[test]
fn what_has_changed_since_a_report_makes_the_next_one_of_it() {
    let of = |all: &[(u32, u64)]| Report {
        replicas: all
            .iter()
            .map(|(s, applied)| {
                let report = ReplicaReport { applied: *applied, ..ReplicaReport::default() };
                (JobShard::from_number(*s), report.into())
            })
            .collect(),
        control_trouble: all.len().to_string(),
        ..Report::default()
    };
    let before = of(&[(0, 1), (1, 1), (64, 1)]);
    let now = of(&[(0, 1), (1, 2), (2, 1), (65, 1)]);
    let (changed, gone) = now.since(&before);
    let shards: Vec<u32> = changed.replicas.keys().map(|s| s.number()).collect();
    assert_eq!((shards, gone.as_slice()), (vec![1, 2, 65], &[JobShard::from_number(64)][..]));
    assert_eq!(changed.clone().merged_onto(&before, &gone), now);
    assert_eq!(now.since(&now).0.replicas.len(), 0, "what is as it was is not told");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn server_that_cannot_serve_a_shard_does_not_lead_it() {
    let scratch = tempfile::tempdir().expect("a folder");
    let (election, agreed) = (Duration::from_millis(50), Arc::<Agreed>::default());
    let calls = Box::new(GrpcCalls::new(paraft_tls::Access::Insecure));
    let agent = an_agent(scratch.path(), (election, calls), agreed.clone()).await;
    // Of a job that only the agreed state knows.
    let shard = JobShard::all(JobId(1), 1).next().expect("one");
    agent.replicas().host(shard, 1, Durability::QuorumMemory, 7).await.expect("there is room");
    let replica = agent.replicas().get(shard).expect("hosted");
    let group = &replica.group;
    group.found(&BTreeMap::from([(group.me(), "nowhere:1".to_string())])).await.expect("founded");
    group.leadership().wait_for(|l| l.leads).await.expect("it leads");
    let began = Instant::now();
    while group.unapplied() > 0 {
        assert!(began.elapsed() < Duration::from_secs(30), "its first entry is not applied");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let why = agent.cannot_serve(shard, &replica).expect("it knows no fleet");
    assert!(why.contains("does not know its fleet's jobs"), "{why}");
    agent.transfer_unservable_shards().await;
    assert!(!group.may_lead(false), "it stands for no election already");
    let servers = BTreeMap::from([(ServerId(0), "127.0.0.1:1".to_string())]);
    agreed.apply(&Command::Found { fleet: 7, shape: SHAPE, servers }).expect("it is new");
    assert_eq!(agent.cannot_serve(shard, &replica), None);
    agent.transfer_unservable_shards().await;
    assert!(!group.may_lead(true), "it stands again");
    agent.replicas().shutdown().await;
}
