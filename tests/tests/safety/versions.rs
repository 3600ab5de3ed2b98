//! Versions: whole weights for readers, while leaders die.

use anyhow::{Context, Result, ensure};
use futures::StreamExt;
use paraft_client::reader::{ReadError, Reader, ValueType, Want, WholeVersion};
use paraft_common::{Durability, Mode, ShardId, Step};
use paraft_proof::Fate;
use paraft_proto::{PROTOCOL, ReadVersionRequest, shards_client::ShardsClient, version_message::Kind};
use paraft_tests::{
    fleet::{Fleet, FleetOptions},
    ledger::Ledger,
    wait::{self, DEADLINE},
};
use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    },
    thread,
    time::Duration,
};
use tokio::runtime::Runtime;

const BUCKETS: usize = 6;
const WITHIN: Duration = Duration::from_secs(30);

fn runtime() -> Result<Runtime> {
    Ok(tokio::runtime::Builder::new_current_thread().enable_all().build()?)
}

fn weights(reader: &Reader, version: &WholeVersion) -> Result<Vec<f32>> {
    let params = version.tensor(reader.layout(), ValueType::F32, 0).context("all values")?;
    Ok(params.as_chunks().0.iter().map(|v| f32::from_le_bytes(*v)).collect())
}

/// What a version must show: in lock-step the steps up to it and nothing else, in every bucket of every shard.
fn check(ledger: &Ledger, version: u64, weights: &[f32]) -> Result<()> {
    let fate = |_, step: Step, _| match (step.0 <= version, ledger.mode) {
        (true, _) => Fate::Acknowledged,
        (false, Mode::Bsp) => Fate::Unmade,
        (false, _) => Fate::Unknown,
    };
    let tally = ledger.read(weights, fate);
    ensure!(
        tally.lost + tally.doubled + tally.damaged == 0,
        "version {version} in {}: {tally:?}",
        ledger.mode
    );
    Ok(())
}

/// Numbers and digests that readers saw.
#[derive(Default)]
struct Seen {
    digests: BTreeMap<u64, u64>,
    reads: usize,
}

/// Reads versions until the job's last one; each is later than the one before.
fn follow(servers: &[String], ledger: &Ledger, shares: bool, seen: &Mutex<Seen>) -> Result<()> {
    // One that shares may serve others while it checks.
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let mut reader = runtime.block_on(Reader::open(servers, ledger.name, ValueType::F32, WITHIN))?;
    if shares {
        reader.share()?;
    }
    let mut last = None;
    loop {
        let least = last.map_or(0, |last: u64| last + 1);
        let version = runtime.block_on(reader.next(Want::AtLeast(least), WITHIN))?;
        ensure!(version.step >= least, "version {} after {last:?}", version.step);
        check(ledger, version.step, &weights(&reader, &version)?)?;
        let mut seen = seen.lock().expect("no reader panicked");
        seen.reads += 1;
        let digest = *seen.digests.entry(version.step).or_insert(version.digest);
        ensure!(digest == version.digest, "version {} has two contents", version.step);
        last = Some(version.step);
        if version.step == ledger.steps {
            return Ok(());
        }
    }
}

#[test]
fn versions_are_whole_and_never_go_back_while_leaders_die() -> Result<()> {
    follow_through_kills(6, 0, [(Mode::Bsp, 6), (Mode::Asp, 4)], 600)
}

/// Half of the readers share what one of them reads.
#[test]
#[ignore = "takes minutes: .ci/nightly"]
fn versions_are_whole_for_32_readers_through_100_kills() -> Result<()> {
    follow_through_kills(32, 16, [(Mode::Bsp, 50), (Mode::Asp, 50)], 5000)
}

