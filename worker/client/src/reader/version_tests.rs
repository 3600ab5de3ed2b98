//! Tests of `version`.

use super::*;
use paraft_common::TensorSpec;

#[test]
fn tensor_is_put_together_from_its_buckets() {
    let tensors =
        vec![TensorSpec::param("a", &[3]), TensorSpec::param("b", &[2, 2]), TensorSpec::buffer("c", &[2])];
    let layout = Layout::new(tensors, 2).expect("a layout");
    let mut buckets = BTreeMap::new();
    for (id, bucket) in (0u32..).zip(layout.buckets()) {
        let values = bucket.range().flat_map(|i| (i as u16).to_le_bytes()).collect::<Vec<_>>();
        buckets.insert(id, Bytes::from(values));
    }
    let foundings = BTreeMap::new();
    let mut version = WholeVersion {
        step: 1,
        foundings,
        digest: 0,
        reached: 1,
        is_last: false,
        buckets,
        updates: BTreeMap::new(),
        received: 0,
    };
    let read = |version: &WholeVersion, i| {
        let bytes = version.tensor(&layout, ValueType::Bf16, i)?;
        Some(bytes.as_chunks().0.iter().map(|v| u16::from_le_bytes(*v)).collect::<Vec<_>>())
    };
    assert_eq!(read(&version, 0), Some(vec![0, 1, 2]));
    assert_eq!(read(&version, 1), Some(vec![3, 4, 5, 6]));
    assert_eq!(read(&version, 2), Some(vec![7, 8]));
    version.buckets.remove(&0);
    assert_eq!((read(&version, 0), read(&version, 2)), (None, Some(vec![7, 8])));
}
