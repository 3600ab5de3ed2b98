//! Tests of `criteo`.

use super::*;
use flate2::{Compression, write::GzEncoder};
use std::io::Write;

fn read(bytes: &[u8]) -> Result<SparseBatch, String> {
    let dir = tempfile::tempdir().expect("temp dir");
    let path = dir.path().join("train.txt");
    std::fs::write(&path, bytes).expect("writes");
    read_criteo(&path).map_err(|e| e.to_string())
}

/// The second sample has gaps and a negative count.
fn rows() -> [Vec<String>; 2] {
    let row = |label: &str, count: &dyn Fn(usize) -> String, category: &dyn Fn(usize) -> String| {
        let counts = (0..COUNTS).map(count);
        [label.to_owned()].into_iter().chain(counts).chain((0..CATEGORIES).map(category)).collect()
    };
    let gap = |i: usize, text: &str| {
        if i == 1 {
            "-2".into()
        } else if i == 2 {
            String::new()
        } else {
            text.into()
        }
    };
    [
        row("0", &|i| i.to_string(), &|i| format!("{:08x}", 0x68fd_1e64 + i)),
        row("1", &|i| gap(i, "7"), &|i| if i == 25 { String::new() } else { "0000000F".into() }),
    ]
}

fn tsv() -> String {
    rows().map(|row| row.join("\t") + "\n").concat()
}

/// As the sample of Kaggle has it.
fn csv() -> String {
    let names = (1..=COUNTS).map(|i| format!("I{i}")).chain((1..=CATEGORIES).map(|i| format!("C{i}")));
    let header = ["Id".to_owned(), "Label".to_owned()].into_iter().chain(names).collect::<Vec<_>>().join(",");
    let rows = rows().map(|row| format!("10000000,{}\r\n", row.join(",")));
    format!("{header}\r\n{}", rows.concat())
}

#[test]
fn both_forms_of_the_logs_are_read_alike() {
    let mut packed = GzEncoder::new(Vec::new(), Compression::fast());
    packed.write_all(tsv().as_bytes()).expect("to memory");
    for bytes in [tsv().into_bytes(), csv().into_bytes(), packed.finish().expect("to memory")] {
        let batch = read(&bytes).expect("reads");
        assert_eq!((&batch.labels[..], batch.fields.len()), (&[0.0, 1.0][..], 26));
        for (i, value) in batch.dense[..13].iter().enumerate() {
            assert_eq!(*value, (i as f64).ln_1p() as f32, "count {i}");
        }
        let seven = 8f64.ln() as f32;
        assert_eq!(batch.dense[13..17], [seven, 0.0, 0.0, seven]);
        for (i, field) in batch.fields.iter().enumerate() {
            let second = if i == 25 { 0 } else { 15 };
            assert_eq!(
                (&field.offsets[..], &field.ids[..]),
                (&[0, 1, 2][..], &[0x68fd_1e64 + i as u64, second][..])
            );
            assert!(field.weights.is_empty());
        }
    }
}

#[test]
fn rows_of_another_form_are_refused_with_their_place() {
    let line = |at: usize, text: &str| {
        let mut row = rows()[0].clone();
        row[at] = text.to_owned();
        row.join("\t")
    };
    let unlabelled = rows()[0][1..].join("\t");
    for (text, expected) in [
        (unlabelled, "line 1, column 1: 39 fields where 40 belong; give the file with the labels"),
        (line(0, "2"), "line 1, column 1: label `2` is neither 1 nor 0"),
        (line(0, ""), "line 1, column 1: label `` is no finite number"),
        (
            line(2, "1.5"),
            "line 1, column 5: count `1.5` is no whole number; write a whole number, or nothing",
        ),
        (line(14, "xyz"), "column 32: category `xyz` is no hexadecimal number of up to 16 digits"),
        (line(14, "12345678123456781"), "category `12345678123456781`"),
        (tsv() + &line(3, "1\t2"), "line 3, column 1: 41 fields where 40 belong"),
        (csv().replace("Label", "label"), ""),
        (csv().replace("C26", "C25"), "line 1, column 1: two columns are named C25; rename"),
        (csv().replace("I7,", "J7,"), "line 1, column 1: no column is named I7; name the columns"),
        (csv().replace("Label", "Click"), "no column is named Label"),
        (csv().lines().next().unwrap_or_default().to_owned(), "no sample"),
    ] {
        match read(text.as_bytes()) {
            Ok(_) => assert!(expected.is_empty(), "{expected}"),
            Err(error) => {
                assert!(!expected.is_empty() && error.contains(expected), "{error}\nlacks: {expected}");
            }
        }
    }
}
