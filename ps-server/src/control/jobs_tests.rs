//! Jobs and checkpoints in the agreed state: the effects of commands, the bounds, and a complete snapshot.

use super::{
    jobs::{Difference, Job, JobFacts, JobState, MAX_ENDED_JOBS, Submission},
    orders::{MAX_ORDERS, Order},
    state::{Agreed, Command, Outcome, Place, Refusal, Shape, State, UNKNOWN_JOB},
};
use crate::{
    header,
    raft::{RawImage, Replicated},
};
use paraft_common::{
    Durability, JobId, JobShard, Mode, ServerId, ShardId, WorkerId,
    checkpoint::{KnownCheckpoint, MAX_KNOWN_CHECKPOINTS},
};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

fn facts(name: &str) -> JobFacts {
    JobFacts { name: name.into(), mode: Mode::Ssp(4).into(), workers: 3, durability: Durability::QuorumDisk }
}

fn found() -> Command {
    let shape = Shape { shards: 2, replicas: 1, durability: Durability::QuorumMemory };
    Command::Found { fleet: 1, shape, servers: BTreeMap::from([(ServerId(0), "s0:1".into())]) }
}

fn place(shard: u32, founding: u64) -> Command {
    Command::Place {
        shard: JobShard::from_number(shard),
        place: Place { founding, voters: BTreeSet::new(), founded: true },
    }
}

/// The fleet's founding job is on two shards, founded as `founding` and `founding + 1`.
fn job(founding: u64, state: JobState, seen_ms: u64) -> Command {
    runs(JobId(0), "a", founding, state, seen_ms)
}

fn runs(id: JobId, name: &str, founding: u64, state: JobState, seen_ms: u64) -> Command {
    let shards = (founding..).zip(JobShard::all(id, 2)).map(|(founding, shard)| (shard, founding)).collect();
    Command::Job { shards, facts: facts(name), state, seen_ms }
}

fn submission(name: &str, token: u64) -> Submission {
    let shape = Shape { shards: 2, replicas: 1, durability: Durability::QuorumMemory };
    Submission { name: name.into(), token, shape, keep_ms: Some(1000), seen_ms: 1, run: String::new() }
}

/// Submits a job, and returns its id.
fn submit(state: &mut State, name: &str, token: u64) -> JobId {
    match state.apply(&Command::Submit(submission(name, token))) {
        Outcome::Submitted(job) => job,
        other => panic!("{other:?}"),
    }
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
    state
        .jobs
        .begun_as(founding)
        .map(|(_, job)| job)
        .unwrap_or_else(|| panic!("no job {founding} in {:?}", state.jobs))
}

/// Notes what `folder` holds, as the leader of the control group does; returns whether a command was
/// proposed.
fn hold(state: &mut State, founding: u64, folder: &str, held: Vec<KnownCheckpoint>) -> bool {
    let Some(difference) = state.jobs.difference(founding, folder, held) else { return false };
    assert_eq!(state.apply(&Command::Checkpoints { job: founding, difference }), Outcome::Done);
    true
}

fn steps(state: &State, founding: u64) -> Vec<u64> {
    the_job(state, founding).checkpoints.iter().map(|c| c.step).collect()
}

#[test]
fn job_keeps_first_seen_time_and_leaves_generation() {
    let mut state = state([place(0, 10), place(1, 11)]);
    let generation = state.generation;
    state.apply(&job(10, JobState::Running, 5));
    state.apply(&job(10, JobState::Finished, 9));
    let job = the_job(&state, 10);
    assert_eq!((job.state, job.first_seen_ms, job.ended_ms), (JobState::Finished, 5, 9));
    assert_eq!(state.generation, generation, "nothing is routed by it");
    assert_eq!(state.jobs.iter().count(), 1);
}

#[test]
fn a_job_whose_shard_begins_anew_is_lost_unless_it_had_finished() {
    for (before, after) in [(JobState::Running, JobState::Lost), (JobState::Finished, JobState::Finished)] {
        let mut state = state([place(0, 10), place(1, 11), job(10, before, 5)]);
        state.apply(&place(1, 11)); // unchanged: its voters have changed, for example
        assert_eq!(the_job(&state, 10).state, before);
        hold(&mut state, 10, "/c", vec![checkpoint("/c", 7)]);
        state.apply(&place(1, 12));
        assert_eq!(the_job(&state, 10).state, after);
        assert_eq!(steps(&state, 10), [7], "that is what it can go on from");
    }
}

