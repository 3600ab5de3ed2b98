//! A comparison follows from the records of its runs: figures, verdict, page.
#![allow(clippy::unwrap_used)]

use paraft_common::{ServerId, ShardId, Step, WorkerId};
use paraft_record::{
    Cell, Comparison, Conditions, Diverged, Eval, Event, LeftOut, ModeSwitch, Run, RunRecord, Shard, Train,
    Wait, Worker, comparison::RULES, render_comparison,
};

/// A run of two workers: `seconds` long, one evaluation in the middle and one at the end.
fn cell(mode: &str, workers: u32, seed: u64, seconds: f64, accuracy: f64) -> Cell {
    let mut events = vec![Event::Run(Run {
        name: "t".into(),
        mode: mode.into(),
        model: "mlp".into(),
        data: "digits".into(),
        workers,
        seed,
        target_accuracy: Some(0.9),
        ..Run::default()
    })];
    for w in [0, 1].map(WorkerId) {
        for i in 1..=20 {
            let (samples, seconds) = (i * 50, seconds * i as f64 / 20.0);
            let (loss, wait_seconds) = (3.0 / (i + seed) as f64, seconds * (0.1 + 0.4 * f64::from(w.0)));
            events.push(Event::Train(Train {
                worker: w,
                samples,
                seconds,
                loss,
                wait_seconds,
                ..Train::default()
            }));
        }
        let (bytes_pushed, wait_seconds) = (4000, seconds * (0.1 + 0.4 * f64::from(w.0)));
        events.push(Event::Worker(Worker {
            worker: w,
            samples: 1000,
            seconds,
            wait_seconds,
            bytes_pushed,
            ..Worker::default()
        }));
    }
    for (epoch, is_final) in [(1, false), (2, true)] {
        let share = f64::from(epoch as u32) / 2.0;
        events.push(Event::Eval(Eval {
            epoch,
            samples: epoch * 1000,
            seconds: seconds * share,
            loss: 1.0 - accuracy,
            accuracy: Some(accuracy * share),
            is_final,
            ..Eval::default()
        }));
    }
    events.push(Event::Shard(Shard { shard: ShardId(0), delay: vec![3, 1], ..Shard::default() }));
    let record = RunRecord::from_events(events).unwrap();
    Cell { mode: mode.into(), workers, algorithm: "job".into(), seed, dir: format!("{mode}_s{seed}"), record }
}

fn of(cells: Vec<Cell>) -> Comparison {
    Comparison { job: "t".into(), cells, ..Comparison::default() }
}

