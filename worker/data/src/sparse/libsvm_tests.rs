//! Tests of `libsvm`.

use super::*;
use crate::sparse::Field;

fn read(text: &str, task: Task) -> Result<SparseBatch, String> {
    let dir = tempfile::tempdir().expect("temp dir");
    let path = dir.path().join("a.libsvm");
    std::fs::write(&path, text).expect("writes");
    read_libsvm(&path, task).map_err(|e| e.to_string())
}

fn rows(batch: &SparseBatch) -> Vec<(Vec<u64>, Vec<f32>)> {
    (0..batch.len()).map(|i| batch.fields[0].row(i)).map(|(ids, w)| (ids.to_vec(), w.to_vec())).collect()
}

#[test]
fn a_file_is_read_as_it_is_written() {
    let text =
        "\u{feff}+1 qid:3 1:0.5 18446744073709551615:-2e3 # 7:x\r\n\n# nothing\n-1:0.25\t9:1 2:1 0:0  \n1\n";
    let batch = read(text, Task::Classification).expect("reads");
    assert_eq!((&batch.labels[..], &batch.importance[..]), (&[1.0, 0.0, 1.0][..], &[1.0, 0.25, 1.0][..]));
    let expected =
        [(vec![1, u64::MAX], vec![0.5, -2000.0]), (vec![9, 2, 0], vec![1.0, 1.0, 0.0]), (vec![], vec![])];
    assert_eq!(rows(&batch), expected);
}

#[test]
fn weights_and_importance_are_empty_where_all_are_one() {
    let batch = read("1 3:1 5:1.0\n0:1 3:1\n", Task::Classification).expect("reads");
    let field = Field { offsets: vec![0, 2, 3], ids: vec![3, 5, 3], weights: vec![] };
    assert_eq!(batch, SparseBatch { labels: vec![1.0, 0.0], fields: vec![field], ..SparseBatch::default() });
}

#[test]
fn numbers_to_predict_stay_as_they_are() {
    let batch = read("2.5 1:1\n-1 2:1\n0 3:1\n1e-3 3:1\n", Task::Regression).expect("reads");
    assert_eq!(batch.labels, [2.5, -1.0, 0.0, 1e-3]);
}

#[test]
fn what_other_readers_guess_is_refused_with_its_place() {
    for (text, expected) in [
        ("1 1:1\n1 2:1 2:2\n", "line 2, column 7: index 2 is there twice; add its values up"),
        ("1 5:1 7:1 5:2\n", "line 1, column 11: index 5 is there twice"),
        ("1 1:nan\n", "line 1, column 5: value `nan` is no finite number; fill the gap"),
        ("1 1:2 33:1e39\n", "line 1, column 10: value `1e39`"),
        ("1 1:\n", "line 1, column 5: value `` is no finite number; write the value"),
        ("1 1:1_000\n", "line 1, column 5: value `1_000`"),
        ("1 4\n", "line 1, column 3: `4` has no value; write index:value"),
        ("1 -1:1\n", "line 1, column 3: index `-1` is no whole number"),
        ("1 1.0:1\n", "line 1, column 3: index `1.0` is no whole number"),
        ("1 18446744073709551616:1\n", "line 1, column 3: index `18446744073709551616` is no whole number"),
        (
            "1 cat:1\n",
            "line 1, column 3: index `cat` is no whole number from 0 to 18446744073709551615; number",
        ),
        ("1 3:1:0.5\n", "line 1, column 5: value `1:0.5` is no finite number; write index:value; LIBFFM"),
        ("1 1:1 qid:3\n", "line 1, column 7: index `qid` is no whole number"),
        ("1 qid:x 1:1\n", "line 1, column 7: qid `x` is no whole number"),
        ("nan 1:1\n", "line 1, column 1: label `nan` is no finite number"),
        ("1,3 1:1\n", "line 1, column 1: label `1,3` is no finite number; give each sample one label"),
        ("1:-1 1:1\n", "line 1, column 3: importance `-1` is no finite number of 0 or more"),
        ("1: 1:1\n", "line 1, column 3: importance ``"),
        ("1 1:1\n2 1:1\n", "line 2, column 1: label `2` is neither 1 nor 0 nor -1; write classes as"),
        ("0 1:1\n -1 1:1\n", "line 2, column 2: label `-1`, where rows before have 0"),
        ("# nothing\n\n", "a.libsvm: no sample; check that"),
    ] {
        let error = read(text, Task::Classification).expect_err(expected);
        assert!(error.contains(expected), "{error}\nlacks: {expected}");
    }
}
