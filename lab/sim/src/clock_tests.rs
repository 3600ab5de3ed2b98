//! Tests of `clock`.

use super::*;

#[test]
fn events_and_server_deadlines_happen_in_time_order() {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let told = seen.clone();
    let ended = Clock::run(|clock| async move {
        let note = move |what: &'static str, at: Moment| told.lock().push((what, at));
        let (n, c) = (note.clone(), clock.clone());
        tokio::spawn(async move {
            tokio::time::sleep(Duration::from_millis(7)).await;
            n("deadline", c.now());
            // Earlier than the target of the advance: it must not be skipped.
            let (n, d) = (n.clone(), c.clone());
            c.at(c.now() + 200_000, move || n("asked for by it", d.now()));
        });
        for (what, at) in [("late", 50_000_000), ("early", 1_500), ("same", 1_500), ("close", 6_900_000)] {
            let (n, c) = (note.clone(), clock.clone());
            clock.at(at, move || n(what, c.now()));
        }
        clock.sleep(60_000_000).await;
        Ok(clock.happened())
    });
    assert_eq!(ended.expect("an end"), 6);
    let want = [
        ("early", 1_500),
        ("same", 1_500),
        ("close", 6_900_000),
        ("deadline", 7_000_000),
        ("asked for by it", 7_200_000),
        ("late", 50_000_000),
    ];
    assert_eq!(*seen.lock(), want);
}

#[test]
fn a_stuck_run_ends() {
    let ended = Clock::run(|_| std::future::pending::<Result<(), SimError>>());
    assert!(matches!(ended, Err(SimError::Stuck(_))));
}
