//! A connection for threads: under TLS or in plain text, over a socket that blocks or that does not; as a whole or in two halves.

use crate::{
    Access,
    handshake::{Handshake, TlsError},
    record::{Opener, Outbox, Sealer},
    verify::Expected,
};
use parking_lot::Mutex;
use std::{
    io::{self, ErrorKind, IoSlice, Read, Write},
    net::TcpStream,
    sync::Arc,
};

/// Made into records at a time.
const SEAL: usize = 256 << 10;
/// Read at a time.
const READ: usize = 64 << 10;

/// See the module.
#[derive(Debug)]
pub struct Wire {
    reads: ReadHalf,
    writes: WriteHalf,
}

/// The half that is read.
#[derive(Debug)]
pub struct ReadHalf {
    socket: Arc<TcpStream>,
    tls: Option<Box<Reads>>,
}

/// The half that is written, by any thread.
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

struct Incoming {
    raw: Vec<u8>,
    start: usize,
    end: usize,
    plain: Vec<u8>,
    at: usize,
    over: bool,
}

fn send(mut socket: &TcpStream, out: &mut Outbox) -> io::Result<()> {
    while !out.waiting().is_empty() {
        match socket.write(out.waiting()) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(n) => out.sent(n),
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

impl Incoming {
    fn fill(&mut self, mut socket: &TcpStream) -> io::Result<()> {
        self.raw.copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, self.end - self.start);
        match socket.read(&mut self.raw[self.end..])? {
            0 => Err(ErrorKind::UnexpectedEof.into()),
            n => {
                self.end += n;
                Ok(())
            }
        }
    }

    fn meet(&mut self, socket: &TcpStream, handshake: &mut Handshake) -> Result<(), TlsError> {
        loop {
            let came = &self.raw[self.start..self.end];
            if handshake.begins_plain(came) {
                return Err(TlsError::Plain);
            }
            let plain = &mut self.plain;
            let mut hear = |said: &[u8]| plain.extend_from_slice(said);
            let read = handshake.read(&mut self.raw[self.start..self.end], &mut hear);
            // Also where it has failed: the other side is told why.
            let sent = send(socket, &mut handshake.out);
            let (used, over) = read?;
            sent?;
            self.start += used;
            if over {
                // What the other side may do was looked at when it showed its certificate.
                return Ok(());
            }
            self.fill(socket)?;
        }
    }
}

impl Wire {
    /// Of a connection that was just made, whose socket blocks; its timeouts hold for the handshake.
    ///
    /// # Errors
    /// One does not take the other, or the socket's.
    pub fn dial(socket: TcpStream, access: &Access, to: &Expected) -> Result<Self, TlsError> {
        Self::of(socket, access, |credentials| Handshake::dials(credentials, to))
    }

    /// Of one that came; the other side may be `from`.
    ///
    /// # Errors
    /// As there.
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
        let raw = vec![0; READ];
        let mut incoming = Incoming { raw, start: 0, end: 0, plain: Vec::new(), at: 0, over: false };
        incoming.meet(&socket, &mut handshake)?;
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

    /// Whether something that was written has not gone out: the socket does not block, and had no room.
    pub fn has_to_send(&self) -> bool {
        self.writes.tls.as_ref().is_some_and(|tls| tls.0.lock().has_to_send())
    }

    /// In halves.
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
        let i = &mut self.incoming;
        loop {
            let rest = &i.plain[i.at..];
            if !rest.is_empty() {
                let n = rest.len().min(to.len());
                to[..n].copy_from_slice(&rest[..n]);
                i.at += n;
                return Ok(n);
            }
            i.plain.clear();
            i.at = 0;
            if i.over {
                return Ok(0);
            }
            let plain = &mut i.plain;
            let mut hear = |said: &[u8]| plain.extend_from_slice(said);
            let came = self.opener.open(&mut i.raw[i.start..i.end], &mut hear)?;
            i.start += came.used;
            i.over = came.end;
            if came.asks {
                self.seals.0.lock().update(false)?; // goes with what is said next
            }
            if i.plain.is_empty() && !i.over {
                i.fill(socket)?;
            }
        }
    }
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
        let Some(tls) = &self.tls else { return (&*self.socket).write(from) };
        let mut sealer = tls.0.lock();
        send(&self.socket, sealer.out())?;
        let taken = sealer.seal(&[IoSlice::new(from)], SEAL)?;
        match send(&self.socket, sealer.out()) {
            Err(e) if e.kind() != ErrorKind::WouldBlock => Err(e),
            _ => Ok(taken),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match &self.tls {
            Some(tls) => send(&self.socket, tls.0.lock().out()),
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
