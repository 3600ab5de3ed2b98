//! Messages between ranks of a group: the data that stages of a model exchange.
//!
//! Each pair of ranks has a connection with a writer and a reader thread, so a rank computes while its messages are
//! in flight. Each message has a tag, and a rank waits for a tag; messages may arrive in any order. The ranks
//! themselves limit the messages in flight: a line refuses only a message longer than the longest allowed.

use super::{GroupError, Watch};
use paraft_tls::blocking::{ReadHalf, Wire, WriteHalf};
use std::{
    collections::{BTreeMap, HashMap},
    io::{self, Read, Write},
    net::Shutdown,
    sync::{Arc, Mutex, PoisonError, mpsc},
    thread,
};

/// Identifies a message among those of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tag {
    /// Chosen by the ranks.
    pub kind: u32,
    /// Chosen by the ranks.
    pub number: u64,
}

/// Bytes of a message before its values.
const HEAD: usize = 24;

/// This rank's connections to the others. Cheap to clone; they close with the last clone.
#[derive(Clone, Debug)]
pub struct Lines {
    lines: Arc<BTreeMap<usize, Line>>,
    watch: Arc<Watch>,
}

#[derive(Debug)]
struct Line {
    /// Dropped first: ends the writer thread after its last message.
    out: Option<mpsc::Sender<(Tag, Vec<f32>)>>,
    received: Mutex<Received>,
    writer: Option<thread::JoinHandle<()>>,
    reader: Option<thread::JoinHandle<()>>,
    socket: std::net::TcpStream,
}

#[derive(Debug)]
struct Received {
    next: mpsc::Receiver<io::Result<(Tag, Vec<f32>)>>,
    /// Messages that arrived before a rank waited for them.
    early: HashMap<Tag, Vec<f32>>,
}

impl Lines {
    /// Over these connections, by place. No message has more than `longest` values.
    pub(super) fn new(
        wires: BTreeMap<usize, Wire>,
        longest: usize,
        watch: Arc<Watch>,
    ) -> Result<Self, GroupError> {
        let cannot = |e: io::Error| GroupError::Broken(format!("its ranks have no lines between them: {e}"));
        let line = |(place, wire): (usize, Wire)| -> io::Result<(usize, Line)> {
            let socket = wire.socket().try_clone()?;
            let ends = socket.try_clone()?;
            // Wakes every waiting thread.
            watch.when_broken(move || drop(ends.shutdown(Shutdown::Both)));
            let (read, write) = wire.into_split();
            let (out, orders) = mpsc::channel();
            let (say, next) = mpsc::channel();
            let named = |what: &str| thread::Builder::new().name(format!("paraft-line-{what}"));
            let writer = named("out").spawn(move || write_all(&write, &orders))?;
            let reader = named("in").spawn(move || read_all(read, longest, &say))?;
            let (writer, reader) = (Some(writer), Some(reader));
            let received = Mutex::new(Received { next, early: HashMap::new() });
            Ok((place, Line { out: Some(out), received, writer, reader, socket }))
        };
        let lines = wires.into_iter().map(line).collect::<io::Result<_>>().map_err(cannot)?;
        Ok(Self { lines: Arc::new(lines), watch })
    }

    /// Sends values to the rank at a place, in the background.
    ///
    /// # Errors
    /// The group is broken.
    pub fn send(&self, place: usize, tag: Tag, values: Vec<f32>) -> Result<(), GroupError> {
        let line = self.lines.get(&place).ok_or_else(|| none(place))?;
        let sent = line.out.as_ref().map(|out| out.send((tag, values)));
        // If the thread has ended, so has the connection.
        if matches!(sent, Some(Ok(()))) { Ok(()) } else { Err(self.watch.reason(over())) }
    }

    /// Breaks the group, for all ranks.
    pub fn break_up(&self, why: &str) -> GroupError {
        self.watch.break_up(why);
        GroupError::Broken(why.into())
    }

    /// Waits for the message of the rank at a place with a tag.
    ///
    /// # Errors
    /// The group is broken.
    pub fn receive(&self, place: usize, tag: Tag) -> Result<Vec<f32>, GroupError> {
        let line = self.lines.get(&place).ok_or_else(|| none(place))?;
        let mut received = line.received.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(values) = received.early.remove(&tag) {
            return Ok(values);
        }
        loop {
            match received.next.recv() {
                Ok(Ok((of, values))) if of == tag => return Ok(values),
                Ok(Ok((of, values))) => drop(received.early.insert(of, values)),
                Ok(Err(e)) => {
                    let seen =
                        GroupError::Broken(format!("the line to its rank at place {place} has ended: {e}"));
                    return Err(self.watch.reason(seen));
                }
                Err(_) => return Err(self.watch.reason(over())),
            }
        }
    }
}

fn none(place: usize) -> GroupError {
    GroupError::Broken(format!("it has no rank at place {place}"))
}

fn over() -> GroupError {
    GroupError::Broken("a line between its ranks has ended".into())
}

impl Drop for Line {
    fn drop(&mut self) {
        self.out = None;
        // The peer reads in any state; if it is gone, the watch has closed the connection.
        if let Some(writer) = self.writer.take() {
            let _ = writer.join();
        }
        let _ = self.socket.shutdown(Shutdown::Both);
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
    }
}

fn write_all(to: &WriteHalf, orders: &mpsc::Receiver<(Tag, Vec<f32>)>) {
    let mut to = to;
    while let Ok((tag, values)) = orders.recv() {
        let mut head = [0; HEAD];
        head[..8].copy_from_slice(&u64::from(tag.kind).to_le_bytes());
        head[8..16].copy_from_slice(&tag.number.to_le_bytes());
        head[16..].copy_from_slice(&(values.len() as u64).to_le_bytes());
        let written = to.write_all(&head).and_then(|()| to.write_all(super::ring::bytes(&values)));
        if written.and_then(|()| to.flush()).is_err() {
            // The reader reports the cause.
            let _ = to.socket().shutdown(Shutdown::Both);
            return;
        }
    }
}

fn read_all(mut from: ReadHalf, longest: usize, say: &mpsc::Sender<io::Result<(Tag, Vec<f32>)>>) {
    loop {
        let received = read(&mut from, longest);
        let ended = received.is_err();
        if say.send(received).is_err() || ended {
            return;
        }
    }
}

fn read(from: &mut ReadHalf, longest: usize) -> io::Result<(Tag, Vec<f32>)> {
    let mut head = [0; HEAD];
    from.read_exact(&mut head)?;
    let word = |i: usize| u64::from_le_bytes(std::array::from_fn(|b| head[8 * i + b]));
    let nonsense = || io::Error::new(io::ErrorKind::InvalidData, format!("a message of {} values", word(2)));
    let kind = u32::try_from(word(0)).map_err(|_| nonsense())?;
    let len = usize::try_from(word(2)).ok().filter(|len| *len <= longest).ok_or_else(nonsense)?;
    let mut values = vec![0.0f32; len];
    from.read_exact(super::ring::bytes_mut(&mut values))?;
    Ok((Tag { kind, number: word(1) }, values))
}
