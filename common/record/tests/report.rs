//! The page: complete, closed to the network, safe with any name, whole with little data.
#![allow(clippy::unwrap_used)]

use paraft_common::{ServerId, ShardId, Step, WorkerId};
use paraft_record::event::Checkpoint;
use paraft_record::{
    Eval, Event, Incident, IncidentKind, Leave, Run, RunRecord, Shard, SwitchedBy, Train, Worker,
    render_report, write_report,
};

fn record(mode: &str, accuracy: Option<f64>, delay: Vec<u64>) -> RunRecord {
    RunRecord::from_events(events(mode, accuracy, delay)).unwrap()
}

fn events(mode: &str, accuracy: Option<f64>, delay: Vec<u64>) -> Vec<Event> {
    let mut events = vec![Event::Run(Run {
        name: "t1".into(),
        mode: mode.into(),
        model: "mlp".into(),
        data: "digits".into(),
        workers: 2,
        target_accuracy: accuracy.map(|a| a - 0.1),
        ..Run::default()
    })];
    for i in 1..=20 {
        for worker in [0, 1].map(WorkerId) {
            let (samples, seconds, loss) = (i * 100, i as f64 * 0.5, 2.0 / i as f64);
            // The run begins at 0, and the first step 2 s later.
            let wall = seconds + 2.0;
            events.push(Event::Train(Train { wall, worker, samples, seconds, loss, ..Train::default() }));
        }
    }
    events.push(Event::Eval(Eval {
        epoch: 1,
        samples: 4000,
        seconds: 10.0,
        loss: 0.5,
        accuracy,
        ..Eval::default()
    }));
    events.push(Event::Worker(Worker {
        samples: 2000,
        seconds: 10.0,
        cpu_seconds: 9.0,
        ..Worker::default()
    }));
    events.push(Event::Shard(Shard { shard: ShardId(0), delay, ..Shard::default() }));
    events
}

