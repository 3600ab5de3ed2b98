//! A minibatch's gradient, micro-batch by micro-batch, and the weights that it uses.

use crate::{engine::StepError, exchange::PushParts, group::GroupResult};
use paraft_compute::collective::{GroupError, Lines, Tag};
use paraft_host::Pages;
use paraft_models::{CpuDevice, DeviceError, Flat, Loan, NetResult, Weights};
use std::ops::Range;

/// Writes values of another rank to their place.
pub(super) fn put(to: &mut [f32], range: &Range<usize>, values: &[f32]) -> GroupResult {
    let to = &mut to[range.clone()];
    if to.len() != values.len() {
        let why = format!("a rank has sent {} values for {range:?}", values.len());
        return Err(GroupError::Broken(why));
    }
    to.copy_from_slice(values);
    Ok(())
}

/// Adds a micro-batch's part to the gradient's sum.
pub(super) fn add(sum: &mut [f32], gradient: &[f32], range: Range<usize>, share: f32, first: bool) {
    let both = sum[range.clone()].iter_mut().zip(&gradient[range]);
    match first {
        true => both.for_each(|(s, g)| *s = share * g),
        false => both.for_each(|(s, g)| *s += share * g),
    }
}

/// Weights in memory, and their version.
pub(super) struct VersionedWeights<'a>(pub &'a [f32], pub u64);

impl Weights<CpuDevice> for VersionedWeights<'_> {
    fn params(&mut self, _: usize) -> NetResult<&[f32]> {
        Ok(self.0)
    }

    fn edition(&mut self, _: usize) -> NetResult<u64> {
        Ok(self.1)
    }
}

/// The backward pass of a micro-batch: adds each ready part of its gradient, and pushes complete buckets of the
/// sum.
pub(super) struct GradientSum<'s, 'p, 'c> {
    pub weights: &'s [f32],
    pub edition: u64,
    pub gradient: &'s mut Pages,
    pub sum: &'s mut Pages,
    /// This micro-batch's share of the minibatch's mean.
    pub share: f32,
    pub first: bool,
    pub own: Range<usize>,
    /// Parts from this offset on are added.
    pub from: usize,
    pub buckets: &'s [Range<usize>],
    /// Buckets from this index on are pushed.
    pub next: usize,
    /// Set in the last micro-batch.
    pub push: Option<&'s mut PushParts<'c>>,
    /// Loans whose gradient has not arrived yet.
    pub awaits: Vec<(usize, Loan, usize)>,
    pub lines: &'p mut Lines,
    /// The tag of the first loan's gradient.
    pub tag: Tag,
    pub broken: Option<StepError>,
}

impl Weights<CpuDevice> for GradientSum<'_, '_, '_> {
    fn params(&mut self, _: usize) -> NetResult<&[f32]> {
        Ok(self.weights)
    }

    fn edition(&mut self, _: usize) -> NetResult<u64> {
        Ok(self.edition)
    }
}

impl Flat<CpuDevice> for GradientSum<'_, '_, '_> {
    fn layer(&mut self, _: usize) -> NetResult<(&[f32], &mut [f32])> {
        Ok((self.weights, self.gradient))
    }

    fn ready(&mut self, offset: usize) -> NetResult {
        let offset = offset.max(self.own.start);
        if offset >= self.from {
            return Ok(());
        }
        let ready = offset..std::mem::replace(&mut self.from, offset);
        add(self.sum, self.gradient, ready.clone(), self.share, self.first);
        self.gradient.release(ready);
        // Once, when the lent parameters' own gradient is complete.
        while let Some(i) = self.awaits.iter().position(|(_, loan, _)| loan.range.start >= offset) {
            let (loan, lent, from) = self.awaits.swap_remove(i);
            let tag = Tag { number: self.tag.number | loan as u64, ..self.tag };
            match self.lines.receive(from, tag) {
                Ok(theirs) if theirs.len() == lent.range.len() => {
                    self.sum[lent.range].iter_mut().zip(&theirs).for_each(|(s, g)| *s += g);
                }
                Ok(_) => {
                    return self
                        .breaks(GroupError::Broken("a gradient of what was lent is not as long".into()));
                }
                Err(e) => return self.breaks(e),
            }
        }
        let lent: Vec<Range<usize>> = self.awaits.iter().map(|(_, loan, _)| loan.range.clone()).collect();
        let Some(push) = &mut self.push else { return Ok(()) };
        while let Some(bucket) = self.next.checked_sub(1).map(|i| self.buckets[i].clone()) {
            let waits = lent.iter().any(|l| l.start < bucket.end && bucket.start < l.end);
            if bucket.start < offset || waits {
                break;
            }
            self.next -= 1;
            if bucket.start < self.own.end {
                push.values(self.next, &self.sum[bucket.clone()]);
                self.sum.release(bucket);
            }
        }
        Ok(())
    }
}

impl GradientSum<'_, '_, '_> {
    fn breaks(&mut self, e: GroupError) -> NetResult {
        let text = e.to_string();
        self.broken = Some(e.into());
        Err(DeviceError::Group(text))
    }
}
