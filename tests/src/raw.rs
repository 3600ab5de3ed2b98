//! Raw HTTP/2, for bytes that no gRPC library sends.

use anyhow::{Context, Result};
use std::{
    io::{Read, Write},
    net::TcpStream,
    time::Duration,
};

/// A connection with one open gRPC call.
pub struct Call {
    tcp: TcpStream,
    got: Vec<u8>,
}

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RESET: u8 = 3;
const SETTINGS: u8 = 4;
const GO_AWAY: u8 = 7;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;

impl Call {
    /// Opens a call of `path`, for example `/paraft.v1.Shards/Exchange`; sends no message.
    pub fn open(address: &str, path: &str) -> Result<Self> {
        let mut call = Self::connect(address)?;
        call.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")?;
        call.frame(SETTINGS, 0, 0, &[])?;
        call.frame(HEADERS, END_HEADERS, 1, &headers(address, path)?)?;
        Ok(call)
    }

    /// Opens this many calls on one connection, whatever the server answers, and sends no message on any.
    pub fn flood(address: &str, path: &str, calls: u32) -> Result<FloodResult> {
        let mut call = Self::connect(address)?;
        call.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")?;
        call.frame(SETTINGS, 0, 0, &[])?;
        let block = headers(address, path)?;
        let mut reading = call.tcp.try_clone()?;
        reading.set_read_timeout(Some(SILENCE_TIMEOUT))?;
        let reader = std::thread::spawn(move || FloodResult::read(&mut reading));
        for stream in 0..calls {
            // If the server has closed the connection, its answer is complete.
            if call.frame(HEADERS, END_HEADERS, 2 * stream + 1, &block).is_err() {
                break;
            }
        }
        reader.join().map_err(|_| anyhow::anyhow!("the reader panicked"))
    }

    /// Connects; sends nothing.
    pub fn connect(address: &str) -> Result<Self> {
        let tcp = TcpStream::connect(address)?;
        tcp.set_read_timeout(Some(Duration::from_secs(30)))?;
        Ok(Self { tcp, got: Vec::new() })
    }

    /// Any bytes.
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        Ok(self.tcp.write_all(bytes)?)
    }

    fn frame(&mut self, kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Result<()> {
        let mut frame = (payload.len() as u32).to_be_bytes()[1..].to_vec();
        frame.extend_from_slice(&[kind, flags]);
        frame.extend_from_slice(&stream.to_be_bytes());
        frame.extend_from_slice(payload);
        self.write(&frame)
    }

    /// Sends bytes of the call's body (at most 16 KiB at a time), and its end if `end`.
    pub fn body(&mut self, bytes: &[u8], end: bool) -> Result<()> {
        self.frame(DATA, if end { END_STREAM } else { 0 }, 1, bytes)
    }

    /// Reads until the server has sent `needle`; fails when it closes before, or is silent for too long.
    pub fn expect(&mut self, needle: &[u8]) -> Result<()> {
        while !self.got.windows(needle.len()).any(|w| w == needle) {
            let n = self.read().context("while waiting for an answer")?;
            let needle = String::from_utf8_lossy(needle);
            anyhow::ensure!(n > 0, "closed before `{needle}`; got {:?}", String::from_utf8_lossy(&self.got));
        }
        Ok(())
    }

    /// Reads until the server closes; fails when it is silent for too long.
    pub fn expect_close(&mut self) -> Result<()> {
        // A reset counts as an end.
        while self.read().is_ok_and(|n| n > 0) {}
        Ok(())
    }

    /// Waits for the response's first header frame: the server has answered.
    pub fn expect_response(&mut self) -> Result<()> {
        loop {
            let mut at = 0;
            while let Some(head) = self.got.get(at..at + 9) {
                if head[3] == HEADERS {
                    return Ok(());
                }
                at += 9 + u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize;
            }
            let n = self.read().context("while waiting for a response")?;
            anyhow::ensure!(n > 0, "closed without a response");
        }
    }

    fn read(&mut self) -> Result<usize> {
        let mut buffer = [0; 4096];
        let n = self.tcp.read(&mut buffer)?;
        self.got.extend_from_slice(&buffer[..n]);
        Ok(n)
    }
}

/// A server's answer to a flood of calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FloodResult {
    /// Calls that it accepted.
    pub taken: u32,
    /// Calls that it refused, each with a reset.
    pub refused: u32,
    /// It closed the connection.
    pub closed: bool,
}

/// After this long a silent server has no more to say.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(2);

impl FloodResult {
    fn read(tcp: &mut TcpStream) -> Self {
        let mut seen = Self::default();
        let mut head = [0; 9];
        loop {
            if let Err(e) = tcp.read_exact(&mut head) {
                let quiet = matches!(e.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut);
                return Self { closed: seen.closed || !quiet, ..seen };
            }
            let len = u32::from_be_bytes([0, head[0], head[1], head[2]]);
            if tcp.read_exact(&mut vec![0; len as usize]).is_err() {
                return Self { closed: true, ..seen };
            }
            match head[3] {
                HEADERS => seen.taken += 1,
                RESET => seen.refused += 1,
                GO_AWAY => seen.closed = true,
                _ => {}
            }
        }
    }
}

fn headers(address: &str, path: &str) -> Result<Vec<u8>> {
    let mut block = Vec::new();
    for (name, value) in [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", address),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    ] {
        block.push(0); // HPACK: a literal, not indexed, not compressed
        for text in [name, value] {
            block.push(u8::try_from(text.len()).context("a short header")?);
            block.extend_from_slice(text.as_bytes());
        }
    }
    Ok(block)
}

/// The five bytes before a gRPC message: uncompressed, of this length.
pub fn prefix(len: u32) -> Vec<u8> {
    [&[0], &len.to_be_bytes()[..]].concat()
}
