//! Parts of a gradient: those that leave the device together, and their encoding there.

use crate::Part;
use paraft_common::Encoding;
use paraft_compute::{DeviceError, cuda::Wire};
use std::ops::Range;

/// The parts in `of`, in runs of at most `most` values (or one part), the last one first.
pub(super) fn runs(parts: &[Part], of: Range<usize>, most: usize) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for i in of.rev() {
        match runs.last_mut() {
            Some(run) if parts[run.end - 1].range.end - parts[i].range.start <= most => run.start = i,
            _ => runs.push(i..i + 1),
        }
    }
    runs
}

/// An encoding of the job, on the device.
pub(super) fn wire(encoding: Encoding) -> Result<Wire, DeviceError> {
    match encoding {
        Encoding::F32 => Ok(Wire::F32),
        Encoding::Bf16 => Ok(Wire::Bf16),
        Encoding::F16 => Ok(Wire::F16),
        Encoding::Int8 => Ok(Wire::Int8),
        _ => Err(DeviceError::Unsupported(format!(
            "a device does not write {encoding}: ask it for f32, and encode that on the host"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_of_so_many_values_or_of_one_part() {
        let parts: Vec<Part> = [0..4, 4..6, 6..20, 20..22, 22..24, 24..25]
            .map(|range| Part { range, encoding: Encoding::F32 })
            .to_vec();
        assert_eq!(runs(&parts, 0..6, 5), [3..6, 2..3, 1..2, 0..1]);
        assert_eq!(runs(&parts, 1..5, 4), [3..5, 2..3, 1..2]);
        assert_eq!(runs(&parts, 0..6, 25), std::slice::from_ref(&(0..6)));
        assert_eq!(runs(&parts, 3..3, 25), []);
    }
}
