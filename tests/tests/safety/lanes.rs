//! The transports between workers and servers: the same bits over each, and workers that misuse shared
//! memory.

use anyhow::{Context, Result, bail, ensure};
use paraft_client::Transport;
use paraft_common::{Mode, ShardId, Step, config::ServerJob};
use paraft_proto::{FromShard, Init, Open, PROTOCOL, Push, ToShard, from_shard, to_shard};
use paraft_tests::{
    fleet::{Fleet, FleetOptions},
    ledger::{At, Ledger},
    train::{job, train},
    wait,
};
use prost::Message;
use rustix::{
    fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create},
    io::pwrite,
    net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg},
};
use std::{
    cell::Cell,
    io::{BufRead, BufReader, IoSlice, Read, Write},
    mem::MaybeUninit,
    net::{Shutdown, TcpListener, TcpStream},
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    process::{Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    },
    thread,
    time::Duration,
};

/// Counts of what a proxy has passed.
#[derive(Default)]
struct ProxyCounts {
    exchanges: AtomicU64,
    appends: AtomicU64,
    /// Lanes of appends that have ended.
    ended: AtomicU64,
    /// Connections without data: checks whether a process listens.
    dials: AtomicU64,
}

/// What the proxy does with the start of a lane.
#[derive(Clone, Copy, PartialEq)]
enum Lanes {
    Passes,
    /// Closes it, like a proxy that only knows HTTP/2.
    Closes,
    /// Keeps the connection, and answers nothing.
    Swallows,
}

/// Forwards bytes to `to`. Returns the proxy's address and its counts.
fn between(to: String, lanes: Lanes) -> Result<(String, Arc<ProxyCounts>)> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let (address, asked) = (listener.local_addr()?.to_string(), Arc::new(ProxyCounts::default()));
    let count = asked.clone();
    thread::spawn(move || {
        for mut socket in listener.incoming().flatten() {
            let (to, count) = (to.clone(), count.clone());
            thread::spawn(move || -> std::io::Result<()> {
                let mut first = [0; 24];
                if let Err(e) = socket.read_exact(&mut first) {
                    count.dials.fetch_add(1, SeqCst);
                    return Err(e);
                }
                socket.set_nodelay(true)?;
                let append = first.ends_with(b"append  \r\n");
                if first.starts_with(b"PARAFT") {
                    let of = if append { &count.appends } else { &count.exchanges };
                    of.fetch_add(1, SeqCst);
                    if lanes == Lanes::Swallows {
                        socket.read_to_end(&mut Vec::new())?;
                    }
                    if lanes != Lanes::Passes {
                        return Ok(());
                    }
                }
                let mut server = TcpStream::connect(to)?;
                server.set_nodelay(true)?;
                server.write_all(&first)?;
                let (mut back, mut socket_back) = (server.try_clone()?, socket.try_clone()?);
                thread::spawn(move || {
                    let _ = std::io::copy(&mut back, &mut socket_back);
                    socket_back.shutdown(Shutdown::Write)
                });
                let passed = std::io::copy(&mut socket, &mut server);
                count.ended.fetch_add(u64::from(append), SeqCst);
                passed?;
                server.shutdown(Shutdown::Write)
            });
        }
    });
    Ok((address, asked))
}

#[test]
fn the_way_to_the_servers_changes_no_bit_of_what_is_learned() -> Result<()> {
    // Buckets of 16 KiB and more are shared with a server of this host.
    let text = "[model]\nkind = \"mlp\"\nhidden = [256]\n[optimizer]\nkind = \"adam\"\nlr = 0.01";
    let set = ["train.max_steps=40", "train.batch=16", "train.epochs=9", "train.mode=bsp", "train.workers=2"];
    let learn = |change: &dyn Fn(&mut At) -> Result<()>| -> Result<Vec<u32>> {
        let fleet = Fleet::start(FleetOptions { shards: 2, ..FleetOptions::default() })?;
        let mut at = fleet.at.clone();
        change(&mut at)?;
        Ok(train(&job(&at, text, &set)?)?.iter().map(|w| w.to_bits()).collect())
    };
    let over = |transport| {
        learn(&move |at| {
            at.transport = transport;
            Ok(())
        })
    };
    let tcp = over(Transport::Tcp)?;
    ensure!(tcp == over(Transport::Auto)?, "shared memory makes other weights than TCP");
    for lanes in [Lanes::Closes, Lanes::Swallows] {
        let counted = Cell::new(None);
        let http = learn(&|at| {
            at.transport = Transport::Tcp;
            let (address, asked) = between(at.addresses[0].clone(), lanes)?;
            at.addresses[0] = address;
            counted.set(Some(asked));
            Ok(())
        })?;
        ensure!(tcp == http, "HTTP/2 makes other weights than a lane");
        let asked = counted.take().context("no proxy")?.exchanges.load(SeqCst);
        ensure!(asked >= 2, "lanes went through the proxy that knows none: {asked}");
    }
    Ok(())
}

