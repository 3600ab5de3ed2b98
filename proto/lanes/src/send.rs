//! Messages into a lane: from a stream, or from any thread.

use crate::{
    KEEPALIVE_INTERVAL, LaneError,
    shared::{Shared, WriteHalf, lock},
    write::Writer,
};
use futures::{FutureExt, Stream, StreamExt, future::poll_fn};
use paraft_proto::{WithBulk, bulk::Bulk};
use std::{
    collections::VecDeque,
    convert::Infallible,
    sync::{Arc, Mutex, TryLockError},
    task::{Context, Poll, ready},
};
use tokio::{
    io::AsyncWriteExt,
    sync::Notify,
    time::{Interval, MissedTickBehavior, interval},
};

/// Up to this many bytes are written by the calling thread: waking another one, perhaps on another core,
/// takes longer.
const MAX_INLINE_BYTES: usize = 64 << 10;

pub(crate) fn keepalive_ticks() -> Interval {
    let mut alive = interval(KEEPALIVE_INTERVAL);
    alive.set_missed_tick_behavior(MissedTickBehavior::Delay);
    alive
}

/// Sends these messages until the stream ends, and keepalives in its pauses. Dropping it may cut a message
/// off.
///
/// # Errors
/// The socket's.
pub async fn send<M: Bulk>(
    socket: WriteHalf,
    shared: Option<Arc<Shared>>,
    mut messages: impl Stream<Item = WithBulk<M>> + Unpin,
) -> Result<(), LaneError> {
    let mut writer = Writer::new(socket, shared);
    let mut alive = keepalive_ticks();
    let mut over = false;
    while !over {
        tokio::select! {
            biased;
            next = messages.next() => match next {
                Some(message) => writer.put(&message),
                None => over = true,
            },
            _ = alive.tick() => writer.tick(),
        }
        while !over && writer.has_room() {
            match messages.next().now_or_never() {
                Some(Some(message)) => writer.put(&message),
                Some(None) => over = true,
                None => break,
            }
        }
        poll_fn(|cx| writer.poll_flush(cx)).await?;
    }
    Ok(writer.into_socket().shutdown().await?)
}

/// Sends what any thread puts into it: iterators, each of which is advanced when its messages are due.
pub struct Sender<I> {
    writer: Mutex<Writer>,
    shared: Option<Arc<Shared>>,
    queue: Mutex<VecDeque<I>>,
    /// Something is left in the queue, or partly written.
    left: Notify,
}

impl<I, M> Sender<I>
where
    I: Iterator<Item = WithBulk<M>>,
    M: Bulk,
{
    /// For one lane.
    pub fn new(socket: WriteHalf, shared: Option<Arc<Shared>>) -> Self {
        let writer = Mutex::new(Writer::new(socket, shared.clone()));
        Self { writer, shared, queue: Mutex::default(), left: Notify::new() }
    }

    /// Sends these after everything that was put before. Does not wait: small messages go out at once, the
    /// rest by [`Self::run`].
    pub fn put(&self, messages: I) {
        lock(&self.queue).push_back(messages);
        self.write();
    }

    fn write(&self) {
        let written = match self.writer.try_lock() {
            Ok(mut writer) => self.write_at_once(&mut writer),
            Err(TryLockError::Poisoned(e)) => self.write_at_once(&mut e.into_inner()),
            // The thread that holds it may have seen the queue without these.
            Err(TryLockError::WouldBlock) => false,
        };
        if !written {
            self.left.notify_one();
        }
    }

    /// `false`: something is left.
    fn write_at_once(&self, writer: &mut Writer) -> bool {
        if writer.waiting() > 0 {
            return false; // for room
        }
        writer.give_back();
        let all = self.take(writer, MAX_INLINE_BYTES);
        // The error occurs again where a caller can receive it.
        all && writer.waiting() <= MAX_INLINE_BYTES && writer.try_flush().unwrap_or(false)
    }

    /// Takes from the queue until this many bytes wait; `true`: the queue is empty.
    fn take(&self, writer: &mut Writer, most: usize) -> bool {
        let mut queue = lock(&self.queue);
        while writer.has_room() && writer.waiting() <= most {
            let Some(first) = queue.front_mut() else { return true };
            match first.next() {
                Some(message) => writer.put(&message),
                None => drop(queue.pop_front()),
            }
        }
        queue.is_empty()
    }

    /// Gives back what was lent to this side and is no longer needed, if it is worth a message of its own.
    pub fn give_back(&self) {
        if self.shared.as_deref().is_some_and(Shared::has_enough_to_return) {
            self.write();
        }
    }

    fn poll_drain(&self, cx: &mut Context<'_>) -> Poll<Result<(), LaneError>> {
        let mut writer = lock(&self.writer);
        writer.give_back();
        loop {
            let all = self.take(&mut writer, usize::MAX);
            ready!(writer.poll_flush(cx))?;
            if all {
                return Poll::Ready(Ok(()));
            }
        }
    }

    /// Writes what others leave, and keepalives in pauses. Dropping it may cut a message off.
    ///
    /// # Errors
    /// The socket's.
    pub async fn run(&self) -> Result<Infallible, LaneError> {
        let mut alive = keepalive_ticks();
        loop {
            poll_fn(|cx| self.poll_drain(cx)).await?;
            tokio::select! {
                biased;
                () = self.left.notified() => {}
                _ = alive.tick() => lock(&self.writer).tick(),
            }
        }
    }
}
