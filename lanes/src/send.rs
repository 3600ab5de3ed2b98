//! Frames into a socket.

use crate::{
    ALIVE_EVERY, LaneError,
    frame::{Outbox, memory_comes},
    shared::{Shared, WriteHalf},
};
use futures::{FutureExt, Stream, StreamExt};
use paraft_proto::{WithBulk, bulk::Bulk};
use std::{future::pending, io::IoSlice, sync::Arc};
use tokio::{
    io::AsyncWriteExt,
    time::{MissedTickBehavior, interval},
};

/// Messages that are there at the same time go out together, up to so many bytes.
const TOGETHER: usize = 1 << 20;
/// Pieces of one call of the kernel.
const SLICES: usize = 64;

/// What bulk may be left in: what the other side has been shown.
fn usable(shared: Option<&Shared>, shown: bool) -> Option<&Shared> {
    shared.filter(|_| shown)
}

/// Sends these messages until there are no more, and says that it lives where there are none. Dropping it may cut one off.
pub async fn send<M: Bulk>(
    mut socket: WriteHalf,
    shared: Option<Arc<Shared>>,
    mut messages: impl Stream<Item = WithBulk<M>> + Unpin,
) -> Result<(), LaneError> {
    let shared = shared.as_deref();
    let mut shown = false;
    let mut out = Outbox::default();
    let mut alive = interval(ALIVE_EVERY);
    alive.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut quiet = false;
    let mut over = false;
    while !over {
        tokio::select! {
            biased;
            next = messages.next() => match next {
                Some(message) => out.put(&message, usable(shared, shown)),
                None => over = true,
            },
            () = async { match shared { Some(s) => s.news.notified().await, None => pending().await } } => {}
            _ = alive.tick() => {
                if std::mem::replace(&mut quiet, true) {
                    out.put_alive();
                }
            }
        }
        while !over && out.bytes() < TOGETHER {
            match messages.next().now_or_never() {
                Some(Some(message)) => out.put(&message, usable(shared, shown)),
                Some(None) => over = true,
                None => break,
            }
        }
        if let Some(shared) = shared {
            out.put_returned(&shared.to_return());
        }
        while out.bytes() > 0 {
            quiet = false;
            let sent = {
                let mut slices = [IoSlice::new(&[]); SLICES];
                let pieces = out.pieces();
                slices.iter_mut().zip(pieces).for_each(|(slice, piece)| *slice = IoSlice::new(piece));
                let n = pieces.len().min(SLICES);
                socket.write_vectored(&slices[..n]).await?
            };
            if sent == 0 {
                return Err(std::io::Error::from(std::io::ErrorKind::WriteZero).into());
            }
            out.sent(sent);
        }
        // Between two frames; what comes from now on may lie there.
        if let Some(ours) = shared.and_then(Shared::ours).filter(|_| !shown) {
            shown = true;
            let frame = memory_comes();
            let mut sent = socket.send_with(&frame, ours.fd()).await?;
            while sent < frame.len() {
                sent += socket.write(&frame[sent..]).await?;
            }
        }
    }
    Ok(socket.shutdown().await?)
}
