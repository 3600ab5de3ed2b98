//! A connection for threads: TLS or plain text, over a blocking or a nonblocking socket; whole or in two
//! halves.

use crate::{
    Access,
    error::TlsError,
    handshake::Handshake,
    incoming::Incoming,
    record::{Opener, Sealer},
    verify::Expected,
};
use parking_lot::Mutex;
use std::{
    io::{self, IoSlice, Read, Write},
    net::TcpStream,
    sync::Arc,
};

/// A connection for threads. See the module.
#[derive(Debug)]
pub struct Wire {
    reads: ReadHalf,
    writes: WriteHalf,
}

/// The read half.
#[derive(Debug)]
pub struct ReadHalf {
    socket: Arc<TcpStream>,
    tls: Option<Box<Reads>>,
}

/// The write half, for any thread.
#[derive(Clone, Debug)]
pub struct WriteHalf {
    socket: Arc<TcpStream>,
    tls: Option<Seals>,
}

#[derive(Clone)]
struct Seals(Arc<Mutex<Sealer>>);

impl std::fmt::Debug for Seals {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("TLS")
    }
}

struct Reads {
    opener: Opener,
    seals: Seals,
    incoming: Incoming,
}

impl std::fmt::Debug for Reads {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("TLS")
    }
}

fn meet(socket: &TcpStream, handshake: &mut Handshake) -> Result<Incoming, TlsError> {
    let mut incoming = Incoming::default();
    loop {
        let greeted = incoming.handshake_step(handshake);
        let sent = handshake.out.send(|bytes| (&*socket).write(bytes));
        // The peer's rights were checked when it showed its certificate.
        let over = greeted?;
        sent?;
        if over {
            return Ok(incoming);
        }
        incoming.fill(|room| (&*socket).read(room))?;
    }
}

impl Wire {
    /// Makes a connection of a new, blocking socket; its timeouts apply to the handshake.
    ///
    /// # Errors
    /// One side refuses the other, or the socket fails.
    pub fn dial(socket: TcpStream, access: &Access, to: &Expected) -> Result<Self, TlsError> {
        Self::of(socket, access, |credentials| Handshake::dials(credentials, to))
    }

    /// Makes a connection of an accepted socket; `from`: the expected peer.
    ///
    /// # Errors
    /// As [`Self::dial`].
    pub fn accept(socket: TcpStream, access: &Access, from: &Expected) -> Result<Self, TlsError> {
        Self::of(socket, access, |credentials| Handshake::accepts(credentials, from, false))
    }

    fn of(
        socket: TcpStream,
        access: &Access,
        begin: impl FnOnce(&crate::Credentials) -> Result<Handshake, TlsError>,
    ) -> Result<Self, TlsError> {
        let credentials = match access {
            Access::Insecure => return Ok(Self::plain(socket)),
            Access::Closed => return Err(TlsError::Io(Access::no_certificate())),
            Access::Certificates(credentials) => credentials,
        };
        let mut handshake = begin(credentials)?;
        let incoming = meet(&socket, &mut handshake)?;
        let (sealer, opener) = handshake.over()?;
        let (socket, seals) = (Arc::new(socket), Seals(Arc::new(Mutex::new(sealer))));
        let reads = Reads { opener, seals: seals.clone(), incoming };
        Ok(Self {
            reads: ReadHalf { socket: socket.clone(), tls: Some(Box::new(reads)) },
            writes: WriteHalf { socket, tls: Some(seals) },
        })
    }

    fn plain(socket: TcpStream) -> Self {
        let socket = Arc::new(socket);
        Self {
            reads: ReadHalf { socket: socket.clone(), tls: None },
            writes: WriteHalf { socket, tls: None },
        }
    }

    /// The socket, to wait for it, or to end it.
    pub fn socket(&self) -> &TcpStream {
        &self.writes.socket
    }

    /// Whether written bytes have not gone out: the socket is nonblocking, and had no room.
    pub fn has_to_send(&self) -> bool {
        self.writes.tls.as_ref().is_some_and(|tls| tls.0.lock().has_to_send())
    }

    /// Splits it into halves.
    pub fn into_split(self) -> (ReadHalf, WriteHalf) {
        (self.reads, self.writes)
    }
}

impl ReadHalf {
    /// The socket.
    pub fn socket(&self) -> &TcpStream {
        &self.socket
    }
}

impl WriteHalf {
    /// The socket.
    pub fn socket(&self) -> &TcpStream {
        &self.socket
    }
}

impl Reads {
    fn read(&mut self, socket: &TcpStream, to: &mut [u8]) -> io::Result<usize> {
        let given = self.incoming.give(&mut |said| put(to, 0, said));
        if given > 0 || to.is_empty() {
            return Ok(given);
        }
        while !self.incoming.is_over() {
            if self.incoming.has_raw() {
                let mut taken = 0;
                let mut take = |said: &[u8]| {
                    let n = put(to, taken, said);
                    taken += n;
                    n
                };
                let (taken, asks) = self.incoming.open(&mut self.opener, &mut take)?;
                self.renew(asks)?;
                if taken > 0 || self.incoming.is_over() {
                    return Ok(taken);
                }
            }
            let read = |room: &mut [u8]| (&*socket).read(room);
            if self.incoming.reads_directly(to.len()) {
                let (contents, asks) = self.incoming.read_to(&mut self.opener, to, read)?;
                self.renew(asks)?;
                if contents > 0 {
                    return Ok(contents);
                }
            } else {
                self.incoming.fill(read)?;
            }
        }
        Ok(0)
    }

    /// Changes to the next key, if the peer asks for it; that goes out with the next bytes.
    fn renew(&self, asks: bool) -> io::Result<()> {
        if asks {
            self.seals.0.lock().update(false)?;
        }
        Ok(())
    }
}

/// Writes as much as there is room for behind the first `at` bytes; returns how much.
fn put(to: &mut [u8], at: usize, said: &[u8]) -> usize {
    let n = said.len().min(to.len() - at);
    to[at..][..n].copy_from_slice(&said[..n]);
    n
}

impl Read for ReadHalf {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        match &mut self.tls {
            Some(tls) => tls.read(&self.socket, to),
            None => (&*self.socket).read(to),
        }
    }
}

impl Write for &WriteHalf {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        let mut socket = &*self.socket;
        match &self.tls {
            Some(tls) => tls.0.lock().write(&[IoSlice::new(from)], |bytes| socket.write(bytes)),
            None => socket.write(from),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        let mut socket = &*self.socket;
        match &self.tls {
            Some(tls) => tls.0.lock().out().send(|bytes| socket.write(bytes)),
            None => Ok(()),
        }
    }
}

impl Read for Wire {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        self.reads.read(to)
    }
}

impl Write for Wire {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        (&self.writes).write(from)
    }

    fn flush(&mut self) -> io::Result<()> {
        (&self.writes).flush()
    }
}
