//! Sums over the ranks of a group, on a ring: each rank sends to the next and receives from the previous one.
//!
//! A reduction is a reduce-scatter and an all-gather (Patarasuk and Yuan, 2009): for n values and p ranks each rank
//! sends and receives 2n(p-1)/p. One rank sums each part in ring order, and then passes it on: the same bits on all
//! ranks, every time.

use super::{GroupError, Watch, rendezvous::Neighbours};
use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
};
use paraft_tls::blocking::Wire;
use std::{
    io::{self, ErrorKind, Read, Write},
    ops::Range,
    os::fd::AsFd,
    sync::Arc,
};

/// Values that a ring can sum.
pub trait Number: Copy + Default + Send + 'static {
    /// Its sum with another.
    fn plus(self, other: Self) -> Self;
}

impl Number for f32 {
    fn plus(self, other: Self) -> Self {
        self + other
    }
}

impl Number for f64 {
    fn plus(self, other: Self) -> Self {
        self + other
    }
}

impl Number for u64 {
    fn plus(self, other: Self) -> Self {
        self.wrapping_add(other)
    }
}

pub(super) fn bytes<T: Number>(values: &[T]) -> &[u8] {
    // SAFETY: numbers without padding, so every byte is initialised; a byte needs no alignment.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

pub(super) fn bytes_mut<T: Number>(values: &mut [T]) -> &mut [u8] {
    let len = size_of_val(values);
    // SAFETY: as above; and every pattern of bits is a number.
    unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), len) }
}

/// Bytes per transfer.
const PIECE: usize = 1 << 18;

/// See the module. All ranks call the same methods in the same order, with equally many values. After a failed call
/// the values are undefined.
#[derive(Debug)]
pub struct Ring {
    place: usize,
    size: usize,
    neighbours: Option<Neighbours>,
    watch: Arc<Watch>,
}

impl Ring {
    pub(super) fn new(
        place: usize,
        size: usize,
        neighbours: Option<Neighbours>,
        watch: Arc<Watch>,
    ) -> Result<Self, GroupError> {
        for stream in neighbours.iter().flat_map(|n| [&n.next, &n.previous]) {
            let cannot = |e: io::Error| GroupError::Broken(format!("its ring cannot be closed: {e}"));
            stream.socket().set_nonblocking(true).map_err(cannot)?;
        }
        Ok(Self { place, size, neighbours, watch })
    }

    /// The number of ranks.
    pub fn size(&self) -> usize {
        self.size
    }

    /// The observer of the other ranks.
    pub fn watch(&self) -> &Arc<Watch> {
        &self.watch
    }

    /// Replaces each value by its sum over the ranks.
    pub fn all_reduce<T: Number>(&mut self, values: &mut [T]) -> Result<(), GroupError> {
        let Some(n) = &mut self.neighbours else { return Ok(()) };
        let (place, size, len) = (self.place, self.size, values.len());
        let part = |i: usize| -> Range<usize> {
            let i = i % size;
            len * i / size..len * (i + 1) / size
        };
        // In pieces: a received piece is added while it is in the cache, and the next one is in flight.
        let piece = PIECE / size_of::<T>();
        let mut received = vec![T::default(); len.div_ceil(size).min(piece)];
        for turn in 0..size - 1 {
            let (out, to) = (part(place + size - turn), part(place + 2 * size - turn - 1));
            for (out, to) in pieces(out, to, piece) {
                let into = &mut received[..to.len()];
                exchange(n, bytes(&values[out]), bytes_mut(into)).map_err(|e| self.watch.reason(e))?;
                for (v, r) in values[to].iter_mut().zip(into) {
                    // In ring order: the received value is the sum over the ranks before.
                    *v = r.plus(*v);
                }
            }
        }
        for turn in 0..size - 1 {
            let (out, to) = (part(place + 1 + size - turn), part(place + size - turn));
            for (out, to) in pieces(out, to, piece) {
                let (out, to) = both(values, out, to);
                exchange(n, bytes(out), bytes_mut(to)).map_err(|e| self.watch.reason(e))?;
            }
        }
        Ok(())
    }

