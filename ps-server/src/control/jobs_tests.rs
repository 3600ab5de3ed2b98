//! Jobs and checkpoints in the agreed state: what commands do to it, its bounds, and that a snapshot holds all of it.

use super::{
    jobs::{Difference, Job, JobFacts, JobState, MAX_ENDED_JOBS, Retired},
    state::{Agreed, Command, Outcome, Place, Shape, State, UNKNOWN_JOB},
};
use crate::{
    header,
    raft::{RawImage, Replicated},
};
use paraft_common::{
    Durability, Mode, ServerId, ShardId, WorkerId,
    checkpoint::{KnownCheckpoint, MAX_KNOWN_CHECKPOINTS},
};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

fn facts(name: &str) -> JobFacts {
    JobFacts {
        name: name.into(),
        mode: Mode::Ssp(4).into(),
        workers: 3,
        durability: Durability::QuorumDisk,
        log: Retired,
    }
}

fn found() -> Command {
    let shape = Shape { shards: 2, replicas: 1, durability: Durability::QuorumMemory };
    Command::Found { fleet: 1, shape, servers: BTreeMap::from([(ServerId(0), "s0:1".into())]) }
}

fn place(shard: u32, founding: u64) -> Command {
    Command::Place {
        shard: ShardId(shard),
        place: Place { founding, voters: BTreeSet::new(), founded: true },
    }
}

/// A job on two shards, founded as `founding` and the number after it.
fn job(founding: u64, state: JobState, seen_ms: u64) -> Command {
    let shards = BTreeMap::from([(ShardId(0), founding), (ShardId(1), founding + 1)]);
    Command::Job { shards, facts: facts("a"), state, seen_ms }
}

fn checkpoint(folder: &str, step: u64) -> KnownCheckpoint {
    KnownCheckpoint {
        path: format!("{folder}/step-{step}"),
        step,
        versions: (step, step + 2),
        bytes: 100,
        loss: None,
        written_ms: 1000 * step,
        worker: Some(WorkerId(1)),
        best: false,
    }
}

fn state(commands: impl IntoIterator<Item = Command>) -> State {
    let mut state = State::default();
    state.apply(&found());
    for c in commands {
        assert_eq!(state.apply(&c), Outcome::Done, "{c:?}");
    }
    state
}

fn the_job(state: &State, founding: u64) -> &Job {
    state.jobs.get(founding).unwrap_or_else(|| panic!("no job {founding} in {:?}", state.jobs))
}

/// Tells what `folder` holds, as the leader of the control group takes it; gives whether anything was proposed.
fn hold(state: &mut State, founding: u64, folder: &str, held: Vec<KnownCheckpoint>) -> bool {
    let Some(difference) = state.jobs.difference(founding, folder, held) else { return false };
    assert_eq!(state.apply(&Command::Checkpoints { job: founding, difference }), Outcome::Done);
    true
}

fn steps(state: &State, founding: u64) -> Vec<u64> {
    the_job(state, founding).checkpoints.iter().map(|c| c.step).collect()
}

#[test]
fn a_job_keeps_when_it_was_first_seen_and_does_not_touch_the_generation() {
    let mut state = state([place(0, 10), place(1, 11)]);
    let generation = state.generation;
    state.apply(&job(10, JobState::Running, 5));
    state.apply(&job(10, JobState::Finished, 9));
    let job = the_job(&state, 10);
    assert_eq!((job.state, job.first_seen_ms, &job.facts), (JobState::Finished, 5, &facts("a")));
    assert_eq!(state.generation, generation, "nothing is routed by it");
    assert_eq!(state.jobs.iter().count(), 1);
}

#[test]
fn a_job_whose_shard_begins_anew_is_lost_unless_it_had_finished() {
    for (before, after) in [(JobState::Running, JobState::Lost), (JobState::Finished, JobState::Finished)] {
        let mut state = state([place(0, 10), place(1, 11), job(10, before, 5)]);
        state.apply(&place(1, 11)); // as it was: its voters have changed, say
        assert_eq!(the_job(&state, 10).state, before);
        hold(&mut state, 10, "/c", vec![checkpoint("/c", 7)]);
        state.apply(&place(1, 12));
        assert_eq!(the_job(&state, 10).state, after);
        assert_eq!(steps(&state, 10), [7], "that is what it can go on from");
    }
}

#[test]
fn the_last_jobs_that_have_ended_stay_and_the_one_that_runs() {
    let mut state = state([job(1, JobState::Running, 0)]);
    let ended = MAX_ENDED_JOBS as u64 + 5;
    for i in 0..ended {
        state.apply(&job(100 + 10 * i, JobState::Finished, i));
    }
    let listed: Vec<u64> = state.jobs.iter().map(Job::founding).collect();
    let last = (5..ended).map(|i| 100 + 10 * i);
    assert_eq!(listed, std::iter::once(1).chain(last).collect::<Vec<_>>());
}