#[test]
fn a_job_that_is_submitted_has_a_number_and_a_name_of_its_own() {
    let mut state = state([]);
    let (generation, a) = (state.generation, submit(&mut state, "b", 1));
    assert_eq!((a, state.generation), (JobId(1), generation + 1), "job 0 is the one of the founding");
    assert_eq!(submit(&mut state, "b", 1), a, "its answer was lost, and it is asked again");
    assert_eq!(state.generation, generation + 1);
    let refused = |state: &mut State, s: Submission| match state.apply(&Command::Submit(s)) {
        Outcome::Refused(why) => why.to_string(),
        other => panic!("{other:?}"),
    };
    let why = refused(&mut state, submission("b", 2));
    assert!(why.contains("job 1 has the name `b` already, and is waiting"), "{why}");
    for name in ["", &"x".repeat(JobFacts::NAME_CHARS + 1)] {
        assert!(refused(&mut state, submission(name, 3)).contains("1 to 200 characters"));
    }
    let even = Shape { replicas: 2, ..submission("c", 4).shape };
    assert!(refused(&mut state, Submission { shape: even, ..submission("c", 4) }).contains("odd"));
    assert_eq!(state.jobs.named("b").map(|(id, _)| id), Some(a));
    assert_eq!(state.jobs.named("x").map(|(id, _)| id), Some(JobId(0)), "nobody has named that one yet");
}

#[test]
fn ended_job_keeps_shards_as_configured_checkpoints_longer() {
    let mut state = state([]);
    let id = submit(&mut state, "b", 1);
    for (founding, shard) in (20..).zip(JobShard::all(id, 2)) {
        let place = Place { founding, voters: BTreeSet::new(), founded: true };
        state.apply(&Command::Place { shard, place });
    }
    assert!(matches!(state.apply(&Command::Release { job: id }), Outcome::Refused(_)), "it has not begun");
    state.apply(&runs(id, "b", 20, JobState::Running, 5));
    hold(&mut state, 20, "/c", vec![checkpoint("/c", 7)]);
    assert!(matches!(state.apply(&Command::Release { job: id }), Outcome::Refused(_)), "it runs");
    state.apply(&runs(id, "b", 20, JobState::Finished, 10));
    let over = |state: &State, at| state.jobs.get(id).is_some_and(|j| j.is_over(at));
    assert_eq!([1009, 1010].map(|at| over(&state, at)), [false, true]);
    let generation = state.generation;
    assert_eq!(state.apply(&Command::Release { job: id }), Outcome::Done);
    assert_eq!((state.shards.len(), state.generation, state.shape_of(id)), (0, generation + 1, None));
    assert_eq!((steps(&state, 20), over(&state, 9999), state.jobs.is_gone(id)), (vec![7], false, true));
    // An older plan no longer places it, and its name is free.
    let place = Place { founding: 30, voters: BTreeSet::new(), founded: false };
    let shard = JobShard::first(id);
    assert!(matches!(state.apply(&Command::Place { shard, place }), Outcome::Refused(_)));
    assert_eq!(submit(&mut state, "b", 2), JobId(2));
    assert_eq!(state.jobs.named("b").map(|(id, _)| id), Some(JobId(2)));
}

#[test]
fn a_job_is_stopped_or_deleted_by_a_persons_word() {
    let mut state = state([]);
    let [a, b] = ["a", "b"].map(|name| submit(&mut state, name, u64::from(name.as_bytes()[0])));
    let stop = |job| Command::Stop { job, now_ms: 50 };
    let word = |state: &State, job| state.jobs.get(job).map(|j| (j.state, j.stopping, j.ended_ms));
    assert_eq!(state.apply(&stop(a)), Outcome::Ended(JobState::Waiting));
    assert_eq!(word(&state, a), Some((JobState::Stopped, true, 50)), "nobody had begun it");
    state.apply(&runs(a, "a", 10, JobState::Running, 55));
    assert_eq!(word(&state, a), Some((JobState::Running, true, 0)), "somebody had: it is told to stop");
    state.apply(&runs(b, "b", 20, JobState::Running, 5));
    assert_eq!(state.apply(&stop(b)), Outcome::Ended(JobState::Running));
    assert_eq!(word(&state, b), Some((JobState::Running, true, 0)), "its workers finish");
    state.apply(&runs(b, "b", 20, JobState::Finished, 60));
    assert_eq!(word(&state, b), Some((JobState::Stopped, true, 60)));
    assert!(
        matches!(state.apply(&stop(b)), Outcome::Refused(why) if why.to_string().contains("stopped already"))
    );
    assert_eq!(state.apply(&Command::Delete { job: b }), Outcome::Ended(JobState::Stopped));
    assert_eq!((word(&state, b), state.jobs.is_gone(b)), (None, true));
    assert!(matches!(state.apply(&Command::Delete { job: b }), Outcome::Refused(_)));
    assert!(!state.jobs.is_gone(JobId(9)), "it may yet come");
}

