//! The values of a version's buckets, as readers get them: made once, whoever asks.

use crate::shard::weights::Weights;
use bytes::Bytes;
use paraft_common::{
    BucketId, Encoding, Step, Version,
    codec::{F32_BYTES, put_f32_le},
    difference::{self, Code},
};
use parking_lot::Mutex;
use std::sync::{Arc, OnceLock};
use xxhash_rust::xxh3::xxh3_64;

/// A bucket of a version.
#[derive(Debug)]
pub struct KeptBucket {
    /// Its number.
    pub id: BucketId,
    /// Updates in it.
    pub version: Version,
    values: Mutex<Values>,
    /// In bf16 and f16.
    rounded: [OnceLock<Arc<Encoded>>; 2],
    whole: OnceLock<Arc<Encoded>>,
}

#[derive(Debug)]
enum Values {
    /// As the shard has them, or had: an update copies them.
    Shared(Weights),
    /// Little-endian.
    Own(Bytes),
}

/// How values travel, and what is sent.
type Difference = (Code, Bytes);

/// The values of a bucket in the type that readers want.
#[derive(Debug)]
pub struct Encoded {
    /// Little-endian.
    pub values: Bytes,
    /// Their XXH3.
    pub digest: u64,
    width: usize,
    /// By the version from which they lead here.
    differences: Mutex<Vec<(Step, Arc<OnceLock<Difference>>)>>,
}

impl KeptBucket {
    pub(super) fn new(id: BucketId, version: Version, weights: Weights) -> Arc<Self> {
        let values = Mutex::new(Values::Shared(weights));
        Arc::new(Self { id, version, values, rounded: Default::default(), whole: OnceLock::new() })
    }

    /// The values, f32, little-endian. The first call copies them; the shard's own are released.
    pub fn bytes(&self) -> Bytes {
        let mut values = self.values.lock();
        if let Values::Shared(weights) = &*values {
            let mut bytes = Vec::with_capacity(size_of_val(&**weights));
            put_f32_le(weights, &mut bytes);
            *values = Values::Own(bytes.into());
        }
        match &*values {
            Values::Own(bytes) => bytes.clone(),
            Values::Shared(_) => Bytes::new(),
        }
    }

    /// The values in f32, or rounded to bf16 or f16, ties to even.
    pub fn encoded(&self, dtype: Encoding) -> Arc<Encoded> {
        let [bf16, f16] = &self.rounded;
        let cell = match dtype {
            Encoding::Bf16 => bf16,
            Encoding::F16 => f16,
            _ => &self.whole,
        };
        cell.get_or_init(|| Encoded::of(rounded(self.bytes(), dtype), dtype)).clone()
    }
}

impl Encoded {
    /// Values of this type, little-endian.
    pub fn of(values: Bytes, dtype: Encoding) -> Arc<Self> {
        let digest = xxh3_64(&values);
        let width = if dtype == Encoding::F32 { F32_BYTES } else { 2 };
        Arc::new(Self { values, digest, width, differences: Mutex::default() })
    }

    /// The shortest way to send the values to a reader that has the `old` ones, of version `base`.
    pub fn difference(&self, base: Step, old: &[u8]) -> Difference {
        let difference = {
            let mut all = self.differences.lock();
            match all.iter().find(|(step, _)| *step == base) {
                Some((_, difference)) => difference.clone(),
                None => {
                    let difference = Arc::<OnceLock<_>>::default();
                    all.push((base, difference.clone()));
                    difference
                }
            }
        };
        let shortest = || match difference::encode(self.width, old, &self.values) {
            Some((code, bytes)) => (code, bytes.into()),
            None => (Code::Whole, self.values.clone()),
        };
        difference.get_or_init(shortest).clone()
    }
}

/// Values rounded to a type, ties to even.
fn rounded(values: Bytes, dtype: Encoding) -> Bytes {
    let f32s = || values.as_chunks::<F32_BYTES>().0.iter().map(|v| f32::from_le_bytes(*v));
    match dtype {
        Encoding::Bf16 => {
            f32s().flat_map(|v| half::bf16::from_f32(v).to_le_bytes()).collect::<Vec<_>>().into()
        }
        Encoding::F16 => f32s().flat_map(|v| half::f16::from_f32(v).to_le_bytes()).collect::<Vec<_>>().into(),
        _ => values,
    }
}