#[test]
fn a_folder_says_what_it_holds_and_what_is_gone() {
    let mut state = state([job(10, JobState::Running, 0)]);
    let of = |folder: &str, steps: &[u64]| steps.iter().map(|s| checkpoint(folder, *s)).collect::<Vec<_>>();
    assert!(hold(&mut state, 10, "/c", of("/c", &[3, 1, 2])));
    assert!(hold(&mut state, 10, "/other", of("/other", &[2])));
    assert!(!hold(&mut state, 10, "/c", of("/c", &[1, 2, 3])), "nothing is new: nothing is proposed");
    assert_eq!(steps(&state, 10), [1, 2, 2, 3], "the latest last");
    assert!(hold(&mut state, 10, "/c", of("/c", &[3, 4])), "as after num_to_keep = 2");
    assert_eq!(steps(&state, 10), [2, 3, 4], "the other folder's stays");
    let latest = the_job(&state, 10).latest().expect("there is one");
    assert_eq!((latest.step, latest.path.as_str()), (4, "/c/step-4"));
}

#[test]
fn what_is_gone_from_a_folder_is_gone_from_every_job() {
    let of = |steps: &[u64]| steps.iter().map(|s| checkpoint("/c", *s)).collect::<Vec<_>>();
    let mut state = state([place(0, 10), place(1, 11), job(10, JobState::Running, 0)]);
    let best = KnownCheckpoint { best: true, ..checkpoint("/c", 2) };
    hold(&mut state, 10, "/c", vec![best, checkpoint("/c", 3), checkpoint("/c", 4)]);
    hold(&mut state, 10, "/other", vec![checkpoint("/other", 1)]);
    [place(0, 20), place(1, 21), job(20, JobState::Running, 1)].iter().for_each(|c| _ = state.apply(c));
    assert_eq!((the_job(&state, 10).state, steps(&state, 10)), (JobState::Lost, vec![1, 2, 3, 4]));

    // It went on from step 3: step 4 is written anew, then the oldest go, and another is the best.
    let anew = KnownCheckpoint { written_ms: 9000, ..checkpoint("/c", 4) };
    let known = |state: &State| the_job(state, 20).checkpoints.clone();
    assert!(hold(&mut state, 20, "/c", [of(&[2, 3]), vec![anew.clone()]].concat()));
    assert_eq!(steps(&state, 10), [1, 2, 3], "the step 4 that is there is not its own");
    assert_eq!(the_job(&state, 10).latest().map(|c| c.step), Some(3));
    assert!(the_job(&state, 10).checkpoints.iter().all(|c| !c.best), "what is the best one is the folder's");
    assert_eq!(known(&state), [of(&[2, 3]), vec![anew.clone()]].concat());
    assert!(hold(&mut state, 20, "/c", vec![checkpoint("/c", 3), anew.clone()]));
    assert_eq!(steps(&state, 10), [1, 3], "the other folder's stays");
    assert!(!hold(&mut state, 20, "/c", vec![checkpoint("/c", 3), anew]), "told: nothing is proposed");
    // Also what the job that tells never listed.
    assert!(hold(&mut state, 20, "/other", Vec::new()));
    assert_eq!((steps(&state, 10), steps(&state, 20)), (vec![3], vec![3, 4]));
}

#[test]
fn who_wrote_a_checkpoint_and_its_loss_are_not_forgotten_when_another_tells() {
    let mut state = state([job(10, JobState::Running, 0)]);
    let known = KnownCheckpoint { loss: Some(0.5), best: true, ..checkpoint("/c", 1) };
    hold(&mut state, 10, "/c", vec![known.clone()]);
    let other = KnownCheckpoint { worker: None, loss: None, ..known.clone() };
    assert!(!hold(&mut state, 10, "/c", vec![other.clone()]), "it knows less, and nothing else");
    assert_eq!(the_job(&state, 10).checkpoints, [known]);
    // Written anew, it is another checkpoint.
    let anew = KnownCheckpoint { written_ms: 2_000_000, ..other };
    assert!(hold(&mut state, 10, "/c", vec![anew.clone()]));
    assert_eq!(the_job(&state, 10).checkpoints, [anew]);
}

#[test]
fn the_newest_checkpoints_and_the_best_stay() {
    let mut state = state([job(10, JobState::Running, 0)]);
    let best = KnownCheckpoint { best: true, ..checkpoint("/a", 1) };
    hold(&mut state, 10, "/a", vec![best, checkpoint("/a", 2)]);
    for from in [10, 50, 90] {
        let folder = format!("/{from}");
        hold(&mut state, 10, &folder, (from..from + 40).map(|s| checkpoint(&folder, s)).collect());
    }
    let kept = steps(&state, 10);
    assert_eq!(kept.len(), MAX_KNOWN_CHECKPOINTS);
    assert_eq!((kept[0], *kept.last().expect("some")), (1, 129));
    assert!(kept[1..].iter().zip(67..).all(|(a, b)| *a == b), "the newest: {kept:?}");
    let old = (10..50).map(|s| checkpoint("/10", s)).collect();
    assert!(
        !hold(&mut state, 10, "/10", old),
        "what would be let go at once is not proposed again and again"
    );
}

