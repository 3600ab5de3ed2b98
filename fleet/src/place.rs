//! What a process is among the tasks of an engine: torchrun's worker, a Slurm step's task, an Indexed Job's pod (JobSet's too).
//!
//! It is read from the variables that the engine sets, and nothing else is asked. One task alone is no engine's: it launches
//! a fleet on its machine as anywhere. Of several none may, or each would train for itself.

use crate::failure::Failure;
use paraft_worker::exit;

/// A task among those that an engine has started for one command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// As people call it.
    pub engine: &'static str,
    /// What the tasks of one command have in common, and those of no other.
    pub id: String,
    /// From 0.
    pub rank: u32,
    /// How many there are.
    pub tasks: u32,
    /// Among the tasks of this host.
    pub local_rank: u32,
    /// Tasks of this host.
    pub local_tasks: u32,
    /// Which host, from 0.
    pub host: u32,
    /// How many hosts there are.
    pub hosts: u32,
    /// The host of task 0.
    pub first: String,
    /// Where on that host the tasks meet.
    pub port: u16,
}

/// Torch's own, where nobody has said another.
const USUAL_PORT: u16 = 29_500;

/// By variables; `workers` are those that the user has asked for, `hosts` is what `/etc/hosts` has.
pub fn find(
    variable: impl Fn(&str) -> Option<String>,
    workers: Option<u32>,
    hosts: &str,
) -> Result<Option<Place>, Failure> {
    let variable = |name: &str| variable(name).filter(|v| !v.is_empty());
    // In a script of `paraft launch` the variables of engines are of the launcher's surroundings.
    if variable("PARAFT_RANK").is_some() {
        return Ok(None);
    }
    let number = |name: &str| match variable(name).map(|text| (text.parse::<u32>(), text)) {
        None => Ok(None),
        Some((Ok(n), _)) => Ok(Some(n)),
        Some((Err(_), text)) => {
            Err(Failure::new(exit::USAGE, format!("{name} is `{text}`; it is a whole number")))
        }
    };
    let needs = |engine: &str, name: &str| {
        let why = format!("this is {engine}'s task, and {name} is not set");
        Failure::new(exit::USAGE, why).help(format!(
            "set {name}, or start it without {engine}'s variables for a fleet on this machine alone"
        ))
    };
    // The script's own processes open that port, or torchrun has.
    let beside =
        || Ok::<_, Failure>(number("MASTER_PORT")?.and_then(|p| u16::try_from(p.saturating_add(1)).ok()));
    let place = if let Some(id) = variable("TORCHELASTIC_RUN_ID") {
        let engine = "torchrun";
        let of = |name: &str| number(name)?.ok_or_else(|| needs(engine, name));
        Place {
            engine,
            id,
            rank: of("RANK")?,
            tasks: of("WORLD_SIZE")?,
            local_rank: of("LOCAL_RANK")?,
            local_tasks: of("LOCAL_WORLD_SIZE")?,
            host: of("GROUP_RANK")?,
            hosts: number("GROUP_WORLD_SIZE")?.unwrap_or(1),
            first: variable("MASTER_ADDR").ok_or_else(|| needs(engine, "MASTER_ADDR"))?,
            port: beside()?.ok_or_else(|| needs(engine, "MASTER_PORT"))?,
        }
    } else if let Some(rank) = number("JOB_COMPLETION_INDEX")? {
        let engine = "an Indexed Job";
        let tasks = workers.map_or_else(|| number("WORLD_SIZE"), |n| Ok(Some(n)))?;
        let tasks = tasks.ok_or_else(|| {
            let why = format!("this is pod {rank} of an Indexed Job, and nothing says of how many");
            Failure::new(exit::USAGE, why)
                .help("add --workers N, the Job's completions; for a fleet in each pod: env -u JOB_COMPLETION_INDEX paraft launch ...")
        })?;
        let first = variable("MASTER_ADDR")
            .or_else(|| first_pod(&variable("HOSTNAME")?, rank, hosts))
            .ok_or_else(|| needs(engine, "MASTER_ADDR"))?;
        // The pods of one Job have their service's name to themselves.
        let port = beside()?.unwrap_or(USUAL_PORT);
        Place {
            engine,
            id: first.clone(),
            rank,
            tasks,
            local_rank: 0,
            local_tasks: 1,
            host: rank,
            hosts: tasks,
            first,
            port,
        }
    } else if let Some(step) = number("SLURM_STEP_ID")?.filter(|step: &u32| *step < NO_STEP) {
        let engine = "Slurm";
        let of = |name: &str| number(name)?.ok_or_else(|| needs(engine, name));
        let host = of("SLURM_NODEID")?;
        let job = of("SLURM_JOB_ID")?;
        let nodes = variable("SLURM_STEP_NODELIST").ok_or_else(|| needs(engine, "SLURM_STEP_NODELIST"))?;
        let on_each = variable("SLURM_STEP_TASKS_PER_NODE")
            .ok_or_else(|| needs(engine, "SLURM_STEP_TASKS_PER_NODE"))?;
        Place {
            engine,
            id: format!("{job}.{step}"),
            rank: of("SLURM_PROCID")?,
            tasks: of("SLURM_STEP_NUM_TASKS")?,
            local_rank: of("SLURM_LOCALID")?,
            local_tasks: nth(&on_each, host).unwrap_or(1),
            host,
            hosts: number("SLURM_STEP_NUM_NODES")?.unwrap_or(1),
            first: first_of(&nodes),
            // Another for each step that may run on the same node, below the ports that the kernel gives away.
            port: beside()?.unwrap_or(12_000 + (job.wrapping_mul(64).wrapping_add(step) % 20_000) as u16),
        }
    } else {
        return Ok(None);
    };
    if place.tasks < 2 {
        return Ok(None);
    }
    if place.rank >= place.tasks {
        let why =
            format!("{} says that this is task {} of {}, from 0", place.engine, place.rank, place.tasks);
        return Err(Failure::new(exit::USAGE, why));
    }
    if let Some(asked) = workers.filter(|n| *n != place.tasks) {
        let why = format!("--workers {asked}, and {} has started {} tasks", place.engine, place.tasks);
        return Err(Failure::new(exit::USAGE, why)
            .help("each task is one worker: leave --workers out, or start as many tasks"));
    }
    Ok(Some(place))
}