/// Three servers, each behind a proxy.
fn behind(shards: u32, lanes: Lanes) -> Result<(Fleet, Vec<Arc<ProxyCounts>>)> {
    let mut fleet = Fleet::bind(FleetOptions::replicated(shards))?;
    let mut asked = Vec::new();
    for address in &mut fleet.at.addresses {
        let (way, count) = between(address.clone(), lanes)?;
        *address = way;
        asked.push(count);
    }
    (0..3).try_for_each(|id| fleet.start_server(id))?;
    fleet.whole()?;
    Ok((fleet, asked))
}

fn sum(asked: &[Arc<ProxyCounts>], of: fn(&ProxyCounts) -> &AtomicU64) -> u64 {
    asked.iter().map(|a| of(a).load(SeqCst)).sum()
}

#[test]
fn ended_idle_lane_causes_no_check_of_the_leader() -> Result<()> {
    let (fleet, asked) = behind(1, Lanes::Passes)?;
    // The worker stays, so that its shard stays awake.
    let bulk = Ledger { bucket_len: VALUES, extra: VALUES - 8, ..Ledger::new(Mode::Asp, 1, 100) };
    let mut page = bulk.join(&fleet.at, 0)?;
    page.begin()?;
    // The first bulk goes on a stream that began without any. While one follower changes to a lane, the
    // other's stream may take it, and the follower's next stream may begin with an entry without bulk.
    let both = || sum(&asked, |a| &a.appends) >= 2;
    for _ in 0..90 {
        page.step()?;
        if both() {
            break;
        }
    }
    ensure!(both(), "bulk went over HTTP/2");
    let (lanes, dials) = (sum(&asked, |a| &a.appends), sum(&asked, |a| &a.dials));
    wait::until("the lanes to the followers to end", || sum(&asked, |a| &a.ended), |n| *n >= lanes);
    // A check happens at once.
    thread::sleep(Duration::from_millis(300));
    let dials = sum(&asked, |a| &a.dials) - dials;
    ensure!(dials == 0, "leaders were looked after {dials} times");
    page.run()?;
    fleet.replicas_agree()?;
    Ok(())
}

#[test]
fn appends_use_lanes_and_fall_back_to_http() -> Result<()> {
    const SHARDS: u32 = 2;
    // Short messages go over HTTP/2 anyway.
    let text = "[model]\nkind = \"mlp\"\nhidden = [512]\n[optimizer]\nkind = \"adam\"\nlr = 0.01";
    let set = ["train.max_steps=40", "train.batch=16", "train.epochs=9", "train.mode=bsp", "train.workers=2"];
    // A proxy that swallows lanes makes each one time out, one after the other.
    let set = [&set[..], &["cluster.timeout_ms=180000"]].concat();
    let learn = |lanes: Lanes| -> Result<(Vec<u32>, u64)> {
        let (fleet, asked) = behind(SHARDS, lanes)?;
        let weights = train(&job(&fleet.at, text, &set)?)?;
        fleet.replicas_agree()?;
        Ok((weights.iter().map(|w| w.to_bits()).collect(), sum(&asked, |a| &a.appends)))
    };
    let (lanes, asked) = learn(Lanes::Passes)?;
    let groups = u64::from(SHARDS) + 1;
    ensure!(asked >= 2 * u64::from(SHARDS), "{asked} lanes for {SHARDS} shards with two followers each");
    let (http, asked) = learn(Lanes::Closes)?;
    ensure!(lanes == http, "HTTP/2 makes other weights than lanes");
    // Each of three servers learns it from each other server, possibly for all groups at once.
    ensure!((1..=6 * groups).contains(&asked), "{asked} lanes were tried in vain");
    ensure!(lanes == learn(Lanes::Swallows)?.0, "nor where they are swallowed");
    Ok(())
}

