//! The write end of a lane, with what has not gone out yet.

use crate::{
    LaneError,
    frame::{Outbox, memory_announcement},
    shared::{Shared, WriteHalf},
};
use paraft_proto::{WithBulk, bulk::Bulk};
use std::{
    io::{self, ErrorKind, IoSlice},
    sync::Arc,
    task::{Context, Poll, ready},
};

/// Messages that wait at the same time go out together, up to this many bytes.
const MAX_BATCH_BYTES: usize = 1 << 20;
/// Maximum number of pieces for one system call.
const MAX_SLICES: usize = 64;

/// A lane's socket, and the bytes that wait for room in it.
pub(crate) struct Writer {
    socket: WriteHalf,
    shared: Option<Arc<Shared>>,
    out: Outbox,
    /// Our memory was offered to the peer.
    shown: bool,
    /// Sent bytes of the frame that offers it.
    showing: usize,
    /// Nothing was sent since this was last set.
    quiet: bool,
}

impl Writer {
    pub fn new(socket: WriteHalf, shared: Option<Arc<Shared>>) -> Self {
        Self { socket, shared, out: Outbox::default(), shown: false, showing: 0, quiet: false }
    }

    /// Number of bytes that wait.
    pub fn waiting(&self) -> usize {
        self.out.bytes()
    }

    /// Whether one more message may go out with the waiting ones.
    pub fn has_room(&self) -> bool {
        self.out.bytes() < MAX_BATCH_BYTES
    }

    /// Appends a message, after what is to be given back: the peer need not copy what this message changes.
    pub fn put<M: Bulk>(&mut self, message: &WithBulk<M>) {
        self.give_back();
        self.out.put(message, self.shared.as_deref().filter(|shared| shared.may_stay_in_memory()));
    }

    /// Appends what is to be given back.
    pub fn give_back(&mut self) {
        let Some(shared) = &self.shared else { return };
        if shared.take_mapped() {
            self.out.put_mapped();
        }
        self.out.put_returned(&shared.places_to_return());
    }

    /// Call this periodically: appends a keepalive if nothing was sent since the last call.
    pub fn tick(&mut self) {
        self.give_back();
        if std::mem::replace(&mut self.quiet, true) && self.out.bytes() == 0 {
            self.out.put_alive();
        }
    }

    /// Writes everything.
    pub fn poll_flush(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), LaneError>> {
        while self.out.bytes() > 0 {
            let out = &mut self.out;
            let sent = ready!(self.socket.poll_io(cx, |socket| write(socket, out)))?;
            self.sent(sent)?;
        }
        ready!(self.socket.poll_io(cx, WriteHalf::try_send))?;
        // Between two frames.
        while let Some(ours) = self.shared.as_deref().and_then(Shared::ours).filter(|_| !self.shown) {
            let frame = memory_announcement();
            let rest = &frame[self.showing..];
            let sent = ready!(self.socket.poll_io(cx, |socket| match rest.len() == frame.len() {
                true => socket.try_write_with(rest, ours.fd()),
                false => socket.try_write(&[IoSlice::new(rest)]),
            }))?;
            self.showing += sent;
            self.shown = self.showing == frame.len();
        }
        Poll::Ready(Ok(()))
    }

    /// Writes as much as there is room for, from any thread. `false`: something is left, for
    /// [`Self::poll_flush`].
    pub fn try_flush(&mut self) -> Result<bool, LaneError> {
        while self.out.bytes() > 0 {
            match write(&self.socket, &mut self.out) {
                Ok(sent) => self.sent(sent)?,
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(e) => return Err(e.into()),
            }
        }
        match self.socket.try_send() {
            Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(false),
            sent => sent?,
        }
        Ok(self.shown || self.shared.as_deref().and_then(Shared::ours).is_none())
    }

    fn sent(&mut self, bytes: usize) -> Result<(), LaneError> {
        if bytes == 0 {
            return Err(io::Error::from(ErrorKind::WriteZero).into());
        }
        self.quiet = false;
        self.out.sent(bytes);
        Ok(())
    }

    pub fn into_socket(self) -> WriteHalf {
        self.socket
    }
}

fn write(socket: &WriteHalf, out: &mut Outbox) -> io::Result<usize> {
    let mut slices = [IoSlice::new(&[]); MAX_SLICES];
    let pieces = out.pieces();
    slices.iter_mut().zip(pieces).for_each(|(slice, piece)| *slice = IoSlice::new(piece));
    let n = pieces.len().min(MAX_SLICES);
    socket.try_write(&slices[..n])
}