fn follow_through_kills(readers: usize, sharing: usize, runs: [(Mode, u64); 2], steps: u64) -> Result<()> {
    for (mode, kills) in runs {
        let mut fleet = Fleet::start(FleetOptions::replicated(2))?;
        let ledger = Ledger { grace_ms: 60_000, ..Ledger::in_every_bucket(mode, 2, steps, BUCKETS) };
        let (at, seen, done) =
            (fleet.at.clone(), Arc::new(Mutex::new(Seen::default())), Arc::new(AtomicU64::new(0)));
        // Readers are there before the job.
        let readers: Vec<_> = (0..readers)
            .map(|reader| {
                let (servers, seen) = (at.addresses.clone(), seen.clone());
                thread::spawn(move || follow(&servers, &ledger, reader < sharing, &seen))
            })
            .collect();
        let workers: Vec<_> = (0..2)
            .map(|worker| {
                let (at, done) = (at.clone(), done.clone());
                thread::spawn(move || -> Result<()> {
                    let mut page = ledger.join(&at, worker)?;
                    page.begin()?;
                    while page.done.0 < ledger.steps {
                        page.step()?;
                        done.fetch_max(page.done.0, SeqCst);
                        thread::sleep(Duration::from_millis(5));
                    }
                    page.finish()?;
                    Ok(())
                })
            })
            .collect();
        for kill in 0..kills {
            let due = (kill + 1) * ledger.steps / (kills + 2);
            wait::until("the next kill", || done.load(SeqCst), |done| *done >= due);
            let (leader, _) = fleet.leader(ShardId((kill % 2) as u32));
            fleet.kill(leader);
            fleet.restart_server(leader)?;
            fleet.whole()?;
        }
        for worker in workers {
            worker.join().expect("no worker panicked")?;
        }
        for reader in readers {
            reader.join().expect("no reader panicked")?;
        }
        let seen = seen.lock().expect("no reader panicked");
        ensure!(
            seen.reads > 40 && seen.digests.len() > 10,
            "{} reads of {:?}",
            seen.reads,
            seen.digests.keys()
        );
        println!("{mode}: {} reads of {} versions", seen.reads, seen.digests.len());
    }
    Ok(())
}

/// Readers that take every version, or one in 3, 7 or 37, get the bits that a reader without any version gets.
#[test]
fn differences_give_the_bits_of_the_whole_version() -> Result<()> {
    let fleet = Fleet::start(FleetOptions::replicated(2))?;
    let ledger =
        Ledger { grace_ms: 60_000, extra: 1 << 16, ..Ledger::in_every_bucket(Mode::Bsp, 1, 80, BUCKETS) };
    let mut page = ledger.join(&fleet.at, 0)?;
    page.begin()?;
    let runtime = runtime()?;
    let open = |dtype| runtime.block_on(Reader::open(&fleet.at.addresses, ledger.name, dtype, WITHIN));
    let types = [ValueType::F32, ValueType::Bf16, ValueType::F16];
    let mut readers = Vec::new();
    for every in [1, 3, 7, 37] {
        for dtype in types {
            readers.push((every, dtype, open(dtype)?));
        }
    }
    for step in 1..=75 {
        page.step()?;
        let mut due: Vec<_> = readers.iter_mut().filter(|(every, ..)| step % every == 0).collect();
        let mut wholes = BTreeMap::new();
        for dtype in types.into_iter().filter(|_| !due.is_empty()) {
            let mut other = open(dtype)?;
            other.once();
            let whole = runtime.block_on(other.next(Want::Exactly(step), WITHIN))?;
            ensure!(whole.received >= 2 << 16, "a whole of {} bytes", whole.received);
            wholes.insert(dtype.name(), whole);
        }
        for (every, dtype, reader) in &mut due {
            let version = runtime.block_on(reader.next(Want::Exactly(step), WITHIN))?;
            let whole = &wholes[dtype.name()];
            ensure!(version.buckets == whole.buckets && version.digest == whole.digest, "{step} of {every}");
            // The replica that answers may not be the one before. Of those that take each version, most are.
            let is_difference = version.received < whole.received / 4;
            ensure!(
                is_difference || step <= 3 * *every || *every > 1,
                "{} bytes at {step}",
                version.received
            );
        }
    }
    page.finish()?;
    Ok(())
}

