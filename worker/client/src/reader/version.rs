//! A version that has arrived whole.

use bytes::Bytes;
use paraft_common::Layout;
use std::{collections::BTreeMap, str::FromStr};

/// The type in which values travel and arrive.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ValueType {
    /// As the servers have them.
    #[default]
    F32,
    /// Rounded to the nearest, ties to even.
    Bf16,
    /// Rounded to the nearest, ties to even.
    F16,
}

impl ValueType {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
        }
    }

    /// Bytes of a value.
    pub fn bytes(self) -> usize {
        if self == Self::F32 { 4 } else { 2 }
    }
}

impl FromStr for ValueType {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let all = [Self::F32, Self::Bf16, Self::F16];
        all.into_iter()
            .find(|t| t.name() == text)
            .ok_or_else(|| format!("`{text}` is none of f32, bf16, f16"))
    }
}

/// A whole version.
#[derive(Clone, Debug, PartialEq)]
pub struct WholeVersion {
    /// Its step, by which it is named.
    pub step: u64,
    /// The founding of each shard's state: a version of other foundings is another one.
    pub foundings: BTreeMap<u32, u64>,
    /// XXH3 of the buckets' digests and versions. Readers that ask for the same buckets in the same type get the same.
    pub digest: u64,
    /// The newest version of shard 0's replica when it had sent its last byte.
    pub reached: u64,
    /// The job has ended: there will be no later version.
    pub is_last: bool,
    /// The values of each bucket, little-endian.
    pub buckets: BTreeMap<u32, Bytes>,
    /// How many updates each bucket has had; empty: another reader of this host received it.
    pub updates: BTreeMap<u32, u64>,
    /// Bytes that were received for it.
    pub received: u64,
}

impl WholeVersion {
    /// The values of a tensor, little-endian, by its place in the layout; `None`: some of them were not asked for.
    pub fn tensor(&self, layout: &Layout, dtype: ValueType, tensor: usize) -> Option<Vec<u8>> {
        let mut bytes = Vec::with_capacity(layout.tensor_range(tensor).len() * dtype.bytes());
        self.parts(layout, dtype, tensor, |part| bytes.extend_from_slice(part))?;
        Some(bytes)
    }

    /// Likewise, into memory of just that many bytes; `None`: it has another length.
    pub fn copy(&self, layout: &Layout, dtype: ValueType, tensor: usize, mut into: &mut [u8]) -> Option<()> {
        if into.len() != layout.tensor_range(tensor).len() * dtype.bytes() {
            return None;
        }
        self.parts(layout, dtype, tensor, |part| {
            let (now, rest) = std::mem::take(&mut into).split_at_mut(part.len());
            now.copy_from_slice(part);
            into = rest;
        })
    }

    /// Gives the values of a tensor, bucket by bucket; nothing if some of them were not asked for.
    fn parts(
        &self,
        layout: &Layout,
        dtype: ValueType,
        tensor: usize,
        mut take: impl FnMut(&[u8]),
    ) -> Option<()> {
        let (range, width) = (layout.tensor_range(tensor), dtype.bytes());
        let mut parts = Vec::new();
        let after = layout.buckets().partition_point(|b| b.offset <= range.start);
        for (id, bucket) in (0u32..).zip(layout.buckets()).skip(after.saturating_sub(1)) {
            let of = bucket.range();
            if of.start >= range.end {
                break;
            }
            let (from, to) = (range.start.max(of.start) - of.start, range.end.min(of.end) - of.start);
            parts.push(self.buckets.get(&id)?.get(from * width..to * width)?);
        }
        parts.into_iter().for_each(&mut take);
        Some(())
    }
}

#[cfg(test)]
#[path = "version_tests.rs"]
mod tests;