/// From here on Slurm numbers what is no step of `srun`'s: the batch script, a shell.
const NO_STEP: u32 = 0xffff_fff0;

/// The first host of a list as Slurm writes it: `n[03-05,9],m1` begins with `n03`.
fn first_of(list: &str) -> String {
    let mut first = String::new();
    let mut rest = list.chars();
    while let Some(c) = rest.next() {
        match c {
            ',' => break,
            '[' => {
                let inside: String = rest.by_ref().take_while(|c| *c != ']').collect();
                first.extend(inside.chars().take_while(|c| *c != ',' && *c != '-'));
            }
            _ => first.push(c),
        }
    }
    first
}

/// Of a list like `2(x3),1`, that of the node.
fn nth(list: &str, node: u32) -> Option<u32> {
    let mut before = 0;
    for part in list.split(',') {
        let (tasks, times) = part.split_once("(x").unwrap_or((part, "1)"));
        before += times.trim_end_matches(')').parse::<u32>().ok()?;
        if node < before {
            return tasks.parse().ok();
        }
    }
    None
}

/// The name of pod 0 as the others find it: that of this pod with another number, in the domain of its headless service, which
/// is in the hosts file of a pod that has one.
fn first_pod(own: &str, index: u32, hosts: &str) -> Option<String> {
    let stem = own.strip_suffix(&format!("-{index}"))?;
    let whole = |line: &str| {
        let mut names = line.split('#').next()?.split_whitespace().skip(1);
        let domain = names.find_map(|name| name.strip_prefix(own)?.strip_prefix('.'))?;
        Some(format!("{stem}-0.{domain}"))
    };
    Some(hosts.lines().find_map(whole).unwrap_or_else(|| format!("{stem}-0")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(variables: &[(&str, &str)], workers: Option<u32>) -> Result<Option<Place>, Failure> {
        let get =
            |name: &str| variables.iter().rev().find(|(key, _)| *key == name).map(|(_, v)| v.to_string());
        find(get, workers, "127.0.0.1 localhost\n10.0.0.7\tt-w-0-2.t.ns.svc.cluster.local\tt-w-0-2\n")
    }

    const TORCHRUN: [(&str, &str); 8] = [
        ("TORCHELASTIC_RUN_ID", "none"),
        ("RANK", "3"),
        ("WORLD_SIZE", "4"),
        ("LOCAL_RANK", "1"),
        ("LOCAL_WORLD_SIZE", "2"),
        ("GROUP_RANK", "1"),
        ("MASTER_ADDR", "n1"),
        ("MASTER_PORT", "29400"),
    ];

    // As recorded of srun in Slurm 22.05.
    const SLURM: [(&str, &str); 9] = [
        ("SLURM_JOB_ID", "17"),
        ("SLURM_STEP_ID", "0"),
        ("SLURM_PROCID", "4"),
        ("SLURM_STEP_NUM_TASKS", "5"),
        ("SLURM_LOCALID", "0"),
        ("SLURM_NODEID", "2"),
        ("SLURM_STEP_NODELIST", "n[03-05]"),
        ("SLURM_STEP_TASKS_PER_NODE", "2(x2),1"),
        ("SLURM_NTASKS", "5"),
    ];

    #[test]
    fn engines_are_recognised() {
        let place = found(&TORCHRUN, None).expect("right").expect("a task");
        assert_eq!((place.engine, place.rank, place.tasks), ("torchrun", 3, 4));
        assert_eq!((place.local_rank, place.local_tasks, place.host), (1, 2, 1));
        assert_eq!((&*place.first, place.port), ("n1", 29_401));

        let place = found(&SLURM, None).expect("right").expect("a task");
        assert_eq!((place.engine, place.rank, place.tasks, &*place.first), ("Slurm", 4, 5, "n03"));
        assert_eq!((place.local_rank, place.local_tasks, place.host), (0, 1, 2));
        assert_eq!((&*place.id, place.port), ("17.0", 12_000 + 17 * 64));

        let pod = [("JOB_COMPLETION_INDEX", "2"), ("HOSTNAME", "t-w-0-2")];
        let place = found(&pod, Some(3)).expect("right").expect("a task");
        assert_eq!((place.rank, place.tasks, &*place.first), (2, 3, "t-w-0-0.t.ns.svc.cluster.local"));

        // torchrun within a step is what is nearest.
        let both: Vec<_> = SLURM.iter().chain(&TORCHRUN).copied().collect();
        assert_eq!(found(&both, None).expect("right").expect("a task").engine, "torchrun");
    }

    #[test]
    fn one_process_alone_is_nobodys_task() {
        let with = |all: &[(&'static str, &'static str)], more: (&'static str, &'static str)| {
            let all: Vec<_> = all.iter().copied().chain([more]).collect();
            found(&all, None).expect("right")
        };
        assert_eq!(found(&[], None).expect("right"), None);
        assert_eq!(with(&SLURM, ("SLURM_STEP_ID", "4294967291")), None, "the batch script");
        assert_eq!(with(&SLURM, ("SLURM_STEP_NUM_TASKS", "1")), None);
        assert_eq!(with(&TORCHRUN, ("PARAFT_RANK", "3")), None, "a script of `paraft launch`");
    }

    #[test]
    fn what_cannot_be_is_refused_with_the_numbers() {
        let wrong = |all: &[(&str, &str)], workers, words: &[&str]| {
            let said = found(all, workers).expect_err("wrong").message().to_string();
            words.iter().for_each(|w| assert!(said.contains(w), "`{w}` is not in {said}"));
        };
        wrong(&TORCHRUN[..7], None, &["torchrun", "MASTER_PORT"]);
        wrong(&TORCHRUN, Some(2), &["--workers 2", "4 tasks"]);
        wrong(&[("JOB_COMPLETION_INDEX", "1")], None, &["pod 1", "of how many"]);
        wrong(&[("JOB_COMPLETION_INDEX", "3"), ("MASTER_ADDR", "h")], Some(3), &["task 3 of 3"]);
        wrong(&[("JOB_COMPLETION_INDEX", "x")], None, &["`x`", "whole number"]);
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
}