/// Readers of one host: one of them reads for all, and when it goes another does.
#[test]
fn readers_of_a_host_share_what_one_of_them_reads() -> Result<()> {
    let fleet = Fleet::start(FleetOptions::replicated(2))?;
    let ledger = Ledger { grace_ms: 60_000, ..Ledger::in_every_bucket(Mode::Bsp, 1, 120, BUCKETS) };
    let mut page = ledger.join(&fleet.at, 0)?;
    page.begin()?;
    page.step()?;
    let shared = |until: u64| -> Result<(u64, Vec<WholeVersion>)> {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        let open = Reader::open(&fleet.at.addresses, ledger.name, ValueType::F32, WITHIN);
        let mut reader = runtime.block_on(open)?;
        reader.share()?;
        let (mut kept, mut received, mut next) = (Vec::new(), 0, 0);
        while next <= until {
            let version = runtime.block_on(reader.next(Want::AtLeast(next), WITHIN))?;
            ensure!(version.step >= next, "version {} instead of {next}", version.step);
            check(&ledger, version.step, &weights(&reader, &version)?)?;
            (received, next) = (received + version.received, version.step + 1);
            kept.push(version);
        }
        Ok((received, kept))
    };
    thread::scope(|scope| {
        // The first ones end early, among them the one that reads for all.
        let readers: Vec<_> = [40, 40, 80, 119, 119, 119, 119, 119]
            .into_iter()
            .map(|until| {
                thread::sleep(Duration::from_millis(20));
                scope.spawn(move || shared(until))
            })
            .collect();
        while page.done.0 < ledger.steps {
            page.step()?;
            thread::sleep(Duration::from_millis(10));
        }
        page.finish()?;
        let mut digests = BTreeMap::new();
        for reader in readers {
            let (received, versions) = reader.join().expect("no reader panicked")?;
            ensure!(received == 0, "{received} bytes were received, not mapped");
            for version in versions {
                // What the others have is there still, though its reader has gone.
                let all: Vec<u8> = version.buckets.values().flat_map(|values| values.to_vec()).collect();
                let known = digests.entry(version.step).or_insert((version.digest, all.clone()));
                ensure!(*known == (version.digest, all), "version {} has two contents", version.step);
            }
        }
        ensure!(digests.len() > 5, "{} versions", digests.len());
        Ok(())
    })
}

/// Cut off from every majority, a reader is told so rather than given old weights as new ones.
#[test]
fn version_of_a_bounded_age_needs_a_majority() -> Result<()> {
    // A majority ends and begins again, which only what is on disk survives.
    let durability = Durability::QuorumDisk;
    let mut fleet = Fleet::start(FleetOptions { durability, ..FleetOptions::replicated(1) })?;
    let ledger =
        Ledger { durability, grace_ms: 60_000, ..Ledger::in_every_bucket(Mode::Bsp, 1, 30, BUCKETS) };
    let mut page = ledger.join(&fleet.at, 0)?;
    page.begin()?;
    page.step()?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let open = || runtime.block_on(Reader::open(&fleet.at.addresses, ledger.name, ValueType::F32, WITHIN));
    let (mut alone, mut first, mut second) = (open()?, open()?, open()?);
    first.share()?;
    second.share()?;
    let age = Want::MaxAge(Duration::from_secs(3600));
    for reader in [&mut alone, &mut first, &mut second] {
        ensure!(runtime.block_on(reader.next(age, WITHIN))?.step == 1, "the newest");
    }
    page.step()?;
    for reader in [&mut alone, &mut first, &mut second] {
        ensure!(runtime.block_on(reader.next(age, WITHIN))?.step == 1, "it was the newest within the hour");
    }
    for reader in [&mut alone, &mut first, &mut second] {
        let now = runtime.block_on(reader.next(Want::MaxAge(Duration::from_secs(5)), WITHIN))?;
        let newest = runtime.block_on(reader.next(Want::AtLeast(0), WITHIN))?;
        ensure!(newest.step == 2 && now.step >= 1, "{} and {}", newest.step, now.step);
        ensure!(runtime.block_on(reader.next(age, WITHIN))?.step == 2, "never an older one than before");
    }
    let (leader, _) = fleet.leader(ShardId(0));
    let others: Vec<_> = fleet.alive().into_iter().filter(|id| *id != leader).collect();
    others.iter().for_each(|id| fleet.kill(*id));
    for reader in [&mut alone, &mut first, &mut second] {
        let fresh = Want::MaxAge(Duration::from_millis(1));
        let error =
            runtime.block_on(reader.next(fresh, Duration::from_secs(4))).expect_err("a minority answers");
        ensure!(matches!(error, ReadError::Timeout(_)), "{error}");
        ensure!(error.to_string().contains("at most 1.0ms old"), "{error}");
    }
    for id in others {
        fleet.restart_server(id)?;
    }
    fleet.whole()?;
    for reader in [&mut alone, &mut first, &mut second] {
        let age = Want::MaxAge(Duration::from_secs(20));
        ensure!(runtime.block_on(reader.next(age, WITHIN))?.step == 2, "a majority is back");
    }
    Ok(())
}

