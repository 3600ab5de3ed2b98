//! CartPole against Gymnasium.

use super::*;

/// `env.reset(seed=42)` of Gymnasium 1.2.0.
const START_42: [f64; 4] =
    [0.027395604855596334, -0.006112156024794771, 0.03585979199113824, 0.019736802905936393];
/// The actions of an episode of Gymnasium 1.2.0: a rule for 40 steps, then pushes to the right.
const ACTIONS_42: &str = "1010101010101010101010101010101101010101111111111";
/// Its states after some of the steps, counted from 1.
const STATES_42: [(u32, [f64; 4]); 6] = [
    (1, [0.02727336173510044, 0.18847766618842926, 0.03625452804925697, -0.26141976017845603]),
    (2, [0.031042915058869025, -0.007142550327267516, 0.031026132845687848, 0.04247424107791564]),
    (10, [0.04528008310146071, -0.010175937388360756, 0.019467041000134567, 0.10938857458681445]),
    (25, [0.06896689724666773, 0.18079274340717713, 0.024040190470867733, -0.09171981845016952]),
    (40, [0.1263359088068972, 0.3710310585012289, 0.007685350458537431, -0.2766569832269417]),
    (49, [0.333786745458444, 2.1315146099889497, -0.25830925970194984, -3.0879576675335088]),
];

fn assert_close(ours: [f64; 4], theirs: [f64; 4]) {
    let far = ours.iter().zip(theirs).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    assert!(far < 1e-12, "{ours:?} and {theirs:?} differ by {far}");
}

#[test]
fn episode_has_the_states_of_gymnasium() {
    let mut pole = CartPole::at(START_42);
    let mut end = None;
    for action in ACTIONS_42.bytes() {
        assert_eq!(end, None, "after {} steps", pole.steps());
        end = pole.step(action == b'1');
        if let Some((_, state)) = STATES_42.iter().find(|(step, _)| *step == pole.steps()) {
            assert_close(pole.state, *state);
        }
    }
    assert_eq!((end, pole.steps()), (Some(End::Fell), 49));
}

/// Gymnasium 1.2.0 says `truncated`, not `terminated`, after 500 steps of this rule.
#[test]
fn time_limit_ends_an_episode_whose_pole_stands() {
    let mut pole = CartPole::at(START_42);
    let end = loop {
        let [x, x_dot, theta, theta_dot] = pole.observation();
        if let Some(end) = pole.step(theta + 0.5 * theta_dot + 0.05 * x + 0.1 * x_dot > 0.0) {
            break end;
        }
    };
    assert_eq!((end, pole.steps()), (End::TimeLimit, MAX_STEPS));
}

#[test]
fn first_states_lie_within_their_bounds_and_differ() {
    let mut rng = Rng::new(1, 0);
    let states: Vec<_> = (0..100).map(|_| CartPole::start(&mut rng).state).collect();
    assert!(states.iter().flatten().all(|v| v.abs() <= START));
    assert!(states.windows(2).all(|s| s[0] != s[1]));
}
