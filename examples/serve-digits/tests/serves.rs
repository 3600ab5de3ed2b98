//! The inference server beside training: it swaps versions between requests, drops none, and says which version answered.

use anyhow::{Context, Result, ensure};
use paraft_common::ShardId;
use paraft_example_serve_digits::{follow, router};
use paraft_tests::{
    fleet::{Fleet, FleetOptions},
    train, wait,
};
use serde_json::Value;
use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    sync::atomic::{AtomicBool, Ordering::SeqCst},
    thread,
    time::Duration,
};

const JOB: &str = "[model]\nkind = \"mlp\"\nhidden = [32]\n[train]\nworkers = 2\nbatch = 32\nepochs = 30\n\
                   [optimizer]\nkind = \"sgd\"\nlr = 0.2\n[cluster]\ngrace_ms = 60000\n";

fn ask(at: SocketAddr, body: &str) -> Result<(String, String)> {
    let mut stream = TcpStream::connect(at)?;
    let length = body.len();
    write!(
        stream,
        "POST /digit HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{body}"
    )?;
    let mut reply = String::new();
    stream.read_to_string(&mut reply)?;
    let (head, body) = reply.split_once("\r\n\r\n").context("a whole reply")?;
    Ok((head.lines().next().unwrap_or_default().into(), body.into()))
}

/// Digit and version.
fn digit(at: SocketAddr, pixels: &[f32]) -> Result<(u64, u64)> {
    let (status, body) = ask(at, &serde_json::to_string(pixels)?)?;
    ensure!(status.contains("200"), "{status}: {body}");
    let reply: Value = serde_json::from_str(&body)?;
    let number = |key: &str| reply[key].as_u64().with_context(|| format!("{key} in {body}"));
    Ok((number("digit")?, number("version")?))
}

#[test]
fn server_answers_from_whole_versions_while_they_train() -> Result<()> {
    let mut fleet = Fleet::start(FleetOptions::replicated(2))?;
    let job = train::job(&fleet.at, JOB, &["name=\"serve\""])?;
    let data = train::data(&job)?;
    let (mut pixels, mut labels) = (Vec::new(), Vec::new());
    let all: Vec<u32> = (0..data.test.len() as u32).collect();
    data.test.fill(&all, &mut pixels, &mut Vec::new(), &mut labels)?;
    let images: Vec<Vec<f32>> =
        pixels.chunks_exact(64).map(|p| p.iter().map(|v| v * 16.0).collect()).collect();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let over = AtomicBool::new(false);
    thread::scope(|s| {
        let workers: Vec<_> = (0..2)
            .map(|rank| {
                let job = &job;
                s.spawn(move || train::worker(job, rank))
            })
            .collect();
        let (digits, following) = runtime.block_on(follow(&fleet.at.addresses, "serve"))?;
        let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0"))?;
        let at = listener.local_addr()?;
        runtime.spawn(async move { axum::serve(listener, router(digits)).await });
        let (images, over) = (&images, &over);
        // All the while somebody asks.
        let asking = s.spawn(move || -> Result<(u64, u64, usize)> {
            let (first, mut last, mut asked) = (digit(at, &images[0])?.1, 0, 0);
            while !over.load(SeqCst) {
                let (_, version) = digit(at, &images[asked % images.len()])?;
                ensure!(version >= last, "version {version} answers after {last}");
                (last, asked) = (version, asked + 1);
            }
            Ok((first, last, asked))
        });
        thread::sleep(Duration::from_millis(300));
        let (leader, _) = fleet.leader(ShardId(0));
        fleet.kill(leader);
        fleet.restart_server(leader)?;
        let reports =
            workers.into_iter().map(|w| w.join().expect("no worker panicked")).collect::<Result<Vec<_>>>()?;
        let steps = reports[0].steps;
        wait::until(
            "the last version",
            || digit(at, &images[0]),
            |v| v.as_ref().is_ok_and(|v| v.1 == steps),
        )?;
        over.store(true, SeqCst);
        let (first, last, asked) = asking.join().expect("it did not panic")?;
        ensure!(first < last && asked > 100, "versions {first} to {last} in {asked} answers");
        let right = images.iter().zip(&labels).map(|(x, y)| Ok(u64::from(digit(at, x)?.0 == u64::from(*y))));
        let right: u64 = right.sum::<Result<u64>>()?;
        ensure!(right * 10 > 9 * images.len() as u64, "{right} of {} are right", images.len());
        let (status, body) = ask(at, "[1, 2]")?;
        ensure!(status.contains("400") && body.contains("64 numbers"), "{status} {body}");
        following.abort();
        Ok(())
    })
}