/// A version that is asked for in time is read though the job has passed it long ago; one that nobody asked for is not kept.
#[test]
fn version_asked_for_in_time_is_kept_for_its_reader() -> Result<()> {
    let fleet = Fleet::start(FleetOptions::replicated(2))?;
    let ledger = Ledger { grace_ms: 60_000, ..Ledger::in_every_bucket(Mode::Bsp, 1, 80, BUCKETS) };
    let mut page = ledger.join(&fleet.at, 0)?;
    page.begin()?;
    (0..20).try_for_each(|_| page.step().map(drop))?;
    let runtime = runtime()?;
    let mut reader =
        runtime.block_on(Reader::open(&fleet.at.addresses, ledger.name, ValueType::F32, WITHIN))?;
    // Nothing is pushed: the newest version is there, on every replica.
    let now = runtime.block_on(reader.next(Want::AtLeast(0), WITHIN))?;
    ensure!(now.step == 20, "version {}", now.step);
    check(&ledger, 20, &weights(&reader, &now)?)?;
    let asked = Arc::new(AtomicBool::new(false));
    let (servers, waits) = (fleet.at.addresses.clone(), asked.clone());
    let ahead = thread::spawn(move || -> Result<u64> {
        let runtime = self::runtime()?;
        let mut reader = runtime.block_on(Reader::open(&servers, ledger.name, ValueType::F32, WITHIN))?;
        waits.store(true, SeqCst);
        let version = runtime.block_on(reader.next(Want::Exactly(40), WITHIN))?;
        check(&ledger, version.step, &weights(&reader, &version)?)?;
        Ok(version.step)
    });
    wait::until("its reader to wait", || asked.load(SeqCst), |asked| *asked);
    thread::sleep(Duration::from_millis(500));
    (0..60).try_for_each(|_| page.step().map(drop))?;
    ensure!(ahead.join().expect("it ends")? == 40, "the version that was asked for");
    // Its last step is applied everywhere, not only sent.
    page.finish()?;
    let gone = runtime.block_on(reader.next(Want::Exactly(60), WITHIN)).expect_err("nobody asked in time");
    ensure!(matches!(gone, ReadError::NotKept { step: 60, reached: 80 }), "{gone}");
    Ok(())
}

