//! Tests of `sparse`.

use super::*;
use crate::{Ids, Task, VowpalOptions, read_criteo, read_libsvm, read_ratings, read_vowpal};
use std::path::Path;

fn put(dir: &tempfile::TempDir, name: &str, bytes: &[u8]) -> std::path::PathBuf {
    let path = dir.path().join(name);
    std::fs::write(&path, bytes).expect("writes");
    path
}

/// Three samples of two fields and one dense value: `[10] [1 2]`, `[] [3]` and `[11 12] []`.
fn samples() -> SparseBatch {
    let mut all = SparseBatch::new(2);
    for (dense, label, importance, first, second) in [
        (0.5, 1.0, 1.0, &[][..], &[(1, 1.0), (2, 1.0)][..]),
        (1.5, 0.0, 0.25, &[(10, 1.0)], &[(3, 7.0)]),
        (2.5, 1.0, 1.0, &[(11, 1.0), (12, 1.0)], &[]),
    ] {
        all.dense.push(dense);
        first.iter().for_each(|(id, weight)| all.fields[0].push(*id, *weight));
        second.iter().for_each(|(id, weight)| all.fields[1].push(*id, *weight));
        assert!(all.end(label, importance));
    }
    all
}

#[test]
fn a_batch_has_the_samples_asked_for_in_their_order() {
    let data = SparseDataset::new(samples()).expect("fits");
    assert_eq!((data.len(), data.fields(), data.dense()), (3, 2, 1));
    let mut batch = SparseBatch::new(7);
    for _ in 0..2 {
        data.fill(&[2, 0, 1, 2], &mut batch);
        let first = Field { offsets: vec![0, 2, 2, 3, 5], ids: vec![11, 12, 10, 11, 12], weights: vec![] };
        let second = Field { offsets: vec![0, 0, 2, 3, 3], ids: vec![1, 2, 3], weights: vec![1.0, 1.0, 7.0] };
        let expected = SparseBatch {
            labels: vec![1.0, 1.0, 0.0, 1.0],
            importance: vec![1.0, 1.0, 0.25, 1.0],
            dense: vec![2.5, 0.5, 1.5, 2.5],
            fields: vec![first, second],
        };
        assert_eq!(batch, expected);
    }
    data.fill(&[], &mut batch);
    assert_eq!(batch, SparseBatch::new(2));
    data.fill(&[1], &mut batch);
    assert_eq!(
        (batch.fields[1].row(0), batch.fields[0].row(0)),
        ((&[3][..], &[7.0][..]), (&[10][..], &[][..]))
    );
}

#[test]
fn parts_that_do_not_fit_are_refused() {
    let change = |with: &dyn Fn(&mut SparseBatch)| {
        let mut all = samples();
        with(&mut all);
        SparseDataset::new(all).expect_err("refused").to_string()
    };
    assert!(change(&|b| b.dense.push(1.0)).contains("4 dense values are no whole number"));
    assert!(change(&|b| b.importance.truncate(2)).contains("3 samples but 2 factors"));
    assert!(change(&|b| b.fields[1].weights.truncate(2)).contains("field 1 has 3 ids but 2 weights"));
    for offsets in
        [vec![0, 2, 3], vec![0, 2, 3, 2], vec![0, 2, 3, 4], vec![1, 2, 3, 3], vec![0, 3, 2, 3], vec![]]
    {
        let error = change(&|b| b.fields[1].offsets = offsets.clone());
        assert!(error.contains("offsets of field 1 do not rise from 0 to 3 in 3 steps"), "{error}");
    }
}

