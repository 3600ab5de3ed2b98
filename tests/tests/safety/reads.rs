//! Readers that do not train get weights from any replica, at the requested version or a later one.

use anyhow::{Context, Result, bail, ensure};
use futures::StreamExt;
use paraft_common::{Durability, Mode, ShardId, Step};
use paraft_proto::{
    FromShard, PROTOCOL, Pull, ReadRequest, ToShard, WithBulk, bulk, from_shard, services, to_shard,
};
use paraft_tests::{
    fleet::{Fleet, FleetOptions},
    ledger::Ledger,
    stream::{Stream, push},
    wait::{self, DEADLINE},
};
use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
    thread,
};

/// Reads from one server; returns versions and values of the buckets, by rising number.
fn read(address: &str, request: ReadRequest) -> Result<Vec<(u64, Vec<f32>)>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let ask = async {
        let channel = tonic::transport::Endpoint::from_shared(format!("http://{address}"))?.connect().await?;
        let mut inbound = services::read(&channel, request).await?;
        let mut got = Vec::new();
        let mut last = false;
        while let Some(answer) = inbound.next().await {
            let answer = answer?;
            let payload = answer.bulk.into_iter().next().unwrap_or_default();
            match answer.message.kind.context("a kind")? {
                from_shard::Kind::Weights(w) => {
                    ensure!(!last, "something comes after the last");
                    last = w.last;
                    let mut values = vec![0.0; payload.len() / 4];
                    payload.reader().values(&mut values).map_err(|e| anyhow::anyhow!("{e}"))?;
                    got.push((w.bucket, (w.version, values)));
                }
                from_shard::Kind::Refused(r) => bail!("{}", r.message),
                other => bail!("{other:?}"),
            }
        }
        ensure!(last, "it ends before the last");
        got.sort_by_key(|(bucket, _)| *bucket);
        Ok(got.into_iter().map(|(_, got)| got).collect())
    };
    runtime.block_on(async { tokio::time::timeout(DEADLINE, ask).await? })
}

fn request(at_least: Vec<u64>) -> ReadRequest {
    ReadRequest { protocol: PROTOCOL, at_least, ..ReadRequest::default() }
}

/// The number of steps of one worker that the weights show: the first ones, each once.
fn shown(ledger: &Ledger, weights: &[f32]) -> Result<u64> {
    let at = |step| weights[ledger.place(0, Step(step))];
    let steps = (1..=ledger.steps).take_while(|s| at(*s) == -1.0).count() as u64;
    let rest = (steps + 1..=ledger.steps).find(|s| at(*s) != 0.0);
    ensure!(rest.is_none(), "step {rest:?} is there and the one behind {steps} is not");
    Ok(steps)
}

#[test]
fn every_replica_serves_requested_version_despite_deaths() -> Result<()> {
    for durability in [Durability::QuorumMemory, Durability::Leader] {
        let mut fleet = Fleet::start(FleetOptions::replicated(1))?;
        fleet.whole()?;
        // One bucket: its version is the number of steps, and its weights show them.
        let ledger =
            Ledger { bucket_len: 1 << 10, durability, grace_ms: 60_000, ..Ledger::new(Mode::Asp, 1, 400) };
        let pushed = Arc::new(AtomicU64::new(0));
        let (at, counts) = (fleet.at.clone(), pushed.clone());
        let worker = thread::spawn(move || -> Result<Vec<f32>> {
            let mut page = ledger.join(&at, 0)?;
            page.begin()?;
            while page.done.0 < ledger.steps {
                page.step()?;
                counts.store(page.done.0, SeqCst);
            }
            Ok(page.finish()?)
        });
        let here = || fleet.at.addresses.iter().filter(|a| read(a, request(Vec::new())).is_ok()).count();
        wait::until("the job to be on every server", here, |n| *n == 3);
        for version in [1, 30, 31, 60, 120] {
            for address in &fleet.at.addresses {
                let got = read(address, request(vec![version]))?;
                let [(found, weights)] = &got[..] else { bail!("{} buckets", got.len()) };
                ensure!(*found >= version && shown(&ledger, weights)? == *found, "version {found}");
            }
        }
        if durability == Durability::QuorumMemory {
            let (leader, _) = fleet.leader(ShardId(0));
            fleet.kill(leader);
            for id in fleet.alive() {
                let got = read(&fleet.at.addresses[id as usize], request(vec![400]))?;
                ensure!(shown(&ledger, &got[0].1)? == 400, "server {id}");
            }
        }
        worker.join().map_err(|_| anyhow::anyhow!("the worker panicked"))??;
        ensure!(pushed.load(SeqCst) == ledger.steps, "all steps");
    }
    Ok(())
}