#[test]
fn order_given_twice_is_done_once_and_says_the_same() {
    let mut state = state([]);
    let mut give = |token, order: &Order| state.apply(&Command::Order { token, order: order.clone() });
    let submit = Order::Submit(submission("b", 7));
    assert_eq!(give(7, &submit), Outcome::Submitted(JobId(1)));
    assert_eq!(give(7, &submit), Outcome::Submitted(JobId(1)));
    let stop = Order::Stop { job: JobId(1), now_ms: 50 };
    assert_eq!([give(8, &stop), give(8, &stop)], [(); 2].map(|()| Outcome::Ended(JobState::Waiting)));
    let delete = Order::Delete { job: JobId(1) };
    assert_eq!(give(9, &delete), Outcome::Ended(JobState::Stopped));
    // Another job takes the name, and the deletion arrives again.
    let next = Order::Submit(submission("b", 10));
    assert_eq!(give(10, &next), Outcome::Submitted(JobId(2)));
    assert_eq!(give(9, &delete), Outcome::Ended(JobState::Stopped));
    assert_eq!(give(11, &delete), Outcome::Refused(Refusal::NoJob(JobId(1))), "another's order");
    assert_eq!(
        give(7, &submit),
        Outcome::Submitted(JobId(1)),
        "it was submitted; that it was deleted since is another matter"
    );
    let forget = Order::Forget { server: ServerId(0) };
    assert_eq!([give(12, &forget), give(12, &forget)], [Outcome::Done, Outcome::Done]);
    assert_eq!(give(13, &forget), Outcome::Refused(Refusal::NoServer(ServerId(0))));
    assert_eq!(state.jobs.iter().map(|(id, _)| id.0).collect::<Vec<_>>(), [0, 2]);
}

#[test]
fn order_that_was_refused_may_be_done_later() {
    let mut state = state([]);
    let drain = Command::Order { token: 5, order: Order::Drain { server: ServerId(1), draining: true } };
    assert_eq!(state.apply(&drain), Outcome::Refused(Refusal::NoServer(ServerId(1))));
    state.apply(&Command::Join { address: "s1:1".into() });
    assert_eq!(state.apply(&drain), Outcome::Done);
    assert!(state.servers[&ServerId(1)].draining);
}

#[test]
fn orders_that_are_kept_are_the_last_ones() {
    let mut state = state([]);
    let drain = |n: u64| Command::Order {
        token: n,
        order: Order::Drain { server: ServerId(0), draining: !n.is_multiple_of(2) },
    };
    let given = MAX_ORDERS as u64 + 5;
    for n in 1..=given {
        state.apply(&drain(n));
    }
    let kept = |state: &State, n| state.orders.of(n).is_some();
    assert_eq!([1, 5, 6, given].map(|n| kept(&state, n)), [false, false, true, true]);
    assert_eq!(state.orders.len(), MAX_ORDERS);
    let image = Agreed::default();
    image.install(&whole(&state)).expect("a snapshot");
    assert_eq!(image.read(|s| s.orders.clone()), state.orders, "a snapshot has them");
}

/// The state as a snapshot holds it.
fn whole(state: &State) -> RawImage {
    RawImage { head: super::format::write(state).expect("written").into(), parts: Vec::new() }
}

#[test]
fn of_the_jobs_without_shards_the_last_ones_stay() {
    let mut state = state([job(1, JobState::Running, 0)]);
    let ended = MAX_ENDED_JOBS as u64 + 5;
    for i in 1..=ended {
        let job = submit(&mut state, "b", i);
        state.apply(&Command::Stop { job, now_ms: i });
        state.apply(&Command::Release { job });
    }
    let listed: Vec<u32> = state.jobs.iter().map(|(id, _)| id.0).collect();
    assert_eq!(listed, std::iter::once(0).chain(6..=ended as u32).collect::<Vec<_>>());
}