#[test]
fn the_held_out_part_is_drawn_by_the_seed() {
    let mut all = SparseBatch::new(1);
    for i in 0..1_000 {
        all.fields[0].push(i, 1.0);
        all.end(0.0, 1.0);
    }
    let split = |seed| {
        let (train, test) = SparseDataset::new(all.clone()).expect("fits").split(0.2, seed).expect("splits");
        [train, test].map(|part| {
            let mut batch = SparseBatch::default();
            part.fill(&(0..part.len() as u32).collect::<Vec<u32>>(), &mut batch);
            batch.fields[0].ids.clone()
        })
    };
    let [train, test] = split(1);
    assert_eq!((train.len(), test.len()), (800, 200));
    assert!(train.is_sorted() && test.is_sorted(), "both in the file's order");
    let mut both = [train.clone(), test.clone()].concat();
    both.sort_unstable();
    assert_eq!(both, (0..1_000).collect::<Vec<u64>>());
    assert_eq!(split(1), [train, test.clone()]);
    assert!(split(2)[1].iter().filter(|id| test.contains(id)).count() < 80, "another seed, another part");
    for fraction in [0.0, 1.0, f64::NAN, 0.0001, 0.9999] {
        let error = SparseDataset::new(all.clone()).expect("fits").split(fraction, 1).expect_err("refused");
        assert!(error.to_string().starts_with("[data] test_fraction: "), "{error}");
    }
}

#[test]
fn hashing_keeps_all_but_the_ids() {
    let (mut all, hashing) = (samples(), Hashing::new(20).expect("in range"));
    all.hash(&hashing);
    let plain = samples();
    assert_eq!(all.fields[1].ids, [1, 2, 3].map(|id| hashing.id(1, id)));
    assert_eq!(all.fields[1].weights, plain.fields[1].weights);
    assert_eq!(all.fields[0].offsets, plain.fields[0].offsets);
}

/// Every reader on a file that others also read, and on what is left of it after random damage.
#[test]
fn damaged_files_are_read_or_refused() {
    const BYTES: &[u8] = b"\t :|#,\n\r\x00\xff'\"0919-+.enaf";
    type Read = fn(&Path) -> Result<SparseBatch, DataError>;
    let criteo: String = (0..40).map(|i| format!("{}\t", i % 2)).collect();
    let seeds: [(&str, Read); 4] = [
        ("1:0.5 qid:3 1:2 7:0.5 # c\n-1 2:1e3 9:1\n", |p| read_libsvm(p, Task::Regression)),
        ("1 2 'tag|f:2 a:3 b:c :4|g 12\n0 | x\n", |p| read_vowpal(p, &VowpalOptions::default())),
        (&format!("{0}\n{0}\n", criteo.trim_end()), read_criteo),
        ("user,item,rating\n1::2,3::4,5\n1,2,3\n", |p| read_ratings(p, Ids::Texts)),
    ];
    let dir = tempfile::tempdir().expect("temp dir");
    for (text, read) in seeds {
        for seed in 0..1_000 {
            let mut bytes = text.as_bytes().to_vec();
            for change in 0..1 + seed % 4 {
                let at = draw(seed, 3 * change) as usize % bytes.len();
                let with = BYTES[draw(seed, 3 * change + 1) as usize % BYTES.len()];
                match draw(seed, 3 * change + 2) % 3 {
                    0 => bytes[at] = with,
                    1 => bytes.insert(at, with),
                    _ => bytes.truncate(at.max(1)),
                }
            }
            // A file of its own: some systems sync one that is overwritten.
            let path = put(&dir, &seed.to_string(), &bytes);
            let read = read(&path);
            std::fs::remove_file(path).expect("it is there");
            if let Ok(batch) = read {
                let finite = |values: &[f32]| values.iter().all(|v| v.is_finite());
                assert!(finite(&batch.labels) && finite(&batch.importance) && finite(&batch.dense));
                assert!(batch.fields.iter().all(|f| finite(&f.weights)));
                SparseDataset::new(batch).expect("what was read fits");
            }
        }
    }
}

#[test]
fn a_line_without_end_is_refused() {
    let dir = tempfile::tempdir().expect("temp dir");
    let path = put(&dir, "a", &vec![b'1'; (16 << 20) + 1]);
    let error = read_libsvm(&path, Task::Regression).expect_err("refused").to_string();
    assert!(error.contains("a line of more than 16777216 bytes ends near here"), "{error}");
}
