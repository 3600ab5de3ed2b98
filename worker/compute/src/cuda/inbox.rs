//! Transfers weights from the host to the device.
//!
//! ```text
//!  pull ─▶ Inbox: host (pinned) ─copy, bucket by bucket─▶ back ─swap─▶ front ─▶ operators
//! ```
//!
//! The copies have their own stream, so that they overlap computation and the outbox's copies.
//!
//! In a group of ranks only rank 0 copies from the host. It broadcasts parameters from its `back` to the others'
//! `back`.

use crate::{
    cuda::{
        device::CudaDevice,
        driver::{Event, Stream},
        flat::Params,
        kernels::Unit,
        launch::{Arg, Geometry, long},
        memory::{Buffer, Pinned},
        nccl::Nccl,
    },
    error::{DeviceError, Result},
};
use std::{ops::Range, sync::Arc};

/// Transfers weights to the device.
#[derive(Debug)]
pub struct Inbox {
    stream: Arc<Stream>,
    host: Pinned<f32>,
    front: Params,
    back: Params,
    /// Ranges that `front` received when it was filled, and `back` lacks.
    only_front: Vec<Range<usize>>,
    /// Ranges that arrived in `back` since the last swap.
    landed: Vec<Range<usize>>,
    /// Recorded after the copies.
    copied: Event,
    /// Recorded at a swap: later work does not read `back`.
    unread: Event,
    /// Recorded when the device has changed `front` itself.
    changed: Event,
    /// Whether `front` and `back` both differ from the host's copy.
    distrusted: bool,
}

impl Inbox {
    /// For this many parameters; zero until weights arrive.
    pub fn new(device: &CudaDevice, len: usize) -> Result<Self> {
        let context = device.context();
        let stream = Stream::new(context, 0)?;
        let front = Params::new(device, len, "the parameters")?;
        let back = Params::new(device, len, "the parameters' second buffer")?;
        for p in [&front, &back] {
            p.master.clear(&stream, 0..len)?;
            if let Some(h) = &p.half {
                h.clear(&stream, 0..len)?;
            }
        }
        let (copied, unread, changed) = (Event::new(context)?, Event::new(context)?, Event::new(context)?);
        copied.record(&stream)?;
        // Reads before the first arrival return zeros.
        device.stream().wait(&copied)?;
        let host = Pinned::new(context, len)?;
        let (only_front, landed) = (Vec::new(), Vec::new());
        let distrusted = false;
        Ok(Self { stream, host, front, back, only_front, landed, copied, unread, changed, distrusted })
    }

    /// The host's copy of the last pull. In a group only rank 0 pulls, so on other ranks it is outdated.
    pub fn host(&self) -> &[f32] {
        self.host.values()
    }

    /// The same, for the next pull to write. Waits for copies from it.
    pub fn host_mut(&mut self) -> Result<&mut [f32]> {
        self.host.as_mut_slice()
    }

    /// Marks the device's parameters as invalid, for example after a failed broadcast or when they are another
    /// rank's: before the next swap everything must land.
    pub fn distrust(&mut self) {
        self.landed.clear();
        self.only_front.clear();
        self.distrusted = true;
    }

    /// Starts to copy `range` of the host's copy to the device. In a group all ranks receive rank 0's copy; all of
    /// them call this with the same ranges in the same order.
    pub fn landed(&mut self, device: &CudaDevice, range: Range<usize>, group: Option<&Nccl>) -> Result {
        if self.landed.is_empty() {
            self.stream.wait(&self.unread)?;
        }
        if group.is_none_or(|g| g.rank() == 0) {
            self.back.master.upload(&self.stream, &self.host, range.clone(), range.start)?;
        }
        if let Some(group) = group {
            group.broadcast(&self.back.master, range.clone(), &self.stream)?;
        }
        if let (Some(half), Some(cast)) = (&self.back.half, device.precision().cast()) {
            // SAFETY: the arguments match the kernel; their buffers are as long as the lengths among them say.
            unsafe {
                device.launcher().launch(
                    &self.stream,
                    (Unit::Elementwise, cast),
                    Geometry::flat(range.len()),
                    &[
                        ("x", Arg::At(self.back.master.at(range.start))),
                        ("y", Arg::At(half.at(range.start))),
                        ("n", long(range.len())),
                    ],
                )
            }?;
        }
        self.landed.push(range);
        Ok(())
    }

