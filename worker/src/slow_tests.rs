//! Tests of `slow`.

use super::*;

#[test]
fn a_step_is_held_up_in_proportion_to_the_one_before() {
    let slower = |factor| Slowdown::new(Slowness { factor, straggle: None }, 1, 0);
    let mut slow = slower(5.0);
    assert_eq!(slow.pause(), Duration::ZERO, "nothing is known of the first");
    slow.step(|| std::thread::sleep(Duration::from_millis(2)));
    assert!(slow.pause() >= Duration::from_millis(8) && slow.pause() == slow.last * 4);
    let mut same = slower(1.0);
    same.step(|| std::thread::sleep(Duration::from_millis(1)));
    assert_eq!(same.pause(), Duration::ZERO);
}

#[test]
fn a_step_that_is_held_up_ends_where_it_is_told_to() {
    let mut slow = Slowdown::new(Slowness { factor: 1000.0, straggle: None }, 1, 0);
    slow.took(Duration::from_secs(3600));
    let looks = std::cell::Cell::new(0);
    slow.hold(|| looks.replace(looks.get() + 1) == 2);
    assert_eq!(looks.get(), 3, "or it would sleep for weeks");
}

#[test]
fn some_steps_straggle_and_each_rank_has_its_own() {
    let straggle: Straggle = "0.25:9x".parse().expect("as it is written");
    let held = |seed, rank| {
        let mut slow = Slowdown::new(Slowness { factor: 2.0, straggle: Some(straggle) }, seed, rank);
        slow.last = Duration::from_millis(1);
        (0..4000).map(|_| slow.pause().as_millis()).collect::<Vec<_>>()
    };
    let pauses = held(1, 0);
    let long = pauses.iter().filter(|p| **p == 17).count();
    assert!((900..1100).contains(&long) && pauses.iter().all(|p| [1, 17].contains(p)), "{long}");
    assert_eq!(held(1, 0), pauses);
    assert_ne!(held(1, 1), pauses);
    assert!("0.25".parse::<Straggle>().is_err() && "2:1x".parse().is_ok_and(|s: Straggle| !s.is_possible()));
    assert_eq!(straggle.to_string(), "0.25:9x");
    assert_eq!(Slowness::of(3.0, Some("0.25:9x")), Ok(Slowness { factor: 3.0, straggle: Some(straggle) }));
    for (factor, straggle) in [(0.5, None), (f64::NAN, None), (1.0, Some("often")), (1.0, Some("2:2x"))] {
        assert!(Slowness::of(factor, straggle).is_err(), "{factor} {straggle:?}");
    }
}
