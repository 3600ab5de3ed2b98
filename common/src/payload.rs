//! The payload of one bucket as received: several pieces of any length and alignment.
//!
//! ```text
//!  frames   ├──── 256 KiB ────┤├──── 256 KiB ────┤├── ...        each where the transport received it
//!  words     ├4┤├4┤ ...    ├4─┼─┤├4┤ ...                         one may begin in a piece and end in the next
//! ```
//!
//! The pieces are never joined. A caller walks over them ([`Payload::reader`]) and receives runs of
//! whole words in place. A word that spans two pieces arrives as a run of one, from a small buffer. The
//! boundaries change no value and no bit of any result.

use bytes::Bytes;
use std::{fmt, ops::Range, slice, sync::Arc};

/// Bytes in one or more pieces. Clones share them.
#[derive(Clone)]
pub struct Payload(Pieces);

#[derive(Clone)]
enum Pieces {
    /// One piece, which may be empty.
    One(Bytes),
    /// At least two pieces, none of them empty, and their total length.
    Several(Arc<[Bytes]>, usize),
}

impl Payload {
    /// A payload without bytes.
    pub const EMPTY: Payload = Payload(Pieces::One(Bytes::new()));

    /// Concatenates the pieces. Empty ones are dropped.
    pub fn from_pieces(mut pieces: Vec<Bytes>) -> Self {
        pieces.retain(|p| !p.is_empty());
        match pieces.len() {
            0 | 1 => Payload(Pieces::One(pieces.pop().unwrap_or_default())),
            _ => {
                let len = pieces.iter().map(Bytes::len).sum();
                Payload(Pieces::Several(pieces.into(), len))
            }
        }
    }

    /// The number of bytes.
    pub fn len(&self) -> usize {
        match &self.0 {
            Pieces::One(only) => only.len(),
            Pieces::Several(_, len) => *len,
        }
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The pieces, none of them empty.
    pub fn pieces(&self) -> &[Bytes] {
        match &self.0 {
            Pieces::One(only) if only.is_empty() => &[],
            Pieces::One(only) => slice::from_ref(only),
            Pieces::Several(all, _) => all,
        }
    }

    /// All bytes in one buffer, which copies several pieces.
    pub fn to_bytes(&self) -> Bytes {
        match &self.0 {
            Pieces::One(only) => only.clone(),
            Pieces::Several(all, _) => all.concat().into(),
        }
    }

    /// The bytes at `range`, shared without a copy. On an error the payload is shorter than that.
    pub fn slice(&self, range: Range<usize>) -> Result<Payload, Short> {
        if range.start > range.end || range.end > self.len() {
            return Err(Short { wanted: range.end, left: self.len() });
        }
        let mut at = 0;
        let inside = |piece: &Bytes| {
            let from = range.start.clamp(at, at + piece.len()) - at;
            let to = range.end.clamp(at, at + piece.len()) - at;
            at += piece.len();
            piece.slice(from..to)
        };
        Ok(self.pieces().iter().map(inside).collect())
    }

    /// A reader from the first byte.
    pub fn reader(&self) -> Reader<'_> {
        Reader { rest: &[], later: self.pieces(), left: self.len() }
    }
}

impl Default for Payload {
    fn default() -> Self {
        Self::EMPTY
    }
}

impl From<Bytes> for Payload {
    fn from(only: Bytes) -> Self {
        Payload(Pieces::One(only))
    }
}

impl From<Vec<u8>> for Payload {
    fn from(only: Vec<u8>) -> Self {
        Bytes::from(only).into()
    }
}

impl FromIterator<Bytes> for Payload {
    fn from_iter<I: IntoIterator<Item = Bytes>>(pieces: I) -> Self {
        Self::from_pieces(pieces.into_iter().collect())
    }
}

/// Compares contents; the boundaries of pieces do not matter.
impl PartialEq for Payload {
    fn eq(&self, other: &Self) -> bool {
        if self.len() != other.len() {
            return false;
        }
        let (mut a, mut b) = (self.reader(), other.reader());
        loop {
            let (x, y) = (a.run(), b.run());
            let n = x.len().min(y.len());
            if n == 0 || x[..n] != y[..n] {
                return n == 0;
            }
            a.skip_within_run(n);
            b.skip_within_run(n);
        }
    }
}

impl Eq for Payload {}

// Payloads have megabytes, so only the size is printed.
impl fmt::Debug for Payload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.len())?;
        match self.pieces().len() {
            0 | 1 => Ok(()),
            n => write!(f, " in {n} pieces"),
        }
    }
}

/// A payload is shorter than the read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{wanted} bytes are wanted and {left} are left of the payload")]
pub struct Short {
    /// Bytes to read.
    pub wanted: usize,
    /// Remaining bytes of the payload.
    pub left: usize,
}

/// Reads a payload once, from its first byte to its last.
#[derive(Clone, Debug)]
pub struct Reader<'a> {
    /// The rest of the current piece.
    rest: &'a [u8],
    later: &'a [Bytes],
    left: usize,
}

impl<'a> Reader<'a> {
    /// Remaining bytes.
    pub fn left(&self) -> usize {
        self.left
    }

    /// Passes `count` words of `N` bytes to `each`, in order, in the longest contiguous runs. On an
    /// error `each` was not called.
    pub fn words<const N: usize>(
        &mut self,
        mut count: usize,
        mut each: impl FnMut(&[[u8; N]]),
    ) -> Result<(), Short> {
        self.has(count.saturating_mul(N))?;
        while count > 0 {
            let (words, _) = self.run().as_chunks::<N>();
            let words = &words[..words.len().min(count)];
            if words.is_empty() {
                let mut cut = [0; N];
                self.bytes(&mut cut)?;
                each(&[cut]);
                count -= 1;
            } else {
                each(words);
                self.skip_within_run(words.len() * N);
                count -= words.len();
            }
        }
        Ok(())
    }

