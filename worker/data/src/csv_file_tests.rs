//! Tests of `csv_file`: columns by name, classes by name, numbers to predict.

use super::*;
use std::path::PathBuf;
use tempfile::TempDir;

/// As spreadsheets write it: a byte order mark, quotes, blanks, CRLF, an empty line.
const IRIS: &str = "\u{feff}id,\"length, cm\",width,species\r\n1, 5.1 ,3.5,setosa\r\n2,\"7.0\",3.2,\"versicolor\"\r\n\r\n\
                    3,6.3,3.3, virginica \r\n4,4.9,3.0,setosa\r\n";

fn put(dir: &TempDir, name: &str, text: &str) -> PathBuf {
    let path = dir.path().join(name);
    std::fs::write(&path, text).expect("writes");
    path
}

fn read(text: &str, options: &CsvOptions) -> Result<Split, String> {
    let dir = tempfile::tempdir().expect("temp dir");
    read_csv(&put(&dir, "table.csv", text), None, options).map_err(|e| e.to_string())
}

fn label(name: &str) -> CsvOptions {
    CsvOptions { label: LabelColumn::Name(name.into()), test_fraction: Some(0.25), ..CsvOptions::default() }
}

fn numbers(label: LabelColumn) -> CsvOptions {
    CsvOptions { label, task: Task::Regression, test_fraction: Some(0.25), ..CsvOptions::default() }
}

fn ignoring(ignore: Vec<Column>, options: CsvOptions) -> CsvOptions {
    CsvOptions { ignore, ..options }
}

fn id() -> Vec<Column> {
    vec![Column::Name("id".into())]
}

fn inputs(data: &Dataset) -> Vec<f32> {
    let all: Vec<u32> = (0..data.len() as u32).collect();
    let (mut inputs, mut labels) = (Vec::new(), Vec::new());
    data.fill(&all, &mut inputs, &mut Vec::new(), &mut labels).expect("in memory");
    inputs
}

#[test]
fn a_table_with_names_is_read_as_spreadsheets_write_it() {
    let by_name = ignoring(id(), label("species"));
    let by_index = CsvOptions { label: LabelColumn::Index(3), ..ignoring(vec![Column::Index(0)], label("")) };
    for options in [by_name, by_index] {
        let split = read(IRIS, &options).expect("reads");
        assert_eq!((split.train.classes(), split.train.shape()), (Some(3), &[2][..]));
        assert_eq!((split.train.labels(), split.test.labels()), (&[0, 1, 2][..], &[0][..]));
        assert_eq!(inputs(&split.train), [5.1, 3.5, 7.0, 3.2, 6.3, 3.3]);
        assert_eq!(inputs(&split.test), [4.9, 3.0]);
    }
}

#[test]
fn class_numbers_do_not_depend_on_the_order_of_rows() {
    let rows = ["1,pear\n", "2,apple\n", "3,fig\n", "4,apple\n"];
    let classes = [2, 0, 1, 0];
    let options = CsvOptions { test_fraction: Some(0.25), ..CsvOptions::default() };
    for first in 0..4 {
        let order: Vec<usize> = (first..4).chain(0..first).collect();
        let text: String = order.iter().map(|i| rows[*i]).collect();
        let split = read(&text, &options).expect("reads");
        let labels = [split.train.labels(), split.test.labels()].concat();
        assert_eq!(labels, order.iter().map(|i| classes[*i]).collect::<Vec<u32>>());
    }
}

#[test]
fn a_test_file_has_the_classes_of_the_training_file() {
    let dir = tempfile::tempdir().expect("temp dir");
    let options = CsvOptions { test_fraction: None, ..label("kind") };
    let train = put(&dir, "train.csv", "a,kind\n1,x\n2,y\n3,z\n");
    let read = |text: &str| read_csv(&train, Some(&put(&dir, "test.csv", text)), &options);
    let split = read("a,kind\n4,z\n5,x\n").expect("known classes");
    assert_eq!((split.test.labels(), split.test.classes()), (&[2, 0][..], Some(3)));
    for (text, expected) in [
        (
            "a,kind\n4,z\n5,v\n6,u\n",
            "test.csv line 3: label `v` is no class of the training file: `x`, `y`, `z`",
        ),
        (
            "a,kind\n4,2\n",
            "test.csv: the labels are numbers, and the training file has the classes `x`, `y`, `z`",
        ),
        ("b,kind\n4,z\n", "field 1 is `a` in "),
        ("a,c,kind\n4,4,z\n", "test.csv has 2"),
        ("kind\nz\n", "the label is column 0"),
    ] {
        let error = read(text).expect_err(expected).to_string();
        assert!(error.contains(expected), "{error}\nlacks: {expected}");
    }
    let train = put(&dir, "train.csv", "a,kind\n1,0\n2,1\n");
    let test = put(&dir, "test.csv", "a,kind\n3,x\n");
    let error = read_csv(&train, Some(&test), &options).expect_err("texts for numbers").to_string();
    assert!(
        error.contains("test.csv line 2: label `x` is no class of the training file: numbers"),
        "{error}"
    );
}

