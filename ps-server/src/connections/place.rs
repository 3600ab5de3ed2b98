//! A connection's place in the table, which it keeps as a socket and as a lane.

use super::Visitor;
use std::{
    future::poll_fn,
    io::{self, ErrorKind},
    task::{Context, Poll},
};

/// A connection's place in the table.
pub(super) struct Place(pub Visitor);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.connections.closed(self.0.held.id);
    }
}

impl Place {
    /// An error if the connection must close. Wakes the polling task when that changes.
    pub fn stays(&self, cx: &Context<'_>) -> io::Result<()> {
        self.0.held.waker.register(cx.waker());
        match self.0.is_shed() {
            true => Err(io::Error::new(ErrorKind::ConnectionAborted, "closed from here")),
            false => Ok(()),
        }
    }

    /// Returns when the connection must close.
    pub async fn until_closing(&self) {
        poll_fn(|cx| if self.stays(cx).is_err() { Poll::Ready(()) } else { Poll::Pending }).await;
    }
}
