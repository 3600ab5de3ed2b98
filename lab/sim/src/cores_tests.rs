//! Tests of `cores`.

use super::*;
use crate::error::SimError;

/// The end of each of these tasks, given by start and work.
fn ends(cores: Option<u32>, work: &[(Moment, u64)]) -> Vec<Moment> {
    let work = work.to_vec();
    let ended = Clock::run(|clock| async move {
        let cores = Cores::new(clock.clone(), cores);
        let ends = work.into_iter().map(|(begin, nanos)| {
            let (cores, clock) = (cores.clone(), clock.clone());
            async move {
                clock.until(begin).await;
                cores.work(nanos).await;
                clock.now()
            }
        });
        Ok::<_, SimError>(futures::future::join_all(ends).await)
    });
    ended.expect("an end")
}

#[test]
fn busy_tasks_share_cores_equally_with_at_most_one_each() {
    assert_eq!(ends(Some(2), &[(0, 1000), (0, 500)]), [1000, 500], "a core for each");
    assert_eq!(ends(None, &[(0, 1000), (0, 1000), (0, 1000)]), [1000; 3]);
    assert_eq!(ends(Some(1), &[(0, 1000), (0, 1000)]), [2000; 2]);
    // Alone until 400, then half a core each until the second ends, then alone again.
    assert_eq!(ends(Some(1), &[(0, 1000), (400, 300)]), [1300, 1000]);
    assert_eq!(ends(Some(2), &[(0, 600), (0, 600), (0, 600)]), [900; 3]);
}

#[test]
fn a_task_that_dies_frees_its_cores() {
    let ended = Clock::run(|clock| async move {
        let cores = Cores::new(clock.clone(), Some(1));
        let dies = async {
            tokio::select! {
                biased;
                () = clock.until(400) => {}
                () = cores.work(1000) => {}
            }
        };
        let lives = async {
            cores.work(1000).await;
            clock.now()
        };
        Ok(futures::join!(dies, lives).1)
    });
    // Half a core until 400, then all of it for the 800 that are left.
    assert_eq!(ended.expect("an end"), 1200);
}
