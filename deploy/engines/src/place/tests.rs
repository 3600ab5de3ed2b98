//! The table of what engines set. Slurm's are as recorded of 22.05, torchrun's of torch 2.9; the others as their pages have them.

use super::{slurm::*, *};

const TORCHRUN: &[(&str, &str)] = &[
    ("TORCHELASTIC_RUN_ID", "none"),
    ("TORCHELASTIC_RESTART_COUNT", "2"),
    ("RANK", "3"),
    ("WORLD_SIZE", "4"),
    ("LOCAL_RANK", "1"),
    ("LOCAL_WORLD_SIZE", "2"),
    ("GROUP_RANK", "1"),
    ("MASTER_ADDR", "n1"),
    ("MASTER_PORT", "29400"),
];

const SLURM: &[(&str, &str)] = &[
    ("SLURM_JOB_ID", "17"),
    ("SLURM_STEP_ID", "0"),
    ("SLURM_PROCID", "4"),
    ("SLURM_STEP_NUM_TASKS", "5"),
    ("SLURM_LOCALID", "0"),
    ("SLURM_NODEID", "2"),
    ("SLURM_STEP_NODELIST", "n[03-05]"),
    ("SLURM_STEP_TASKS_PER_NODE", "2(x2),1"),
    ("SLURM_NTASKS", "5"),
    ("SLURMD_NODENAME", "n05"),
];

/// A step of one task in an element of an array, started a second time.
const ARRAY: &[(&str, &str)] = &[
    ("SLURM_JOB_ID", "23"),
    ("SLURM_ARRAY_JOB_ID", "21"),
    ("SLURM_ARRAY_TASK_ID", "2"),
    ("SLURM_ARRAY_TASK_COUNT", "3"),
    ("SLURM_ARRAY_TASK_MIN", "0"),
    ("SLURM_ARRAY_TASK_MAX", "2"),
    ("SLURM_RESTART_COUNT", "1"),
    ("SLURM_STEP_ID", "0"),
    ("SLURM_PROCID", "0"),
    ("SLURM_STEP_NUM_TASKS", "1"),
    ("SLURM_LOCALID", "0"),
    ("SLURM_NODEID", "0"),
    ("SLURM_STEP_NODELIST", "n6"),
    ("SLURM_STEP_TASKS_PER_NODE", "1"),
    ("SLURMD_NODENAME", "n6"),
];

const JOBSET: &[(&str, &str)] = &[
    ("JOB_COMPLETION_INDEX", "0"),
    ("JOBSET_JOB_INDEX", "2"),
    ("JOBSET_RESTART_ATTEMPT", "1"),
    ("JOBSET_NAME", "digits"),
    ("HOSTNAME", "digits-servers-2-0"),
];

const LWS: &[(&str, &str)] =
    &[("LWS_LEADER_ADDRESS", "t-0.t.default"), ("LWS_GROUP_SIZE", "4"), ("LWS_WORKER_INDEX", "3")];

const TF: &str = r#"{"cluster":{"chief":["c-0:2222"],"ps":["ps-0:2222","ps-1:2222"],"worker":["w-0:2222","w-1:2222"]},
 "task":{"type":"worker","index":1}}"#;

const SKYPILOT: &[(&str, &str)] = &[
    ("SKYPILOT_NODE_RANK", "1"),
    ("SKYPILOT_NUM_NODES", "2"),
    ("SKYPILOT_NODE_IPS", "10.0.0.4\n10.0.0.9"),
    ("SKYPILOT_TASK_ID", "sky-2026-1"),
];

const DSTACK: &[(&str, &str)] =
    &[("DSTACK_NODE_RANK", "0"), ("DSTACK_NODES_NUM", "3"), ("DSTACK_MASTER_NODE_IP", "10.1.0.2")];

fn around() -> HostContext {
    HostContext {
        hosts: "127.0.0.1 localhost\n10.0.0.7\tt-w-0-2.t.ns.svc.cluster.local\tt-w-0-2\n".into(),
        hostfile: "# of the rack\nn1 slots=2\nn2.rack slots=2\n\nn3\n".into(),
        own: "n2".into(),
    }
}

fn find(all: &[&[(&str, &str)]], asked: &PlaceFlags) -> Result<Option<Place>, EngineError> {
    let all = all.iter().copied().flatten().map(|(k, v)| (k.to_string(), v.to_string()));
    place(&all.collect(), asked, &around())
}

