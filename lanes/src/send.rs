//! Frames into a socket.

use crate::{ALIVE_EVERY, LaneError, frame::Outbox};
use futures::{FutureExt, Stream, StreamExt};
use paraft_proto::{WithBulk, bulk::Bulk};
use std::io::IoSlice;
use tokio::{
    io::{AsyncWrite, AsyncWriteExt},
    time::{MissedTickBehavior, interval},
};

/// Messages that are there at the same time go out together, up to so many bytes.
const TOGETHER: usize = 1 << 20;
/// Pieces of one call of the kernel.
const SLICES: usize = 64;

/// Sends these messages until there are no more, and says that it lives where there are none. Dropping it may cut one off.
pub async fn send<M: Bulk>(
    mut socket: impl AsyncWrite + Unpin,
    mut messages: impl Stream<Item = WithBulk<M>> + Unpin,
) -> Result<(), LaneError> {
    let mut out = Outbox::default();
    let mut alive = interval(ALIVE_EVERY);
    alive.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut quiet = false;
    let mut over = false;
    while !over {
        tokio::select! {
            biased;
            next = messages.next() => match next {
                Some(message) => out.put(&message),
                None => over = true,
            },
            _ = alive.tick() => {
                if std::mem::replace(&mut quiet, true) {
                    out.put_alive();
                }
            }
        }
        while !over && out.bytes() < TOGETHER {
            match messages.next().now_or_never() {
                Some(Some(message)) => out.put(&message),
                Some(None) => over = true,
                None => break,
            }
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
    }
    Ok(socket.shutdown().await?)
}
