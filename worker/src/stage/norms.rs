//! The norm of the whole gradient, for jobs that clip by it. Each rank that speaks with servers knows its stages'
//! part.
//!
//! ```text
//!  asynchronous   window ─ own squares ─▶ exchange ─▶ the pushes, which have waited, go out with the sum
//!  bsp            pull ─ parts of the round's mean, from the shards ─▶ exchange ─▶ the shards, which wait, are told the sum
//! ```
//!
//! Both exchanges happen in every mode, because ranks may learn of a switch at different steps. Parts are summed in
//! the order of the shards, so all ranks of all workers obtain the same bits.
//!
//! No exchange waits forever. In a pull every rank sends its parts, or that its pull was answered without them. If
//! a rank dies, the group breaks and the ranks repeat the pull, with the parts that each session has kept.
//!
//! A pull that is answered without parts means that its shards need no norm of this step any more. There are three
//! cases. The shards apply pushes one by one, because the mode is being switched, and what was pushed counts. Or
//! another worker has supplied the norm, also to the other ranks' shards. Or the worker that knew it died, or a new
//! rank has skipped the step. Shards whose leader still waits then receive the known part of the norm, unless
//! another worker supplies all of it meanwhile (see the client). That part may be less than the whole norm, but no
//! stage's update exceeds the bound.

use super::{Stage, messages::NORM, place::Place};
use crate::{engine::StepError, group::GroupResult};
use paraft_client::{Client, ClientError, Norm, Pull, Pulled, sum_of_parts};
use paraft_common::{ShardId, Step};
use paraft_compute::collective::{GroupError, Lines, Tag};

/// A shard and its sum of squares.
type Part = (ShardId, f64);

/// One exchange between the group's ranks, which make all exchanges in the same order.
pub(super) struct Exchange {
    here: Place,
    tag: Tag,
}

impl Exchange {
    /// Makes the exchange; returns what all ranks know together.
    fn make(&self, lines: &Lines, own: &[Part], whole: bool) -> GroupResult<Norm> {
        let here = self.here.beside(self.here.at);
        let others = || self.here.speakers().filter(|place| *place != here);
        for place in others() {
            lines.send(place, self.tag, write(own, whole))?;
        }
        let (mut all, mut all_whole) = (own.to_vec(), whole);
        for place in others() {
            let (parts, whole) = read(&lines.receive(place, self.tag)?)?;
            all.extend(parts);
            all_whole &= whole;
        }
        Ok(Norm { sum_of_squares: sum_of_parts(all), whole: all_whole })
    }
}

impl Stage<'_> {
    /// The next exchange, if there are several ranks.
    fn exchange(&mut self) -> Option<Exchange> {
        if !self.clips || !self.here.speaks() || self.here.of == 1 {
            return None;
        }
        let tag = Tag { kind: NORM, number: self.norms };
        self.norms += 1;
        Some(Exchange { here: self.here.clone(), tag })
    }

    /// Shares the squares after this rank has pushed its part of a step.
    pub(super) fn share_squares(
        &mut self,
        lines: &Lines,
        step: Step,
        client: &mut Client,
    ) -> Result<(), StepError> {
        if let Some(exchange) = self.exchange() {
            let own = client.pushed_squares(step);
            let norm = exchange.make(lines, own.as_deref().unwrap_or_default(), own.is_some())?;
            client.clip_by(step, norm.sum_of_squares);
        }
        Ok(())
    }

    /// A pull that all ranks make.
    pub fn pull_sharing(
        &mut self,
        client: &mut Client,
        pull: Pull,
        lines: &Lines,
    ) -> Result<Pulled, StepError> {
        let Some(exchange) = self.exchange() else { return self.pull_by(client, pull) };
        let (before, mut broke) = (client.counters().rejoins, None);
        let mut share = |parts: &[Part], whole: bool| {
            exchange.make(lines, parts, whole).map_err(|e| {
                broke = Some(e);
                ClientError::Interrupted
            })
        };
        let pulled = self.pull_with(client, pull, Some(&mut share));
        if client.counters().rejoins != before {
            // Pushes of the former session may be lost.
            (self.pushed, self.lost) = (None, true);
        }
        let Some(e) = broke else { return pulled };
        self.spoiled = client.has_begun();
        Err(e.into())
    }

    /// Takes part in the other ranks' pull of a step that no rank here waits for.
    pub fn shares_nothing(&mut self, lines: &Lines) -> Result<(), StepError> {
        if let Some(exchange) = self.exchange() {
            exchange.make(lines, &[], false)?;
        }
        Ok(())
    }
}

/// 16 bits per value, which an f32 holds exactly.
fn write(parts: &[Part], whole: bool) -> Vec<f32> {
    let words = |bits: u64, n: u32| (0..n).map(move |i| f32::from((bits >> (16 * i)) as u16));
    let part = |(shard, squares): &Part| words(u64::from(shard.0), 2).chain(words(squares.to_bits(), 4));
    std::iter::once(f32::from(u8::from(whole))).chain(parts.iter().flat_map(part)).collect()
}

fn read(message: &[f32]) -> GroupResult<(Vec<Part>, bool)> {
    let nonsense = || GroupError::Broken(format!("a rank has sent {} values of a norm", message.len()));
    let (whole, values) = message.split_first().ok_or_else(nonsense)?;
    let (parts, rest) = values.as_chunks::<6>();
    if !rest.is_empty() {
        return Err(nonsense());
    }
    let bits = |words: &[f32]| words.iter().rev().fold(0, |bits, w| bits << 16 | u64::from(*w as u16));
    let part = |p: &[f32; 6]| (ShardId(bits(&p[..2]) as u32), f64::from_bits(bits(&p[2..])));
    Ok((parts.iter().map(part).collect(), *whole > 0.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_bit_of_a_part_is_lost_on_its_way() {
        for squares in [0.0, 1.0 / 3.0, 1e300, f64::MIN_POSITIVE, f64::INFINITY, f64::from_bits(u64::MAX)] {
            let parts = [(ShardId(7), squares), (ShardId(u32::MAX), 2.5)];
            let (come, whole) = read(&write(&parts, true)).expect("whole");
            let bits = |parts: &[Part]| parts.iter().map(|(s, p)| (*s, p.to_bits())).collect::<Vec<_>>();
            assert_eq!((bits(&come), whole), (bits(&parts), true));
        }
        assert_eq!(read(&write(&[], false)).expect("whole"), (Vec::new(), false));
        assert!(read(&[]).is_err() && read(&[1.0, 2.0]).is_err());
    }
}
