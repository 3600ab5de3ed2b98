//! Tests of `tally`.

use super::*;
use proptest::prelude::*;
use std::time::Duration;

proptest! {
    /// No wait is longer than the counting, each lead is reported once, and all other counts only grow.
    #[test]
    fn counts_grow_and_waits_are_within_what_has_passed(
        ops in prop::collection::vec((0u8..6, 0u64..50, 0u64..80), 1..120),
    ) {
        let (mut tally, mut now) = (Tally::default(), Instant::now());
        let (mut seen, mut told, mut lead) = (0u64, Counted::default(), 0);
        for (op, passes, held) in ops {
            now += Duration::from_millis(passes);
            match op {
                0..4 => {
                    tally.pulled(now.checked_sub(Duration::from_millis(held)), held, now);
                    tally.pushed(Version(9), Version(3));
                    tally.loss(Some(f32::NAN));
                    (seen, lead) = (seen + 1, lead.max(held));
                }
                4 => {
                    tally.begin(now);
                    (seen, told, lead) = (0, Counted::default(), 0);
                }
                _ => {
                    let counted = tally.take();
                    prop_assert_eq!((counted.pulls, counted.delays), (seen, (5 * seen, seen)));
                    prop_assert_eq!((counted.lead, counted.losses), (std::mem::take(&mut lead), (0.0, 0)));
                    prop_assert!(counted.lasted >= told.lasted && counted.waited >= told.waited);
                    prop_assert!(counted.waited <= counted.lasted * seen as u32);
                    told = counted;
                }
            }
        }
    }
}
