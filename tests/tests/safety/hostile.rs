//! Bad input is refused with a reason and changes nothing, and the server keeps running.

use anyhow::{Context, Result};
use paraft_common::{Mode, ShardId};
use paraft_proto::{
    Acquire, Advance, Advice, Init, Norm, Open, Pause, PeerCall, PeerRequest, Pull, Report, SwitchMode,
    ToShard, WireKind, WithBulk, limits, services, to_shard::Kind,
};
use paraft_server::raft::{ReplicaId, stranger};
use paraft_tests::{
    fleet::{Fleet, FleetOptions},
    ledger::Ledger,
    raw::{Call, prefix},
    stream::{Stream, open, push},
};

/// One server, shards 0 (buckets 0 and 2) and 1 (bucket 1), four values each.
fn fleet() -> Result<(Fleet, Ledger)> {
    let fleet = Fleet::start(FleetOptions { servers: 1, shards: 2, replicas: 1, ..Default::default() })?;
    Ok((fleet, Ledger { bucket_len: 4, grace_ms: 1, ..Ledger::new(Mode::Asp, 1, 12) }))
}

/// A correct worker does the whole job.
fn serves_a_good_client(fleet: &Fleet, ledger: &Ledger) -> Result<()> {
    assert_eq!(ledger.join(&fleet.at, 0)?.run()?, vec![-1.0; ledger.len()]);
    Ok(())
}

/// Only a switch that another shard has taken reaches a shard through a worker.
#[test]
fn a_worker_cannot_switch_the_mode() -> Result<()> {
    let (fleet, ledger) = fleet()?;
    let (mut stream, _) = Stream::open(&fleet.at.addresses[0], &ledger.job(), 0, &[(0, 4), (2, 4)])?;
    for number in [1, 2, 1 << 53] {
        stream.send(Kind::SwitchMode(SwitchMode { number, mode: "bsp".into() }));
    }
    let weights = stream.pull(0)?;
    let last = weights.last().context("weights")?;
    assert_eq!((&last.mode[..], last.mode_number), ("asp", 0));
    drop(stream);
    serves_a_good_client(&fleet, &ledger)
}

