//! Connections that turn out to be lanes.

use super::{Visitor, guarded::Place};
use paraft_lanes::Purpose;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpStream, UnixStream},
};

/// The half of a socket that is read.
pub type ReadHalf = Box<dyn AsyncRead + Send + Unpin>;
/// The half that is written.
pub type WriteHalf = Box<dyn AsyncWrite + Send + Unpin>;

/// A socket that can be read and written at the same time.
pub trait Halves {
    /// Both.
    fn halves(self) -> (ReadHalf, WriteHalf);
}

impl Halves for TcpStream {
    fn halves(self) -> (ReadHalf, WriteHalf) {
        let (read, write) = self.into_split();
        (Box::new(read), Box::new(write))
    }
}

impl Halves for UnixStream {
    fn halves(self) -> (ReadHalf, WriteHalf) {
        let (read, write) = self.into_split();
        (Box::new(read), Box::new(write))
    }
}

/// A connection that asks for a lane, and has no answer yet. It is counted among the others until it is dropped.
pub struct Lane {
    /// What for.
    pub purpose: Purpose,
    /// Its frames are read here.
    pub read: ReadHalf,
    /// And written here.
    pub write: WriteHalf,
    pub(super) place: Place,
}

impl Lane {
    /// The connection, as its requests see it.
    pub fn visitor(&self) -> Visitor {
        self.place.0.clone()
    }

    /// Takes it apart; it must be closed when the future is over, and leaves the table then.
    pub fn parts(self) -> (ReadHalf, WriteHalf, impl Future<Output = ()> + Send) {
        let place = self.place;
        (self.read, self.write, async move { place.must_go().await })
    }
}
