//! Reads frames from a socket.

use crate::{
    KEEPALIVE_INTERVAL, LaneError, SILENT_TICKS, error::FrameError, frame::Inbox, pool::Pool,
    send::keepalive_ticks, shared::ReadHalf,
};
use futures::Stream;
use paraft_proto::{WithBulk, bulk::Bulk};
use std::{
    marker::PhantomData,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};
use tokio::{
    io::{AsyncRead, ReadBuf},
    time::Interval,
};

/// The messages of a lane in order, until its end. Silence counts only while a caller waits for a message:
/// without reading, it is unknown what has arrived.
pub struct Receiver<M> {
    socket: ReadHalf,
    inbox: Inbox,
    alive: Interval,
    /// Consecutive ticks without any bytes.
    silent: u32,
    over: bool,
    messages: PhantomData<fn() -> M>,
}

impl<M> Receiver<M> {
    /// For messages of at most `limit` bytes, whose bulk goes into buffers of this pool.
    pub fn new(socket: ReadHalf, limit: usize, pool: Arc<Pool>) -> Self {
        let inbox = Inbox::new(limit, socket.shared().cloned(), pool);
        Self { socket, inbox, alive: keepalive_ticks(), silent: 0, over: false, messages: PhantomData }
    }
}

impl<M: Bulk> Receiver<M> {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<WithBulk<M>>, LaneError>> {
        loop {
            if let Some(message) = self.inbox.message()? {
                return Poll::Ready(Ok(Some(message)));
            }
            let mut space = ReadBuf::new(self.inbox.space());
            let read = Pin::new(&mut self.socket).poll_read(cx, &mut space)?.map(|()| space.filled().len());
            match read {
                Poll::Ready(0) if self.inbox.is_between() => return Poll::Ready(Ok(None)),
                Poll::Ready(0) => return Poll::Ready(Err(FrameError::CutShort.into())),
                Poll::Ready(n) => {
                    self.inbox.filled(n);
                    self.silent = 0;
                }
                Poll::Pending => {
                    while self.alive.poll_tick(cx).is_ready() {
                        self.silent += 1;
                        if self.silent > SILENT_TICKS {
                            return Poll::Ready(Err(LaneError::Silent(KEEPALIVE_INTERVAL * SILENT_TICKS)));
                        }
                    }
                    return Poll::Pending;
                }
            }
        }
    }
}

impl<M: Bulk> Stream for Receiver<M> {
    type Item = Result<WithBulk<M>, LaneError>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        if this.over {
            return Poll::Ready(None);
        }
        this.poll(cx).map(|m| {
            this.over = !matches!(m, Ok(Some(_)));
            m.transpose()
        })
    }
}
