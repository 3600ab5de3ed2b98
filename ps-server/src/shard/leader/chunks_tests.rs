//! Tests of `chunks`.

use super::*;
use proptest::prelude::*;

proptest! {
    /// A requester gets at most one reply to wait, then one answer, and nothing after that.
    #[test]
    fn an_ask_is_answered_once(
        ops in prop::collection::vec((0u64..3, prop::option::weighted(0.5, any::<bool>())), 1..60),
    ) {
        let mut asks = ChunkRequests::default();
        let mut heard: BTreeMap<(ConnId, u64), Vec<Answer>> = BTreeMap::new();
        let mut open: BTreeMap<ConnId, u64> = BTreeMap::new();
        let mut requests = 0;
        for (conn, says) in ops {
            match says {
                None => {
                    requests += 1;
                    asks.ask(conn, WorkerId(conn as u32), requests);
                    open.insert(conn, requests);
                }
                Some(for_good) => {
                    let answer = if for_good { Answer::Ended } else { Answer::Wait };
                    let knows = |ask: &ChunkRequest| (ask.worker == WorkerId(conn as u32)).then_some(answer);
                    for (conn, reply) in asks.answer_where(knows) {
                        let Reply::Acquired { request, answer } = reply else { panic!("{reply:?}") };
                        prop_assert_eq!(open.get(&conn), Some(&request));
                        heard.entry((conn, request)).or_default().push(answer);
                    }
                    if for_good && let Some(request) = open.remove(&conn) {
                        prop_assert_eq!(heard[&(conn, request)].last(), Some(&Answer::Ended));
                    }
                    prop_assert_eq!(asks.is_empty(), open.is_empty());
                }
            }
        }
        for answers in heard.values() {
            prop_assert!(answers.len() <= 2 && answers[..answers.len() - 1] == vec![Answer::Wait; answers.len() - 1][..]);
        }
    }
}