/// Shards pass a version before all are asked for it: the next one is asked for ahead of them.
#[test]
fn version_of_a_job_of_fast_steps_is_read_soon() -> Result<()> {
    let fleet = Fleet::start(FleetOptions::replicated(3))?;
    let ledger = Ledger { grace_ms: 60_000, ..Ledger::in_every_bucket(Mode::Bsp, 1, 1 << 20, BUCKETS) };
    let done = Arc::new(AtomicBool::new(false));
    let trains = {
        let (at, done) = (fleet.at.clone(), done.clone());
        thread::spawn(move || -> Result<u64> {
            let mut page = ledger.join(&at, 0)?;
            page.begin()?;
            while !done.load(SeqCst) {
                page.step()?;
            }
            Ok(page.done.0)
        })
    };
    let runtime = runtime()?;
    let read = || -> Result<()> {
        for _ in 0..20 {
            let open = Reader::open(&fleet.at.addresses, ledger.name, ValueType::F32, WITHIN);
            let mut reader = runtime.block_on(open)?;
            let version = runtime.block_on(reader.next(Want::AtLeast(0), WITHIN))?;
            check(&ledger, version.step, &weights(&reader, &version)?)?;
        }
        Ok(())
    };
    let read = read();
    done.store(true, SeqCst);
    let steps = trains.join().expect("no panic")?;
    read.with_context(|| format!("of {steps} steps"))
}

/// Streams of versions that take nothing hold no update, and have few versions between them.
#[test]
fn readers_of_versions_that_take_nothing_stop_no_update() -> Result<()> {
    let fleet = Fleet::start(FleetOptions::replicated(1))?;
    // 12 MiB.
    let ledger = Ledger { extra: 12 << 18, bucket_len: 1 << 18, ..Ledger::new(Mode::Asp, 1, 120) };
    let mut page = ledger.join(&fleet.at, 0)?;
    page.begin()?;
    page.step()?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let request = ReadVersionRequest { protocol: PROTOCOL, ..ReadVersionRequest::default() };
    let updates = || -> Result<Vec<u64>> {
        fleet.alive().into_iter().map(|id| Ok(fleet.status(id, false)?.shards[0].version)).collect()
    };
    wait::until(
        "each replica to have weights",
        || updates().unwrap_or_default(),
        |u| u.len() == 3 && !u.contains(&0),
    );
    let (mut open, mut refused) = (Vec::new(), 0);
    for step in 0..ledger.steps - 1 {
        let address = &fleet.at.addresses[(step % 3) as usize];
        let ask = async {
            let endpoint = tonic::transport::Endpoint::from_shared(format!("http://{address}"))?;
            let channel = endpoint.initial_stream_window_size(1 << 16).connect().await?;
            let mut stream = ShardsClient::new(channel).read_version(request.clone()).await?.into_inner();
            let first = stream.next().await.context("an answer")??;
            anyhow::Ok((stream, first))
        };
        let (stream, first) = runtime.block_on(async { tokio::time::timeout(DEADLINE, ask).await })??;
        match first.kind {
            Some(Kind::Of(_)) => open.push(stream),
            other => anyhow::bail!("{other:?}"),
        }
        page.step()?;
    }
    // What their readers have not taken is copied: it shares no memory with the shard, and no update waits for it.
    let copies = || -> Result<Vec<u64>> {
        fleet.alive().into_iter().map(|id| Ok(fleet.status(id, false)?.shards[0].memory_copies)).collect()
    };
    wait::until("no vector to be kept for a reader", || copies().unwrap_or_default(), |c| *c == [0; 3]);
    // The first message of those beyond the bound is followed by a refusal.
    for mut stream in open {
        let next = async { tokio::time::timeout(Duration::from_millis(50), stream.next()).await };
        if let Ok(Some(Ok(message))) = runtime.block_on(next)
            && let Some(Kind::Refused(why)) = message.kind
        {
            ensure!(why.message.contains("versions for readers"), "{}", why.message);
            refused += 1;
        }
    }
    ensure!(refused > 60, "{refused} were refused");
    let last = page.finish()?;
    let steps = (1..=ledger.steps).filter(|step| last[ledger.place(0, Step(*step))] == -1.0).count() as u64;
    ensure!(steps == ledger.steps, "each push once: {steps}");
    Ok(())
}
