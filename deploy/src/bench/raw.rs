//! What the wire is compared with: plain blocking sockets between two processes, without protocol or framing.
//!
//! A push is N bytes one way, in writes of 1 MiB, and one byte back; a pull is a request of nine bytes and N bytes back.
//! The far side is this program again, as a process of its own, so that both cores work as they do for a server.

use super::load::Via;
use crate::{failure::Failure, fleet::Process};
use clap::Args;
use paraft_host::lifeline;
use paraft_worker::exit;
use std::{
    io::{self, Read, Write},
    net::{TcpListener, TcpStream},
    os::unix::net::{UnixListener, UnixStream},
    path::{Path, PathBuf},
    process::Command,
    thread,
};

#[derive(Args)]
pub struct RawPeerArgs {
    /// The Unix socket to listen at, beside a TCP port of its own choice.
    socket: PathBuf,
}

const PUSH: u8 = b'u';
const PULL: u8 = b'p';
const WRITE_BYTES: usize = 1 << 20;
/// No payload of the benchmarks is longer; who asks for more is not one of them.
const MAX_BYTES: u64 = 1 << 32;

/// The far side: says its TCP address on standard output, and ends with its launcher.
pub fn serve(args: &RawPeerArgs) -> Result<i32, Failure> {
    let listen = |e: io::Error| Failure::new(exit::IO, format!("the raw peer cannot listen: {e}"));
    let unix = UnixListener::bind(&args.socket).map_err(listen)?;
    let tcp = TcpListener::bind("127.0.0.1:0").map_err(listen)?;
    out!("{}", tcp.local_addr().map_err(listen)?);
    lifeline::end_with_launcher();
    thread::scope(|s| {
        s.spawn(|| unix.incoming().flatten().for_each(|stream| drop(thread::spawn(|| answer(stream)))));
        for stream in tcp.incoming().flatten() {
            let _ = stream.set_nodelay(true);
            thread::spawn(|| answer(stream));
        }
    });
    Ok(exit::OK)
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
                stream.write_all(&[1])?;
            }
            PULL => write(&mut stream, &buffer[..length])?,
            _ => return Err(io::ErrorKind::InvalidData.into()),
        }
    }
}

fn write(stream: &mut impl Write, payload: &[u8]) -> io::Result<()> {
    payload.chunks(WRITE_BYTES).try_for_each(|part| stream.write_all(part))
}

/// The far side, as its launcher has it.
pub struct RawPeer {
    process: Process,
    address: String,
    socket: PathBuf,
}

impl RawPeer {
    /// Starts it; its socket and its words are in `dir`.
    pub fn start(name: &str, dir: &Path) -> Result<Self, Failure> {
        let program =
            std::env::current_exe().map_err(|e| Failure::new(exit::IO, format!("own program: {e}")))?;
        let socket = dir.join(format!("{name}.sock"));
        let mut command = Command::new(program);
        command.args(["bench", "raw-peer"]).arg(&socket);
        let mut process = Process::start(name.into(), command, dir)?;
        let address = process.first_line()?;
        Ok(Self { process, address, socket })
    }

    /// Its process id.
    pub fn id(&self) -> u32 {
        self.process.id()
    }

    /// A connection of its own.
    pub fn connect(&self, via: Via) -> Result<Raw, Failure> {
        let stream: io::Result<Box<dyn Stream>> = match via {
            Via::Tcp => TcpStream::connect(&self.address).and_then(|s| {
                s.set_nodelay(true)?;
                Ok(Box::new(s) as Box<dyn Stream>)
            }),
            Via::Unix => UnixStream::connect(&self.socket).map(|s| Box::new(s) as Box<dyn Stream>),
        };
        Ok(Raw(stream.map_err(broken)?))
    }
}

trait Stream: Read + Write + Send {}
impl<T: Read + Write + Send> Stream for T {}

/// A connection to the far side.
pub struct Raw(Box<dyn Stream>);

impl Raw {
    /// Sends the payload and waits for the answer.
    pub fn push(&mut self, payload: &[u8]) -> Result<(), Failure> {
        let mut push = || {
            self.ask(PUSH, payload.len())?;
            write(&mut self.0, payload)?;
            self.0.read_exact(&mut [0])
        };
        push().map_err(broken)
    }

    /// Asks for as many bytes as fit.
    pub fn pull(&mut self, into: &mut [u8]) -> Result<(), Failure> {
        self.ask(PULL, into.len()).and_then(|()| self.0.read_exact(into)).map_err(broken)
    }

    fn ask(&mut self, op: u8, length: usize) -> io::Result<()> {
        let mut head = [op; 9];
        head[1..].copy_from_slice(&(length as u64).to_le_bytes());
        self.0.write_all(&head)
    }
}

fn broken(e: io::Error) -> Failure {
    Failure::new(exit::FAILED, format!("the raw peer, a process of this benchmark: {e}"))
}