fn found(all: &[&[(&str, &str)]], workers: Option<u32>) -> Place {
    find(all, &PlaceFlags { workers, ..PlaceFlags::default() }).expect("right").expect("a task")
}

fn with_role(all: &[&[(&str, &str)]], role: Role) -> Place {
    find(all, &PlaceFlags { role: Some(role), ..PlaceFlags::default() }).expect("right").expect("a task")
}

#[test]
fn engines_are_recognised() {
    let tf: &[(&str, &str)] = &[("TF_CONFIG", TF)];
    let pod: &[(&str, &str)] = &[("JOB_COMPLETION_INDEX", "2"), ("HOSTNAME", "t-w-0-2")];
    // Engine, number of how many, where they meet.
    for (variables, workers, engine, rank, tasks, first, port) in [
        (TORCHRUN, None, "torchrun", 3, 4, "n1", 29_401),
        (SLURM, None, "Slurm", 4, 5, "n03", 12_000 + 17 * 64),
        (pod, Some(3), "an Indexed Job", 2, 3, "t-w-0-0.t.ns.svc.cluster.local", 29_500),
        (LWS, None, "a LeaderWorkerSet", 3, 4, "t-0.t.default", 29_500),
        (tf, None, "TF_CONFIG", 2, 3, "ps-0", 2222),
        (SKYPILOT, None, "SkyPilot", 1, 2, "10.0.0.4", 29_500),
        (DSTACK, None, "dstack", 0, 3, "10.1.0.2", 29_500),
    ] {
        let p = found(&[variables], workers);
        assert_eq!((p.engine, p.rank, p.tasks), (engine, rank, tasks));
        assert_eq!((&*p.first, p.port), (first, port), "{engine}");
    }
    let asked = PlaceFlags { hostfile: Some("/etc/hosts.list".into()), ..PlaceFlags::default() };
    let p = find(&[], &asked).expect("right").expect("a task");
    assert_eq!((p.engine, p.rank, p.tasks, &*p.first, p.port), ("--hostfile", 1, 3, "n1", 29_500));
    let p = found(&[TORCHRUN], None);
    assert_eq!((p.local_rank, p.local_tasks, p.host, p.attempt), (1, 2, 1, 2));
    let p = found(&[SLURM], None);
    assert_eq!((p.local_rank, p.local_tasks, p.host, &*p.id), (0, 1, 2, "17.0"));
    assert_eq!((&*p.node, p.role, p.attempt), ("n05", None, 0));
    let p = found(&[&[("TF_CONFIG", TF)]], None);
    assert_eq!((p.role, &p.servers[..]), (Some(Role::Worker), &["ps-0:2222".into(), "ps-1:2222".into()][..]));
}

#[test]
fn with_a_role_the_number_is_that_of_the_role() {
    let p = with_role(&[ARRAY], Role::Server);
    assert_eq!((p.engine, p.rank, p.tasks, p.attempt), ("Slurm", 2, 3, 1));
    assert_eq!((&*p.id, &*p.node, p.role), ("21", "n6", Some(Role::Server)));
    // Workers that came later, in an array of their own.
    let later: &[(&str, &str)] =
        &[("SLURM_ARRAY_JOB_ID", "25"), ("SLURM_ARRAY_TASK_COUNT", "1"), ("SLURM_ARRAY_TASK_MIN", "2")];
    let p = with_role(&[ARRAY, later], Role::Worker);
    assert_eq!((p.rank, p.tasks, &*p.id), (2, 3, "25"));
    // A single task belongs to a fleet if it has a role, otherwise to no engine.
    assert_eq!(find(&[ARRAY], &PlaceFlags::default()).expect("right"), None);
    let p = with_role(&[SLURM], Role::Worker);
    assert_eq!((p.rank, p.tasks), (4, 5));
    let p = with_role(&[JOBSET], Role::Server);
    assert_eq!((p.engine, p.rank, p.attempt, &*p.id), ("an Indexed Job", 2, 1, "digits"));
}

