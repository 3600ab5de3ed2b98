//! The table of what engines set. Slurm's are as recorded of 22.05, torchrun's of torch 2.9, Open MPI's of 4.1.8 and 5.0.11, hydra's of
//! MPICH 5.0.2 and Intel MPI 2021.18; the others as their pages have them.

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

/// Rank 1 of 3 on one host: Open MPI 5 gave it local rank 2, since there were two processors.
const OPEN_MPI: &[(&str, &str)] = &[
    ("OMPI_COMM_WORLD_RANK", "1"),
    ("OMPI_COMM_WORLD_SIZE", "3"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "2"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "3"),
    ("OMPI_COMM_WORLD_NODE_RANK", "2"),
    ("PMIX_RANK", "1"),
    ("PMIX_NAMESPACE", "prterun-vm-16402@1"),
];

/// MPICH's, and Intel MPI's but for the job's name.
const HYDRA: &[(&str, &str)] = &[
    ("PMI_RANK", "2"),
    ("PMI_SIZE", "3"),
    ("PMI_FD", "16"),
    ("MPI_LOCALRANKID", "2"),
    ("MPI_LOCALNRANKS", "3"),
];

const INTEL: (&str, &str) = ("I_MPI_HYDRA_UUID", "3c400000-63f6-49ad-6b61-0600cd06041d");

/// The third rank of six, on the second of three hosts.
const ON_HOSTS: &[(&str, &str)] =
    &[("PMI_RANK", "2"), ("PMI_SIZE", "6"), ("MPI_LOCALRANKID", "0"), ("MPI_LOCALNRANKS", "2")];

const FLUX: &[(&str, &str)] = &[
    ("FLUX_TASK_RANK", "3"),
    ("FLUX_JOB_SIZE", "4"),
    ("FLUX_JOB_NNODES", "2"),
    ("FLUX_TASK_LOCAL_ID", "1"),
    ("FLUX_JOB_ID", "f2GqDq5Z"),
    ("MASTER_ADDR", "n1"),
];

const LSF: &[(&str, &str)] = &[
    ("LSB_JOBID", "71"),
    ("LSB_JOBINDEX", "0"),
    ("LSF_PM_TASKID", "3"),
    ("LSB_DJOB_NUMPROC", "4"),
    ("LSB_MCPU_HOSTS", "n4 2 n5 2"),
];

/// Names and values of environment variables.
type Variables<'v> = &'v [(&'v str, &'v str)];

const HTCONDOR: &[(&str, &str)] =
    &[("_CONDOR_PROCNO", "1"), ("_CONDOR_NPROCS", "2"), ("MASTER_ADDR", "n1"), ("MASTER_PORT", "29400")];

