//! Real sockets: which connections are admitted, and which are closed.

use super::*;
use std::{
    io,
    net::SocketAddr,
    sync::atomic::{AtomicUsize, Ordering::SeqCst},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    time::timeout,
};

/// Long enough for a loaded machine; reached only if a test fails.
const DEADLINE: Duration = Duration::from_secs(30);

#[test]
fn descriptors_of_logs_and_peers_are_kept_from_connections() {
    assert_eq!(room(128, 1, 2), 128 - 32 - 8 - 8 - 16);
    assert_eq!(room(1024, 64, 2), 1024 - 32 - 512 - 8 - 16);
    assert_eq!(room(1 << 20, 64, 1000), MAX_CONNECTIONS);
    assert_eq!(room(64, 64, 1000), MIN_CONNECTIONS, "too few for anything");
}

/// A server that reads everything; returns its address.
async fn reads(connections: &Arc<Connections>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address");
    let connections = connections.clone();
    tokio::spawn(async move {
        loop {
            let mut socket = connections.accept(&listener).await;
            tokio::spawn(async move {
                let mut buffer = [0; 64];
                while socket.read(&mut buffer).await.is_ok_and(|n| n > 0) {}
            });
        }
    });
    address
}

async fn dial(to: SocketAddr) -> TcpStream {
    TcpStream::connect(to).await.expect("it listens")
}

/// Whether the peer closes it; `false`: it is still open after `within`.
async fn closes(socket: &mut TcpStream, within: Duration) -> bool {
    timeout(within, socket.read(&mut [0; 8])).await.is_ok_and(|r| r.is_err() || r.is_ok_and(|n| n == 0))
}

async fn until(what: &str, mut done: impl FnMut() -> bool) {
    let wait = async {
        while !done() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    timeout(DEADLINE, wait).await.unwrap_or_else(|_| panic!("waited for {what}"));
}

#[tokio::test(flavor = "multi_thread")]
async fn connection_silent_past_timeout_is_closed_others_stay() {
    let connections = Connections::with_preface(|| 100, Access::Insecure, Duration::from_millis(300));
    let address = reads(&connections).await;
    let (mut silent, mut slow, mut speaks) = (dial(address).await, dial(address).await, dial(address).await);
    slow.write_all(&[1; 23]).await.expect("written");
    speaks.write_all(&[1; 24]).await.expect("written");
    assert!(closes(&mut silent, DEADLINE).await && closes(&mut slow, DEADLINE).await);
    assert!(!closes(&mut speaks, Duration::from_millis(600)).await);
    let counts = connections.counts();
    assert_eq!((counts.unknown, counts.silent, counts.shed), (1, 2, 0));
    drop(speaks);
    until("the last to go", || connections.counts().unknown == 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crowd_of_strangers_costs_the_oldest_of_them_their_places() {
    let connections = Connections::with_preface(|| 20, Access::Insecure, DEADLINE * 10);
    let address = reads(&connections).await;
    let mut crowd = Vec::new();
    for _ in 0..100 {
        crowd.push(dial(address).await);
    }
    for socket in &mut crowd[..80] {
        assert!(closes(socket, DEADLINE).await);
    }
    for socket in &mut crowd[80..] {
        assert!(!closes(socket, Duration::from_millis(5)).await);
    }
    let counts = connections.counts();
    assert_eq!((counts.unknown, counts.most, counts.shed, counts.refused), (20, 20, 80, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn one_with_a_rank_outlives_a_crowd_that_comes_later() {
    let connections = Connections::with_preface(|| 20, Access::Insecure, DEADLINE * 10);
    let visitor = connections.admit(Origin::Here).expect("room");
    visitor.is(Rank::Server);
    visitor.is(Rank::Reader);
    let address = reads(&connections).await;
    let mut crowd = Vec::new();
    for _ in 0..100 {
        crowd.push(dial(address).await);
    }
    until("the crowd to be taken in", || connections.counts().shed == 81).await;
    assert!(!visitor.is_shed());
    assert_eq!((connections.counts().servers, connections.counts().readers), (1, 0), "it keeps its highest");
}

/// The first calls fail as without a free descriptor.
struct FailingListener(TcpListener, AtomicUsize);

impl Listen for FailingListener {
    type Socket = TcpStream;

    async fn next(&self) -> io::Result<(TcpStream, Origin)> {
        const EMFILE: i32 = 24;
        match self.1.fetch_add(1, SeqCst) < 3 {
            true => Err(io::Error::from_raw_os_error(EMFILE)),
            false => self.0.next().await,
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn listener_without_descriptor_waits_and_closes_strangers() {
    let connections = Connections::with_preface(|| 20, Access::Insecure, DEADLINE * 10);
    let (stranger, friend) = (connections.admit(Origin::Here), connections.admit(Origin::Here));
    let (stranger, friend) = (stranger.expect("room"), friend.expect("room"));
    friend.is(Rank::Worker);
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address");
    let listener = FailingListener(listener, AtomicUsize::new(0));
    let _client = dial(address).await;
    let began = Instant::now();
    let accepted = timeout(DEADLINE, connections.accept(&listener)).await;
    assert!(accepted.is_ok(), "it goes on");
    assert!(began.elapsed() >= Duration::from_millis(150), "it does not spin");
    assert_eq!(listener.1.load(SeqCst), 4);
    assert!(stranger.is_shed() && !friend.is_shed());
}