/// A worker's lane made by hand, over shared memory that it keeps writing to.
struct ScriptedLane {
    socket: UnixStream,
    memory: OwnedFd,
    read: Vec<u8>,
}

const VALUES: usize = 1 << 16;

/// The first number of a frame that says that the peer has mapped the memory.
const MAPPED: u32 = u32::MAX - 2;

impl ScriptedLane {
    fn open(address: &str, job: &ServerJob) -> Result<Self> {
        let path = paraft_host::socket_path(address).context("no socket")?;
        let mut socket = UnixStream::connect(path)?;
        socket.set_read_timeout(Some(Duration::from_secs(30)))?;
        let preface = b"PARAFT-LANE/1 exchange\r\n";
        socket.write_all(preface)?;
        let mut answer = [0; 24];
        socket.read_exact(&mut answer)?;
        ensure!(answer == *preface, "no lane");
        let memory = memfd_create("hostile", MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&memory, VALUES as u64 * 4)?;
        fcntl_add_seals(&memory, SealFlags::SHRINK)?;
        let hand = Self { socket, memory, read: Vec::new() };
        let open = Open { protocol: PROTOCOL, job: job.to_toml()?, ..Open::default() };
        hand.send(to_shard::Kind::Open(open), None)?;
        hand.show(hand.memory.as_fd())?;
        Ok(hand)
    }

    /// Sends a frame that announces memory, with a descriptor.
    fn show(&self, fd: std::os::fd::BorrowedFd<'_>) -> Result<()> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut beside = SendAncillaryBuffer::new(&mut space);
        let fds = [fd];
        ensure!(beside.push(SendAncillaryMessage::ScmRights(&fds)), "no room");
        let frame = [u32::MAX.to_le_bytes(), [0; 4]].concat();
        sendmsg(&self.socket, &[IoSlice::new(&frame)], &mut beside, SendFlags::NOSIGNAL)?;
        Ok(())
    }

    /// Sends a message; its payload, if any, lies in the shared memory.
    fn send(&self, kind: to_shard::Kind, payload: Option<(u32, u64)>) -> Result<()> {
        let header = ToShard { kind: Some(kind) }.encode_to_vec();
        let mut frame = [header.len() as u32, u32::from(payload.is_some())].map(u32::to_le_bytes).concat();
        if let Some((len, place)) = payload {
            frame.extend_from_slice(&len.to_le_bytes());
            frame.extend_from_slice(&place.to_le_bytes());
        }
        frame.extend_from_slice(&header);
        Ok((&self.socket).write_all(&frame)?)
    }

    /// The next message; `None`: the lane has ended.
    fn receive(&mut self) -> Result<Option<from_shard::Kind>> {
        let number = |b: &[u8]| u32::from_le_bytes([b[0], b[1], b[2], b[3]]);
        loop {
            if self.read.len() >= 8 && number(&self.read) == MAPPED {
                self.read.drain(..8);
            }
            if let [head @ .., _, _, _, _] = self.read.get(..8).unwrap_or_default()
                && let (header, bulks) = (number(head), number(&self.read[4..]))
                && self.read.len() >= 8 + bulks as usize * 12 + header as usize
            {
                ensure!(bulks == 0, "no weights were asked for");
                let rest = self.read.split_off(8 + header as usize);
                let frame = std::mem::replace(&mut self.read, rest);
                if header > 0 {
                    return Ok(FromShard::decode(&frame[8..])?.kind);
                }
                continue;
            }
            let mut some = [0; 4096];
            match self.socket.read(&mut some) {
                Ok(0) => return Ok(None),
                Ok(n) => self.read.extend_from_slice(&some[..n]),
                Err(e) if e.kind() == std::io::ErrorKind::ConnectionReset => return Ok(None),
                Err(e) => return Err(e.into()),
            }
        }
    }

