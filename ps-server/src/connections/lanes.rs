//! Connections that turn out to be lanes.

use super::{Visitor, place::Place};
use paraft_lanes::{
    Purpose,
    shared::{ReadHalf, Shared, Trust, WriteHalf, over_tcp, over_unix},
};
use paraft_tls::Wire;
use std::{io, sync::Arc};
use tokio::net::UnixStream;

/// The halves of a lane's socket, and what its ends share: a server copies what lies in a worker's memory.
pub type Halves = (ReadHalf, WriteHalf, Option<Arc<Shared>>);

/// A socket that can carry a lane.
pub trait LaneSocket {
    /// Splits it into both halves.
    ///
    /// # Errors
    /// The runtime cannot wait for it.
    fn halves(self) -> io::Result<Halves>;
}

impl LaneSocket for Wire {
    fn halves(self) -> io::Result<Halves> {
        let (read, write) = over_tcp(self);
        Ok((read, write, None))
    }
}

impl LaneSocket for UnixStream {
    fn halves(self) -> io::Result<Halves> {
        let shared = Shared::new(Trust::Copies);
        let (read, write) = over_unix(self, shared.clone())?;
        Ok((read, write, Some(shared)))
    }
}

/// A connection that asks for a lane, and has no answer yet. It counts as a connection until it is dropped.
pub struct Lane {
    /// What for.
    pub purpose: Purpose,
    pub(super) halves: Halves,
    pub(super) place: Place,
}

impl Lane {
    /// The connection, as its requests see it.
    pub fn visitor(&self) -> Visitor {
        self.place.0.clone()
    }

    /// Splits it; close it when the future ends. It leaves the table then.
    pub fn parts(self) -> (Halves, impl Future<Output = ()> + Send) {
        let place = self.place;
        (self.halves, async move { place.until_closing().await })
    }
}