#[test]
fn a_bad_message_is_refused_by_name_and_the_stream_goes_on() -> Result<()> {
    let (fleet, ledger) = fleet()?;
    let (mut stream, _) = Stream::open(&fleet.at.addresses[0], &ledger.job(), 0, &[(0, 4), (2, 4)])?;
    let clean = stream.pull(0)?;
    let push_with = |value: f32, at: usize| {
        let mut p = push(5, 1, 0, 1.0, 4);
        let mut bytes = p.payload.to_vec();
        bytes[at * 4..at * 4 + 4].copy_from_slice(&value.to_le_bytes());
        p.payload = bytes.into();
        Kind::Push(p)
    };
    let init = |bucket, value: f32, len: usize| {
        Kind::Init(Init { bucket, payload: value.to_le_bytes().repeat(len).into(), ..Init::default() })
    };
    let slot = Kind::Init(Init { bucket: 0, part: 1, payload: vec![0; 16].into(), ..Init::default() });
    let cases = [
        ("a bucket of another shard", Kind::Push(push(5, 1, 1, 1.0, 4)), "bucket 1 is not on shard 0", 5),
        ("a bucket of no shard", Kind::Push(push(5, 1, u32::MAX, 1.0, 4)), "is not on shard 0", 5),
        ("too short", Kind::Push(push(5, 1, 0, 1.0, 3)), "holds 16 bytes, the message brought 12", 5),
        ("empty", Kind::Push(push(5, 1, 0, 1.0, 0)), "the message brought 0", 5),
        ("too long", Kind::Push(push(5, 1, 0, 1.0, 1 << 18)), "the message brought 1048576", 5),
        ("a NaN", push_with(f32::NAN, 0), "holds a NaN or an infinity", 5),
        ("an infinity", push_with(f32::NEG_INFINITY, 3), "holds a NaN or an infinity", 5),
        (
            "a norm that is no number",
            Kind::Push(paraft_proto::Push { sum_of_squares: f64::NAN, ..push(5, 1, 0, 1.0, 4) }),
            "holds a NaN or an infinity",
            5,
        ),
        ("a step too far", Kind::Push(push(5, 9, 0, 1.0, 4)), "next is step 1", 5),
        ("the step before the first", Kind::Push(push(5, 0, 0, 1.0, 4)), "next is step 1", 5),
        ("the last step there is", Kind::Push(push(5, u64::MAX, 0, 1.0, 4)), "next is step 1", 5),
        (
            "a version of the future",
            Kind::Push(paraft_proto::Push { version: 7, ..push(5, 1, 0, 1.0, 4) }),
            "has only reached 0",
            5,
        ),
        ("Open again", Kind::Open(open(&ledger.job(), 0)?), "open already", 0),
        ("weights that are no numbers", init(0, f32::NAN, 4), "NaN", 0),
        ("weights of the wrong length", init(2, 1.0, 5), "the message brought 20", 0),
        (
            "a negative norm",
            Kind::Norm(Norm { step: 1, sum_of_squares: -1.0, bound: None }),
            "is -1, which is no number from 0",
            0,
        ),
        (
            "a norm of infinity",
            Kind::Norm(Norm { step: 1, sum_of_squares: f64::INFINITY, bound: None }),
            "is inf, which is no number from 0",
            0,
        ),
        (
            "a negative bound",
            Kind::Norm(Norm { step: 1, sum_of_squares: 1.0, bound: Some(-2.0) }),
            "is -2, which is no number from 0",
            0,
        ),
        ("a clock beyond all steps", Kind::Advance(Advance { step: u64::MAX }), "steps go up to 2^53", 0),
        (
            "a pull beyond all steps",
            Kind::Pull(Pull { done: u64::MAX, ..Pull::default() }),
            "steps go up to",
            0,
        ),
        (
            "versions of too few buckets",
            Kind::Pull(Pull { have: vec![0], ..Pull::default() }),
            "has 2 buckets",
            0,
        ),
        ("buckets in no order", Kind::Pull(Pull { only: vec![2, 0], ..Pull::default() }), "rise strictly", 0),
        (
            "a final pull of a part",
            Kind::Pull(Pull { only: vec![0], r#final: true, ..Pull::default() }),
            "beside `final`",
            0,
        ),
        ("a state vector that there is not", slot, "it has 0 state vectors", 0),
        ("no number of a push", Kind::Push(push(0, 1, 0, 1.0, 4)), "has seq 0", 0),
        (
            "a chunk of no chunks",
            Kind::Acquire(Acquire { request: 1, ..Acquire::default() }),
            "Acquire: this job gives",
            0,
        ),
        ("a pause without chunks", Kind::Pause(Pause {}), "Pause: this job gives", 0),
        (
            "no mode",
            Kind::SwitchMode(SwitchMode { number: 1, mode: "fast\u{1b}[2J".into() }),
            "`fast[2J` is no mode",
            0,
        ),
        (
            "no number of a switch",
            Kind::SwitchMode(SwitchMode { number: 0, mode: "asp".into() }),
            "has number 0",
            0,
        ),
    ];
    // Open may have been refused before there was a leader.
    let count = fleet.leader(ShardId(0)).1.refused + cases.len() as u64;
    for (what, message, words, seq) in cases {
        stream.send(message);
        let refused = stream.refused().context(what)?;
        assert!(refused.message.contains(words), "{what}: {}", refused.message);
        assert_eq!((refused.advice(), refused.seq), (Advice::Fix, seq), "{what}");
    }
    stream.send_raw(ToShard { kind: None });
    assert_eq!(stream.refused()?.kind(), WireKind::NoKind);
    assert_eq!(stream.pull(0)?, clean, "nothing has changed the weights");
    // A second Init is legal (every worker sends them) and changes nothing.
    stream.send(init(0, 5.0, 4));
    stream.send(Kind::Push(push(1, 1, 0, 1.0, 4)));
    assert_eq!(stream.ack()?, (1, 1));
    let status = fleet.leader(ShardId(0)).1;
    assert_eq!((status.refused, status.pushes), (count + 1, 1));
    // Sums that overflow are a worker's error, and must not end the server.
    for epoch in [1, 2] {
        stream.send(Kind::Report(Report { epoch, loss_sum: f64::MAX, correct: u64::MAX, count: u64::MAX }));
    }
    drop(stream);
    let page = ledger.join(&fleet.at, 0)?;
    assert!(page.done.0 <= 1);
    page.run()?;
    Ok(())
}

#[test]
fn overflowing_evaluations_do_not_stop_the_server() -> Result<()> {
    let (fleet, ledger) = fleet()?;
    let address = &fleet.at.addresses[0];
    let (mut a, _) = Stream::open(address, &ledger.job(), 0, &[(0, 4), (2, 4)])?;
    let (b, _) = Stream::open(address, &ledger.job(), 1, &[])?;
    let report = Kind::Report(Report { epoch: 1, loss_sum: f64::MAX, correct: u64::MAX, count: u64::MAX });
    a.send(report.clone());
    b.send(report);
    match a.receive()? {
        Some(paraft_proto::from_shard::Kind::Reported(r)) => assert_eq!((r.epoch, r.count), (1, u64::MAX)),
        other => anyhow::bail!("{other:?}"),
    }
    a.send(Kind::Finish(paraft_proto::Finish {}));
    drop((a, b));
    serves_a_good_client(&fleet, &ledger)
}

#[test]
fn a_stream_that_does_not_open_rightly_is_refused_and_ended() -> Result<()> {
    let (fleet, ledger) = fleet()?;
    let address = &fleet.at.addresses[0];
    let right = open(&ledger.job(), 0)?;
    let changed = |f: &dyn Fn(&mut paraft_common::config::ServerJob)| -> Result<String> {
        let mut job = ledger.job();
        f(&mut job);
        Ok(job.to_toml()?)
    };
    let with_job = |job: String| Kind::Open(Open { job, ..right.clone() });
    let refused = |kind: Option<Kind>, words: &str| -> Result<()> {
        let mut stream = Stream::connect(address)?;
        stream.send_raw(ToShard { kind });
        let refused = stream.refused().with_context(|| words.to_string())?;
        assert!(refused.message.contains(words), "{words}: {}", refused.message);
        assert_eq!(refused.seq, 0);
        assert_eq!(stream.receive()?, None, "{words}: the stream ends");
        Ok(())
    };
    // Before there is a job: none of these may configure one.
    refused(Some(Kind::Push(push(1, 1, 0, 1.0, 4))), "must be Open")?;
    refused(None, "must be Open")?;
    refused(Some(Kind::Open(Open { protocol: 99, ..right.clone() })), "protocol 99")?;
    refused(Some(Kind::Open(Open { shard: 9, ..right.clone() })), "shard 9 is not on this server")?;
    refused(Some(with_job("lr = = 1".into())), "not valid")?;
    refused(Some(with_job(String::new())), "not valid")?;
    refused(Some(with_job("x".repeat(limits::MAX_JOB_BYTES + 1))), "too long")?;
    refused(Some(with_job(changed(&|j| j.params_len = 0)?)), "0 values")?;
    refused(Some(with_job(changed(&|j| j.params_len = usize::MAX >> 1)?)), "values; a job has")?;
    refused(
        Some(with_job(changed(&|j| (j.params_len, j.bucket_len) = (1 << 33, 1))?)),
        "a layout has at most",
    )?;
    refused(Some(with_job(changed(&|j| j.bucket_len = 0)?)), "bucket_len 0")?;
    refused(Some(with_job(changed(&|j| j.workers = 0)?)), "0 workers")?;
    let nan = paraft_common::optim::OptimizerConfig::sgd(f64::NAN);
    refused(Some(with_job(changed(&|j| j.optimizer = nan.clone())?)), "[optimizer] lr")?;
    assert_eq!(fleet.shard().buckets, 0, "no job was taken");
    // With a job.
    let (mut owner, opened) = Stream::open(address, &ledger.job(), 0, &[(0, 4), (2, 4)])?;
    refused(Some(with_job(changed(&|j| j.name = "another".into())?)), "trains job `ledger`, not `another`")?;
    refused(Some(with_job(changed(&|j| j.mode = Mode::Bsp.into())?)), "mode = \"bsp\"")?;
    refused(Some(Kind::Open(right.clone())), "connected from another process")?;
    refused(Some(Kind::Open(Open { session: 77, ..right.clone() })), "was taken out of the job")?;
    refused(
        Some(Kind::Open(Open { worker: 1, session: opened.session, ..right.clone() })),
        "worker w1 has no",
    )?;
    // The correct stream is still open.
    owner.pull(0)?;
    drop(owner);
    serves_a_good_client(&fleet, &ledger)
}

#[test]
fn a_session_is_taken_up_again_only_by_who_was_told_its_number() -> Result<()> {
    let (fleet, ledger) = fleet()?;
    let ledger = Ledger { grace_ms: 60_000, ..ledger }; // it is silent for as long as the strangers take
    let address = &fleet.at.addresses[0];
    let right = open(&ledger.job(), 0)?;
    let (mut owner, opened) = Stream::open(address, &ledger.job(), 0, &[(0, 4), (2, 4)])?;
    // Values that a stranger may guess, and values that any client may read.
    let shown: Vec<u64> =
        fleet.leader(ShardId(0)).1.members.iter().flat_map(|m| [m.session, m.session << 40]).collect();
    let near = [opened.session ^ 1, opened.session.wrapping_add(1)];
    for session in (1..=8).chain(shown).chain(near).filter(|s| *s != 0) {
        assert_ne!(session, opened.session);
        let mut stranger = Stream::connect(address)?;
        stranger.send(Kind::Open(Open { session, ..right.clone() }));
        assert_eq!(stranger.refused()?.kind(), WireKind::UnknownSession, "{session}");
    }
    owner.send(Kind::Push(push(1, 1, 0, 1.0, 4)));
    assert_eq!(owner.ack()?, (1, 1), "the session is still its own");
    let mut back = Stream::connect(address)?;
    back.send(Kind::Open(Open { session: opened.session, ..right }));
    let again = back.receive()?;
    assert!(matches!(again, Some(paraft_proto::from_shard::Kind::Opened(_))), "{again:?}");
    back.send(Kind::Push(push(1, 1, 0, 1.0, 4)));
    assert_eq!(back.ack()?, (1, 1), "who knows the number takes it up, and the push is in already");
    Ok(())
}

#[test]
fn the_same_job_in_other_words_is_the_same_job() -> Result<()> {
    let (fleet, ledger) = fleet()?;
    let address = &fleet.at.addresses[0];
    let (_owner, _) = Stream::open(address, &ledger.job(), 0, &[(0, 4), (2, 4)])?;
    let text = ledger.job().to_toml()?;
    // Top-level keys in another order; the tables stay in place.
    let top = text.find("\n[").expect("tables");
    let mut lines: Vec<&str> = text[..top].lines().collect();
    lines.reverse();
    let job = format!("# by hand\n{}\n{}", lines.join("\n"), &text[top..]);
    assert_ne!(job, text);
    let mut other = Stream::connect(address)?;
    other.send(Kind::Open(Open { job, ..open(&ledger.job(), 0)? }));
    assert_eq!(other.refused()?.kind(), WireKind::RankTaken, "the job is right, the rank is not");
    Ok(())
}

#[test]
fn a_message_for_a_session_that_is_not_open_yet_is_refused() -> Result<()> {
    let (fleet, ledger) = fleet()?;
    let address = &fleet.at.addresses[0];
    drop(Stream::open(address, &ledger.job(), 3, &[(0, 4), (2, 4)])?);
    // Sent right after Open, before the server has sent Opened: a join takes as long as a proposal.
    let mut stream = Stream::connect(address)?;
    stream.send(Kind::Open(open(&ledger.job(), 4)?));
    stream.send(Kind::Push(push(1, 1, 0, 0.0, 4)));
    let mut words = Vec::new();
    while let Some(kind) = stream.receive()? {
        match kind {
            paraft_proto::from_shard::Kind::Refused(r) => words.push(r.message),
            // Or the join was faster than the push; then it is an ordinary push.
            paraft_proto::from_shard::Kind::Ack(_) => break,
            _ => {}
        }
    }
    assert!(words.iter().all(|w| w.contains("must be Open")), "{words:?}");
    drop(stream);
    // If the push was applied, the correct worker starts after it.
    ledger.join(&fleet.at, 0)?.run()?;
    Ok(())
}

#[test]
fn invalid_bytes_are_refused_and_the_server_keeps_running() -> Result<()> {
    let (fleet, ledger) = fleet()?;
    let address = &fleet.at.addresses[0];
    let unknown = b"cannot be read: ";
    let exchange = |bytes: &[u8], end: bool| -> Result<Call> {
        let mut call = Call::open(address, "/paraft.v1.Shards/Exchange")?;
        call.body(bytes, end)?;
        Ok(call)
    };
    exchange(&prefix(1 << 30), false)?.expect(unknown)?;
    exchange(&prefix(limits::MAX_MESSAGE_BYTES as u32 + 1), false)?.expect(unknown)?;
    exchange(&[&prefix(100)[..], &[0; 10]].concat(), true)?.expect(unknown)?; // truncated
    exchange(&[&prefix(4)[..], &[0xff; 4]].concat(), false)?.expect(unknown)?; // not protobuf
    exchange(&[1, 0, 0, 0, 1, 0], false)?.expect(unknown)?; // claims to be compressed
    exchange(&[&prefix(2)[..], &[0x0d, 1]].concat(), false)?.expect(unknown)?; // Open with another wire type
    exchange(&[], true)?.expect(b"must be Open")?;
    let mut nonsense = Call::connect(address)?;
    nonsense.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")?;
    nonsense.expect_close()?;
    let mut nowhere = Call::open(address, "/paraft.v1.Shards/Nothing")?;
    nowhere.body(&prefix(0), true)?;
    nowhere.expect_response()?;
    serves_a_good_client(&fleet, &ledger)
}

#[test]
fn strangers_among_the_servers_are_refused_and_change_nothing() -> Result<()> {
    let fleet = Fleet::start(FleetOptions::replicated(3))?;
    let ledger = Ledger { bucket_len: 4, ..Ledger::new(Mode::Bsp, 1, 12) };
    let mut page = ledger.join(&fleet.at, 0)?;
    page.begin()?;
    for _ in 0..5 {
        page.step()?;
    }
    let before = fleet.replicas_agree()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let call = |request: WithBulk<PeerRequest>| {
        runtime.block_on(async {
            let to = tonic::transport::Endpoint::from_shared(format!("http://{}", fleet.at.addresses[0]));
            let channel = to.map_err(|e| e.to_string())?.connect().await.map_err(|e| e.to_string())?;
            let reply = services::peer_call(&channel, request).await;
            reply.map(|_| ()).map_err(|s| s.message().to_string())
        })
    };
    let known = fleet.describe()?.fleet;
    let member = fleet.status(1, false)?.shards[0].node;
    let to = |group: u32, to: u64| PeerRequest {
        group,
        from: member,
        to,
        fleet: known,
        call: PeerCall::Vote as i32,
        ..PeerRequest::default()
    };
    let expect = |request: PeerRequest, words: &str| {
        let refused = call(request.into()).expect_err(words);
        assert!(refused.contains(words), "{words}: {refused}");
    };
    expect(to(9, 1), "shard 9 is not on this server");
    // A replica of an earlier incarnation, and one of another server.
    expect(to(0, 4711), "it has lost its log");
    let own = fleet.status(0, false)?.shards[0].node;
    expect(PeerRequest { fleet: known + 1, ..to(0, own) }, "belongs to another fleet");
    expect(PeerRequest { fleet: 0, ..to(0, own) }, "belongs to another fleet");
    expect(PeerRequest { from: 1 << 32 | 7, ..to(0, own) }, "is no member of shard 0");
    expect(to(u32::MAX, own), "is no member of the control group");
    // Valid messages of every kind. If a server believed them, they would end the group for ever.
    for term in [u64::MAX, 1 << 62, 1 << 40] {
        for (kind, header, bulk) in stranger::forged(term, ReplicaId(member)) {
            let message = PeerRequest { call: kind as i32, header, ..to(0, own) };
            let request = WithBulk { message, bulk };
            assert!(call(request).is_err(), "{kind:?} of term {term} was taken from a member");
        }
        for (kind, header, bulk) in stranger::forged(term, ReplicaId(1 << 32 | 7)) {
            for group in [0, u32::MAX] {
                let to = to(group, if group == 0 { own } else { fleet.hello(0)?.node });
                let message =
                    PeerRequest { from: 1 << 32 | 7, call: kind as i32, header: header.clone(), ..to };
                let refused = call(WithBulk { message, bulk: bulk.clone() }).expect_err("from nobody");
                assert!(refused.contains("is no member"), "{kind:?}: {refused}");
            }
        }
    }
    let kinds =
        [PeerCall::Unspecified, PeerCall::Append, PeerCall::Vote, PeerCall::PreVote, PeerCall::Snapshot];
    for kind in kinds.into_iter().chain([PeerCall::TransferLeader]) {
        for header in [vec![], vec![0xff; 40], vec![7; 300], (0..=255).collect()] {
            let known = PeerRequest { call: kind as i32, header: header.into(), ..to(0, own) };
            call(known.into()).expect_err("no header of any call");
        }
    }
    assert_eq!(fleet.replicas_agree()?, before);
    assert_eq!(page.run()?, [-1.0; 12]);
    Ok(())
}