#[test]
fn a_folder_says_what_it_holds_and_what_is_gone() {
    let mut state = state([job(10, JobState::Running, 0)]);
    let of = |folder: &str, steps: &[u64]| steps.iter().map(|s| checkpoint(folder, *s)).collect::<Vec<_>>();
    assert!(hold(&mut state, 10, "/c", of("/c", &[3, 1, 2])));
    assert!(hold(&mut state, 10, "/other", of("/other", &[2])));
    assert!(!hold(&mut state, 10, "/c", of("/c", &[1, 2, 3])), "nothing is new: nothing is proposed");
    assert_eq!(steps(&state, 10), [1, 2, 2, 3], "the latest last");
    assert!(hold(&mut state, 10, "/c", of("/c", &[3, 4])), "as after keep = 2");
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
    state.apply(&place(1, 12));
    let next = submit(&mut state, "b", 1);
    state.apply(&runs(next, "b", 20, JobState::Running, 1));
    assert_eq!((the_job(&state, 10).state, steps(&state, 10)), (JobState::Lost, vec![1, 2, 3, 4]));

    // The job continued from step 3: it writes step 4 again, then the oldest ones go, and another one is the
    // best.
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
    // Including those that the reporting job never listed.
    assert!(hold(&mut state, 20, "/other", Vec::new()));
    assert_eq!((steps(&state, 10), steps(&state, 20)), (vec![3], vec![3, 4]));
}

#[test]
fn checkpoint_writer_and_loss_survive_another_jobs_report() {
    let mut state = state([job(10, JobState::Running, 0)]);
    let known = KnownCheckpoint { loss: Some(0.5), best: true, ..checkpoint("/c", 1) };
    hold(&mut state, 10, "/c", vec![known.clone()]);
    let other = KnownCheckpoint { worker: None, loss: None, ..known.clone() };
    assert!(!hold(&mut state, 10, "/c", vec![other.clone()]), "it knows less, and nothing else");
    assert_eq!(the_job(&state, 10).checkpoints, [known]);
    // Written again, it is another checkpoint.
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
    assert_eq!(refused, Outcome::Refused(Refusal::Other(UNKNOWN_JOB.into())));
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
        (0u64..9, 0u64..9).prop_map(|(name, token)| Command::Submit(submission(&name.to_string(), token))),
        (0u32..12, 0u64..400, prop::sample::select(states.to_vec())).prop_map(|(id, o, s)| runs(
            JobId(id),
            &id.to_string(),
            10 * o,
            s,
            o
        )),
        (0u32..12).prop_map(|id| Command::Stop { job: JobId(id), now_ms: 7 }),
        (0u32..12).prop_map(|id| Command::Release { job: JobId(id) }),
        (0u64..9, 0u32..12)
            .prop_map(|(token, id)| Command::Order { token, order: Order::Delete { job: JobId(id) } }),
        (0u32..12).prop_map(|id| Command::Delete { job: JobId(id) }),
        (0u32..12, 0u32..2, 0u64..400).prop_map(|(id, s, founding)| {
            let shard = JobShard::new(JobId(id), ShardId(s)).expect("a shard");
            Command::Place { shard, place: Place { founding, voters: BTreeSet::new(), founded: false } }
        }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// A replica that starts from a snapshot in the middle of the log equals one that applied all entries,
    /// bit for bit.
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
                for (_, j) in s.jobs.iter() {
                    assert!(j.checkpoints.len() <= MAX_KNOWN_CHECKPOINTS);
                    assert!(j.checkpoints.is_sorted_by_key(|c| c.written_ms), "the latest last");
                    let paths: BTreeSet<_> = j.checkpoints.iter().map(|c| &c.path).collect();
                    assert_eq!(paths.len(), j.checkpoints.len(), "each once");
                }
                assert!(s.jobs.iter().filter(|(_, j)| j.released).count() <= MAX_ENDED_JOBS);
                let held = |shard: &JobShard| s.shape_of(shard.job()).is_some_and(|of| shard.shard().0 < of.shards);
                assert!(s.shards.keys().all(held), "{:?}", s.shards);
            });
        }
        prop_assert_eq!(whole.get(), late.get());
        prop_assert_eq!(whole.image().into_digest(), late.image().into_digest());
    }
}

#[test]
fn snapshot_of_another_build_is_refused_and_changes_nothing() {
    let agreed = Agreed::default();
    agreed.apply(&found()).expect("applied");
    let before = agreed.get();
    let image = agreed.image();
    let (format, state): (u16, Vec<u8>) = header::decode(&image.head).expect("a header");
    for other in [0, format + 1] {
        let head = header::encode(&(other, &state)).expect("a header").into();
        let format = format!("format {other}");
        let refused = agreed.install(&RawImage { head, parts: Vec::new() }).expect_err("of another build");
        let said = refused.text();
        assert!(said.contains(&format) && said.contains("the build that wrote it"), "{refused}");
    }
    assert_eq!(agreed.get(), before);
    agreed.install(&image).expect("its own");
}