/// The JSON the charts are drawn from.
fn data(page: &str) -> serde_json::Value {
    let (_, rest) = page.split_once(r#"<script type="application/json" id="data">"#).unwrap();
    serde_json::from_str(rest.split_once("</script>").unwrap().0).unwrap()
}

#[test]
fn nothing_is_loaded_from_anywhere() {
    let page = render_report(&[record("bsp", Some(0.9), vec![10])]);
    assert!(page.contains("default-src 'none'"), "the policy forbids it");
    for load in ["src=", "href=", "@import", "url(", "<link", "fetch(", "XMLHttpRequest"] {
        assert!(!page.contains(load), "{load}");
    }
    assert!(!page.contains("{{"), "every place is filled");
}

#[test]
fn modes_stand_side_by_side() {
    let page =
        render_report(&[record("bsp", Some(0.9), vec![9, 1]), record("asp", Some(0.8), vec![5, 0, 0, 5])]);
    assert!(
        page.contains("<th scope=\"col\" data-run=\"0\">bsp</th><th scope=\"col\" data-run=\"1\">asp</th>")
    );
    assert!(page.contains("<td>0 / 1 / 1</td><td>0 / 3 / 3</td>"), "delays");
    assert!(
        page.contains("<td><strong>90.0\u{a0}%</strong></td><td>80.0\u{a0}%</td>"),
        "the better accuracy is bold"
    );
    let data = data(&page);
    assert_eq!(data["runs"], serde_json::json!(["bsp", "asp"]));
    assert_eq!(
        data["groups"][2]["charts"][0]["shares"],
        serde_json::json!([[0.9, 0.1, 0.0, 0.0], [0.5, 0.0, 0.0, 0.5]])
    );
    assert_eq!(data["groups"][0]["charts"][0]["lines"][0]["y"].as_array().unwrap().len(), 20);
}

#[test]
fn hostile_names_stay_text() {
    let evil = "</script><script>alert(1)</script>{{data}}\"'&";
    let mut r = record(evil, None, vec![1]);
    r.run.name = evil.into();
    r.run.model = evil.into();
    r.run.optimizer = evil.into();
    let page = render_report(&[r.clone(), r]);
    assert!(!page.contains("<script>alert"));
    assert_eq!(page.matches("</script>").count(), 4, "only the page's own scripts end");
    assert!(page.contains("&lt;/script&gt;&lt;script&gt;alert(1)&lt;/script&gt;{{data}}&quot;&#39;&amp;"));
    let labels = data(&page)["runs"].clone();
    assert_eq!(labels[1], format!("{evil} ({evil}) #2"), "equal modes are told apart");
}

#[test]
fn a_run_without_accuracy_shows_its_held_out_loss() {
    let page = render_report(&[record("bsp", None, vec![7])]);
    assert!(!page.contains("accuracy</th>"));
    let data = data(&page);
    assert_eq!(data["groups"][1]["title"], "Held-out loss");
    assert_eq!(data["groups"][1]["charts"][0]["lines"][0]["y"], serde_json::json!([0.5]));
    assert_eq!(data["groups"][1]["charts"].as_array().unwrap().len(), 2);
    // Beside an accuracy the loss has charts of its own.
    let both = self::data(&render_report(&[record("bsp", Some(0.9), vec![7])]));
    let charts = both["groups"][1]["charts"].as_array().unwrap();
    let drawn: Vec<_> = charts.iter().map(|c| (&c["title"], &c["lines"][0]["y"][0])).collect();
    assert_eq!(drawn[0], (&"Accuracy against samples of the fleet".into(), &0.9.into()));
    assert_eq!(drawn[3], (&"Loss against training time".into(), &0.5.into()));
    assert_eq!(data["groups"][2]["charts"][0]["bins"], serde_json::json!(["0"]), "only zero delays: one bar");
}

#[test]
fn a_run_with_nothing_to_draw_still_has_a_page() {
    let bare = RunRecord::from_events([Event::Run(Run { mode: "asp".into(), ..Run::default() })]).unwrap();
    let data = data(&render_report(&[bare]));
    assert_eq!(data["groups"].as_array().unwrap().len(), 2, "no evaluation, no such charts");
    assert_eq!(data["groups"][1]["charts"][0]["shares"], serde_json::json!([[]]));
    assert!(render_report(&[]).contains("No runs"));
}

#[test]
fn a_diverged_run_shows_gaps_and_says_so() {
    let mut r = record("asp", None, vec![1]);
    r.train.iter_mut().skip(20).for_each(|t| t.loss = f64::NAN);
    r.evals[0].loss = f64::NAN;
    let page = render_report(&[r]);
    assert!(page.contains("<td>not a number</td>"));
    assert!(data(&page)["groups"][0]["charts"][0]["lines"][0]["y"][19].is_null());
}

#[test]
fn long_tails_get_one_place_at_the_end() {
    let mut delay = vec![10; 100];
    delay.resize(900, 0);
    delay.push(1);
    let data = data(&render_report(&[record("asp", None, delay)]));
    let bars = &data["groups"][2]["charts"][0];
    assert_eq!((bars["bins"][0].as_str(), bars["bins"][20].as_str()), (Some("0–4"), Some("100+")));
    assert_eq!(bars["shares"][0].as_array().unwrap().len(), 21);
}

#[test]
fn the_file_is_written_whole_beside_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("report.html");
    let records = [record("bsp", Some(0.9), vec![1])];
    std::fs::write(&path, "old").unwrap();
    write_report(&path, &records).unwrap();
    assert_eq!(std::fs::read_to_string(&path).unwrap(), render_report(&records));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "no temporary file stays");
    let told = write_report(dir.path().join("no/report.html"), &records).unwrap_err().to_string();
    assert!(told.contains("no/report.html"), "{told}");
}

fn at(wall: f64, what: IncidentKind) -> Event {
    Event::Incident(Incident { wall, what })
}

/// A server is killed, a shard gets a new leader, a worker leaves, a user switches the mode.
fn broken() -> RunRecord {
    let server = ServerId(0);
    let how = "was ended by <SIGKILL>".into();
    let mut all = events("bsp", Some(0.9), vec![10]);
    all.extend([
        at(7.0, IncidentKind::ServerEnded { server, how, code: None, signal: Some(9), restarts: true }),
        at(
            7.1,
            IncidentKind::LeaderChanged {
                shard: ShardId(2),
                from: server,
                to: ServerId(1),
                term: 2,
                stall_seconds: Some(0.08),
                handed_over: false,
            },
        ),
        at(8.0, IncidentKind::ServerBack { server, seconds: 1.0 }),
        at(
            9.0,
            IncidentKind::ModeSwitched {
                number: 1,
                from: "bsp".into(),
                to: "asp".into(),
                by: SwitchedBy::User,
            },
        ),
        Event::Leave(Leave {
            wall: 1.0,
            worker: WorkerId(1),
            reason: "was ended by SIGTERM".into(),
            ..Leave::default()
        }),
    ]);
    RunRecord::from_events(all).unwrap()
}

