//! Tests of `incarnations`.

use super::*;

fn line(wall: f64, samples: u64, seconds: f64) -> Train {
    Train { wall, worker: WorkerId(3), samples, seconds, wait_seconds: seconds / 10.0, ..Train::default() }
}

#[test]
fn a_restarted_worker_continues_where_it_was() {
    let mut incarnations = Incarnations::default();
    let seen: Vec<_> =
        [line(101.0, 100, 1.0), line(110.0, 900, 10.0), line(121.0, 50, 1.0), line(130.0, 500, 10.0)]
            .into_iter()
            .map(|t| incarnations.train(t))
            .map(|t| (t.samples, t.seconds, t.wait_seconds))
            .collect();
    // It was gone from 110 to 120: its clock went on, as the others' did.
    assert_eq!(seen, [(100, 1.0, 0.1), (900, 10.0, 1.0), (950, 21.0, 1.1), (1400, 30.0, 2.0)]);
    assert!(incarnations.any());
    let total =
        incarnations.worker(Worker { worker: WorkerId(3), samples: 520, seconds: 10.5, ..Worker::default() });
    assert_eq!((total.samples, total.seconds), (1420, 30.5));
    let other = Worker { worker: WorkerId(1), samples: 7, ..Worker::default() };
    assert_eq!(incarnations.worker(other.clone()), other);
}