#[test]
fn checkpoints_of_a_job_that_is_not_known_are_refused() {
    let mut state = state([job(10, JobState::Running, 0)]);
    let difference = Difference { held: vec![checkpoint("/c", 1)], gone: Vec::new() };
    let refused = state.apply(&Command::Checkpoints { job: 11, difference });
    assert_eq!(refused, Outcome::Refused(UNKNOWN_JOB.into()));
}

fn a_command() -> impl Strategy<Value = Command> {
    let one = (0u64..200, 0u64..4, any::<bool>(), prop::option::of(0.0f64..9.0));
    let one = one.prop_map(|(step, folder, best, loss)| KnownCheckpoint {
        best,
        loss,
        ..checkpoint(&format!("/{folder}"), step)
    });
    let gone = (0u64..200, 0u64..4).prop_map(|(step, folder)| format!("/{folder}/step-{step}"));
    let states = [JobState::Running, JobState::Finished, JobState::Lost];
    prop_oneof![
        (0u64..40, prop::sample::select(states.to_vec()), any::<u64>()).prop_map(|(o, s, ms)| job(
            10 * o,
            s,
            ms
        )),
        (0u64..40, prop::collection::vec(one, 0..70), prop::collection::vec(gone, 0..9)).prop_map(
            |(o, held, gone)| Command::Checkpoints { job: 10 * o, difference: Difference { held, gone } }
        ),
        (0u32..2, 0u64..400).prop_map(|(s, o)| place(s, o)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// A replica that gets a snapshot in the middle of the log, and one that applied it all, are the same to the bit.
    #[test]
    fn a_replica_that_began_with_a_snapshot_is_like_the_others(
        commands in prop::collection::vec(a_command(), 1..60), at in any::<prop::sample::Index>(),
    ) {
        let (whole, late) = (Agreed::default(), Agreed::default());
        whole.apply(&found()).expect("applied");
        let at = at.index(commands.len());
        for (i, c) in commands.into_iter().enumerate() {
            if i == at {
                late.install(&whole.image()).expect("its own snapshot");
            }
            let told = whole.apply(&c);
            if i >= at {
                prop_assert_eq!(told, late.apply(&c));
            }
            whole.read(|s| {
                for j in s.jobs.iter() {
                    assert!(j.checkpoints.len() <= MAX_KNOWN_CHECKPOINTS);
                    assert!(j.checkpoints.is_sorted_by_key(|c| c.written_ms), "the latest last");
                    let paths: BTreeSet<_> = j.checkpoints.iter().map(|c| &c.path).collect();
                    assert_eq!(paths.len(), j.checkpoints.len(), "each once");
                }
                assert!(s.jobs.iter().filter(|j| j.state != JobState::Running).count() <= MAX_ENDED_JOBS);
            });
        }
        prop_assert_eq!(whole.get(), late.get());
        prop_assert_eq!(whole.image().digest(), late.image().digest());
    }
}

#[test]
fn a_snapshot_of_another_build_is_refused_by_name_and_changes_nothing() {
    let agreed = Agreed::default();
    agreed.apply(&found()).expect("applied");
    let before = agreed.get();
    let image = agreed.image();
    let (format, state): (u16, Vec<u8>) = header::decode(&image.head).expect("a header");
    for other in [1, format + 1] {
        let head = header::encode(&(other, &state)).expect("a header").into();
        let format = format!("format {other}");
        let refused = agreed.install(&RawImage { head, parts: Vec::new() }).expect_err("of another build");
        let said = refused.text();
        assert!(said.contains(&format) && said.contains("the build that wrote it"), "{refused}");
    }
    assert_eq!(agreed.get(), before);
    agreed.install(&image).expect("its own");
}

#[test]
fn a_snapshot_of_the_release_before_is_read() {
    let agreed = Agreed::default();
    agreed.apply(&found()).expect("applied");
    let s = agreed.get();
    // Format 2 was format 3 without its last field.
    let old = (s.fleet, s.generation, s.shape, s.servers.clone(), s.shards.clone(), s.jobs.clone());
    let old = header::encode(&old).expect("a state");
    let head = header::encode(&(2u16, old)).expect("a header").into();
    let fresh = Agreed::default();
    fresh.install(&RawImage { head, parts: Vec::new() }).expect("format 2");
    assert_eq!(fresh.get(), s);
}
