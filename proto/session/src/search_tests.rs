//! Tests of `search`.

use super::*;
use proptest::prelude::*;

#[test]
fn a_name_is_followed_and_a_circle_is_left() {
    let mut search = Search::default();
    assert_eq!(search.next(0, Some(2), 4), 2, "a name");
    assert_eq!(search.next(2, None, 4), 3, "the next in the list");
    // 3 names 2, which names 3: neither is asked before 1.
    assert_eq!(search.next(3, Some(2), 4), 1);
    assert_eq!(search.next(1, Some(2), 4), 2, "all were asked: names count again");
    search.found();
    assert_eq!(search.next(2, Some(1), 4), 1);
    assert_eq!(Search::default().next(0, Some(0), 1), 0);
}

proptest! {
    /// Whatever they name, every server is asked within two rounds.
    #[test]
    fn nobody_is_kept_from_being_asked(
        names in proptest::collection::vec(proptest::option::of(0usize..6), 1..6),
        before in proptest::collection::vec((0usize..6, proptest::option::of(0usize..6)), 0..8),
    ) {
        let servers = names.len();
        let mut search = Search::default();
        let mut at = 0;
        for (from, named) in before {
            at = search.next(from % servers, named.map(|n| n % servers), servers);
        }
        let mut asked = BTreeSet::new();
        for _ in 0..2 * servers {
            asked.insert(at);
            at = search.next(at, names[at].map(|n| n % servers), servers);
        }
        prop_assert_eq!(asked.len(), servers);
    }
}