#[test]
fn what_happened_is_listed_and_marked() {
    let record = broken();
    let summary = record.summarize();
    assert_eq!((summary.servers_lost, summary.leaders_elected), (1, 1));
    assert_eq!(summary.longest_stall_seconds, Some(0.08));
    let page = render_report(&[record]);
    for wanted in [
        "What happened</h2>",
        "<th scope=\"row\">7.00 s</th><td><i class=\"letter server\">S</i>server 0 was ended by &lt;SIGKILL&gt;; it is started again</td>",
        "server 1 leads shard 2 instead of server 0</td><td>stall of 0.08 s</td>",
        "server 0 is back</td><td>away for 1.0 s</td>",
        "a user switched the mode from bsp to asp",
        "worker 1 has left: was ended by SIGTERM",
        "<th scope=\"row\">Servers lost</th><td>1</td>",
        "<th scope=\"row\">Leaders elected</th><td>1</td>",
        "<th scope=\"row\">Longest stall</th>",
    ] {
        assert!(page.contains(wanted), "{wanted}");
    }
    let data = data(&page);
    // On both charts of the loss, of the accuracy, and on that of the throughput.
    for (group, chart) in [(0, 0), (0, 1), (1, 0), (1, 1), (2, 1)] {
        let events = &data["groups"][group]["charts"][chart]["events"];
        let letters: Vec<_> = events.as_array().unwrap().iter().map(|e| e["letter"].clone()).collect();
        assert_eq!(letters, ["W", "S", "L", "S"], "the mode's switch has a mark of its own");
    }
    let of = |chart: usize, key: &str| data["groups"][0]["charts"][chart]["events"][1][key].clone();
    // 7 s after the run's begin are 5 s of training, and 2 workers have trained 1000 samples each.
    assert_eq!((of(1, "x"), of(0, "x")), (5.0.into(), 2000.0.into()));
    assert_eq!((of(0, "kind"), of(0, "run")), ("server".into(), 0.into()));
    let before = &data["groups"][0]["charts"][1]["events"][0];
    assert_eq!(before["x"], 0.0, "before the first step");
}

#[test]
fn a_quiet_run_has_no_list_and_no_marks() {
    let page = render_report(&[record("bsp", Some(0.9), vec![10])]);
    for unwanted in ["What happened", "Servers lost", "Leaders elected", "Longest stall"] {
        assert!(!page.contains(&format!("{unwanted}<")), "{unwanted}");
    }
    let data = data(&page);
    let groups = data["groups"].as_array().unwrap();
    let mut charts = groups.iter().flat_map(|g| g["charts"].as_array().unwrap());
    assert!(charts.all(|c| c["events"].is_null()));
}

#[test]
fn of_many_checkpoints_the_last_and_the_failed_are_shown() {
    let mut all = events("bsp", None, vec![1]);
    all.extend((1..=30_u64).map(|n| {
        let error = (n == 7).then(|| "the disk is full".to_string());
        Event::Checkpoint(Checkpoint { wall: n as f64, step: Step(n), error, ..Checkpoint::default() })
    }));
    let page = render_report(&[RunRecord::from_events(all).unwrap()]);
    assert!(
        page.contains("no checkpoint of step 7: the disk is full") && page.contains("checkpoint of step 30 ")
    );
    assert!(!page.contains("checkpoint of step 29 "));
}

#[test]
fn values_that_change_have_charts_and_constants_have_none() {
    let with = |e: Event| match e {
        Event::Train(t) => {
            let all = [("learning_rate", 0.1), ("gradient_norm", t.loss), ("<own>", t.samples as f64)];
            let values = all.map(|(name, value)| (name.to_string(), value)).into();
            Event::Train(Train { values, ..t })
        }
        other => other,
    };
    let record = RunRecord::from_events(events("bsp", None, vec![10]).into_iter().map(with)).unwrap();
    let data = data(&render_report(&[record]));
    let charts = data["groups"].as_array().unwrap().last().unwrap()["charts"].as_array().unwrap();
    let titles: Vec<_> = charts.iter().map(|c| c["title"].as_str().unwrap()).collect();
    assert_eq!(titles, ["<own>", "Norm of a worker's gradient"]);
    let norms = charts[1]["lines"][0]["y"].as_array().unwrap();
    assert_eq!((norms.len(), norms[0].as_f64()), (20, Some(2.0)));
}
