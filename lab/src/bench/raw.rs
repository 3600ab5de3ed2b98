//! What the wire is compared with: plain blocking sockets between two processes, without protocol or framing.
//!
//! A push is N bytes one way, in writes of 1 MiB, and one byte back; a pull is a request of nine bytes and N bytes back.
//! The far side is a process of its own, so that both cores work as they do for a server. It answers the same in the
//! records of [`tls`]: the reference for what our servers do under TLS.

mod tls;

use super::{
    far::{FarArgs, FarSide, broken},
    load::Via,
};
use paraft_fleet::failure::Failure;
use paraft_worker::exit;
use std::{
    io::{self, Read, Write},
    net::TcpStream,
    os::unix::net::UnixStream,
    thread,
};
use tls::Sealed;

/// The hidden command that is the far side.
pub const COMMAND: &str = "raw-peer";

const PUSH: u8 = b'u';
const PULL: u8 = b'p';
const WRITE_BYTES: usize = 1 << 20;
/// No payload of the benchmarks is longer; a peer that asks for more is not one of them.
const MAX_BYTES: u64 = 1 << 32;

/// The far side.
pub fn serve(args: &FarArgs) -> Result<i32, Failure> {
    let (tcp, unix) = args.listen()?;
    thread::scope(|s| {
        s.spawn(|| unix.incoming().flatten().for_each(|stream| drop(thread::spawn(|| answer(stream)))));
        for stream in tcp.incoming().flatten() {
            let _ = stream.set_nodelay(true);
            thread::spawn(|| answer_tcp(stream));
        }
    });
    Ok(exit::OK)
}

/// In records, if the first byte begins one: no operation does.
fn answer_tcp(stream: TcpStream) -> io::Result<()> {
    let mut first = [0];
    stream.peek(&mut first)?;
    if first == [tls::CONTENT] { answer(Sealed::far(stream)?) } else { answer(stream) }
}

/// Until the other side closes.
fn answer(mut stream: impl Read + Write) -> io::Result<()> {
    let mut buffer = Vec::new();
    loop {
        let mut head = [0; 9];
        stream.read_exact(&mut head)?;
        let [op, length @ ..] = head;
        let length = u64::from_le_bytes(length);
        if length > MAX_BYTES {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let length = length as usize;
        if buffer.len() < length {
            buffer.resize(length, 1);
        }
        match op {
            PUSH => {
                stream.read_exact(&mut buffer[..length])?;
                write(&mut stream, &[1])?;
            }
            PULL => write(&mut stream, &buffer[..length])?,
            _ => return Err(io::ErrorKind::InvalidData.into()),
        }
    }
}

fn write(stream: &mut impl Write, payload: &[u8]) -> io::Result<()> {
    payload.chunks(WRITE_BYTES).try_for_each(|part| stream.write_all(part))?;
    stream.flush()
}

trait Stream: Read + Write + Send {}
impl<T: Read + Write + Send> Stream for T {}

/// What Paraft is compared with: a connection to the far side of this kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reference {
    Plain(Via),
    /// Over TCP, in records.
    Tls,
}

impl Reference {
    /// The name in the benchmark's cases.
    pub fn name(self) -> &'static str {
        match self {
            Self::Plain(Via::Tcp) => "raw tcp",
            Self::Plain(Via::Unix) => "raw unix",
            Self::Tls => "raw tls",
        }
    }

    fn via(self) -> Via {
        match self {
            Self::Plain(via) => via,
            Self::Tls => Via::Tcp,
        }
    }
}

/// A connection to the far side.
pub struct Raw(Via, Box<dyn Stream>);

impl Raw {
    /// Connects.
    pub fn connect(to: &FarSide, reference: Reference) -> Result<Self, Failure> {
        let tcp = || -> io::Result<TcpStream> {
            let stream = TcpStream::connect(&to.address)?;
            stream.set_nodelay(true)?;
            Ok(stream)
        };
        let connect = || -> io::Result<Box<dyn Stream>> {
            let stream: Box<dyn Stream> = match reference {
                Reference::Plain(Via::Unix) => Box::new(UnixStream::connect(&to.socket)?),
                Reference::Plain(Via::Tcp) => Box::new(tcp()?),
                Reference::Tls => Box::new(Sealed::near(tcp()?)?),
            };
            Ok(stream)
        };
        Ok(Self(reference.via(), connect().map_err(|e| broken(reference.via(), e))?))
    }

    /// Sends the payload and waits for the answer.
    pub fn push(&mut self, payload: &[u8]) -> Result<(), Failure> {
        let mut push = || {
            self.ask(PUSH, payload.len())?;
            write(&mut self.1, payload)?;
            self.1.read_exact(&mut [0])
        };
        push().map_err(|e| broken(self.0, e))
    }

    /// Asks for as many bytes as fit.
    pub fn pull(&mut self, into: &mut [u8]) -> Result<(), Failure> {
        let mut pull = || {
            self.ask(PULL, into.len())?;
            self.1.flush()?;
            self.1.read_exact(into)
        };
        pull().map_err(|e| broken(self.0, e))
    }

    /// Sealed, it waits for a flush, so that it goes out with what follows.
    fn ask(&mut self, op: u8, length: usize) -> io::Result<()> {
        let mut head = [op; 9];
        head[1..].copy_from_slice(&(length as u64).to_le_bytes());
        self.1.write_all(&head)
    }
}
