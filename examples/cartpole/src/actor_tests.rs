//! Fragments of one actor.

use super::*;
use crate::env::MAX_STEPS;

fn random_policy() -> Policy {
    let mut weights = vec![0.0; LEN];
    net::init(3, &mut weights);
    Policy { version: 12, weights, reader: None, reading: None, read: 0 }
}

#[test]
fn fragments_of_one_actor_continue_its_episode() {
    let (policy, mut rng) = (random_policy(), Rng::new(1, 1));
    let mut pole = CartPole::start(&mut rng);
    let (mut steps, mut episodes, mut last) = (0, Vec::new(), None);
    for _ in 0..40 {
        let fragment = play_fragment(&policy, &mut pole, 16, &mut rng);
        assert_eq!((fragment.version, fragment.steps.len()), (12, 16));
        let ends = fragment.steps.iter().filter(|s| s.over).count();
        assert_eq!(ends, fragment.episodes.len(), "no random episode reaches the time limit");
        if let Some((last, false)) = last {
            assert_eq!(fragment.steps[0].observation, last);
        }
        last = Some((fragment.last, fragment.steps[15].over));
        steps += fragment.steps.len() as u32;
        episodes.extend(fragment.episodes);
    }
    assert_eq!(episodes.iter().sum::<u32>() + pole.steps(), steps);
}

#[test]
fn time_limit_ends_a_fragment_and_not_its_value() {
    // Two steps are left: no pole falls so fast from there.
    let (policy, mut rng) = (random_policy(), Rng::new(1, 1));
    let mut pole = CartPole::at([0.0; 4]).after(MAX_STEPS - 2);
    let fragment = play_fragment(&policy, &mut pole, 16, &mut rng);
    assert_eq!((fragment.steps.len(), fragment.episodes), (2, vec![MAX_STEPS]));
    assert!(fragment.steps.iter().all(|s| !s.over));
    assert_ne!(fragment.last, pole.observation(), "the new episode begins elsewhere");
}

#[test]
fn random_policy_has_short_episodes() {
    let mean = evaluate(&random_policy().weights, 200, 7);
    assert!((15.0..35.0).contains(&mean), "mean reward {mean}");
}
