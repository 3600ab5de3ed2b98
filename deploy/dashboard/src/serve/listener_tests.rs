//! Tests of `listener`.

use super::*;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    time::{Instant, timeout},
};

async fn a_listener() -> (BoundedListener, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("bound");
    (BoundedListener::new(listener), address)
}

/// A browser's end of a connection, and the server's.
async fn connected(listener: &mut BoundedListener, address: SocketAddr) -> (TcpStream, BoundedStream) {
    let (browser, (stream, _)) = tokio::join!(TcpStream::connect(address), listener.accept());
    (browser.expect("it listens"), stream)
}

#[tokio::test(start_paused = true)]
async fn browser_that_reads_nothing_loses_its_connection() {
    let (mut listener, address) = a_listener().await;
    let (_browser, mut stream) = connected(&mut listener, address).await;
    let (began, more_than_fits) = (Instant::now(), vec![0u8; 256 << 20]);
    let written = timeout(TAKE_TIMEOUT * 2, stream.write_all(&more_than_fits)).await.expect("it ends");
    assert_eq!(written.expect_err("the browser reads nothing").kind(), io::ErrorKind::TimedOut);
    assert!(began.elapsed() >= TAKE_TIMEOUT, "{:?}", began.elapsed());
}

#[tokio::test]
async fn connection_without_the_token_gives_way_to_newer_ones() {
    let (mut listener, address) = a_listener().await;
    let mut all = vec![connected(&mut listener, address).await];
    all[0].1.is_known.store(true, Relaxed);
    for _ in 0..=MAX_STRANGERS {
        all.push(connected(&mut listener, address).await);
    }
    let mut byte = [0; 1];
    let mut ends = [false; 3];
    for (ends, (_, stream)) in ends.iter_mut().zip(&mut all) {
        let read = timeout(Duration::from_millis(200), stream.read(&mut byte)).await;
        *ends = read.is_ok_and(|read| read.is_err());
    }
    assert_eq!(ends, [false, true, false], "the oldest that has not shown the token, and no other");
}