#[test]
fn a_reader_that_asks_for_what_is_not_there_is_told_so() -> Result<()> {
    let fleet = Fleet::start(FleetOptions::replicated(1))?;
    fleet.whole()?;
    let address = &fleet.at.addresses[1];
    let why = |request| read(address, request).expect_err("refused").to_string();
    let none = why(request(Vec::new()));
    ensure!(none.contains("no job yet"), "{none}");
    let ledger = Ledger { bucket_len: 8, ..Ledger::new(Mode::Asp, 1, 16) };
    ensure!(ledger.join(&fleet.at, 0)?.run()? == vec![-1.0; 16], "all pushes");
    ensure!(read(address, request(vec![8, 8]))?.len() == 2, "both buckets");
    ensure!(read(address, ReadRequest { only: vec![1], ..request(Vec::new()) })?.len() == 1, "one of them");
    for (request, words) in [
        (ReadRequest { protocol: PROTOCOL + 1, ..request(Vec::new()) }, "protocol"),
        (request(vec![1]), "2 buckets"),
        (ReadRequest { only: vec![7], ..request(Vec::new()) }, "bucket"),
        (ReadRequest { only: vec![1, 0], ..request(Vec::new()) }, "rise"),
        (ReadRequest { founding: 1, ..request(Vec::new()) }, "founding"),
        (ReadRequest { shard: 9, ..request(Vec::new()) }, "shard"),
    ] {
        let said = why(request);
        ensure!(said.contains(words), "`{words}` is not in: {said}");
    }
    Ok(())
}

/// A worker may try again: a machine with too much to do is slow to send.
#[test]
fn a_stream_without_a_first_message_ends() -> Result<()> {
    let fleet = Fleet::start(FleetOptions::replicated(1))?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let ask = async {
        let at = format!("http://{}", fleet.at.addresses[0]);
        let channel = tonic::transport::Endpoint::from_shared(at)?.connect().await?;
        let silent_read = futures::stream::pending::<WithBulk<ReadRequest>>();
        let read = bulk::call::<ReadRequest, FromShard, _>(&channel, services::READ, silent_read, 1 << 20);
        let silent_worker = futures::stream::pending::<WithBulk<ToShard>>();
        let exchange = async {
            let mut answers =
                bulk::call::<ToShard, FromShard, _>(&channel, services::EXCHANGE, silent_worker, 1 << 20)
                    .await?;
            answers.next().await.context("an answer")?.map_err(anyhow::Error::from)
        };
        tokio::time::timeout(DEADLINE, async { tokio::join!(read, exchange) })
            .await
            .map_err(anyhow::Error::from)
    };
    let (read, exchange) = runtime.block_on(ask)?;
    match read {
        Ok(_) => bail!("the read is answered"),
        Err(status) => ensure!(status.code() == tonic::Code::DeadlineExceeded, "{status:?}"),
    }
    match exchange?.message.kind {
        Some(from_shard::Kind::Refused(r)) => {
            ensure!(!r.is_final() && r.message.contains("first message"), "{r:?}")
        }
        other => bail!("{other:?}"),
    }
    Ok(())
}

/// A worker need not wait for the ack of one step before it pushes the next: the leader applies them in
/// order.
#[test]
fn a_push_that_follows_one_that_is_not_applied_yet_waits_for_it() -> Result<()> {
    const STEPS: u64 = 50;
    let fleet = Fleet::start(FleetOptions::replicated(1))?;
    fleet.whole()?;
    let ledger = Ledger { grace_ms: 60_000, ..Ledger::new(Mode::Asp, 1, STEPS) };
    let (leader, _) = fleet.leader(ShardId(0));
    let buckets: Vec<_> = ledger.job().layout().buckets().iter().map(|b| b.len).enumerate().collect();
    let buckets: Vec<(u32, usize)> = buckets.into_iter().map(|(i, len)| (i as u32, len)).collect();
    let (mut stream, _) = Stream::open(&fleet.at.addresses[leader as usize], &ledger.job(), 0, &buckets)?;
    stream.pull(0)?;
    let seq = |step: u64, bucket: u32| (step - 1) * buckets.len() as u64 + u64::from(bucket) + 1;
    for step in (1..=STEPS).step_by(2) {
        // Both before the first is applied; one push of each of two steps may be in flight.
        for step in [step, step + 1] {
            for (bucket, len) in &buckets {
                stream.send(to_shard::Kind::Push(push(seq(step, *bucket), step, *bucket, 1.0, *len)));
            }
        }
        for _ in 0..2 * buckets.len() {
            stream.ack()?;
        }
    }
    let version = stream.pull(STEPS)?.iter().map(|w| w.version).sum::<u64>();
    ensure!(version == STEPS * buckets.len() as u64, "{version} updates");
    // Two steps ahead is still wrong.
    stream.send(to_shard::Kind::Push(push(seq(STEPS + 2, 0), STEPS + 2, 0, 1.0, buckets[0].1)));
    let refused = stream.refused()?;
    ensure!(refused.message.contains("next is step"), "{}", refused.message);
    Ok(())
}

