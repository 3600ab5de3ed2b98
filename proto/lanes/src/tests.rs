//! Lanes over real sockets.

use crate::shared::{ReadHalf, Shared, Trust, WriteHalf, over_unix};
use crate::*;
use futures::{StreamExt, stream};
use paraft_proto::{Push, ToShard, WithBulk, limits, to_shard::Kind};
use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::UnixStream,
    time::Instant,
};

fn push(seq: u64, len: usize) -> WithBulk<ToShard> {
    ToShard { kind: Some(Kind::Push(Push { seq, payload: vec![seq as u8; len].into(), ..Push::default() })) }
        .into()
}

fn halves(socket: UnixStream, trust: Trust) -> (ReadHalf, WriteHalf, Arc<Shared>) {
    let shared = Shared::new(trust);
    let (read, write) = over_unix(socket, shared.clone()).expect("halves");
    (read, write, shared)
}

fn receiver(socket: UnixStream) -> Receiver<ToShard> {
    Receiver::new(halves(socket, Trust::Copies).0, limits::MAX_MESSAGE_BYTES, Pool::new(1 << 20))
}

#[tokio::test]
async fn what_is_sent_comes_in_order_and_then_the_end() {
    let (a, b) = UnixStream::pair().expect("a pair");
    let all: Vec<_> = (0..200).map(|i| push(i, [0, 10, 5_000, 1 << 20][i as usize % 4])).collect();
    let sends = tokio::spawn(send(halves(a, Trust::Reads).1, None, stream::iter(all.clone())));
    let mut receiver = receiver(b);
    for m in all {
        assert_eq!(receiver.next().await.expect("a message").expect("whole"), m);
    }
    assert!(receiver.next().await.is_none());
    sends.await.expect("no panic").expect("sent");
}

fn some(seq: u64, len: usize) -> std::vec::IntoIter<WithBulk<ToShard>> {
    vec![push(seq, len)].into_iter()
}

#[tokio::test]
async fn what_threads_put_comes_in_their_order_and_whole() {
    let (a, b) = UnixStream::pair().expect("a pair");
    let (_read, write, _) = halves(a, Trust::Reads);
    let sender = Arc::new(Sender::new(write, None));
    let runs = tokio::spawn({
        let sender = sender.clone();
        async move { sender.run().await }
    });
    // Some are written at once, others are left, and those after them must wait.
    let threads: Vec<_> = (0..3u64)
        .map(|t| {
            let sender = sender.clone();
            std::thread::spawn(move || {
                (0..300u64)
                    .for_each(|i| sender.put(some(t << 32 | i, [0, 10, 5_000, 1 << 18][i as usize % 4])));
            })
        })
        .collect();
    let (mut receiver, mut next) = (receiver(b), [0u64; 3]);
    while next != [300; 3] {
        let m = receiver.next().await.expect("a message").expect("whole");
        let Some(Kind::Push(Push { seq, .. })) = m.message.kind else { panic!("no push") };
        let (t, i) = ((seq >> 32) as usize, seq & 0xffff_ffff);
        assert_eq!(i, next[t], "of thread {t}");
        assert_eq!(m, push(seq, [0, 10, 5_000, 1 << 18][i as usize % 4]));
        next[t] += 1;
    }
    threads.into_iter().for_each(|t| t.join().expect("no panic"));
    runs.abort();
}

#[tokio::test]
async fn small_message_is_sent_inline_without_waiting_for_reader() {
    let (a, b) = UnixStream::pair().expect("a pair");
    let (_read, write, _) = halves(a, Trust::Reads);
    let sender = Sender::new(write, None);
    sender.put(some(1, 100));
    // No task runs the sender.
    let mut receiver = receiver(b);
    assert_eq!(receiver.next().await.expect("a message").expect("whole"), push(1, 100));
    // More than the socket takes without a reader.
    (2..100).for_each(|seq| sender.put(some(seq, 1 << 16)));
    let reads = async {
        for seq in 2..100 {
            assert_eq!(receiver.next().await.expect("a message").expect("whole"), push(seq, 1 << 16));
        }
    };
    tokio::select! {
        ended = sender.run() => panic!("{ended:?}"),
        read = tokio::time::timeout(Duration::from_secs(30), reads) => read.expect("all of them"),
    }
}

#[tokio::test]
async fn iterator_is_advanced_when_its_messages_are_due() {
    let (a, _b) = UnixStream::pair().expect("a pair");
    let (_read, write, _) = halves(a, Trust::Reads);
    let sender = Sender::new(write, None);
    let made = Arc::new(AtomicUsize::new(0));
    let count = made.clone();
    sender.put((0..1000u64).map(move |seq| {
        count.fetch_add(1, Relaxed);
        push(seq, 1 << 20)
    }));
    // There is no reader.
    let runs = tokio::time::timeout(Duration::from_millis(50), sender.run()).await;
    assert!(runs.is_err(), "it waits for room");
    assert!((1..10).contains(&made.load(Relaxed)), "{made:?} of them are in memory");
}

#[tokio::test(start_paused = true)]
async fn who_has_nothing_to_say_says_that_it_lives() {
    let (a, b) = UnixStream::pair().expect("a pair");
    let sends =
        tokio::spawn(send(halves(a, Trust::Reads).1, None, stream::pending::<WithBulk<ToShard>>().boxed()));
    let mut receiver = receiver(b);
    let waits = tokio::time::timeout(Duration::from_secs(60), receiver.next()).await;
    assert!(waits.is_err(), "it has said something or was given up: {waits:?}");
    sends.abort();
}

#[tokio::test(start_paused = true)]
async fn silence_ends_a_lane_but_only_while_somebody_listens() {
    let (_a, b) = UnixStream::pair().expect("a pair");
    let mut receiver = receiver(b);
    tokio::time::sleep(Duration::from_secs(60)).await;
    let began = Instant::now();
    let end = receiver.next().await;
    assert!(matches!(end, Some(Err(LaneError::Silent(_)))), "{end:?}");
    assert!((2..=4).contains(&began.elapsed().as_secs()), "{:?}", began.elapsed());
    assert!(receiver.next().await.is_none());
}

#[tokio::test]
async fn a_lane_begins_where_both_sides_speak_it() {
    let (mut a, mut b) = UnixStream::pair().expect("a pair");
    let answers = tokio::spawn(async move {
        let mut first = [0; 24];
        b.read_exact(&mut first).await.expect("read");
        let purpose = Purpose::of(&first).expect("known");
        answer(&mut b, purpose).await.expect("answered");
        b
    });
    dial(&mut a, Purpose::Exchange).await.expect("a lane");
    drop(answers.await);
    assert_eq!(Purpose::of(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), None);
    // HTTP/2 answers with its settings, or closes.
    for says in [&[0u8; 24][..], b"short", b""] {
        let (mut a, mut b) = UnixStream::pair().expect("a pair");
        b.write_all(says).await.expect("written");
        drop(b);
        let dialled = dial(&mut a, Purpose::Exchange).await;
        assert!(matches!(dialled, Err(LaneError::NoLanes | LaneError::Io(_))), "{dialled:?}");
    }
}
