//! Folders are read back by a decoder that has nothing of the writer.

#[path = "../../tests/decoder/weight_v.rs"]
mod decoder;

use super::*;
use decoder::{Tensors, decode, index_of, safetensors};
use paraft_client::reader::ValueType;
use paraft_common::{Layout, TensorSpec};

fn layout() -> Layout {
    let tensors = vec![
        TensorSpec::param("embed.weight", &[40, 8]),
        TensorSpec::param("norm.weight", &[8]),
        TensorSpec::buffer("bn.running_mean", &[8]),
    ];
    Layout::new(tensors, 100).unwrap()
}

fn export() -> Export {
    Export::new("j", ValueType::F32, &layout(), &[])
}

/// A version whose value `i` is what `value` says.
fn version(step: u64, founding: u64, value: impl Fn(usize) -> f32) -> WholeVersion {
    let layout = layout();
    let bytes =
        |range: std::ops::Range<usize>| range.flat_map(|i| value(i).to_le_bytes()).collect::<Vec<u8>>();
    let buckets = (0u32..).zip(layout.buckets()).map(|(id, b)| (id, bytes(b.range()).into())).collect();
    let foundings = BTreeMap::from([(0, founding)]);
    WholeVersion {
        step,
        foundings,
        digest: step * 31 + founding,
        reached: step,
        is_last: false,
        buckets,
        updates: BTreeMap::new(),
        received: 0,
    }
}

/// Few of the values change from step to step.
fn sparse(step: u64) -> WholeVersion {
    version(step, 7, |i| if i % 29 == step as usize % 29 { step as f32 + 0.5 } else { i as f32 })
}

/// What a plain pull writes.
fn plain(version: &WholeVersion) -> Tensors {
    let folder = tempfile::tempdir().unwrap();
    export().save(version, &folder.path().join("plain.safetensors")).unwrap();
    safetensors(&folder.path().join("plain.safetensors")).1
}

fn open(root: &Path, keep: usize) -> Result<Chain, Failure> {
    Chain::open(root, &export(), Base::default(), keep)
}

fn folders(root: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(root).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.retain(|name| !name.starts_with(".paraft"));
    names.sort();
    names
}

#[test]
fn fulls_and_differences_give_the_bits_of_a_plain_pull() {
    let root = tempfile::tempdir().unwrap();
    let mut chain = open(root.path(), 9).unwrap();
    for step in 0..23 {
        let version = sparse(3 * step);
        let written = chain.put(&export(), &version).unwrap();
        assert_eq!((written.number, written.full), (step + 1, step % 10 == 0));
        assert_eq!(decode(root.path(), step + 1), plain(&version), "version {}", version.step);
    }
    // Nothing but the counter changes: the difference has it alone.
    let mut same = sparse(66);
    same.step = 67;
    chain.put(&export(), &same).unwrap();
    let index = index_of(&root.path().join("weight_v000024"));
    assert_eq!(index["weight_map"], json!({ "bn.num_batches_tracked": "model.safetensors" }));
    assert_eq!(decode(root.path(), 24), plain(&same));
}

#[test]
fn version_of_which_most_has_changed_is_written_whole() {
    let root = tempfile::tempdir().unwrap();
    let mut chain = open(root.path(), 9).unwrap();
    chain.put(&export(), &version(1, 7, |i| i as f32)).unwrap();
    let other = version(2, 7, |i| (i as f32).sqrt() * -1.37);
    assert!(chain.put(&export(), &other).unwrap().full);
    assert_eq!(decode(root.path(), 2), plain(&other));
}

#[test]
fn tensor_beyond_the_positions_makes_the_version_a_full_one() {
    let root = tempfile::tempdir().unwrap();
    let mut chain = open(root.path(), 9).unwrap();
    chain.longest = 40 * 8 * 4 - 1;
    chain.put(&export(), &sparse(1)).unwrap();
    // Only the short tensors differ.
    let near = version(2, 7, |i| if i % 29 == 1 && i < 320 { 1.5 } else { i as f32 + (i / 320) as f32 });
    assert!(!chain.put(&export(), &near).unwrap().full);
    let far = version(3, 7, |i| if i == 5 { 9.0 } else { i as f32 });
    assert!(chain.put(&export(), &far).unwrap().full);
    assert_eq!(decode(root.path(), 3), plain(&far));
}

#[test]
fn chains_beyond_keep_go_and_kept_ones_stay_whole() {
    let root = tempfile::tempdir().unwrap();
    let mut chain = open(root.path(), 2).unwrap();
    for step in 0..35 {
        chain.put(&export(), &sparse(step)).unwrap();
        let first = ((step + 1 - 1) / 10).saturating_sub(1) * 10 + 1;
        let names: Vec<_> = (first..=step + 1).map(|n| format!("weight_v{n:06}")).collect();
        assert_eq!(folders(root.path()), names);
    }
}

#[test]
fn process_that_begins_or_another_founding_writes_a_full_one() {
    let root = tempfile::tempdir().unwrap();
    let mut chain = open(root.path(), 9).unwrap();
    (0..3).for_each(|step| drop(chain.put(&export(), &sparse(step)).unwrap()));
    let refused = open(root.path(), 9).map(drop).unwrap_err();
    assert!(refused.message().contains("another process"), "{}", refused.message());
    drop(chain);
    // Killed within the writing and within the removal of folders.
    for left in [".tmp-weight_v000004", ".tmp-old-weight_v000001"] {
        fs::create_dir(root.path().join(left)).unwrap();
        fs::write(root.path().join(left).join("model.part"), b"half").unwrap();
    }
    let mut chain = open(root.path(), 9).unwrap();
    assert_eq!(folders(root.path()), ["weight_v000001", "weight_v000002", "weight_v000003"]);
    assert_eq!(chain.newest().map(|n| (n.founding, n.step)), Some((7, 2)));
    assert!(chain.has(&export(), &sparse(2)) && !chain.has(&export(), &sparse(3)));
    let restarted = version(1, 8, |i| i as f32 * 2.0);
    let written = chain.put(&export(), &restarted).unwrap();
    assert_eq!((written.number, written.full), (4, true));
    assert_eq!(decode(root.path(), 4), plain(&restarted));
    assert_eq!(index_of(&written.folder)["metadata"]["founding"], "8");
}

#[test]
fn folders_of_another_job_are_refused_and_left() {
    let root = tempfile::tempdir().unwrap();
    open(root.path(), 9).unwrap().put(&export(), &sparse(1)).unwrap();
    let other = Export::new("other", ValueType::F32, &layout(), &[]);
    let refused = Chain::open(root.path(), &other, Base::default(), 9).map(drop).unwrap_err();
    assert_eq!(refused.code(), exit::CONFIG);
    assert_eq!(folders(root.path()), ["weight_v000001"]);
}