/// More streams than a server accepts, none of which is read.
#[test]
fn readers_that_take_nothing_stop_no_update_and_are_closed() -> Result<()> {
    const STREAMS: usize = 300;
    let fleet = Fleet::start(FleetOptions::replicated(1))?;
    fleet.whole()?;
    // 12 buckets of 1 MiB, and one that shows the steps.
    let ledger = Ledger { bucket_len: 1 << 18, slot: true, extra: 12 << 18, ..Ledger::new(Mode::Asp, 1, 60) };
    let mut page = ledger.join(&fleet.at, 0)?;
    page.begin()?;
    let here =
        |address: &&String| read(address, ReadRequest { only: vec![0], ..request(Vec::new()) }).is_ok();
    wait::until("the job to be everywhere", || fleet.at.addresses.iter().filter(here).count(), |n| *n == 3);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let hang = |address: String| async move {
        // A stream takes 64 KiB and no more.
        let endpoint = tonic::transport::Endpoint::from_shared(format!("http://{address}"))?;
        let channel = endpoint.initial_stream_window_size(1 << 16).connect().await?;
        let mut open = Vec::new();
        for _ in 0..STREAMS {
            open.push(services::read(&channel, request(Vec::new())).await?);
        }
        anyhow::Ok((channel, open))
    };
    let hanging: Vec<_> =
        fleet.at.addresses.iter().cloned().map(|a| runtime.block_on(hang(a))).collect::<Result<_>>()?;
    while page.done.0 < ledger.steps {
        page.step()?;
    }
    let weights = page.finish()?;
    ensure!(shown(&ledger, &weights)? == ledger.steps, "each push once");
    // Weights that the worker pulled are taken; weights that readers wait for are not part of the state.
    let copied = || -> Result<Vec<u64>> {
        fleet.alive().into_iter().map(|id| Ok(fleet.status(id, false)?.shards[0].memory_copies)).collect()
    };
    wait::until("no vector to be kept for a reader", || copied().unwrap_or_default(), |c| *c == [0; 3]);
    let stalled = || {
        fleet
            .alive()
            .into_iter()
            .map(|id| fleet.status(id, false))
            .map(|s| s.ok()?.connections.map(|c| c.stalled))
            .collect()
    };
    wait::until("the readers' connections to be closed", stalled, |s: &Vec<Option<u64>>| {
        s.iter().all(|n| *n >= Some(1))
    });
    let refused = hanging.into_iter().map(|(_, open)| open).next().context("the first server")?;
    let (mut ended, mut over) = (0, 0);
    for mut inbound in refused {
        let ends = async { tokio::time::timeout(DEADLINE, inbound.message()).await };
        match runtime.block_on(ends).context("it ends")? {
            Err(_) => ended += 1,
            Ok(Some(m)) => over += usize::from(matches!(m.message.kind, Some(from_shard::Kind::Refused(_)))),
            Ok(None) => {}
        }
    }
    ensure!(
        over > 0 && ended > 0 && over + ended <= STREAMS,
        "{over} were refused and {ended} closed of {STREAMS}"
    );
    for address in &fleet.at.addresses {
        ensure!(read(address, request(Vec::new()))?.len() == 13, "others are served");
    }
    Ok(())
}

/// A worker that pulls before each update and reads no answer has some buckets of one version in flight, not
/// all buckets of each version.
#[test]
fn workers_that_read_no_answer_hold_no_version_of_the_weights() -> Result<()> {
    const WORKERS: u32 = 16;
    // One in the transport, one behind it, and one that an update has just replaced.
    const BUCKETS_EACH: u64 = 3;
    let fleet = Fleet::start(FleetOptions::replicated(1))?;
    fleet.whole()?;
    // 12 buckets of 1 MiB, and one that shows the steps.
    let ledger = Ledger { bucket_len: 1 << 18, extra: 12 << 18, ..Ledger::new(Mode::Asp, 1, 60) };
    let mut page = ledger.join(&fleet.at, 0)?;
    page.begin()?;
    let (leader, _) = fleet.leader(ShardId(0));
    let address = &fleet.at.addresses[leader as usize];
    let hanging: Vec<_> = (1..=WORKERS)
        .map(|worker| Stream::open(address, &ledger.job(), worker, &[]).map(|(stream, _)| stream))
        .collect::<Result<_>>()?;
    let mut most = 0;
    while page.done.0 < ledger.steps {
        for stream in &hanging {
            stream.send(to_shard::Kind::Pull(Pull::default()));
        }
        page.step()?;
        most = most.max(fleet.status(leader, false)?.shards[0].memory_copies);
    }
    ensure!(
        most <= u64::from(WORKERS) * (BUCKETS_EACH << 20),
        "{most} bytes are kept for workers that do not read"
    );
    drop(hanging);
    ensure!(shown(&ledger, &page.finish()?)? == ledger.steps, "each push once");
    Ok(())
}
