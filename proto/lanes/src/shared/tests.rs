//! Two ends of a lane in one process: which payloads are shared, copied and given back.

use super::*;
use crate::{LaneError, Receiver, Sender, send};
use futures::{Stream, StreamExt};
use paraft_proto::{FromShard, Push, ToShard, Weights, WithBulk, from_shard, limits, to_shard::Kind};
use std::{convert::Infallible, option, time::Duration};
use tokio::{net::UnixStream, sync::mpsc, task::JoinHandle};
use tokio_stream::wrappers::UnboundedReceiverStream;

const LEN: usize = 1 << 20;

fn push(seq: u64, payload: Bytes) -> WithBulk<ToShard> {
    ToShard { kind: Some(Kind::Push(Push { seq, payload, ..Push::default() })) }.into()
}

fn weights(version: u64, payload: Bytes) -> WithBulk<FromShard> {
    FromShard { kind: Some(from_shard::Kind::Weights(Weights { version, payload, ..Weights::default() })) }
        .into()
}

fn filled(memory: &Arc<Memory>, with: u8) -> Bytes {
    let mut slot = memory.slot(LEN).expect("room");
    slot.as_mut().fill(with);
    slot.freeze()
}

/// A worker's end and a server's.
struct Ends {
    worker: Arc<Shared>,
    server: Arc<Shared>,
    pushes: Arc<Sender<option::IntoIter<WithBulk<ToShard>>>>,
    pulls: mpsc::UnboundedSender<WithBulk<FromShard>>,
    at_server: Receiver<ToShard>,
    at_worker: Receiver<FromShard>,
    sends: JoinHandle<Result<Infallible, LaneError>>,
    answers: JoinHandle<Result<(), LaneError>>,
}

impl Drop for Ends {
    fn drop(&mut self) {
        self.sends.abort();
        self.answers.abort();
    }
}

fn messages<M: Send + 'static>() -> (mpsc::UnboundedSender<M>, impl Stream<Item = M> + Unpin + Send) {
    let (tx, rx) = mpsc::unbounded_channel();
    (tx, UnboundedReceiverStream::new(rx))
}

fn ends() -> Ends {
    let (a, b) = UnixStream::pair().expect("a pair");
    let (worker, server) = (Shared::new(Trust::Reads), Shared::new(Trust::Copies));
    let (read, write) = over_unix(a, worker.clone()).expect("halves");
    let pushes = Arc::new(Sender::new(write, Some(worker.clone())));
    let runs = pushes.clone();
    let sends = tokio::spawn(async move { runs.run().await });
    let at_worker = Receiver::new(read, limits::MAX_MESSAGE_BYTES, Pool::new(1 << 20));
    let (read, write) = over_unix(b, server.clone()).expect("halves");
    let (pulls, out) = messages();
    let answers = tokio::spawn(send(write, Some(server.clone()), out));
    let at_server = Receiver::new(read, limits::MAX_MESSAGE_BYTES, Pool::new(1 << 20));
    Ends { worker, server, pushes, pulls, at_server, at_worker, sends, answers }
}

impl Ends {
    async fn pushed(&mut self, m: WithBulk<ToShard>) -> Bytes {
        self.pushes.put(Some(m).into_iter());
        let got = self.at_server.next().await.expect("a message").expect("whole");
        got.bulk[0].to_bytes()
    }

    /// Both sides read, and report that the offered memory is mapped.
    async fn answers(&mut self) {
        for _ in 0..2 {
            self.pushed(push(0, Bytes::new())).await;
            self.pulled(weights(0, Bytes::new())).await;
        }
    }

    async fn pulled(&mut self, m: WithBulk<FromShard>) -> Bytes {
        self.pulls.send(m).expect("sent");
        let got = self.at_worker.next().await.expect("a message").expect("whole");
        got.bulk[0].to_bytes()
    }
}

