//! The reader that reads for all of its host.

use super::wire::{ANY_AGE, Answer, Shared, send};
use crate::reader::{ReadError, Reader, Want, WholeVersion};
use std::{
    fs::File,
    io,
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::{
    io::AsyncReadExt,
    net::{UnixListener, UnixStream},
    sync::{mpsc, oneshot},
    task::JoinHandle,
};

/// A version may come late: those who wait have deadlines of their own.
const WITHIN: Duration = Duration::from_secs(1 << 20);
/// How often the task looks whether anybody waits still.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);
/// A client that takes no answer for so long loses its connection.
const TAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Requests that wait for the task that reads.
const MAX_WAITING: usize = 64;

/// The tasks that read for all; they end when it is dropped.
#[derive(Debug)]
pub(super) struct Serving {
    tasks: [JoinHandle<()>; 2],
    _lock: File,
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

/// Somebody wants a version.
struct Asked {
    step: u64,
    /// At most so old.
    age: Option<Duration>,
    answer: oneshot::Sender<Reply>,
}

/// A version, and the time when it was the newest, if that is known.
type Reply = Result<(Arc<Shared>, Option<Instant>), ReadError>;

impl Serving {
    /// Listens while the lock is held, and reads what is asked for.
    pub(super) fn begin(listener: UnixListener, lock: File, reader: Reader) -> Self {
        let (asks, asked) = mpsc::channel(MAX_WAITING);
        let reads = tokio::spawn(read(reader, asked));
        let listens = tokio::spawn(async move {
            let mut clients = tokio::task::JoinSet::new();
            loop {
                while clients.try_join_next().is_some() {}
                match listener.accept().await {
                    Ok((stream, _)) => drop(clients.spawn(serve(stream, asks.clone()))),
                    Err(_) => tokio::time::sleep(super::RETRY_DELAY).await,
                }
            }
        });
        Self { tasks: [reads, listens], _lock: lock }
    }
}

/// Answers one client, request by request.
async fn serve(mut stream: UnixStream, asks: mpsc::Sender<Asked>) {
    // Any error means that the client has gone.
    let _ = serve_until_gone(&mut stream, asks).await;
}

async fn serve_until_gone(stream: &mut UnixStream, asks: mpsc::Sender<Asked>) -> io::Result<()> {
    loop {
        let step = stream.read_u64_le().await?;
        let age = stream.read_u64_le().await?;
        let age = (age != ANY_AGE).then_some(Duration::from_micros(age));
        let (answer, answered) = oneshot::channel();
        asks.send(Asked { step, age, answer }).await.map_err(io::Error::other)?;
        let reply = tokio::select! {
            reply = answered => reply.map_err(io::Error::other)?,
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

/// The last version that was read, and the time when it was the newest, if that is known.
type Last = Option<(Arc<Shared>, Option<Instant>)>;

/// Reads versions: for all who have asked by then, never from before they asked, unless they accept an older one.
async fn read(mut reader: Reader, mut asked: mpsc::Receiver<Asked>) {
    let (mut waiting, mut last): (Vec<Asked>, Last) = (Vec::new(), None);
    loop {
        while let Ok(one) = asked.try_recv() {
            waiting.push(one);
        }
        waiting.retain(|one| !one.answer.is_closed());
        if let Some((shared, Some(at))) = &last {
            let is_young = |one: &Asked| one.age.is_some_and(|age| at.elapsed() <= age);
            let is_served = |one: &Asked| is_young(one) && one.step <= shared.version().step;
            for one in waiting.extract_if(.., |one| is_served(one)) {
                let _ = one.answer.send(Ok((shared.clone(), Some(*at))));
            }
        }
        let Some(step) = waiting.iter().map(|one| one.step).min() else {
            match asked.recv().await {
                Some(one) => waiting.push(one),
                None => return,
            }
            continue;
        };
        let ages = waiting.iter().filter_map(|one| one.age);
        let want = ages.min().map_or(Want::AtLeast(step), Want::MaxAge);
        let (began, mut later) = (Instant::now(), Vec::new());
        let came = {
            let mut next = std::pin::pin!(reader.next(want, WITHIN));
            loop {
                tokio::select! {
                    came = &mut next => break Some(came),
                    one = asked.recv() => match one {
                        // The version that is waited for may be far off, and this one there.
                        Some(one) if one.step < step || one.age.is_some() && want == Want::AtLeast(step) => {
                            later.push(one);
                            break None;
                        }
                        Some(one) => later.push(one),
                        None => return,
                    },
                    () = tokio::time::sleep(LOOK_INTERVAL) => {
                        if waiting.iter().all(|one| one.answer.is_closed()) {
                            break None;
                        }
                    }
                }
            }
        };
        match came {
            None => {}
            Some(Ok(version)) => match sealed(version).await {
                Ok(shared) => {
                    reader.has_now(shared.version());
                    // That it was the newest is known only if the leader was asked.
                    let at = matches!(want, Want::MaxAge(_)).then_some(began);
                    let step = shared.version().step;
                    for one in
                        waiting.extract_if(.., |one| one.step <= step && (one.age.is_none() || at.is_some()))
                    {
                        let _ = one.answer.send(Ok((shared.clone(), at)));
                    }
                    last = Some((shared, at));
                }
                Err(error) => fail(&mut waiting, &error),
            },
            Some(Err(error)) => fail(&mut waiting, &error),
        }
        waiting.append(&mut later);
    }
}

async fn sealed(version: WholeVersion) -> Result<Arc<Shared>, ReadError> {
    let shared = tokio::task::spawn_blocking(move || Shared::of(version)).await;
    let shared = shared.unwrap_or_else(|e| Err(io::Error::other(e)));
    shared.map(Arc::new).map_err(|e| ReadError::Refused(format!("no sealed memory for a version: {e}")))
}

fn fail(waiting: &mut Vec<Asked>, error: &ReadError) {
    for one in waiting.drain(..) {
        let _ = one.answer.send(Err(error.clone()));
    }
}
