//! Tests of `streams`.

use super::*;
use proptest::prelude::*;

proptest! {
    /// A member has one stream, the last attached one that is open; only messages on that stream count.
    #[test]
    fn a_member_has_the_last_of_its_streams(ops in prop::collection::vec((0u8..3, 0u64..6, 0u32..2), 1..80)) {
        let mut streams = Streams::default();
        let mut attached: BTreeMap<WorkerId, ConnId> = BTreeMap::new();
        for (op, conn, worker) in ops {
            let worker = WorkerId(worker);
            match op {
                0 if streams.get(conn).is_none() => streams.open(conn, worker, Some(SessionId(1))),
                1 => {
                    let closed = streams.close(conn);
                    let own = closed.is_some_and(|(s, _)| attached.get(&s.worker) == Some(&conn));
                    prop_assert_eq!(closed.map(|c| c.1), closed.map(|_| own));
                    attached.retain(|_, c| *c != conn);
                }
                2 if streams.get(conn).is_some_and(|s| s.worker == worker) => {
                    let old = attached.insert(worker, conn).filter(|old| *old != conn);
                    prop_assert_eq!(streams.attach(worker, conn), old);
                    prop_assert!(old.is_none_or(|old| streams.get(old).is_none()));
                }
                _ => {}
            }
            for w in (0..2).map(WorkerId) {
                prop_assert_eq!(streams.of(w), attached.get(&w).copied());
                prop_assert_eq!(streams.of_session(w, SessionId(2)), None);
            }
            for conn in 0..6 {
                let member = streams.get(conn).filter(|s| attached.get(&s.worker) == Some(&conn));
                prop_assert_eq!(streams.member(conn), member.map(|s| (s.worker, SessionId(1))));
            }
        }
    }
}