#[tokio::test]
async fn a_push_is_read_where_it_lies_and_changes_no_more_once_it_was() {
    let mut ends = ends();
    let memory = Memory::new(4 * LEN).expect("memory");
    ends.worker.offer(&memory);
    // The first push offers the memory.
    assert_eq!(ends.pushed(push(1, filled(&memory, 1))).await, vec![1; LEN]);
    ends.answers().await;
    assert!(ends.worker.may_stay_in_memory());
    let mut slot = memory.slot(LEN).expect("room");
    slot.as_mut().fill(2);
    let payload = slot.freeze();
    let place = memory.place_of(&payload).expect("it is in there");
    let got = ends.pushed(push(2, payload.clone())).await;
    assert_eq!(got, vec![2; LEN]);
    // A worker that writes after handing over.
    drop(payload);
    let again = filled(&memory, 9);
    assert_eq!(memory.place_of(&again), Some(place), "it is the same place");
    assert_eq!(got, vec![2; LEN], "what was taken is nobody's else");
    // Payloads outside the memory go through the socket, as small ones do.
    assert_eq!(ends.pushed(push(3, vec![3; LEN].into())).await, vec![3; LEN]);
    assert_eq!(ends.pushed(push(4, again.slice(..100))).await, vec![9; 100]);
}

#[tokio::test]
async fn a_little_is_given_back_with_the_next_push_and_before_it() {
    let mut ends = ends();
    let memory = Memory::new(4 * LEN).expect("memory");
    ends.server.offer(&memory);
    drop(ends.pulled(weights(1, filled(&memory, 1))).await);
    ends.answers().await;
    let little = memory.slot(SHARED_BYTES).expect("room").freeze();
    drop(ends.pulled(weights(2, little)).await);
    assert_eq!(lock(&ends.server.lent).bytes, SHARED_BYTES);
    ends.pushed(push(1, Bytes::new())).await;
    assert_eq!(lock(&ends.server.lent).bytes, 0);
}

#[tokio::test]
async fn weights_are_lent_until_they_are_given_back() {
    let mut ends = ends();
    let memory = Memory::new(8 * LEN).expect("memory");
    ends.server.offer(&memory);
    drop(ends.pulled(weights(1, filled(&memory, 1))).await);
    ends.answers().await;
    let lent = filled(&memory, 2);
    let got = ends.pulled(weights(2, lent.clone())).await;
    assert_eq!(got, lent);
    assert_eq!(lock(&ends.server.lent).bytes, LEN);
    drop((got, lent));
    ends.pushes.give_back();
    let back = async {
        while lock(&ends.server.lent).bytes > 0 {
            let _ = tokio::time::timeout(Duration::from_millis(5), ends.at_server.next()).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), back).await.expect("given back");
    assert!(lock(&ends.server.lent).at.is_empty());
    let places: Vec<_> = (0..8).map(|i| filled(&memory, i)).collect();
    assert_eq!(places.len(), 8, "all of it is free again");
}

#[tokio::test]
async fn who_gives_nothing_back_gets_the_rest_through_the_socket() {
    let mut ends = ends();
    let memory = Memory::new(LEN).expect("memory");
    ends.server.offer(&memory);
    let one = filled(&memory, 7);
    let mut kept = Vec::new();
    for version in 0..100 {
        kept.push(ends.pulled(weights(version, one.clone())).await);
        ends.answers().await;
    }
    assert!(kept.iter().all(|k| *k == one));
    assert!(lock(&ends.server.lent).bytes <= MAX_LENT_BYTES);
}

#[tokio::test]
async fn who_cannot_map_what_it_is_shown_is_sent_everything() {
    use tokio::io::AsyncWriteExt;
    let (mut a, b) = UnixStream::pair().expect("a pair");
    let shared = Shared::new(Trust::Copies);
    let (read, _write) = over_unix(b, shared.clone()).expect("halves");
    let mut receiver = Receiver::<ToShard>::new(read, limits::MAX_MESSAGE_BYTES, Pool::new(1 << 20));
    // Without a free descriptor the kernel delivers only the bytes.
    a.write_all(&crate::frame::memory_announcement()).await.expect("written");
    let mut out = crate::frame::Outbox::default();
    out.put(&push(1, vec![5; LEN].into()), None);
    let bytes = out.pieces().iter().flat_map(|p| p.to_vec()).collect::<Vec<_>>();
    let sends = tokio::spawn(async move { a.write_all(&bytes).await.map(|()| a) });
    let got = receiver.next().await.expect("a message").expect("whole");
    assert_eq!(got.bulk[0].to_bytes(), vec![5; LEN]);
    assert!(!shared.take_mapped(), "nobody is told that it is mapped");
    sends.await.expect("no panic").expect("written");
}