fn around() -> HostContext {
    HostContext {
        hosts: "127.0.0.1 localhost\n10.0.0.7\tt-w-0-2.t.ns.svc.cluster.local\tt-w-0-2\n".into(),
        hostfile: "# of the rack\nn1 slots=2\nn2.rack slots=2\n\nn3\n".into(),
        own: "n2".into(),
        ..HostContext::default()
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

#[test]
fn launchers_of_mpi_and_batch_systems_are_recognised() {
    for (variables, engine, rank, tasks, local, host, first) in [
        (OPEN_MPI, "Open MPI", 1, 3, (2, 3), (0, 1), "127.0.0.1"),
        (FLUX, "Flux", 3, 4, (1, 2), (1, 2), "n1"),
        (LSF, "LSF", 2, 4, (0, 2), (1, 2), "n4"),
        (HTCONDOR, "HTCondor", 1, 2, (0, 1), (1, 2), "n1"),
    ] {
        let p = found(&[variables], None);
        assert_eq!((p.engine, p.rank, p.tasks, &*p.first), (engine, rank, tasks, first));
        assert_eq!(((p.local_rank, p.local_tasks), (p.host, p.hosts)), (local, host), "{engine}");
        assert!(!p.id.is_empty() && p.role.is_none(), "{engine}");
    }
    assert_eq!(found(&[HTCONDOR], None).port, 29_401);
    // All of one job meet at one port, those of the next elsewhere.
    let (one, port) = (found(&[OPEN_MPI], None), batch::port_of("prterun-vm-16402@1"));
    assert_eq!((&*one.id, one.port), ("prterun-vm-16402@1", port));
    assert!((12_000..32_000).contains(&port) && port != batch::port_of("prterun-vm-16402@2"), "{port}");
    assert_eq!(found(&[OPEN_MPI, &[("MASTER_PORT", "29400")]], None).port, 29_401);
    // blaunch starts a task for each host that it is given.
    let p = found(&[LSF, &[("LSF_PM_TASKID", "2")]], Some(2));
    assert_eq!((p.rank, p.tasks, p.local_tasks, p.host), (1, 2, 1, 1));
    assert_eq!(batch::slot("n1 4 n2 2", 5, 6), Some((1, 2, 1, 2)));
    for (list, rank, tasks) in [("n1 4 n2 2", 5, 7), ("n1", 0, 1), ("n1 x", 0, 1), ("", 0, 1)] {
        assert_eq!(batch::slot(list, rank, tasks), None, "{list}");
    }
}

fn with_context(all: &[&[(&str, &str)]], context: &HostContext) -> Result<Option<Place>, EngineError> {
    let all = all.iter().copied().flatten().map(|(k, v)| (k.to_string(), v.to_string()));
    place(&all.collect(), &PlaceFlags::default(), context)
}

#[test]
fn ranks_of_hydra_meet_only_where_all_know_the_job() {
    // On one host by the process that has started them, else by Intel MPI's name.
    let below = HostContext { proxy: Some(77), ..around() };
    let p = with_context(&[HYDRA], &below).expect("right").expect("a task");
    assert_eq!((p.engine, p.rank, p.tasks, &*p.first, &*p.id), ("hydra", 2, 3, "127.0.0.1", "hydra 77"));
    let p = found(&[HYDRA, &[INTEL]], None);
    assert_eq!((&*p.id, p.port), (INTEL.1, batch::port_of(INTEL.1)));
    // On several hosts that process is another on each.
    let said = with_context(&[ON_HOSTS], &below).expect_err("no name").to_string();
    assert!(said.contains("rank 2 of 6") && said.contains("MASTER_PORT"), "{said}");
    let said = with_context(&[ON_HOSTS, &[INTEL]], &below).expect_err("no host").to_string();
    assert!(said.contains("meet") && said.contains("MASTER_ADDR"), "{said}");
    let master: &[(&str, &str)] = &[("MASTER_ADDR", "n7"), ("MASTER_PORT", "29400")];
    let p = found(&[ON_HOSTS, master], None);
    assert_eq!((&*p.first, p.port, p.host, p.hosts), ("n7", 29_401, 1, 3));
    // The batch system around the launcher has both.
    let pbs: &[(&str, &str)] = &[("PBS_JOBID", "12.pbs"), ("PBS_NODEFILE", "/var/aux/12.pbs")];
    let listed = HostContext { allocation: "n3\nn3\nn4\nn4\n".into(), ..around() };
    let p = with_context(&[ON_HOSTS, pbs], &listed).expect("right").expect("a task");
    assert_eq!((&*p.id, &*p.first, p.port), ("12.pbs", "n3", batch::port_of("12.pbs")));
    let p = found(&[ON_HOSTS, &LSF[..2], &LSF[4..]], None);
    assert_eq!((p.engine, &*p.id, &*p.first), ("hydra", "71.0", "n4"));
    let slurm: &[(&str, &str)] = &[("SLURM_JOB_ID", "17"), ("SLURM_JOB_NODELIST", "n[03-05]")];
    let p = found(&[ON_HOSTS, slurm], None);
    assert_eq!((p.engine, &*p.id, &*p.first), ("hydra", "17", "n03"));
    let sge: &[(&str, &str)] = &[("JOB_ID", "9"), ("SGE_TASK_ID", "undefined")];
    let listed = HostContext { allocation: "n8 2 all.q@n8 UNDEFINED\n".into(), ..around() };
    let p = with_context(&[ON_HOSTS, sge], &listed).expect("right").expect("a task");
    assert_eq!((&*p.id, &*p.first), ("9.undefined", "n8"));
}

#[test]
fn a_launcher_inside_of_another_engine_goes_before_it() {
    // mpirun starts its daemons with srun and blaunch: their variables are the daemon's.
    let blaunch: &[(&str, &str)] = &[("LSF_PM_TASKID", "1"), ("LSB_DJOB_NUMPROC", "2"), ("LSB_JOBID", "71")];
    for outer in [SLURM, FLUX, blaunch, SKYPILOT] {
        assert_eq!(found(&[OPEN_MPI, outer], None).engine, "Open MPI");
        assert_eq!(found(&[HYDRA, &[INTEL], outer], None).engine, "hydra");
    }
    for order in [[OPEN_MPI, TORCHRUN], [TORCHRUN, OPEN_MPI]] {
        assert_eq!(found(&order, None).engine, "torchrun");
    }
    assert_eq!(found(&[FLUX, LSF], None).engine, "Flux");
    // What srun and Flux themselves set for MPI programs is no launcher's.
    let pmi2: &[(&str, &str)] =
        &[("PMI_RANK", "4"), ("PMI_SIZE", "5"), ("PMI_FD", "8"), ("PMI_JOBID", "17.0")];
    assert_eq!(found(&[SLURM, pmi2], None).engine, "Slurm");
    let pmix: &[(&str, &str)] = &[("PMIX_RANK", "4"), ("PMIX_NAMESPACE", "slurm.pmix.17.0")];
    assert_eq!(found(&[SLURM, pmix], None).engine, "Slurm");
    let flux: &[(&str, &str)] = &[("PMI_RANK", "3"), ("PMI_SIZE", "4"), ("PMI_FD", "8")];
    assert_eq!(found(&[FLUX, flux], None).engine, "Flux");
    // A flag goes before all.
    let asked = PlaceFlags { hostfile: Some("/etc/hosts.list".into()), ..PlaceFlags::default() };
    let p = find(&[OPEN_MPI], &asked).expect("right").expect("a task");
    assert_eq!(p.engine, "--hostfile");
    let asked = PlaceFlags { role: Some(Role::Server), index: Some(0), ..PlaceFlags::default() };
    let p = find(&[OPEN_MPI], &asked).expect("right").expect("a task");
    assert_eq!((p.engine, p.rank, p.role), ("Open MPI", 0, Some(Role::Server)));
    // With a role the folder of the run is where they meet: no name is needed.
    assert_eq!(
        (with_role(&[ON_HOSTS], Role::Worker).rank, with_role(&[ON_HOSTS], Role::Worker).tasks),
        (2, 6)
    );
}

#[test]
fn a_child_of_rays_actor_goes_before_its_nodes_engine() {
    let ray: &[(&str, &str)] = &[("PARAFT_RAY_NODE", "10.0.0.4")];
    let asked = PlaceFlags { role: Some(Role::Worker), index: Some(5), ..PlaceFlags::default() };
    for node in [SLURM, OPEN_MPI, SKYPILOT] {
        let p = find(&[node, ray], &asked).expect("right").expect("a process");
        assert_eq!((p.engine, p.rank, p.tasks, &*p.node), ("Ray", 5, 0, "10.0.0.4"));
    }
    // Where its script starts a fleet of its own.
    assert_eq!(find(&[ray], &PlaceFlags::default()).expect("right"), None);
}

#[test]
fn a_launcher_that_starts_one_process_is_no_engine() {
    let none = |all: &[&[(&str, &str)]]| find(all, &PlaceFlags::default()).expect("right");
    let alone: &[(&str, &str)] =
        &[("PMI_RANK", "0"), ("PMI_SIZE", "1"), ("MPI_LOCALRANKID", "0"), ("MPI_LOCALNRANKS", "1")];
    assert_eq!(none(&[alone]), None);
    // A batch script of PBS, LSF, Grid Engine: they have started one process.
    let scripts: [&[(&str, &str)]; 3] = [
        &[("PBS_JOBID", "12.pbs"), ("PBS_NODENUM", "0"), ("PBS_TASKNUM", "1"), ("PBS_ARRAY_INDEX", "3")],
        &LSF[..2],
        &[("JOB_ID", "9"), ("SGE_TASK_ID", "2"), ("NSLOTS", "4")],
    ];
    scripts.iter().for_each(|script| assert_eq!(none(&[script]), None, "{script:?}"));
    assert_eq!(none(&[OPEN_MPI, &[("PARAFT_RANK", "1")]]), None, "a script of `paraft launch`");
}

#[test]
fn with_a_role_an_element_of_an_array_has_its_number() {
    let elements: [(Variables, &str, u32, &str); 3] = [
        (&[("PBS_ARRAY_ID", "12[].pbs"), ("PBS_ARRAY_INDEX", "2")], "PBS", 2, "12[].pbs"),
        (&[("LSB_JOBID", "71"), ("LSB_JOBINDEX", "3")], "LSF", 2, "71"),
        (&[("JOB_ID", "9"), ("SGE_TASK_ID", "1")], "Grid Engine", 0, "9"),
    ];
    for (variables, engine, rank, id) in elements {
        let p = with_role(&[variables], Role::Server);
        assert_eq!((p.engine, p.rank, p.tasks, &*p.id), (engine, rank, 0, id));
    }
    let server = PlaceFlags { role: Some(Role::Server), ..PlaceFlags::default() };
    for no_array in [&LSF[..2], &[("JOB_ID", "9"), ("SGE_TASK_ID", "undefined")][..]] {
        let said = find(&[no_array], &server).expect_err("no number").to_string();
        assert!(said.contains("which server"), "{said}");
    }
}

#[test]
fn half_of_what_a_launcher_sets_is_refused_by_name() {
    /// The variables without one, or with another value of it.
    fn without<'a>(
        all: &[(&'a str, &'a str)],
        name: &str,
        value: Option<&'a str>,
    ) -> Vec<(&'a str, &'a str)> {
        let other = |(k, v): &(&'a str, &'a str)| match (*k == name, value) {
            (true, None) => None,
            (true, Some(value)) => Some((*k, value)),
            (false, _) => Some((*k, *v)),
        };
        all.iter().filter_map(other).collect()
    }
    let all: [(Variables, &[&str]); 5] = [
        (
            OPEN_MPI,
            &[
                "OMPI_COMM_WORLD_RANK",
                "OMPI_COMM_WORLD_SIZE",
                "OMPI_COMM_WORLD_LOCAL_RANK",
                "OMPI_COMM_WORLD_LOCAL_SIZE",
            ],
        ),
        (HYDRA, &["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"]),
        (FLUX, &["FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", "FLUX_JOB_ID", "FLUX_JOB_NNODES"]),
        (LSF, &["LSB_JOBID", "LSB_DJOB_NUMPROC"]),
        (HTCONDOR, &["_CONDOR_PROCNO", "_CONDOR_NPROCS"]),
    ];
    for (variables, names) in all {
        for name in names {
            for value in [None, Some("")] {
                let said = find(&[&without(variables, name, value)], &PlaceFlags::default());
                let said = said.expect_err(name).to_string();
                assert!(said.contains(name) && said.contains("not set, or empty"), "{said}");
            }
            for value in ["x", "-1", "1.0", "4294967296"] {
                if matches!(*name, "FLUX_JOB_ID" | "LSB_JOBID") {
                    continue;
                }
                let said = find(&[&without(variables, name, Some(value))], &PlaceFlags::default());
                let said = said.expect_err(name).to_string();
                assert!(said.contains(name) && said.contains("whole number"), "{said}");
            }
        }
    }
    // A rank outside of all.
    for (variables, rank, size) in [
        (OPEN_MPI, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        (OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        (HYDRA, "PMI_RANK", "PMI_SIZE"),
        (HYDRA, "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        (FLUX, "FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
        (HTCONDOR, "_CONDOR_PROCNO", "_CONDOR_NPROCS"),
    ] {
        let wrong = without(&without(variables, rank, Some("7")), size, Some("7"));
        let said = find(&[&wrong], &PlaceFlags::default()).expect_err(rank).to_string();
        assert!(said.contains(rank) && said.contains(size) && said.contains("unset both"), "{said}");
    }
    for (task, why) in [("0", "counts from 1"), ("5", "task 4 of 4")] {
        let said = find(&[&without(LSF, "LSF_PM_TASKID", Some(task))], &PlaceFlags::default());
        let said = said.expect_err(why).to_string();
        assert!(said.contains(why), "{said}");
    }
    // MPICH's gforker, and others that say no more.
    let said = find(&[&[("PMI_RANK", "0"), ("PMI_SIZE", "2")]], &PlaceFlags::default()).expect_err("half");
    assert!(said.to_string().contains("MPI_LOCALRANKID"), "{said}");
}

#[test]
fn a_host_that_a_hostfile_names_for_each_slot_counts_once() {
    let asked = PlaceFlags { hostfile: Some("nodes".into()), ..PlaceFlags::default() };
    let context = HostContext { hostfile: "n1\nn1\nn2\nn2\n".into(), ..around() };
    let p = place(&BTreeMap::new(), &asked, &context).expect("right").expect("a task");
    assert_eq!((p.rank, p.tasks, &*p.first), (1, 2, "n1"));
}