    /// Fills `out` with the next bytes.
    pub fn bytes(&mut self, out: &mut [u8]) -> Result<(), Short> {
        self.has(out.len())?;
        let mut out = out;
        while !out.is_empty() {
            let run = self.run();
            let n = run.len().min(out.len());
            let (now, later) = out.split_at_mut(n);
            now.copy_from_slice(&run[..n]);
            self.skip_within_run(n);
            out = later;
        }
        Ok(())
    }

    /// Skips the next bytes. On an error nothing was skipped.
    pub fn skip(&mut self, mut count: usize) -> Result<(), Short> {
        self.has(count)?;
        while count > 0 {
            let n = self.run().len().min(count);
            self.skip_within_run(n);
            count -= n;
        }
        Ok(())
    }

    fn has(&self, wanted: usize) -> Result<(), Short> {
        if wanted <= self.left { Ok(()) } else { Err(Short { wanted, left: self.left }) }
    }

    /// The next contiguous bytes; empty only at the end.
    fn run(&mut self) -> &'a [u8] {
        while self.rest.is_empty()
            && let Some((next, later)) = self.later.split_first()
        {
            (self.rest, self.later) = (next, later);
        }
        self.rest
    }

    fn skip_within_run(&mut self, n: usize) {
        self.rest = &self.rest[n..];
        self.left -= n;
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    /// `bytes` cut at each of `at` (modulo its length), some pieces empty.
    pub(crate) fn cut(bytes: &[u8], at: &[prop::sample::Index]) -> Payload {
        let mut at: Vec<usize> = at.iter().map(|i| i.index(bytes.len() + 1)).collect();
        at.extend([0, bytes.len()]);
        at.sort_unstable();
        at.windows(2).map(|w| Bytes::copy_from_slice(&bytes[w[0]..w[1]])).collect()
    }

    #[test]
    fn one_piece_is_not_copied_and_none_has_no_pieces() {
        let bytes = Bytes::from(vec![1, 2, 3]);
        let payload = Payload::from(bytes.clone());
        assert_eq!(payload.to_bytes().as_ptr(), bytes.as_ptr());
        assert_eq!(payload.pieces().len(), 1);
        for empty in [Payload::default(), Payload::from_pieces(vec![Bytes::new(); 3]), Vec::new().into()] {
            assert!(empty.is_empty() && empty.pieces().is_empty() && empty.reader().left() == 0);
            assert_eq!(empty.reader().words::<4>(1, |_| ()), Err(Short { wanted: 4, left: 0 }));
            assert_eq!(empty, Payload::EMPTY);
        }
    }

    #[test]
    fn a_payload_prints_its_size() {
        assert_eq!(format!("{:?}", Payload::from(vec![0; 5])), "5 bytes");
        let two = Payload::from_pieces(vec![vec![0; 5].into(), Bytes::new(), vec![1].into()]);
        assert_eq!(format!("{two:?}"), "6 bytes in 2 pieces");
    }

    proptest! {
        #[test]
        fn the_cuts_change_nothing_that_is_read(
            bytes in prop::collection::vec(any::<u8>(), 0..200),
            a in prop::collection::vec(any::<prop::sample::Index>(), 0..12),
            b in prop::collection::vec(any::<prop::sample::Index>(), 0..12),
            change in any::<prop::sample::Index>(),
        ) {
            let (a, b) = (cut(&bytes, &a), cut(&bytes, &b));
            prop_assert_eq!(a.len(), bytes.len());
            prop_assert_eq!(&a.to_bytes()[..], &bytes[..]);
            prop_assert_eq!(&a, &b);
            prop_assert!(a.pieces().iter().all(|p| !p.is_empty()));
            let mut reader = a.reader();
            let (mut words, whole) = (Vec::new(), bytes.len() / 3);
            reader.words::<3>(whole, |run| words.extend_from_slice(run.as_flattened())).expect("they are there");
            prop_assert_eq!(&words[..], &bytes[..whole * 3]);
            prop_assert_eq!(reader.left(), bytes.len() % 3);
            let mut rest = vec![0; reader.left()];
            reader.bytes(&mut rest).expect("they are there");
            prop_assert_eq!(&rest[..], &bytes[whole * 3..]);
            let (from, to) = (change.index(bytes.len() + 1), bytes.len());
            prop_assert_eq!(&a.slice(from..to).expect("it has them").to_bytes()[..], &bytes[from..]);
            prop_assert_eq!(&b.slice(0..from).expect("it has them").to_bytes()[..], &bytes[..from]);
            prop_assert!(a.slice(from..to + 1).is_err());
            let mut behind = a.reader();
            behind.skip(from).expect("it has them");
            prop_assert_eq!(behind.left(), to - from);
            prop_assert!(behind.skip(to - from + 1).is_err() && behind.left() == to - from);
            prop_assert!(reader.bytes(&mut [0]).is_err());
            if !bytes.is_empty() {
                let mut other = bytes.clone();
                other[change.index(bytes.len())] ^= 1;
                prop_assert_ne!(&a, &Payload::from(other));
                prop_assert_ne!(&a, &Payload::from(bytes[1..].to_vec()));
            }
        }
    }
}