#[tokio::test]
async fn place_outside_shared_memory_ends_the_lane() {
    for (place, len) in
        [(LEN as u64, LEN), (4096 * 3, LEN), (1, 100), (u64::MAX - 4096, LEN), (u64::MAX - 1, 1)]
    {
        let theirs = Memory::new(LEN).expect("memory");
        let shared = Shared::new(Trust::Copies);
        assert!(
            matches!(shared.bulk(place, len, &Pool::new(0)), Err(FrameError::NotShared)),
            "nothing is shared yet"
        );
        lock(&shared.fds).push_back(theirs.fd().try_clone_to_owned().expect("a descriptor"));
        shared.map().expect("mapped");
        assert!(
            matches!(shared.bulk(place, len, &Pool::new(0)), Err(FrameError::NotShared)),
            "{place} {len}"
        );
        shared.returned(place);
    }
}

#[test]
fn memory_that_could_end_its_reader_is_not_mapped() {
    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
    let plain = memfd_create("test", MemfdFlags::ALLOW_SEALING).expect("memory");
    ftruncate(&plain, 1 << 20).expect("room");
    assert!(PeerMemory::new(&plain).is_err(), "it may shrink");
    fcntl_add_seals(&plain, SealFlags::SHRINK).expect("sealed");
    assert!(PeerMemory::new(&plain).is_ok());
    let empty = memfd_create("test", MemfdFlags::ALLOW_SEALING).expect("memory");
    fcntl_add_seals(&empty, SealFlags::SHRINK).expect("sealed");
    assert!(PeerMemory::new(&empty).is_err(), "nothing is in it");
    let file = tempfile::tempfile().expect("a file");
    file.set_len(1 << 20).expect("room");
    assert!(PeerMemory::new(&file.into()).is_err(), "it is a file");
    let shared = Shared::new(Trust::Copies);
    assert!(shared.map().is_err(), "no descriptor came");
}

#[test]
fn nobody_maps_our_memory_for_writing() {
    use rustix::mm::{MapFlags, ProtFlags, mmap};
    let memory = Memory::new(LEN).expect("memory");
    // SAFETY: a new mapping, to which no reference is made.
    let mapped = unsafe {
        mmap(std::ptr::null_mut(), LEN, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, memory.fd(), 0)
    };
    assert!(mapped.is_err());
    assert!(
        rustix::fs::ftruncate(memory.fd(), 0).is_err()
            && rustix::fs::ftruncate(memory.fd(), 1 << 30).is_err()
    );
}

#[test]
fn slots_come_back_and_join() {
    let memory = Memory::new(4 * 4096).expect("memory");
    let slots: Vec<_> = (0..4).map(|_| memory.slot(100).expect("room")).collect();
    assert!(memory.slot(1).is_none());
    let mut slots = slots.into_iter();
    let (a, b, c) = (slots.next(), slots.next(), slots.next());
    drop(a);
    drop(c);
    assert!(memory.slot(4097).is_none(), "they are not neighbours");
    drop(b);
    assert!(memory.slot(3 * 4096).is_some());
    drop(slots);
    assert_eq!(lock(&memory.free).0.len(), 1);
    assert!(memory.slot(4 * 4096).is_some());
}

#[test]
fn a_copy_is_made_of_any_length() {
    let memory = Memory::new(2 * 4096).expect("memory");
    let mut slot = memory.slot(2 * 4096).expect("room");
    slot.as_mut().iter_mut().enumerate().for_each(|(i, b)| *b = (i * 7) as u8);
    let theirs = PeerMemory::new(&memory.fd().try_clone_to_owned().expect("a descriptor")).expect("mapped");
    for (at, len) in [(0, 0), (0, 1), (0, 7), (0, 8), (0, 513), (0, 8192), (4096, 4096), (4096, 4001)] {
        let mut copy = Pool::new(0).take(len);
        theirs.copy(at, &mut copy);
        assert_eq!(copy.as_ref(), &slot.as_ref()[at..at + len], "{at} {len}");
    }
    assert!(!theirs.has(4096, 4097) && !theirs.has(1, 1));
}
