//! `paraft bench ring`: a group's sums over the sockets of this machine.
//!
//! Ranks in threads, each with its listener, reduce a vector together. In the same repeat they send each other as many bytes
//! as that takes, `2n(p-1)/p` of each rank to the next, over one more TCP connection and without adding anything: that is what the
//! machine allows.

use super::{
    figure::{self, Figure},
    load::go_on,
    wire::{named, size},
};
use clap::Args;
use paraft_common::codec::F32_BYTES;
use paraft_compute::collective::{Group, Listener, Peer, Rendezvous};
use paraft_fleet::{certs::Certs, failure::Failure, launch};
use paraft_worker::exit;
use std::{
    io::{Read, Write},
    net::TcpStream,
    sync::{
        Arc, Barrier,
        atomic::{AtomicBool, AtomicI32, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

#[derive(Args)]
pub struct RingBenchArgs {
    /// Bytes of the vector, comma-separated.
    #[arg(long, value_delimiter = ',', default_value = "4K,64K,1M,4M,16M,64M", value_parser = size)]
    pub sizes: Vec<usize>,
    /// Ranks, 2 to 64.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(2..=64))]
    pub ranks: u32,
    /// Milliseconds of each measure in each repeat, about; at least one sum is made.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u64).range(1..=60_000))]
    pub millis: u64,
    /// Repeats, interleaved; the median counts.
    #[arg(long, default_value_t = 7, value_parser = super::repeats)]
    pub repeats: usize,
    /// One JSON object for each figure.
    #[arg(long)]
    pub json: bool,
}

/// Seconds of one sum, and of as many bytes without one, of each repeat.
type Times = (Vec<f64>, Vec<f64>);

pub fn run(args: &RingBenchArgs) -> Result<i32, Failure> {
    let interrupted = launch::interrupts();
    for bytes in &args.sizes {
        let (sums, raws) = one(args, *bytes, &interrupted)?;
        let speed = |seconds: &[f64]| seconds.iter().map(|s| *bytes as f64 / s / 1e9).collect::<Vec<_>>();
        let case = format!("{} ranks, {}", args.ranks, named(*bytes));
        let (ours, theirs) = (speed(&sums), speed(&raws));
        let figures = [
            Figure::alone("ring", &case, "all-reduce", "GB/s of vector", &ours)
                .map(|f| f.against("the same bytes over TCP", &ours, &theirs)),
            Figure::alone("ring", &case, "time", "ms", &sums.iter().map(|s| s * 1e3).collect::<Vec<_>>()),
        ];
        figure::show(&figures.into_iter().flatten().collect::<Vec<_>>(), args.json);
    }
    Ok(exit::OK)
}

fn failed(e: impl std::fmt::Display) -> Failure {
    Failure::new(exit::FAILED, format!("the ring: {e}"))
}

fn one(args: &RingBenchArgs, bytes: usize, interrupted: &AtomicI32) -> Result<Times, Failure> {
    let scratch = tempfile::tempdir().map_err(failed)?;
    let _ = Certs::of_own(scratch.path(), None)?;
    let n = args.ranks as usize;
    let listen = || Listener::towards("127.0.0.1:1").map_err(failed);
    let listeners = (0..n).map(|_| listen()).collect::<Result<Vec<_>, _>>()?;
    let peer = |(rank, l): (usize, &Listener)| Peer { rank: rank as u32, address: l.address().to_string() };
    let ranks: Vec<Peer> = listeners.iter().enumerate().map(peer).collect();
    let mut pipes = pipes(n).map_err(failed)?;
    let (together, stop) = (Arc::new(Barrier::new(n)), AtomicBool::new(false));
    let stop = &stop;
    // How often in a repeat: so that it takes about as long as it should on a machine of 1 GB/s.
    let often = ((args.millis as f64 * 1e6 / bytes as f64).round() as usize).clamp(1, 5000);
    thread::scope(|s| {
        let mut running = Vec::new();
        for (place, mut listener) in listeners.into_iter().enumerate() {
            let rendezvous =
                Rendezvous { generation: 1, secret: 1, job: String::new(), place, ranks: ranks.clone() };
            let (together, (mut next, mut previous)) = (together.clone(), pipes.remove(0));
            running.push(s.spawn(move || {
                let met = Group::form(rendezvous, &mut listener, Duration::from_secs(10));
                let (_group, mut ring) = met.map_err(failed)?;
                let mut vector = vec![1f32; bytes / F32_BYTES];
                let way = 2 * bytes * (n - 1) / n;
                let (out, mut to) = (vec![1u8; way], vec![0u8; way]);
                let mut times = Times::default();
                for repeat in 0..=args.repeats {
                    // The first decides for all: who stopped alone would leave the others waiting.
                    if place == 0 {
                        stop.store(interrupted.load(Relaxed) != 0, Relaxed);
                    }
                    together.wait();
                    if stop.load(Relaxed) {
                        return go_on(interrupted).map(|()| times);
                    }
                    let began = Instant::now();
                    for _ in 0..often {
                        ring.all_reduce(&mut vector).map_err(failed)?;
                    }
                    let sum = began.elapsed().as_secs_f64() / often as f64;
                    vector.fill(1.0);
                    together.wait();
                    let began = Instant::now();
                    for _ in 0..often {
                        thread::scope(|s| {
                            let sent = s.spawn(|| next.write_all(&out));
                            let received = previous.read_exact(&mut to);
                            sent.join().map_err(|_| failed("a thread has panicked"))?.map_err(failed)?;
                            received.map_err(failed)
                        })?;
                    }
                    let raw = began.elapsed().as_secs_f64() / often as f64;
                    // The first one warms up.
                    if repeat > 0 {
                        times.0.push(sum);
                        times.1.push(raw);
                    }
                }
                Ok(times)
            }));
        }
        let mut all: Vec<Result<Times, Failure>> = Vec::new();
        for t in running {
            all.push(t.join().unwrap_or_else(|_| Err(failed("a rank has panicked"))));
        }
        all.into_iter().collect::<Result<Vec<_>, _>>().map(|mut all| all.swap_remove(0))
    })
}

/// For each rank a connection to the next, and the one from the rank before.
fn pipes(n: usize) -> std::io::Result<Vec<(TcpStream, TcpStream)>> {
    let listener = std::net::TcpListener::bind("127.0.0.1:0")?;
    let mut ends = Vec::new();
    for _ in 0..n {
        let out = TcpStream::connect(listener.local_addr()?)?;
        let (to, _) = listener.accept()?;
        out.set_nodelay(true)?;
        ends.push((Some(out), Some(to)));
    }
    let mut pipes = Vec::new();
    for i in 0..n {
        let previous = (i + n - 1) % n;
        if let (Some(out), Some(to)) = (ends[i].0.take(), ends[previous].1.take()) {
            pipes.push((out, to));
        }
    }
    Ok(pipes)
}
