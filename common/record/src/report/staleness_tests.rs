//! Tests of `staleness`.

use super::*;
use crate::{Event, Run, event};

fn run(workers: u32) -> RunRecord {
    let of = |w: u32| {
        let (mut distance, mut age) = (LogHistogram::default(), LogHistogram::default());
        for i in 0..10u32 {
            distance.record(f64::from(i * w));
            age.record(0.01 * f64::from(w + 1));
        }
        Staleness { worker: WorkerId(w), delay: vec![5, 3, u64::from(w)], distance, age }
    };
    let shard = event::Shard { staleness: (0..workers).map(of).collect(), ..event::Shard::default() };
    RunRecord::from_events([Event::Run(Run::default()), Event::Shard(shard)]).expect("a run")
}

#[test]
fn every_worker_has_a_histogram_row_up_to_the_limit() {
    let (three, twenty) = (run(3), run(20));
    let html = section([("asp", vec![&three, &three])].into_iter());
    assert_eq!((html.matches("<tr>").count(), html.matches("<svg").count()), (1 + 3, 9));
    assert!(html.contains("<th scope=\"row\">asp</th><td>2</td><td>0, 2</td>"), "{html}");
    let html = section([("asp", vec![&twenty])].into_iter());
    assert!(html.contains("<td>all 20</td>") && html.contains("<td>19</td>"), "{html}");
    assert_eq!(html.matches("<tr>").count(), 1 + 1 + LATEST);
}

#[test]
fn the_heights_are_the_shares() {
    let axis = Axis { least: 0, places: 3 };
    let svg = axis.draw(&[(0.0, 1), (1.0, 2), (2.0, 1)]);
    let heights: Vec<&str> =
        svg.split(" height=\"").skip(2).map(|s| &s[..s.find('"').expect("closed")]).collect();
    assert_eq!(heights, ["5.0", "10.0", "5.0"]);
}

#[test]
fn a_run_without_late_pushes_has_no_section() {
    let prompt = event::Shard {
        staleness: vec![Staleness { delay: vec![7], ..Staleness::default() }],
        ..event::Shard::default()
    };
    let r = RunRecord::from_events([Event::Run(Run::default()), Event::Shard(prompt)]).expect("a run");
    assert_eq!(section([("bsp", vec![&r])].into_iter()), "");
}