    /// Replaces each value by the first rank's.
    pub fn broadcast<T: Number>(&mut self, values: &mut [T]) -> Result<(), GroupError> {
        let Some(n) = &mut self.neighbours else { return Ok(()) };
        let (first, last) = (self.place == 0, self.place == self.size - 1);
        let all = bytes_mut(values);
        // Passes on all received pieces except the current one.
        let (mut sent, mut come) = (0, if first { all.len() } else { 0 });
        while come < all.len() || (!last && sent < all.len()) {
            let (have, to_come) = all.split_at_mut(come);
            let out = if last { &[][..] } else { &have[sent..have.len().min(sent + PIECE)] };
            let want = to_come.len().min(PIECE);
            exchange(n, out, &mut to_come[..want]).map_err(|e| self.watch.reason(e))?;
            sent += out.len();
            come += want;
        }
        Ok(())
    }
}

/// Pairs the pieces of two parts that are transferred at the same time. The longer part's last piece goes alone.
fn pieces(
    out: Range<usize>,
    to: Range<usize>,
    piece: usize,
) -> impl Iterator<Item = (Range<usize>, Range<usize>)> {
    let cut = move |r: &Range<usize>, at: usize| {
        let start = r.start + at.min(r.len());
        start..(start + piece).min(r.end)
    };
    (0..out.len().max(to.len())).step_by(piece).map(move |at| (cut(&out, at), cut(&to, at)))
}

/// Two disjoint parts, the second one mutable.
fn both<T>(values: &mut [T], out: Range<usize>, to: Range<usize>) -> (&[T], &mut [T]) {
    if out.is_empty() {
        (&[], &mut values[to])
    } else if to.is_empty() {
        (&values[out], &mut [])
    } else if out.start < to.start {
        let (before, after) = values.split_at_mut(to.start);
        (&before[out], &mut after[..to.len()])
    } else {
        let (before, after) = values.split_at_mut(out.start);
        (&after[..out.len()], &mut before[to])
    }
}

/// Sends and receives at the same time: two ranks that first send and then receive would deadlock.
fn exchange(n: &mut Neighbours, mut out: &[u8], mut to: &mut [u8]) -> Result<(), GroupError> {
    let ended = |e: io::Error| GroupError::Broken(format!("a connection of its ring has ended: {e}"));
    loop {
        send(&mut n.next, &mut out).map_err(ended)?;
        receive(&mut n.previous, &mut to).map_err(ended)?;
        let mut fds = Vec::with_capacity(2);
        if !out.is_empty() || n.next.has_to_send() {
            fds.push(PollFd::new(n.next.socket().as_fd(), PollFlags::POLLOUT));
        }
        if !to.is_empty() {
            fds.push(PollFd::new(n.previous.socket().as_fd(), PollFlags::POLLIN));
        }
        if fds.is_empty() {
            return Ok(());
        }
        // Without a timeout: the watch notices a rank that ends or is silent.
        match poll(&mut fds, PollTimeout::NONE) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(e) => return Err(ended(e.into())),
        }
    }
}

fn send(to: &mut Wire, out: &mut &[u8]) -> io::Result<()> {
    while !out.is_empty() || to.has_to_send() {
        let sent = if out.is_empty() { to.flush().map(|()| 0) } else { to.write(out) };
        match sent {
            Ok(n) => *out = &out[n..],
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) if e.kind() == ErrorKind::WouldBlock => break,
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

fn receive(from: &mut Wire, to: &mut &mut [u8]) -> io::Result<()> {
    while !to.is_empty() {
        match from.read(to) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(n) => *to = &mut std::mem::take(to)[n..],
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) if e.kind() == ErrorKind::WouldBlock => break,
            Err(e) => return Err(e),
        }
    }
    Ok(())
}
