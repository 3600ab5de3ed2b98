//! The reader that reads for all of its host.

use super::wire::{ANY_AGE, Answer, Shared, send};
use crate::reader::{Fetcher, Reader};
use std::{
    fs::File,
    io,
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::{
    io::AsyncReadExt,
    net::{UnixListener, UnixStream},
    task::JoinHandle,
};

/// A version may come late: those who wait have deadlines of their own.
const READ_TIMEOUT: Duration = Duration::from_secs(1 << 20);
/// A client that takes no answer for so long loses its connection.
const TAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// The task that serves others, with the reader that reads for all; both end when it is dropped.
#[derive(Debug)]
pub(super) struct Serving {
    listens: JoinHandle<()>,
    _lock: File,
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.listens.abort();
    }
}

impl Serving {
    /// Listens while the lock is held, and reads what is asked for.
    pub(super) fn begin(listener: UnixListener, lock: File, reader: Reader) -> Self {
        let fetcher = Arc::new(Fetcher::begin(reader, READ_TIMEOUT));
        let listens = tokio::spawn(async move {
            let mut clients = tokio::task::JoinSet::new();
            loop {
                while clients.try_join_next().is_some() {}
                match listener.accept().await {
                    Ok((stream, _)) => drop(clients.spawn(serve(stream, fetcher.clone()))),
                    Err(_) => tokio::time::sleep(super::RETRY_DELAY).await,
                }
            }
        });
        Self { listens, _lock: lock }
    }
}

/// Answers one client, request by request.
async fn serve(mut stream: UnixStream, fetcher: Arc<Fetcher<Shared>>) {
    // Any error means that the client has gone.
    let _ = serve_until_gone(&mut stream, &fetcher).await;
}

async fn serve_until_gone(stream: &mut UnixStream, fetcher: &Fetcher<Shared>) -> io::Result<()> {
    loop {
        let step = stream.read_u64_le().await?;
        let age = stream.read_u64_le().await?;
        // On a clock that began later than that, only the newest is young enough.
        let since = (age != ANY_AGE).then(|| {
            let now = Instant::now();
            now.checked_sub(Duration::from_micros(age)).unwrap_or(now)
        });
        let reply = tokio::select! {
            reply = fetcher.next(step, since) => reply,
            // One that waits says nothing: it has gone, or given up.
            byte = stream.read_u8() => return byte.map(drop),
        };
        let sends = async {
            match &reply {
                Ok((shared, at)) => shared.send(stream, at.map_or(Duration::ZERO, |at| at.elapsed())).await,
                Err(error) => send(stream, &Answer::Failed(error.clone())).await,
            }
        };
        tokio::time::timeout(TAKE_TIMEOUT, sends).await??;
    }
}
