//! The encoding `top-k`: some of the values, all others are zero.
//!
//! ```text
//!  | k places, u32, rising | k values, f32 |
//! ```
//!
//! How many there are follows from the bucket's length, so it is not transmitted.

use crate::{
    codec::{F32_BYTES, Word},
    payload::{Payload, Reader, Short},
};

/// Bytes of a value with its place.
pub(super) const LISTED_BYTES: usize = 2 * F32_BYTES;

/// The order of magnitudes is that of the bits without the sign, and what is not finite is above all others: a NaN is sent.
fn magnitude(v: f32) -> u32 {
    v.to_bits() & 0x7fff_ffff
}

/// Writes the `kept` largest of the values, the first of those that are equal. `order` is memory to work in.
pub(super) fn put_largest(values: &[f32], kept: usize, order: &mut Vec<u32>, out: &mut Vec<u8>) {
    if kept == 0 {
        return;
    }
    order.clear();
    order.extend(values.iter().map(|v| magnitude(*v)));
    let (above, smallest, _) = order.select_nth_unstable_by(kept - 1, |a, b| b.cmp(a));
    let smallest = *smallest;
    // Of the ones that are as large as the smallest, as many as there is room for.
    let mut equal = kept - above.iter().filter(|m| **m > smallest).count();
    order.clear();
    for (i, v) in (0u32..).zip(values) {
        let m = magnitude(*v);
        let take = m > smallest || m == smallest && equal > 0;
        if take {
            equal -= usize::from(m == smallest);
            order.push(i);
        }
    }
    order.iter().for_each(|i| out.extend_from_slice(&i.to_le_bytes()));
    order.iter().for_each(|i| out.extend_from_slice(&values[*i as usize].to_le_bytes()));
}

/// Whether the places of a top-k payload, whose length is right, rise and are places of `values` values.
pub(super) fn check(payload: &Payload, kept: usize, values: usize) -> Result<(), &'static str> {
    let mut least = 0usize;
    let mut rising = true;
    let read = payload.reader().words(kept, |run: &[[u8; 4]]| {
        for word in run {
            let place = u32::from_le_bytes(*word) as usize;
            rising &= place >= least;
            least = place.saturating_add(1);
        }
    });
    match read {
        Err(_) => Err("it is too short for its places"),
        Ok(()) if !rising => Err("its places do not rise"),
        // The last one is the largest.
        Ok(()) if least > values => Err("a place is beyond the bucket's end"),
        Ok(()) => Ok(()),
    }
}

/// The values of a payload on their way to their places.
#[derive(Clone, Debug)]
pub(super) struct Sparse<'a> {
    /// At the places behind `next`, so many of them.
    places: Reader<'a>,
    left: usize,
    /// Of the next value that is not zero.
    next: Option<usize>,
    /// Values handed out.
    at: usize,
}

impl<'a> Sparse<'a> {
    /// Of a payload with the reader at its begin; it is at the values then.
    pub fn new(reader: &mut Reader<'a>, kept: usize) -> Result<Self, Short> {
        let mut sparse = Self { places: reader.clone(), left: kept, next: None, at: 0 };
        reader.skip(kept * 4)?;
        sparse.advance()?;
        Ok(sparse)
    }

    /// Goes to the next place.
    fn advance(&mut self) -> Result<(), Short> {
        self.next = None;
        if self.left > 0 {
            let mut place = [0; 4];
            self.places.bytes(&mut place)?;
            self.left -= 1;
            self.next = Some(u32::from_le_bytes(place) as usize);
        }
        Ok(())
    }

    /// Fills `out` with the next values; `reader` is at those that are not zero.
    pub fn decode(&mut self, reader: &mut Reader<'_>, out: &mut [Word]) -> Result<(), Short> {
        out.fill([0; F32_BYTES]);
        let end = self.at + out.len();
        while let Some(place) = self.next.filter(|p| *p < end) {
            if let Some(o) = place.checked_sub(self.at).and_then(|i| out.get_mut(i)) {
                reader.bytes(o)?;
            }
            self.advance()?;
        }
        self.at = end;
        Ok(())
    }
}