    /// Opens a session and sends the shard its weights.
    fn begin(address: &str, job: &ServerJob) -> Result<Self> {
        for _ in 0..500 {
            let mut hand = Self::open(address, job)?;
            match hand.receive()? {
                Some(from_shard::Kind::Opened(o)) => {
                    if !o.initialised {
                        hand.send(to_shard::Kind::Init(Init::default()), Some((VALUES as u32 * 4, 0)))?;
                    }
                    return Ok(hand);
                }
                // Right after its start a server has no leader yet.
                Some(from_shard::Kind::Refused(_)) => thread::sleep(Duration::from_millis(20)),
                other => bail!("Open was answered by {other:?}"),
            }
        }
        bail!("no server opens a session")
    }
}

fn one_bucket(workers: u32) -> ServerJob {
    ServerJob {
        grace_ms: 60_000,
        ..Ledger { bucket_len: VALUES, extra: VALUES - 8, ..Ledger::new(Mode::Asp, workers, 8) }.job()
    }
}

#[test]
fn worker_writing_after_handover_diverges_no_replicas() -> Result<()> {
    let fleet = Fleet::start(FleetOptions::replicated(1))?;
    let job = one_bucket(1);
    let (leader, _) = fleet.leader(ShardId(0));
    let mut hand = ScriptedLane::begin(&fleet.at.addresses[leader as usize], &job)?;
    // The initial weights are in before it starts to write.
    hand.send(
        to_shard::Kind::Push(Push { seq: 1, step: 1, ..Push::default() }),
        Some((VALUES as u32 * 4, 0)),
    )?;
    let first = hand.receive()?;
    ensure!(matches!(&first, Some(from_shard::Kind::Ack(_))), "{first:?}");
    let (memory, stop) = (hand.memory.try_clone()?, Arc::new(AtomicBool::new(false)));
    let stopped = stop.clone();
    let writes = thread::spawn(move || -> Result<u64> {
        let mut times = 0;
        while !stopped.load(SeqCst) {
            // Finite most of the time: a push that is read while it is NaN is only refused.
            let value = if times % 7 == 0 { f32::NAN } else { times as f32 };
            for at in (0..VALUES).step_by(1024) {
                pwrite(&memory, &value.to_le_bytes().repeat(1024), at as u64 * 4)?;
            }
            times += 1;
        }
        Ok(times)
    });
    let (mut taken, mut refused, mut seq) = (1, 0, 1);
    while taken < 100 || refused < 3 {
        ensure!(seq < 20_000, "{taken} taken and {refused} refused of {seq}");
        seq += 1;
        let push = Push { seq, step: taken + 1, ..Push::default() };
        hand.send(to_shard::Kind::Push(push), Some((VALUES as u32 * 4, 0)))?;
        match hand.receive()? {
            Some(from_shard::Kind::Ack(a)) if a.seq == seq => taken += 1,
            Some(from_shard::Kind::Refused(r)) if r.seq == seq => {
                ensure!(r.message.contains("NaN") || r.message.contains("finite"), "{r:?}");
                refused += 1;
            }
            other => bail!("a push was answered by {other:?}"),
        }
    }
    stop.store(true, SeqCst);
    let times = writes.join().map_err(|_| anyhow::anyhow!("it panicked"))??;
    ensure!(times > 10, "it wrote {times} times");
    fleet.replicas_agree()?;
    Ok(())
}

#[test]
fn a_place_that_is_not_there_ends_the_lane_and_nothing_else() -> Result<()> {
    let fleet = Fleet::start(FleetOptions::default())?;
    let job = one_bucket(2);
    let bytes = VALUES as u32 * 4;
    for (len, place) in [(bytes, 4096), (bytes, 1 << 40), (bytes, u64::MAX - 4095), (100, 1)] {
        let mut hand = ScriptedLane::begin(&fleet.at.addresses[0], &job)?;
        hand.send(to_shard::Kind::Push(Push { seq: 1, step: 1, ..Push::default() }), Some((len, place)))?;
        match hand.receive()? {
            None | Some(from_shard::Kind::Refused(_)) => {}
            other => bail!("{len} bytes at {place} were answered by {other:?}"),
        }
    }
    // Memory that may shrink, and a file.
    let shrinks = memfd_create("shrinks", MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&shrinks, u64::from(bytes))?;
    for fd in [shrinks, tempfile::tempfile()?.into()] {
        let mut hand = ScriptedLane::begin(&fleet.at.addresses[0], &job)?;
        hand.show(fd.as_fd())?;
        let _ = hand.send(to_shard::Kind::Heartbeat(Default::default()), None);
        let end = hand.receive();
        ensure!(matches!(end, Ok(None | Some(from_shard::Kind::Refused(_))) | Err(_)), "{end:?}");
    }
    let mut hand = ScriptedLane::begin(&fleet.at.addresses[0], &job)?;
    hand.send(to_shard::Kind::Push(Push { seq: 1, step: 1, ..Push::default() }), Some((bytes, 0)))?;
    let answer = hand.receive()?;
    ensure!(matches!(&answer, Some(from_shard::Kind::Ack(_))), "{answer:?}");
    Ok(())
}

