//! How a target takes what steers it off the front of its bytes. Past their end everything is 0 or empty, so that any
//! bytes are an input, and a seed is written with the same words ([`Seed`]).

use bytes::Bytes;
use paraft_common::Payload;

/// The bytes of an input that are not used up.
#[derive(Clone, Copy, Debug)]
pub struct Input<'a>(pub &'a [u8]);

impl<'a> Input<'a> {
    /// The next byte.
    pub fn byte(&mut self) -> u8 {
        self.bytes(1).first().copied().unwrap_or(0)
    }

    /// The next two bytes, little-endian.
    pub fn word(&mut self) -> u16 {
        u16::from(self.byte()) | u16::from(self.byte()) << 8
    }

    /// The next `n` bytes, or as many as there are.
    pub fn bytes(&mut self, n: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(n.min(self.0.len()));
        self.0 = rest;
        taken
    }

    /// A part that says its length in two bytes.
    pub fn part(&mut self) -> &'a [u8] {
        let n = self.word();
        self.bytes(n.into())
    }

    /// The rest.
    pub fn rest(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.0)
    }

    /// Whether nothing is left.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// The bytes in pieces that end at each of `cuts`, which are shares of the length in 65536ths.
pub fn pieces(bytes: &[u8], cuts: [u16; 3]) -> Vec<Bytes> {
    let mut at: Vec<usize> = cuts.iter().map(|c| (usize::from(*c) * bytes.len()) >> 16).collect();
    at.extend([0, bytes.len()]);
    at.sort_unstable();
    at.windows(2).map(|w| Bytes::copy_from_slice(&bytes[w[0]..w[1]])).collect()
}

/// As [`pieces`], as a payload.
pub fn payload(bytes: &[u8], cuts: [u16; 3]) -> Payload {
    pieces(bytes, cuts).into_iter().collect()
}

/// An input under construction.
#[derive(Clone, Debug, Default)]
pub struct Seed(pub Vec<u8>);

impl Seed {
    /// What [`Input::byte`] will give.
    pub fn byte(mut self, b: u8) -> Self {
        self.0.push(b);
        self
    }

    /// What [`Input::word`] will give.
    pub fn word(mut self, w: u16) -> Self {
        self.0.extend(w.to_le_bytes());
        self
    }

    /// What [`Input::part`] will give; at most 65535 bytes.
    pub fn part(mut self, bytes: &[u8]) -> Self {
        self.0.extend((bytes.len() as u16).to_le_bytes());
        self.rest(bytes)
    }

    /// Bytes as they are.
    pub fn rest(mut self, bytes: &[u8]) -> Self {
        self.0.extend(bytes);
        self
    }
}
