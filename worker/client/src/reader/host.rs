//! Readers of one host that share what one of them has read.
//!
//! ```text
//!  servers ──▶ reader that has the lock ──▶ sealed memory ──descriptor──▶ the others map it
//! ```
//!
//! The first reader takes a lock, reads versions for all, and listens on a Unix socket; itself is one of its clients. When it has
//! gone, the next one that asks takes the lock. Versions that were mapped stay.
//!
//! Readers share if they are of one user, and read the same values of the same state. Whoever can open the socket could read
//! the memory of the others anyway.

mod serve;
mod wire;

use super::{ReadError, Reader, WholeVersion};
use rustix::fs::{FlockOperation, flock};
use serve::Serving;
use std::{
    fs::File,
    io,
    path::PathBuf,
    time::{Duration, Instant},
};
use tokio::net::{UnixListener, UnixStream};
use xxhash_rust::xxh3::Xxh3;

/// Before the socket is tried again, while another reader begins to listen on it.
const RETRY_DELAY: Duration = Duration::from_millis(20);

/// This reader's part in the sharing.
#[derive(Debug)]
pub(super) struct Host {
    /// Of the socket; beside it is that of the lock.
    path: PathBuf,
    /// Reads for all, if it comes to that.
    reader: Box<Reader>,
    connection: Option<UnixStream>,
    /// This reader reads for all.
    serving: Option<Serving>,
}

impl Host {
    /// For readers of the same values as this one.
    pub(super) fn of(reader: Reader) -> io::Result<Self> {
        let dir = paraft_host::socket_dir().ok_or_else(|| {
            let dir = std::env::temp_dir();
            io::Error::other(format!("{} has no directory that only this user can open", dir.display()))
        })?;
        let mut key = Xxh3::new();
        key.update(reader.name.as_bytes());
        key.update(reader.dtype.name().as_bytes());
        let foundings = reader.foundings.iter().map(|(shard, founding)| (u64::from(*shard), *founding));
        let only = reader.only.iter().flatten().map(|bucket| (1 << 32, u64::from(*bucket)));
        foundings.chain(only).for_each(|(a, b)| {
            key.update(&a.to_le_bytes());
            key.update(&b.to_le_bytes());
        });
        let path = dir.join(format!("versions-{:016x}.sock", key.digest()));
        Ok(Self { path, reader: Box::new(reader), connection: None, serving: None })
    }

    /// The newest version, of this step or a later one, and at most so old; `None`: it has not come until then.
    pub(super) async fn next(
        &mut self,
        step: u64,
        age: Option<Duration>,
        deadline: Instant,
    ) -> Option<Result<WholeVersion, ReadError>> {
        loop {
            let began = Instant::now();
            let asks = async {
                let mut connection = match self.connection.take() {
                    Some(connection) => connection,
                    None => self.connect().await?,
                };
                let answer = wire::ask(&mut connection, step, age).await?;
                self.connection = Some(connection);
                io::Result::Ok(answer)
            };
            match tokio::time::timeout_at(deadline.into(), asks).await {
                // It was so old when it was sent.
                Ok(Ok((Ok(_), then))) if age.is_some_and(|age| then + began.elapsed() > age) => {}
                Ok(Ok((answer, _))) => return Some(answer),
                // It has gone: another one takes its place.
                Ok(Err(e)) => tracing::debug!("{}: {e}", self.path.display()),
                Err(_) => return None,
            }
            tokio::time::sleep(RETRY_DELAY).await;
        }
    }

    async fn connect(&mut self) -> io::Result<UnixStream> {
        match UnixStream::connect(&self.path).await {
            Ok(connection) => return Ok(connection),
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => {}
            Err(e) => return Err(e),
        }
        let lock = File::options().create(true).append(true).open(self.path.with_extension("lock"))?;
        flock(&lock, FlockOperation::NonBlockingLockExclusive)?;
        // Whoever listened has gone: it held the lock.
        let _ = std::fs::remove_file(&self.path);
        let listener = UnixListener::bind(&self.path)?;
        self.serving = Some(Serving::begin(listener, lock, self.reader.again(self.reader.dtype)));
        UnixStream::connect(&self.path).await
    }
}
