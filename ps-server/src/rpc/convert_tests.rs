//! Tests of `convert`.

use super::*;
use crate::shard::{Command, begin::JOB_FORM};
use bytes::Bytes;
use paraft_common::{Mode, config::ServerJob, encoding::Values};
use proptest::prelude::*;

/// Shard 0 of 2: buckets 0 (4 values) and 2 (2 values).
fn shard(encoding: Encoding) -> Shard {
    let job = ServerJob::new("convert", Mode::Asp, 10, 4);
    let job = ServerJob { grace_ms: 0, encoding, ..job };
    let shard = Shard::new(ShardId(0), 2);
    shard.apply(&Command::Admit { form: JOB_FORM, job: job.to_toml().expect("valid") }.into());
    shard
}

#[test]
fn words_of_a_worker_hold_nothing_a_terminal_obeys() {
    let h = wire::Heartbeat {
        host: "n1\u{1b}[2J\u{202e}".into(),
        device: "cuda:0\n".into(),
        said: vec!["a\rb".into(), "ü ok".into()],
    };
    let WorkerInfo { host, device, said } = about(&h);
    assert_eq!((&*host, &*device), ("n1\u{fffd}[2J\u{fffd}", "cuda:0\u{fffd}"));
    assert_eq!(said, ["a\u{fffd}b", "ü ok"]);
}

#[test]
fn words_of_a_worker_have_a_bound() {
    let long = || "a".repeat(1000);
    let h = wire::Heartbeat { host: long(), device: long(), said: vec![long(); 1000] };
    let WorkerInfo { host, device, said } = about(&h);
    assert_eq!((host.len(), device.len(), said.len()), (64, 64, 20));
    assert!(said.iter().all(|line| line.len() == 240));
}

fn a_payload() -> impl Strategy<Value = Bytes> {
    prop_oneof![
        prop::collection::vec(any::<u8>(), 0..40),
        prop::collection::vec(any::<f32>(), 0..6)
            .prop_map(|v| v.iter().flat_map(|x| x.to_le_bytes()).collect()),
    ]
    .prop_map(Bytes::from)
}

fn a_message() -> impl Strategy<Value = ToShard> {
    use to_shard::Kind;
    let n = any::<u64>;
    prop_oneof![
        Just(None),
        Just(Some(Kind::Finish(wire::Finish {}))),
        Just(Some(Kind::Leave(wire::Leave {}))),
        Just(Some(Kind::Open(wire::Open::default()))),
        (0u32..5, a_payload(), prop_oneof![0u32..4, any::<u32>()], n(), any::<f64>()).prop_map(
            |(bucket, payload, part, version, clock)| {
                Some(Kind::Init(wire::Init { bucket, payload, part, version, clock, ..Default::default() }))
            }
        ),
        (
            (n(), n(), prop_oneof![0u32..5, any::<u32>()], n(), any::<f64>(), a_payload(), any::<u32>()),
            (prop::option::of(prop_oneof![any::<f64>(), 0f64..1.0]), prop::bool::weighted(0.2)),
        )
            .prop_map(
                |((seq, step, bucket, version, sum_of_squares, payload, samples), (rate, skip))| {
                    Some(Kind::Push(wire::Push {
                        seq,
                        step,
                        bucket,
                        version,
                        sum_of_squares,
                        payload,
                        samples,
                        rate,
                        skip,
                        overrides: None,
                        clipped: false,
                    }))
                }
            ),
        (
            n(),
            (any::<bool>(), any::<bool>(), any::<bool>()),
            prop::collection::vec(n(), 0..4),
            any::<Option<f32>>(),
            prop::collection::vec(prop_oneof![0u32..5, any::<u32>()], 0..4)
        )
            .prop_map(|(done, (last, checkpoint, barrier), have, loss, only)| {
                Some(Kind::Pull(wire::Pull {
                    done,
                    r#final: last,
                    checkpoint,
                    have,
                    loss,
                    only,
                    barrier,
                    rows: Vec::new(),
                }))
            }),
        (n(), any::<f64>(), any::<Option<f64>>()).prop_map(|(step, sum_of_squares, bound)| Some(Kind::Norm(
            wire::Norm { step, sum_of_squares, bound }
        ))),
        (n(), any::<f64>(), n(), n()).prop_map(|(epoch, loss_sum, correct, count)| {
            Some(Kind::Report(wire::Report { epoch, loss_sum, correct, count }))
        }),
        n().prop_map(|step| Some(Kind::Advance(wire::Advance { step }))),
        (n(), n(), any::<Option<u64>>()).prop_map(|(request, epoch, done)| {
            Some(Kind::Acquire(wire::Acquire { request, epoch, done }))
        }),
        any::<bool>().prop_map(|level| Some(Kind::Resume(wire::Resume { level }))),
        Just(Some(Kind::Pause(wire::Pause {}))),
        Just(Some(Kind::Heartbeat(wire::Heartbeat::default()))),
        (n(), prop::sample::select(vec!["asp", "ssp:3", "bsp", "", "?"])).prop_map(|(number, mode)| {
            Some(Kind::SwitchMode(wire::SwitchMode { number, mode: mode.into() }))
        }),
    ]
    .prop_map(|kind| ToShard { kind })
}