const CHILD: &str = "PARAFT_LANE_CHILD";
const STEPS: u64 = 400;
/// Each of two workers is killed this often, and another takes its place.
const KILLS: u32 = 12;

/// Four buckets of 64 KiB: a page for every worker that comes, and one for the final reader.
fn wide() -> Ledger {
    let pages = 2 * (KILLS + 1) + 1;
    Ledger { pages, bucket_len: 1 << 14, extra: 3 << 14, ..Ledger::new(Mode::Asp, 2, STEPS) }
}

/// Not a test by itself: the process of a worker that is killed.
#[test]
fn a_worker_of_the_ledger() -> Result<()> {
    let Ok(addresses) = std::env::var(CHILD) else { return Ok(()) };
    let (worker, addresses) = addresses.split_once(' ').context("worker and addresses")?;
    let addresses = addresses.split(' ').map(str::to_string).collect();
    let at = At { addresses, shards: 1, replicas: 3, transport: Transport::Auto };
    let mut page = wide().join(&at, worker.parse()?)?;
    page.begin()?;
    while page.done.0 < STEPS {
        page.step()?;
        println!("\nstep {}", page.done.0);
    }
    page.finish()?;
    Ok(())
}

#[test]
fn workers_killed_while_writing_lose_and_double_no_push() -> Result<()> {
    let fleet = Fleet::start(FleetOptions::replicated(1))?;
    let addresses = fleet.at.addresses.join(" ");
    // Runs a worker's process; returns the steps whose pushes were acknowledged, since their pulls were
    // answered.
    let run = |worker: u32, kill_after: Option<usize>| -> Result<Vec<u64>> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(["--exact", "lanes::a_worker_of_the_ledger", "--nocapture"])
            .env(CHILD, format!("{worker} {addresses}"))
            .stdout(Stdio::piped())
            .spawn()?;
        let mut acknowledged = Vec::new();
        let out = BufReader::new(child.stdout.take().context("no output")?);
        for line in out.lines() {
            acknowledged.extend(line?.strip_prefix("step ").and_then(|s| s.parse::<u64>().ok()));
            if kill_after.is_some_and(|n| acknowledged.len() >= n) {
                child.kill()?;
            }
        }
        let ended = child.wait()?;
        ensure!(kill_after.is_some() || ended.success(), "worker {worker} ended with {ended}");
        Ok(acknowledged)
    };
    let place = |w: u32| (0..=KILLS).map(move |i| (2 * i + w, (i < KILLS).then_some(7 + 3 * i as usize)));
    let all = |w| place(w).map(|(worker, kill)| Ok((worker, run(worker, kill)?))).collect::<Result<Vec<_>>>();
    let pages = thread::scope(|s| {
        let both = [0, 1].map(|w| s.spawn(move || all(w)));
        both.map(|t| t.join().map_err(|_| anyhow::anyhow!("it panicked"))?)
            .into_iter()
            .collect::<Result<Vec<_>>>()
    })?;
    let ledger = wide();
    let at = At { transport: Transport::Tcp, ..fleet.at.clone() };
    let weights = ledger.join(&at, ledger.pages - 1)?.finish()?;
    let mut seen = 0;
    for (worker, acknowledged) in pages.into_iter().flatten() {
        ensure!(!acknowledged.is_empty(), "worker {worker} did nothing");
        for step in 1..=STEPS {
            let entry = weights[ledger.place(worker, Step(step))];
            let is_in = acknowledged.contains(&step);
            ensure!(
                entry == -1.0 || entry == 0.0 && !is_in,
                "worker {worker}, step {step}: {entry}, {is_in}"
            );
            seen += u64::from(is_in);
        }
    }
    ensure!(seen > 500, "{seen}");
    fleet.replicas_agree()?;
    Ok(())
}