    /// At a step's boundary: makes the arrived parameters those that operators read.
    pub fn swap(&mut self, device: &CudaDevice) -> Result<&Params> {
        if self.distrusted {
            let missing = without(0..self.front.len(), &self.landed);
            if let Some(range) = missing.first() {
                return Err(DeviceError::Unsupported(format!(
                    "{}: the group has changed, and parameters {range:?} have not landed since",
                    device.context().name()
                )));
            }
            self.distrusted = false;
        }
        if !self.landed.is_empty() {
            // Ranges that arrived last time and not now are only in the other buffer. Copy them from there, because
            // a group's other ranks do not have them on the host. This stream wrote them, or waited for their
            // writer (`changed`); it overwrites them only after `unread`.
            for range in std::mem::take(&mut self.only_front) {
                for missing in without(range, &self.landed) {
                    self.back.master.copy_from(&self.stream, &self.front.master, missing.clone())?;
                    if let (Some(back), Some(front)) = (&self.back.half, &self.front.half) {
                        back.copy_from(&self.stream, front, missing)?;
                    }
                }
            }
            self.copied.record(&self.stream)?;
            device.stream().wait(&self.copied)?;
            self.unread.record(device.stream())?;
            std::mem::swap(&mut self.front, &mut self.back);
            self.only_front = std::mem::take(&mut self.landed);
        }
        Ok(&self.front)
    }

    /// The parameters that operators read.
    pub fn params(&self) -> &Params {
        &self.front
    }

    /// Marks the device's parameters as valid on this rank, even before anything lands.
    pub fn trust(&mut self) {
        self.distrusted = false;
    }

    /// Starts to copy rank 0's current parameters to all ranks, after present work of the device's stream. On the
    /// other ranks parameters that landed since the last swap are lost.
    pub fn share(&mut self, device: &CudaDevice, group: &Nccl) -> Result {
        if group.rank() > 0 {
            self.landed.clear();
        }
        group.broadcast(&self.front.master, 0..self.front.len(), device.stream())?;
        self.changed(device)
    }

    /// Copies the operators' parameters to the host's copy; waits for it.
    pub fn fetch(&mut self, device: &CudaDevice) -> Result<&[f32]> {
        self.copied.synchronize()?;
        fetch(device, &self.front.master, &mut self.host)
    }

    /// Lends the host's copy as a buffer for other values: at most as many, and until the copy is needed.
    /// Allocating and freeing pinned memory instead would wait for the whole device.
    pub(super) fn borrow_host(&mut self) -> Result<&mut Pinned<f32>> {
        self.copied.synchronize()?;
        Ok(&mut self.host)
    }

    /// Records that present work of the device's stream has changed the operators' f32 parameters.
    pub(super) fn changed(&mut self, device: &CudaDevice) -> Result {
        if let (Some(half), Some(cast)) = (&self.front.half, device.precision().cast()) {
            let n = self.front.len();
            // SAFETY: the arguments match the kernel; their buffers are as long as the lengths among them say.
            unsafe {
                device.launcher().launch(
                    device.stream(),
                    (Unit::Elementwise, cast),
                    Geometry::flat(n),
                    &[("x", Arg::At(self.front.master.at(0))), ("y", Arg::At(half.at(0))), ("n", long(n))],
                )
            }?;
        }
        // The next swap copies everything that does not land from here, on the inbox's own stream.
        self.only_front = std::iter::once(0..self.front.len()).collect();
        self.changed.record(device.stream())?;
        self.stream.wait(&self.changed)
    }
}

impl CudaDevice {
    /// Copies parameters from the host, for comparisons.
    pub fn hold(&mut self, from: &[f32]) -> Result<Inbox> {
        let mut inbox = Inbox::new(self, from.len())?;
        inbox.host_mut()?.copy_from_slice(from);
        inbox.landed(self, 0..from.len(), None)?;
        inbox.swap(self)?;
        Ok(inbox)
    }
}

impl Drop for Inbox {
    fn drop(&mut self) {
        // Pinned memory must not be freed during a copy.
        let _ = self.stream.synchronize();
    }
}

/// Copies values to the host; waits for it.
pub(super) fn fetch<'a>(
    device: &CudaDevice,
    from: &Buffer<f32>,
    to: &'a mut Pinned<f32>,
) -> Result<&'a [f32]> {
    let begun = from.download(device.stream(), 0..from.len(), to);
    // Wait even after an error: the memory must not be used otherwise during a copy.
    device.stream().synchronize()?;
    begun?;
    Ok(&to.as_slice()?[..from.len()])
}

/// The parts of `range` outside all `others`.
fn without(range: Range<usize>, others: &[Range<usize>]) -> Vec<Range<usize>> {
    let mut left = vec![range];
    for o in others {
        left = left
            .into_iter()
            .flat_map(|r| [r.start..r.end.min(o.start), r.start.max(o.end)..r.end])
            .filter(|r| !r.is_empty())
            .collect();
    }
    left
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_others_cover_is_taken_away() {
        let places = |range: Range<usize>, others: &[(usize, usize)]| {
            let others: Vec<_> = others.iter().map(|(a, b)| *a..*b).collect();
            without(range, &others).iter().map(|r| (r.start, r.end)).collect::<Vec<_>>()
        };
        assert_eq!(places(0..10, &[(2, 4), (6, 7)]), [(0, 2), (4, 6), (7, 10)]);
        assert_eq!(places(0..10, &[]), [(0, 10)]);
        assert_eq!(places(3..5, &[(0, 10)]), []);
        assert_eq!(places(3..8, &[(0, 4), (7, 9)]), [(4, 7)]);
    }
}
