//! Which jobs a server admits, and which it decodes.

use super::*;

fn job() -> ServerJob {
    ServerJob::new("rules", Mode::Bsp, 10, 4)
}

#[test]
fn what_a_worker_must_not_send_is_refused_with_the_value() {
    let stop = |patience, min_delta| Some(EarlyStop { patience, min_delta });
    let cases = [
        (ServerJob { name: String::new(), ..job() }, "it is empty. A name has 1 to 128 letters"),
        (ServerJob { name: "n".repeat(129), ..job() }, "129 characters"),
        (ServerJob { name: "a\0b".into(), ..job() }, "'\\0'"),
        (ServerJob { name: "a\u{1b}[2J".into(), ..job() }, "'\\u{1b}'"),
        (ServerJob { fingerprint: "f".repeat(5000), ..job() }, "5000 bytes"),
        (ServerJob { fingerprint: "\u{1b}".into(), ..job() }, "control characters"),
        (ServerJob { grace_ms: i64::MAX as u64, ..job() }, "more than a day"),
        (ServerJob { early_stop: stop(0, 0.0), ..job() }, "patience 0"),
        (ServerJob { early_stop: stop(1, f64::NAN), ..job() }, "NaN"),
        (ServerJob { early_stop: stop(1, -0.5), ..job() }, "-0.5"),
    ];
    for (job, word) in cases {
        let text = job.to_toml().expect("written");
        let why = ServerJob::from_toml(&text).expect_err(word).to_string();
        assert!(why.contains(word), "`{word}` is not in: {why}");
        ServerJob::decode(&text).expect("its log may hold it, and is replayed");
    }
    let of = |lr, weight_decay| ParamGroup::new(5, lr, weight_decay);
    let in_groups = |second| ServerJob { groups: vec![of(0.1, 0.0), second], ..job() };
    let cases = [
        (in_groups(of(-0.1, 0.0)), "group 1 of the parameters: [optimizer] lr = -0.1"),
        (in_groups(of(0.1, f64::NAN)), "weight_decay = NaN"),
    ];
    for (job, word) in cases {
        let why = job.validate().expect_err(word).to_string();
        assert!(why.contains(word), "`{word}` is not in: {why}");
    }
    let most = ServerJob { name: "n".repeat(128), grace_ms: MAX_GRACE_MS, early_stop: stop(1, 0.0), ..job() };
    most.validate().expect("at the bounds");
}

#[test]
fn what_is_no_job_at_all_is_never_decoded() {
    let cases = [
        ServerJob { params_len: 0, ..job() },
        ServerJob { params_len: MAX_VALUES + 1, ..job() },
        ServerJob { bucket_len: 0, ..job() },
        ServerJob { bucket_len: MAX_BUCKET_LEN + 1, ..job() },
        ServerJob { params_len: 1 << 20, bucket_len: 1, ..job() },
        ServerJob { workers: 0, ..job() },
        ServerJob { groups: vec![ParamGroup::new(9, 0.1, 0.0)], ..job() },
        ServerJob { chunks: Some(ChunkPlan { per_epoch: 0, epochs: 1 }), ..job() },
    ];
    for job in cases {
        ServerJob::decode(&job.to_toml().expect("written")).expect_err("no layout has it");
    }
}

#[test]
fn a_logged_job_names_every_key_so_defaults_may_change() {
    let text = job().to_toml().expect("written");
    let table: toml::Table = toml::from_str(&text).expect("a table");
    for key in [
        "name",
        "fingerprint",
        "workers",
        "mode",
        "auto",
        "all_reduce",
        "params_len",
        "buffers_len",
        "bucket_len",
        "grace_ms",
        "durability",
        "leader_window",
        "encoding",
        "algorithm",
        "round",
        "optimizer",
        "schedule",
        "clip",
    ] {
        assert!(table.contains_key(key), "`{key}` is missing in {text}");
    }
    assert_eq!(ServerJob::decode(&text), Ok(job()));
    let group = |values, lr| ParamGroup::new(values, lr, 1e-4);
    let in_groups = ServerJob { groups: vec![group(3, 0.5), group(7, 0.0)], ..job() };
    assert_eq!(ServerJob::from_toml(&in_groups.to_toml().expect("written")), Ok(in_groups));
}
