//! Job files, the servers' job, `metrics.jsonl`.

use crate::{files::Scratch, input::Input};
use paraft_common::{BucketId, Payload, SessionId, ShardId, TensorSpec, WorkerId, config::ServerJob};
use paraft_record::{METRICS_FILE, MetricsWriter, RunRecord, read_events, render_report};
use paraft_server::shard::{Command, Contribution, InitPart, Outcome, Proposal, Shard, begin::JOB_FORM};
use paraft_worker::Job;
use std::path::Path;

/// The text of a job as servers get it, and three steps of it where it is small.
pub fn server_job(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let Ok(job) = ServerJob::from_toml(text) else { return };
    let layout = job.layout();
    let len = job.params_len + job.buffers_len + job.results_len;
    assert_eq!((layout.params_len(), layout.len()), (job.params_len, len));
    let again = job.to_toml().expect("what was read can be written");
    let back = ServerJob::from_toml(&again).expect("and read again");
    // As text: a NaN is not equal to itself.
    assert_eq!(format!("{back:?}"), format!("{job:?}"));
    assert!(job.heartbeat() <= job.lease());
    if layout.len() <= 1 << 12 && layout.buckets().len() <= 64 {
        train(&job, text);
    }
}

fn train(job: &ServerJob, text: &str) {
    let shard = Shard::new(ShardId(0), 1);
    assert_eq!(shard.apply(&Command::Admit { form: JOB_FORM, job: text.into() }.into()), Outcome::Done);
    let buckets: Vec<_> = (0u32..).map(BucketId).zip(job.layout().buckets().to_vec()).collect();
    for (bucket, spec) in &buckets {
        let payload = Payload::from(0.25f32.to_le_bytes().repeat(spec.len));
        let command = Command::Init { bucket: *bucket, part: InitPart::FRESH };
        assert_eq!(shard.apply(&Proposal { command, payload }), Outcome::Done);
    }
    let worker = WorkerId(0);
    let Outcome::Joined { session, .. } =
        shard.apply(&Command::Join { worker, session: SessionId(1) }.into())
    else {
        panic!("a worker may join")
    };
    let clock = shard.read(|m| m.members.get(worker).map(|m| m.clock())).expect("it has joined");
    let (mut step, mut seq) = (clock, paraft_common::Seq(0));
    for _ in 0..3 {
        step = step.next();
        for (bucket, spec) in &buckets {
            seq.0 += 1;
            let mut payload = Vec::new();
            let encoding = job.encoding(spec.kind);
            encoding.encode(&vec![0.5; spec.len], &mut payload);
            let pulled = paraft_common::Version(0);
            let contributions = vec![Contribution { worker, session, seq, step, pulled, samples: 1 }];
            let command = Command::Update {
                bucket: *bucket,
                contributions,
                encoding,
                factor: 1.0,
                closes: false,
                rate: None,
            };
            let outcome = shard.apply(&Proposal { command, payload: payload.into() });
            assert!(matches!(outcome, Outcome::Updated { applied: true, .. }), "{outcome:?}");
        }
    }
}

/// A job file; what stands behind zero bytes are `--set` assignments.
pub fn job_file(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let (text, set) = text.split_once('\0').map_or((text, Vec::new()), |(text, set)| {
        (text, set.split('\0').take(3).map(str::to_string).collect())
    });
    let path = Path::new("jobs/fuzz.toml");
    let job = match Job::parse(text, path, &set) {
        Ok(job) => job,
        Err(e) => {
            assert!(!e.to_string().is_empty());
            assert!(e.line.is_none_or(|l| l >= 1 && l <= text.lines().count().max(1)), "{e}");
            return;
        }
    };
    let again = Job::parse(&job.to_toml(), path, &[]).expect("what is put into a run's folder is a job");
    assert_eq!(format!("{again:?}"), format!("{job:?}"));
    // What a worker tells the servers, they take.
    let sent = job.server_job(&[TensorSpec::param("w", &[3, 100]), TensorSpec::buffer("b", &[7])]);
    let text = sent.to_toml().expect("it can be written");
    let back = ServerJob::from_toml(&text).unwrap_or_else(|e| panic!("{e}: {text}"));
    assert_eq!(format!("{back:?}"), format!("{sent:?}"));
}

/// `metrics.jsonl`, and what is computed from it.
pub fn metrics(data: &[u8]) {
    let scratch = Scratch::new();
    let path = scratch.file(METRICS_FILE, Input(data).rest());
    if let Ok(events) = read_events(&path) {
        let copy = scratch.file("copy", &[]);
        let mut writer = MetricsWriter::append(&copy).expect("a scratch file");
        events.iter().for_each(|e| writer.write(e).expect("what was read can be written"));
        let again = read_events(&copy).expect("and read again");
        assert_eq!(format!("{again:?}"), format!("{events:?}"));
    }
    if let Ok(record) = RunRecord::load(scratch.path()) {
        let _ = record.summarize();
        assert!(render_report(&[record]).contains("<html"));
    }
}