fn data(page: &str) -> serde_json::Value {
    let (_, rest) = page.split_once(r#"<script type="application/json" id="data">"#).unwrap();
    serde_json::from_str(rest.split_once("</script>").unwrap().0).unwrap()
}

#[test]
fn figures_average_over_seeds_and_waiting_is_a_share_of_time() {
    let c = of(vec![cell("bsp", 2, 1, 10.0, 0.9), cell("bsp", 2, 2, 14.0, 0.96)]);
    let groups = c.groups();
    assert_eq!((groups.len(), groups[0].label.as_str()), (1, "bsp"));
    let f = groups[0].figures();
    let near =
        |s: Option<paraft_record::comparison::Spread>, wanted: f64| (s.unwrap().mean - wanted).abs() < 1e-12;
    assert!(near(f.seconds_to_target, 12.0) && near(f.final_accuracy, 0.93) && near(f.delay_mean, 0.25));
    assert!(near(f.wait_share, 0.3) && near(f.bytes_pushed, 8000.0) && near(f.samples, 2000.0));
    assert!((f.seconds.unwrap().deviation.unwrap() - 8.0_f64.sqrt()).abs() < 1e-12);
    let shares = c.cells[0].record.wait_shares();
    assert!((shares[&WorkerId(1)] - 0.5).abs() < 1e-12 && (shares[&WorkerId(0)] - 0.1).abs() < 1e-12);
}

#[test]
fn waiting_for_workers_and_for_servers_is_told_apart() {
    let mut cell = cell("bsp", 2, 1, 10.0, 0.9);
    cell.record.shards.clear();
    assert_eq!(cell.record.wait_share_for_others(), None, "nobody has counted it");
    let wait = |worker, of, seconds| Wait { worker: WorkerId(worker), of: WorkerId(of), seconds };
    let counted = |shard, server, waits| Shard {
        shard: ShardId(shard),
        server: ServerId(server),
        waits,
        ..Shard::default()
    };
    cell.record.shards = vec![counted(0, 0, vec![]), counted(1, 1, vec![])];
    assert_eq!(cell.record.wait_share_for_others(), Some(0.0), "in asp nobody waits");
    // Shard 0 had two leaders; worker 0 waited 3 s on it, and 2 s on the other one.
    cell.record.shards = vec![
        counted(0, 0, vec![wait(0, 1, 1.0)]),
        counted(0, 1, vec![wait(0, 1, 2.0), wait(1, 0, 0.5)]),
        counted(1, 2, vec![wait(0, 1, 2.0)]),
    ];
    let share = cell.record.wait_share_for_others().expect("counted");
    assert!((share - 3.5 / 20.0).abs() < 1e-12, "{share} of two workers' 10 s");
    let page = render_comparison(&of(vec![cell]));
    assert!(page.contains("for others") && page.contains("class=\"rest\""), "both parts are drawn");
}

#[test]
fn the_verdict_follows_from_the_rules() {
    let said = |cells: Vec<Cell>| {
        let c = of(cells);
        let label = |i: usize| c.groups()[i].label.clone();
        let v = c.verdict();
        (v.recommended.map(label), v.sentences.join(" "))
    };
    let bsp = || vec![cell("bsp", 2, 1, 30.0, 0.950), cell("bsp", 2, 2, 32.0, 0.952)];
    // Faster, and within half a point: asp is to be used, and each of its seeds is faster.
    let (use_, text) =
        said([bsp(), vec![cell("asp", 2, 1, 10.0, 0.947), cell("asp", 2, 2, 11.0, 0.948)]].concat());
    assert_eq!(use_.as_deref(), Some("asp"));
    assert!(
        text.starts_with("Use asp: the fastest to 90.0\u{a0}% of the 2 groups within 0.5 points"),
        "{text}"
    );
    assert!(text.contains("asp, 10.5 s; next is bsp, 31.0 s. Each seed of the one beats"), "{text}");
    // Faster by far, but too far below the best.
    let (use_, text) =
        said([bsp(), vec![cell("asp", 2, 1, 10.0, 0.944), cell("asp", 2, 2, 11.0, 0.944)]].concat());
    assert_eq!(use_.as_deref(), Some("bsp"));
    assert!(text.starts_with("Use bsp: the only group within 0.5 points of the best accuracy."), "{text}");
    // One seed of asp misses the target: it cannot be the fastest to it.
    let (_, text) =
        said([bsp(), vec![cell("asp", 2, 1, 10.0, 0.949), cell("asp", 2, 2, 11.0, 0.89)]].concat());
    assert!(text.contains("Fastest to 90.0\u{a0}%: bsp, 31.0 s."), "{text}");
    // Overlap, and one seed alone.
    let (use_, text) =
        said([bsp(), vec![cell("asp", 2, 1, 31.5, 0.95), cell("asp", 2, 2, 29.0, 0.95)]].concat());
    assert!(use_.is_none() && text.contains("Their seeds overlap"), "{text}");
    assert!(text.starts_with("No recommendation: asp does not differ"), "{text}");
    assert!(!text.contains("Use ") && !text.contains("Add --seeds"), "{text}");
    let (use_, text) = said(vec![cell("bsp", 2, 1, 30.0, 0.95), cell("asp", 2, 1, 10.0, 0.95)]);
    assert!(use_.is_none() && text.contains("Add --seeds 3."), "{text}");
    // The slowest is the only one near the best, but not clearly.
    let (use_, text) =
        said([bsp(), vec![cell("asp", 2, 1, 60.0, 0.99), cell("asp", 2, 2, 60.0, 0.94)]].concat());
    assert!(use_.is_none() && !text.contains("shortest") && !text.contains("Use "), "{text}");
    // A run that diverged: its group cannot win, and is named.
    let mut wild = cell("asp", 2, 2, 1.0, 0.99);
    wild.record.diverged = Some(Diverged { wall: 1.0, reason: "the loss became NaN".into() });
    let (use_, text) = said([bsp(), vec![cell("asp", 2, 1, 1.0, 0.99), wild.clone()]].concat());
    assert_eq!(use_.as_deref(), Some("bsp"));
    assert!(text.starts_with("Use bsp: no other group has only runs that count."), "{text}");
    assert!(text.contains("Diverged: asp (1 of 2 runs)."), "{text}");
    let (use_, text) = said(vec![wild]);
    assert!(use_.is_none() && text.contains("No group has only runs that count"), "{text}");
    // No run reaches the target: the shortest training time decides.
    let low = |mode, seconds, accuracy| [1, 2].map(|seed| cell(mode, 2, seed, seconds, accuracy));
    let (use_, text) = said([low("bsp", 30.0, 0.80), low("asp", 10.0, 0.799)].concat());
    assert_eq!(use_.as_deref(), Some("asp"));
    assert!(text.starts_with("Use asp: the shortest training time of the 2 groups within"), "{text}");
    assert!(text.contains("No group reached 90.0"), "{text}");
}

#[test]
fn the_comparison_page_is_complete_and_loads_nothing() {
    let mut cells =
        vec![cell("bsp", 2, 1, 10.0, 0.9), cell("bsp", 2, 2, 20.0, 0.8), cell("bsp", 4, 1, 5.0, 0.7)];
    let switch = ModeSwitch {
        step: Step(3),
        samples: 150,
        seconds: 1.5,
        number: 1,
        mode: "asp".into(),
        ..ModeSwitch::default()
    };
    cells[2].record.switches =
        vec![switch.clone(), ModeSwitch { worker: WorkerId(1), samples: 151, ..switch }];
    let evil = "</script><script>alert(1)</script>{{data}}\"'&";
    let mut c = of(cells);
    c.left_out =
        vec![LeftOut { mode: "asp".into(), workers: 2, algorithm: evil.into(), reason: evil.into() }];
    c.conditions = Conditions { delay_ms: 3.0, notes: vec![evil.into()], ..Conditions::default() };
    c.cells[2].algorithm = evil.into();
    let page = render_comparison(&c);
    for load in ["src=", "href=", "@import", "url(", "<link", "fetch(", "XMLHttpRequest"] {
        assert!(!page.contains(load), "{load}");
    }
    assert!(page.contains("default-src 'none'") && !page.contains("<script>alert"));
    assert_eq!(page.matches("</script>").count(), 4, "only the page's own scripts end");
    assert!(
        page.contains("took 3 ms longer") && page.contains("Waiting workers") && page.contains("width:30.0%")
    );
    let docs = include_str!("../../../docs/metrics.md").split_whitespace().collect::<Vec<_>>().join(" ");
    for rule in RULES {
        assert!(page.contains(&rule.replace('\'', "&#39;")) && docs.contains(rule), "{rule}");
    }
    let data = data(&page);
    assert_eq!(data["runs"][0], "bsp job ×2");
    let chart = |group: usize, chart: usize| data["groups"][group]["charts"][chart].clone();
    let accuracy = chart(1, 1)["lines"][0].clone();
    assert_eq!(accuracy["x"], serde_json::json!([7.5, 15.0]), "the mean of 5 and 10, and of 10 and 20");
    assert_eq!(
        (&accuracy["low"], &accuracy["high"]),
        (&serde_json::json!([0.4, 0.8]), &serde_json::json!([0.45, 0.9]))
    );
    assert_eq!(chart(1, 2)["lines"][0]["x"], serde_json::json!([4000.0, 8000.0]), "four bytes a sample");
    assert!(
        accuracy["y"].as_array().unwrap().len() == 2 && chart(1, 1)["lines"][1]["low"].is_null(),
        "one seed: no band"
    );
    // The first worker to hear of a switch marks it, at the fleet's samples.
    assert_eq!(chart(0, 0)["marks"], serde_json::json!([{ "run": 1, "x": 600.0, "text": "asp" }]));
    let momentum = chart(2, 1)["lines"].as_array().unwrap().clone();
    assert_eq!(momentum[0]["y"], serde_json::json!([0.2]), "a mean delay of 1/4 is like 1 - 1/(1 + 1/4)");
}

#[test]
fn of_many_groups_the_best_are_drawn() {
    let cells = (0..12).map(|i| cell(&format!("ssp:{i}"), 2, 1, 10.0, 0.5 + 0.01 * f64::from(i))).collect();
    let data = data(&render_comparison(&of(cells)));
    assert_eq!(data["hidden"], serde_json::json!([0, 1, 2, 3]));
    let drawn = data["groups"][2]["charts"][0]["shares"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|s| s[0].is_number())
        .count();
    assert_eq!(drawn, 6, "bars of more groups cannot be told apart");
    assert!(render_comparison(&of(Vec::new())).contains("No runs"));
}