#[test]
fn numbers_to_predict_are_read_as_they_are() {
    let text = "area,price,rooms\n50,-1.5,2\n70,2e3,3\n60,0,2\n90,7,4\n";
    let scaled = CsvOptions { scale: 0.5, ..numbers(LabelColumn::Name("price".into())) };
    let split = read(text, &scaled).expect("reads");
    assert!(split.train.has_targets() && split.test.has_targets());
    assert_eq!((split.train.classes(), split.train.len()), (None, 3));
    let targets: Vec<f32> = split.train.labels().iter().map(|bits| f32::from_bits(*bits)).collect();
    assert_eq!(targets, [-1.5, 2000.0, 0.0], "only features are scaled");
    assert_eq!(inputs(&split.train), [25.0, 1.0, 35.0, 1.5, 30.0, 1.0]);
    let other = read(&text.replace("2e3", "2001"), &scaled).expect("reads");
    assert_ne!(split.digest().expect("in memory"), other.digest().expect("in memory"));
    let none = read(text, &CsvOptions { label: LabelColumn::None, ..label("") }).expect("reads");
    assert!(!none.train.has_targets());
}

#[test]
fn tables_that_do_not_fit_the_options_are_refused() {
    let price = || numbers(LabelColumn::Last);
    for (text, options, expected) in [
        (
            IRIS,
            label("specie"),
            "line 1: no column is named `specie`; the header has `id`, `length, cm`, `width`, `species`; give one",
        ),
        ("1,2,x\n", label("b"), "line 1: no column is named `b`; the header has `1`, `2`, `x`"),
        ("x,x,y\n1,2,0\n", label("x"), "columns 0 and 1 (from 0) are both named `x`; rename one"),
        (IRIS, ignoring(id(), label("id")), "the label is column 0 (from 0), and `ignore` has it too"),
        (
            IRIS,
            ignoring(vec![Column::Index(4)], label("species")),
            "`ignore` has column 4 (from 0) but the row has 4",
        ),
        ("id,b\n1,x\n", ignoring(id(), label("b")), "no column is left for the features"),
        ("a,b\n1,x\n2,\n", label("b"), "line 3: the label is missing; fill the gap, or remove the row"),
        ("a,b\n1,x\n,y\n", label("b"), "line 3: field 1 (`a`) is ``, not a number; fill the gap"),
        (
            "a,town,b\n1,Rome,x\n",
            label("b"),
            "line 2: field 2 (`town`) is `Rome`, not a number; write a number",
        ),
        ("a,b\n1,x\n2,3\n", label("b"), "line 3: label `3` is a number, and those before it are texts"),
        (
            "a,b\n1,3\n2,x\n",
            label("b"),
            "line 3: label `x` is no whole number from 0 to 65535, as those before",
        ),
        (
            "a,b\n1,0.5\n",
            label("b"),
            "line 2: label `0.5` is no whole number from 0 to 65535; number the classes",
        ),
        (
            "a,b\n1,x\n2,x\n3,x\n4,x\n",
            label("b"),
            "every row has the label `x`, and a model needs two classes",
        ),
        ("a,b\n1,1\n2,1\n3,1\n4,1\n", label("b"), "every row has the label `1`"),
        ("a,b\n1,high\n", price(), "line 2: label `high` is no finite number; write a number"),
        ("a,b\n1,nan\n", price(), "line 2: label `nan` is no finite number"),
        ("a,b\n1,\n", price(), "line 2: the label is missing"),
        ("a,b\n1,2\n", numbers(LabelColumn::None), "[data] task: regression predicts the label"),
    ] {
        let error = read(text, &options).expect_err(expected);
        assert!(error.contains(expected), "{error}\nlacks: {expected}");
    }
}

#[test]
fn long_lists_of_names_are_cut_short() {
    let fields = vec![b"a".as_slice(); 23];
    assert!(listed(&fields).ends_with("`a` and 3 more"), "{}", listed(&fields));
    assert_eq!(listed(&fields[..2]), "`a`, `a`");
}
