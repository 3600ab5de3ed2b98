//! What readers of one host say to each other: a step; an answer, with a descriptor if it is a version.

use crate::reader::{ReadError, WholeVersion, fetch::Held};
use bytes::Bytes;
use paraft_host::Sealed;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeMap,
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
    time::Duration,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, Interest},
    net::UnixStream,
};

/// An answer has at most so many bytes before its buckets' list: a longer one is no answer.
const MAX_ANSWER: u32 = 64 << 20;

/// An answer, without the values.
#[derive(Serialize, Deserialize)]
pub(super) enum Answer {
    Version {
        step: u64,
        foundings: BTreeMap<u32, u64>,
        digest: u64,
        reached: u64,
        is_last: bool,
        /// So long ago it was the newest; 0: that is not known.
        age_us: u64,
        /// Lengths in the memory that comes with it, by bucket.
        buckets: Vec<(u32, usize)>,
    },
    Failed(ReadError),
}

/// A version in sealed memory.
pub(super) struct Shared {
    version: WholeVersion,
    memory: Arc<Sealed>,
}

/// Bytes of the memory, for [`Bytes`].
struct Mapped(Arc<Sealed>);

impl AsRef<[u8]> for Mapped {
    fn as_ref(&self) -> &[u8] {
        (*self.0).as_ref()
    }
}

/// The parts of the memory with these lengths.
fn parts(memory: &Arc<Sealed>, lengths: &[(u32, usize)]) -> Option<BTreeMap<u32, Bytes>> {
    let all = Bytes::from_owner(Mapped(memory.clone()));
    let mut at = 0usize;
    let mut part = |len: usize| {
        let from = at;
        at = from.checked_add(len)?;
        (at <= all.len()).then(|| all.slice(from..at))
    };
    let parts = lengths.iter().map(|(id, len)| Some((*id, part(*len)?))).collect::<Option<_>>()?;
    (at == all.len()).then_some(parts)
}

impl Held for Shared {
    /// Copies it to sealed memory.
    fn of(mut version: WholeVersion) -> io::Result<Self> {
        let memory = Arc::new(Sealed::copy_of(version.buckets.values().map(|values| &values[..]))?);
        let lengths: Vec<_> = version.buckets.iter().map(|(id, values)| (*id, values.len())).collect();
        version.buckets = parts(&memory, &lengths).ok_or(io::ErrorKind::InvalidData)?;
        Ok(Self { version, memory })
    }

    fn version(&self) -> &WholeVersion {
        &self.version
    }
}

impl Shared {
    /// Sends it. `age`: so long ago it was the newest.
    pub(super) async fn send(&self, to: &mut UnixStream, age: Duration) -> io::Result<()> {
        let v = &self.version;
        let buckets = v.buckets.iter().map(|(id, values)| (*id, values.len())).collect();
        let (step, foundings, digest) = (v.step, v.foundings.clone(), v.digest);
        let age_us = age.as_micros() as u64;
        let answer = Answer::Version {
            step,
            foundings,
            digest,
            reached: v.reached,
            is_last: v.is_last,
            age_us,
            buckets,
        };
        send(to, &answer).await?;
        to.async_io(Interest::WRITABLE, || {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut beside = SendAncillaryBuffer::new(&mut space);
            let fds = [self.memory.fd()];
            beside.push(SendAncillaryMessage::ScmRights(&fds));
            sendmsg(to.as_fd(), &[IoSlice::new(&[0])], &mut beside, SendFlags::NOSIGNAL)?;
            Ok(())
        })
        .await
    }
}

pub(super) async fn send(to: &mut UnixStream, answer: &Answer) -> io::Result<()> {
    let text = serde_json::to_vec(answer)?;
    to.write_all(&(text.len() as u32).to_le_bytes()).await?;
    to.write_all(&text).await
}

/// A request: a step, and microseconds of its greatest age, or this many if any age will do.
pub(super) const ANY_AGE: u64 = u64::MAX;

/// Asks for the newest version from a step on, and at most so old. With it comes how old it was then.
pub(super) async fn ask(
    of: &mut UnixStream,
    step: u64,
    age: Option<Duration>,
) -> io::Result<(Result<WholeVersion, ReadError>, Duration)> {
    let age = age.map_or(ANY_AGE, |age| age.as_micros() as u64);
    of.write_all(&[step.to_le_bytes(), age.to_le_bytes()].concat()).await?;
    let len = of.read_u32_le().await?;
    if len > MAX_ANSWER {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut text = vec![0; len as usize];
    of.read_exact(&mut text).await?;
    let (step, foundings, digest, reached, is_last, age_us, lengths) = match serde_json::from_slice(&text)? {
        Answer::Failed(error) => return Ok((Err(error), Duration::ZERO)),
        Answer::Version { step, foundings, digest, reached, is_last, age_us, buckets } => {
            (step, foundings, digest, reached, is_last, age_us, buckets)
        }
    };
    let memory = Arc::new(Sealed::open(descriptor(of).await?)?);
    let buckets = parts(&memory, &lengths).ok_or(io::ErrorKind::InvalidData)?;
    let version = WholeVersion {
        step,
        foundings,
        digest,
        reached,
        is_last,
        buckets,
        updates: BTreeMap::new(),
        received: 0,
    };
    Ok((Ok(version), Duration::from_micros(age_us)))
}

async fn descriptor(of: &UnixStream) -> io::Result<OwnedFd> {
    of.async_io(Interest::READABLE, || {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut beside = RecvAncillaryBuffer::new(&mut space);
        let mut byte = [0];
        recvmsg(of.as_fd(), &mut [IoSliceMut::new(&mut byte)], &mut beside, RecvFlags::CMSG_CLOEXEC)?;
        let came = beside.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
            _ => None,
        });
        came.ok_or_else(|| io::ErrorKind::InvalidData.into())
    })
    .await
}
