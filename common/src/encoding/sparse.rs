//! The encodings `top-k` and `random-k`: some of the values, all others are zero.
//!
//! ```text
//!  top-k     | k places, u32, rising | k values, f32 |
//!  random-k  | seed, u64 | k values, f32 |               at the places that `Chosen` draws of the seed
//! ```
//!
//! How many there are follows from the bucket's length, so nobody says it. Values travel as they are: random-k is not
//! scaled up by 1/F, since what is left out is sent later (Stich et al., 2018).

use super::{Word, draws::Chosen};
use crate::{
    codec::{F32_BYTES, put_f32_le},
    payload::{Payload, Reader, Short},
};

/// Bytes of a value with its place.
pub(super) const LISTED_BYTES: usize = 2 * F32_BYTES;
/// Bytes of the seed.
pub(super) const SEED_BYTES: usize = 8;

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

/// Writes the values at `kept` places, drawn by the seed. Where one is not finite all are NaN, or it might not be seen.
pub(super) fn put_drawn(values: &[f32], kept: usize, seed: u64, out: &mut Vec<u8>) {
    out.extend_from_slice(&seed.to_le_bytes());
    let finite = values.iter().all(|v| v.is_finite());
    let value = |i: usize| if finite { values[i] } else { f32::NAN };
    Chosen::new(seed, kept, values.len()).for_each(|i| put_f32_le(&[value(i)], out));
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

/// Where the values of a payload are.
#[derive(Clone, Debug)]
enum Places<'a> {
    /// In the payload, so many more of them.
    Listed(Reader<'a>, usize),
    Drawn(Chosen),
}

impl Places<'_> {
    fn next(&mut self) -> Result<Option<usize>, Short> {
        match self {
            Places::Listed(_, 0) => Ok(None),
            Places::Listed(reader, left) => {
                let mut place = [0; 4];
                reader.bytes(&mut place)?;
                *left -= 1;
                Ok(Some(u32::from_le_bytes(place) as usize))
            }
            Places::Drawn(chosen) => Ok(chosen.next()),
        }
    }
}

/// The values of a payload on their way to their places.
#[derive(Clone, Debug)]
pub(super) struct Sparse<'a> {
    places: Places<'a>,
    /// Of the next value that is not zero.
    next: Option<usize>,
    /// Values handed out.
    at: usize,
}

impl<'a> Sparse<'a> {
    /// Of a payload of top-k, with the reader at its begin; it is at the values then.
    pub fn listed(reader: &mut Reader<'a>, kept: usize) -> Result<Self, Short> {
        let places = Places::Listed(reader.clone(), kept);
        reader.skip(kept * 4)?;
        Self::new(places)
    }

    /// Likewise of random-k.
    pub fn drawn(reader: &mut Reader<'a>, kept: usize, values: usize) -> Result<Self, Short> {
        let mut seed = [0; SEED_BYTES];
        reader.bytes(&mut seed)?;
        Self::new(Places::Drawn(Chosen::new(u64::from_le_bytes(seed), kept, values)))
    }

    fn new(mut places: Places<'a>) -> Result<Self, Short> {
        let next = places.next()?;
        Ok(Self { places, next, at: 0 })
    }

    /// Fills `out` with the next values; `reader` is at those that are not zero.
    pub fn decode(&mut self, reader: &mut Reader<'_>, out: &mut [Word]) -> Result<(), Short> {
        out.fill([0; F32_BYTES]);
        let end = self.at + out.len();
        while let Some(place) = self.next.filter(|p| *p < end) {
            if let Some(o) = place.checked_sub(self.at).and_then(|i| out.get_mut(i)) {
                reader.bytes(o)?;
            }
            self.next = self.places.next()?;
        }
        self.at = end;
        Ok(())
    }
}