#[test]
fn a_rate_is_a_number_that_an_optimizer_can_take() {
    let with = |algorithm: &str| {
        let algorithm = toml::from_str(&format!("kind = \"{algorithm}\"")).expect("a kind");
        let momentum = toml::from_str("kind = \"nesterov\"").expect("a kind");
        let job = ServerJob {
            algorithm,
            optimizer: momentum,
            buffers_len: 4,
            ..ServerJob::new("rates", Mode::Asp, 4, 4)
        };
        let shard = Shard::new(ShardId(0), 1);
        shard.apply(&Command::Admit { form: JOB_FORM, job: job.to_toml().expect("valid") }.into());
        shard
    };
    let push = |shard: &Shard, bucket: u32, rate: f64| {
        let payload = vec![0u8; 16].into();
        let push = wire::Push { seq: 3, step: 1, bucket, payload, rate: Some(rate), ..Default::default() };
        message(shard, ToShard { kind: Some(to_shard::Kind::Push(push)) }.into())
    };
    let plain = with("asgd");
    for rate in [0.0, -0.0, 0.1, 1e30] {
        let Ok(Some(Message::Push { overrides: got, .. })) = push(&plain, 0, rate) else { panic!("{rate}") };
        assert_eq!(got, Overrides::rate(Some(rate)));
    }
    let bad =
        |r: Result<_, Refusal>| r.is_err_and(|r| r.seq == 3 && matches!(r.kind, RefusalKind::BadRate { .. }));
    for rate in [-0.1, f64::NAN, f64::INFINITY, 1e39] {
        assert!(bad(push(&plain, 0, rate)), "{rate}");
    }
    let Ok(Some(Message::Push { overrides, .. })) = push(&plain, 1, -1.0) else { panic!("no push") };
    assert_eq!(overrides, Overrides::default(), "running statistics have no rate");
    assert!(bad(push(&with("dana-zero"), 0, 0.1)), "it looks ahead at the job's rate");
}

proptest! {
    #[test]
    fn what_comes_through_fits_the_shard_and_is_finite(
        m in a_message(), encoding in prop::sample::select(Encoding::ALL.to_vec()),
    ) {
        let shard = shard(encoding);
        let conf = shard.configured().expect("configured");
        match message(&shard, m.clone().into()) {
            Ok(Some(Message::Push { payload, overrides, skip: true, .. })) => {
                prop_assert!(payload.is_empty() && overrides == Overrides::default());
            }
            Ok(Some(Message::Push { bucket, payload, sum_of_squares, overrides, .. })) => {
                let rate = overrides.rate;
                prop_assert!(rate.is_none_or(|r| r >= 0.0 && (r as f32).is_finite()), "{:?}", rate);
                let mut values = vec![0.0; conf.buckets[bucket].spec.len];
                let decoded = Values::new(&payload, encoding, values.len()).map(|mut v| v.read(&mut values));
                prop_assert_eq!(decoded, Ok(Ok(())));
                prop_assert!(values.iter().all(|v| v.is_finite()));
                prop_assert!(sum_of_squares.is_finite() && sum_of_squares >= 0.0);
            }
            Ok(Some(Message::Init { bucket, part, payload })) => {
                let local = conf.local(bucket).expect("a bucket of this shard");
                match part {
                    InitPart::Slot(_) | InitPart::Rows { .. } | InitPart::History { .. } => {
                        prop_assert!(false, "plain SGD has no slots, and the job no tables");
                    }
                    InitPart::Weights { version, clock } => {
                        prop_assert!(version.0 <= MAX_STEP && clock >= 0.0 && clock.is_finite());
                    }
                }
                let len = conf.buckets[local].spec.len;
                prop_assert_eq!(all_finite(&payload, Encoding::F32, len), Ok(true), "whatever pushes have");
            }
            Ok(Some(Message::Norm { sum_of_squares, .. })) => prop_assert!(sum_of_squares >= 0.0),
            Ok(Some(Message::Advance { step })) => prop_assert!(step.0 <= MAX_STEP),
            Ok(Some(Message::Acquire { .. } | Message::Pause | Message::Resume { .. })) => {
                prop_assert!(false, "this job has no chunks");
            }
            Ok(_) => {}
            Err(refusal) => {
                // A refusal names the refused push, so that the stream stays open.
                let seq = match m.kind { Some(to_shard::Kind::Push(p)) => p.seq, _ => 0 };
                prop_assert_eq!(refusal.seq, seq);
            }
        }
    }

    #[test]
    fn a_reader_gets_what_the_shard_has_or_is_refused(
        at_least in prop::collection::vec(any::<u64>(), 0..4),
        only in prop::collection::vec(prop_oneof![0u32..5, any::<u32>()], 0..4),
    ) {
        let request = wire::ReadRequest { at_least: at_least.clone(), only: only.clone(), ..Default::default() };
        let read = read(&shard(Encoding::F32), request);
        let versions = [0, 2].contains(&at_least.len());
        let buckets = only.iter().all(|b| [0, 2].contains(b)) && only.is_sorted_by(|a, b| a < b);
        prop_assert_eq!(read.is_ok(), versions && buckets, "{:?}", read);
    }

    #[test]
    fn a_shard_without_a_job_takes_no_bulk(m in a_message()) {
        let refused = message(&Shard::new(ShardId(0), 1), m.clone().into()).is_err();
        let bulk = matches!(m.kind, Some(to_shard::Kind::Push(_) | to_shard::Kind::Init(_)));
        prop_assert!(refused || !bulk);
    }
}
