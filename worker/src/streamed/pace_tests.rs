//! Tests of `pace`.

use super::*;

fn pace(layer: u64, pull: u64) -> Pace {
    let ms = |n| Some(Duration::from_millis(n));
    Pace { since: Instant::now(), layer: ms(layer), pull: ms(pull) }
}

#[test]
fn as_many_layers_come_ahead_as_are_computed_while_a_pull_comes() {
    assert_eq!(Pace::new().ahead(), 1, "nothing is known yet");
    for (layer, pull, ahead) in
        [(10, 3, 1), (10, 10, 1), (10, 35, 4), (1, 1000, MAX_PULLS_AHEAD), (0, 5, MAX_PULLS_AHEAD)]
    {
        assert_eq!(pace(layer, pull).ahead(), ahead, "{layer} ms, {pull} ms");
    }
}

#[test]
fn a_pull_without_a_wait_is_not_known_to_be_slower() {
    let long_ago = Instant::now().checked_sub(Duration::from_secs(5)).expect("a clock");
    let mut pace = pace(10, 20);
    pace.came(long_ago, Duration::ZERO);
    assert_eq!(pace.pull, Some(Duration::from_millis(20)), "it may have come at once");
    pace.came(long_ago, Duration::from_secs(4));
    assert!(pace.pull > Some(Duration::from_millis(600)), "{:?}", pace.pull);
    pace.came(Instant::now(), Duration::ZERO);
    assert!(pace.pull < Some(Duration::from_millis(600)), "{:?}", pace.pull);
}