#[test]
fn a_flag_goes_before_a_variable_and_that_before_an_engine() {
    let own: &[(&str, &str)] =
        &[("PARAFT_INDEX", "1"), ("PARAFT_SERVERS", "a:1, b:1"), ("PARAFT_ATTEMPT", "4")];
    let server = PlaceFlags { role: Some(Role::Server), ..PlaceFlags::default() };
    let p = find(&[ARRAY, own], &server).expect("right").expect("a task");
    assert_eq!((p.role, p.rank, p.attempt, p.servers.len()), (Some(Role::Server), 1, 4, 2));
    let asked = PlaceFlags { role: Some(Role::Worker), index: Some(0), ..PlaceFlags::default() };
    let p = find(&[ARRAY, own], &asked).expect("right").expect("a task");
    assert_eq!((p.role, p.rank, p.engine), (Some(Role::Worker), 0, "Slurm"));
    let p = find(&[own], &server).expect("right").expect("a task");
    assert_eq!((p.engine, p.rank, &*p.node), ("the command", 1, "n2"));
    // What runs inside the other is what is nearest.
    for order in [[SLURM, TORCHRUN], [TORCHRUN, SLURM]] {
        assert_eq!(found(&order, None).engine, "torchrun");
    }
    let far: [&[(&str, &str)]; 5] = [DSTACK, SKYPILOT, LWS, JOBSET, SLURM];
    assert_eq!(found(&far, None).engine, "Slurm");
    assert_eq!(with_role(&far[..4], Role::Server).engine, "an Indexed Job");
    assert_eq!(found(&far[..3], None).engine, "a LeaderWorkerSet");
    assert_eq!(found(&far[..2], None).engine, "SkyPilot");
}

#[test]
fn a_single_process_is_no_engine_task() {
    let none = |all: &[&[(&str, &str)]]| find(all, &PlaceFlags::default()).expect("right");
    assert_eq!(none(&[]), None);
    assert_eq!(none(&[SLURM, &[("SLURM_STEP_ID", "4294967291")]]), None, "the batch script");
    assert_eq!(none(&[SLURM, &[("SLURM_STEP_NUM_TASKS", "1")]]), None);
    assert_eq!(none(&[SKYPILOT, &[("SKYPILOT_NUM_NODES", "1")]]), None);
    assert_eq!(none(&[TORCHRUN, &[("PARAFT_RANK", "3")]]), None, "a script of `paraft launch`");
}

#[test]
fn what_cannot_be_is_refused_with_the_numbers() {
    let wrong = |all: &[(&str, &str)], asked: PlaceFlags, words: &[&str]| {
        let said = find(&[all], &asked).expect_err("wrong").to_string();
        words.iter().for_each(|w| assert!(said.contains(w), "`{w}` is not in {said}"));
    };
    let workers = |n| PlaceFlags { workers: Some(n), ..PlaceFlags::default() };
    let role = |index| PlaceFlags { role: Some(Role::Server), index, ..PlaceFlags::default() };
    wrong(&TORCHRUN[..8], PlaceFlags::default(), &["torchrun", "MASTER_PORT"]);
    wrong(TORCHRUN, workers(2), &["--workers 2", "4 tasks"]);
    wrong(&[("JOB_COMPLETION_INDEX", "1")], PlaceFlags::default(), &["pod 1", "of how many"]);
    wrong(&[("JOB_COMPLETION_INDEX", "3"), ("MASTER_ADDR", "h")], workers(3), &["task 3 of 3"]);
    wrong(&[("JOB_COMPLETION_INDEX", "x")], PlaceFlags::default(), &["`x`", "whole number"]);
    wrong(&[], role(None), &["which server", "--index"]);
    wrong(ARRAY, role(Some(3)), &["task 3 of 3"]);
    wrong(&[("TF_CONFIG", "{")], PlaceFlags::default(), &["TF_CONFIG", "cannot be read"]);
    wrong(&[("SKYPILOT_NODE_RANK", "0")], PlaceFlags::default(), &["SkyPilot", "SKYPILOT_NUM_NODES"]);
}

#[test]
fn lists_of_slurm_are_read() {
    for (list, first) in [
        ("n1", "n1"),
        ("n[1-3]", "n1"),
        ("a,b", "a"),
        ("gpu-[007,9]x,b", "gpu-007x"),
        ("r[1-2]n[05-06]", "r1n05"),
    ] {
        assert_eq!(first_of(list), first, "{list}");
    }
    assert_eq!([0, 2, 3, 4].map(|n| nth("2(x3),1", n)), [Some(2), Some(2), Some(1), None]);
    assert_eq!(nth("x", 0), None);
}
