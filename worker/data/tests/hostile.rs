//! Files from outside: each is either read correctly or refused with a helpful message.

use flate2::Compression;
use flate2::write::GzEncoder;
use paraft_data::{CsvOptions, Dataset, LabelColumn, TextCorpus};
use paraft_data::{read_csv, read_idx_folder, read_idx_pair};
use std::io::Write;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut out = GzEncoder::new(Vec::new(), Compression::fast());
    out.write_all(bytes).expect("to memory");
    out.finish().expect("to memory")
}

fn idx(magic: u32, dims: &[u32], values: &[u8]) -> Vec<u8> {
    let head = [magic].into_iter().chain(dims.iter().copied()).flat_map(u32::to_be_bytes);
    head.chain(values.iter().copied()).collect()
}

struct Folder(TempDir);

impl Folder {
    fn new() -> Self {
        Self(tempfile::tempdir().expect("temp dir"))
    }

    fn put(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.0.path().join(name);
        std::fs::write(&path, bytes).expect("writes");
        path
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    fn pair(&self, images: &[u8], labels: &[u8]) -> Result<Dataset, String> {
        let (images, labels) = (self.put("images", images), self.put("labels", labels));
        read_idx_pair(&images, &labels).map_err(|e| e.to_string())
    }

    fn csv(&self, text: &[u8], options: &CsvOptions) -> Result<(Dataset, Dataset), String> {
        let path = self.put("table.csv", text);
        read_csv(&path, None, options).map(|s| (s.train, s.test)).map_err(|e| e.to_string())
    }
}

fn images() -> Vec<u8> {
    idx(2051, &[2, 2, 3], &[0, 51, 102, 153, 204, 255, 1, 2, 3, 4, 5, 6])
}

fn labels() -> Vec<u8> {
    idx(2049, &[2], &[7, 3])
}

#[test]
fn idx_is_read_plain_and_packed_whatever_the_name_says() {
    let f = Folder::new();
    for (images, labels) in [(images(), labels()), (gzip(&images()), labels()), (images(), gzip(&labels()))] {
        let d = f.pair(&images, &labels).expect("reads");
        assert_eq!((d.len(), d.shape(), d.classes(), d.labels()), (2, &[1, 2, 3][..], Some(8), &[7, 3][..]));
        let (mut x, mut y) = (Vec::new(), Vec::new());
        d.fill(&[0], &mut x, &mut Vec::new(), &mut y).expect("there");
        assert_eq!(x, [0.0, 51.0, 102.0, 153.0, 204.0, 255.0].map(|v: f32| v / 255.0));
    }
}

#[test]
fn user_file_truncated_while_open_is_a_read_error() {
    let f = Folder::new();
    let d = f.pair(&idx(2051, &[1100, 32, 32], &vec![9; 1100 << 10]), &idx(2049, &[1100], &[3; 1100]));
    let d = d.expect("reads");
    let fill = |i| d.fill(&[i], &mut Vec::new(), &mut Vec::new(), &mut Vec::new());
    fill(1099).expect("there");
    let file = std::fs::File::options().write(true).open(f.0.path().join("images")).expect("opens");
    file.set_len(16 + 500 * 1024).expect("cuts");
    fill(0).expect("before the cut");
    let error = fill(1099);
    assert!(matches!(error, Err(paraft_data::DataError::Read { .. })), "{error:?}");
}

#[test]
fn folder_is_read_by_usual_names_and_missing_file_named() {
    let f = Folder::new();
    f.put("train-images-idx3-ubyte.gz", &gzip(&images()));
    f.put("train-labels.idx1-ubyte", &labels());
    f.put("t10k-images-idx3-ubyte", &images());
    let text = read_idx_folder(f.path()).expect_err("incomplete").to_string();
    assert!(text.contains("t10k-labels-idx1-ubyte.gz"), "{text}");
    f.put("t10k-labels-idx1-ubyte", &idx(2049, &[2], &[9, 0]));
    let split = read_idx_folder(f.path()).expect("reads");
    assert_eq!((split.train.classes(), split.test.classes()), (Some(10), Some(10)));
    f.put("t10k-images-idx3-ubyte", &idx(2051, &[2, 1, 1], &[0, 0]));
    assert!(read_idx_folder(f.path()).expect_err("shapes").to_string().contains("[1, 1, 1]"));
}

#[test]
fn broken_idx_is_refused_with_its_place() {
    let f = Folder::new();
    let cut = |bytes: Vec<u8>, n: usize| bytes[..n].to_vec();
    let packed = gzip(&images());
    let mut damaged = packed.clone();
    let end = damaged.len() - 6;
    damaged[end] ^= 0xff; // the checksum
    let cases: [(Vec<u8>, Vec<u8>, &str); 13] = [
        (vec![], labels(), "images at byte 0: the header of 16 bytes is cut off"),
        (cut(images(), 9), labels(), "at byte 9: the header of 16 bytes is cut off"),
        (cut(images(), 20), labels(), "at byte 20: the header [2, 2, 3] promises 12 bytes but only 4 follow"),
        (
            [images(), vec![0]].concat(),
            labels(),
            "at byte 28: the header [2, 2, 3] promises 12 bytes but more",
        ),
        (labels(), labels(), "expected images (2051), found labels (2049)"),
        (images(), images(), "expected labels (2049), found images (2051)"),
        (b"P5 28 28 255 ....".to_vec(), labels(), "found no IDX file of bytes"),
        (idx(2051, &[2, 0, 3], &[]), labels(), "at byte 8: a dimension of [2, 0, 3] is 0"),
        (idx(2051, &[u32::MAX; 3], &[]), labels(), "the limit is 8589934592"),
        (idx(2051, &[60_000, 280, 280], &[1]), labels(), "only 1 follow"),
        (images(), idx(2049, &[3], &[1, 2, 3]), "2 images but"),
        (cut(packed.clone(), packed.len() - 12), labels(), "the gzip stream is cut off here"),
        (damaged, labels(), "the gzip stream is damaged"),
    ];
    for (images, labels, expected) in cases {
        let text = f.pair(&images, &labels).expect_err(expected);
        assert!(text.contains(expected), "{text}\nlacks: {expected}");
    }
}

/// The header claims 4.7 GB, but a few bytes of gzip follow. If memory followed the header, this would show it;
/// Linux counts the process's peak.
#[test]
#[cfg(target_os = "linux")]
fn a_header_that_lies_costs_no_memory() {
    let f = Folder::new();
    let text = f.pair(&gzip(&idx(2051, &[60_000, 280, 280], &[1])), &labels()).expect_err("short");
    assert!(text.contains("promises 4704000000 bytes"), "{text}");
    let status = std::fs::read_to_string("/proc/self/status").expect("procfs");
    let peak = status.lines().find_map(|l| l.strip_prefix("VmHWM:")).expect("a line");
    let kib: u64 = peak.trim().trim_end_matches(" kB").trim().parse().expect("a number");
    assert!(kib < 200_000, "{kib} KiB");
}

#[test]
fn what_is_no_file_is_refused() {
    let f = Folder::new();
    let text = read_csv(f.path(), None, &CsvOptions::default()).expect_err("folder").to_string();
    assert!(text.contains("it is a folder"), "{text}");
    let text =
        read_csv(&f.path().join("none.csv"), None, &CsvOptions::default()).expect_err("none").to_string();
    assert!(text.contains("none.csv"), "{text}");
    #[cfg(unix)]
    assert!(TextCorpus::read(Path::new("/dev/zero"), 8).is_err());
}

#[test]
fn a_table_is_read_with_its_label_wherever_it_is() {
    let f = Folder::new();
    let base = CsvOptions { test_fraction: Some(0.25), ..CsvOptions::default() };
    let text = b"a,b,c\n1,2,0\n3,4,1\n5,6,2.0\n\n7, 8 ,1\r\n".as_slice();
    for bytes in [text.to_vec(), gzip(text)] {
        let (train, test) = f.csv(&bytes, &base).expect("reads");
        assert_eq!((train.len(), train.labels(), train.classes()), (3, &[0, 1, 2][..], Some(3)));
        let (mut x, mut y) = (Vec::new(), Vec::new());
        test.fill(&[0], &mut x, &mut Vec::new(), &mut y).expect("there");
        assert_eq!((x, y), (vec![7.0, 8.0], vec![1]));
    }
    for (label, labels, width) in [
        (LabelColumn::First, &[1, 3, 5][..], 2),
        (LabelColumn::Index(1), &[2, 4, 6], 2),
        (LabelColumn::None, &[], 3),
    ] {
        let (train, _) = f.csv(text, &CsvOptions { label: label.clone(), ..base.clone() }).expect("reads");
        assert_eq!((train.labels(), train.input_len()), (labels, width), "{label:?}");
    }
    let half = CsvOptions { label: LabelColumn::None, scale: 0.5, ..base };
    let (train, _) = f.csv(text, &half).expect("reads");
    let (mut x, mut y) = (Vec::new(), Vec::new());
    train.fill(&[1], &mut x, &mut Vec::new(), &mut y).expect("there");
    assert_eq!(x, [1.5, 2.0, 0.5]);
}

#[test]
fn a_second_file_is_the_held_out_part() {
    let f = Folder::new();
    let (a, b) = (f.put("a.csv", b"1,0\n2,1\n"), f.put("b.csv", b"3,4\n"));
    let split = read_csv(&a, Some(&b), &CsvOptions::default()).expect("reads");
    assert_eq!((split.train.len(), split.test.len(), split.train.classes()), (2, 1, Some(5)));
    let both = CsvOptions { test_fraction: Some(0.5), ..CsvOptions::default() };
    assert!(read_csv(&a, Some(&b), &both).expect_err("both").to_string().contains("test_fraction"));
    let wide = f.put("b.csv", b"3,4,1\n");
    assert!(read_csv(&a, Some(&wide), &CsvOptions::default()).is_err());
}

#[test]
fn broken_tables_are_refused_with_their_line() {
    let f = Folder::new();
    let packed = gzip(&b"1,2,0\n".repeat(10_000));
    let cases: [(&[u8], &str); 17] = [
        (b"", "no row of numbers"),
        (b"a,b,c\n", "no row of numbers"),
        (b"1,2,0\n1,nan,0\n", "line 2: field 2 is `nan`: not finite"),
        (b"1,2,0\n1,-inf,0\n", "line 2: field 2 is `-inf`"),
        (b"1,2,0\n1,1e39,0\n", "line 2: field 2 is `1e39`"),
        (b"1,2,0\n1,,0\n", "line 2: field 2 is ``, not a number; fill the gap, or remove the row"),
        (b"1,2,0\n1,x,0\n", "line 2: field 2 is `x`, not a number; write a number, or remove the row"),
        (
            b"5.1;3.5;0\n",
            "line 1: the first row is one field, with semicolons in it; separate the fields by commas",
        ),
        (b"5.1\t3.5\t0\n", "with tabs in it"),
        (
            b"1,0\n2,1000\n3,9000\n4,0\n5,1000\n",
            "labels up to 9000 are 9001 classes, and only 3 of these have a sample",
        ),
        (b"1,2,0\n1,2\n", "line 2: 2 fields where the first row has 3"),
        (b"1,2,0\n1,2,3,4\n", "line 2: 4 fields"),
        (b"1,x,0\n", "line 1: field 2 is `x`, not a number; write a number"),
        (b"1,2,-1\n", "line 1: label `-1` is no whole number"),
        (b"1,2,0.5\n", "line 1: label `0.5` is no whole number"),
        (b"1\n2\n", "line 1: the label is column 0 (from 0) but the row has 1 fields"),
        (&packed[..packed.len() - 10], "the gzip stream is cut off here"),
    ];
    for (bytes, expected) in cases {
        let text = f.csv(bytes, &CsvOptions::default()).expect_err(expected);
        assert!(text.contains(expected), "{text}\nlacks: {expected}");
    }
    let ok = b"1,2,0\n1,2,1\n".as_slice();
    for (options, expected) in [
        (CsvOptions { scale: f64::NAN, ..CsvOptions::default() }, "[data] scale"),
        (CsvOptions { test_fraction: Some(1.0), ..CsvOptions::default() }, "[data] test_fraction"),
        (CsvOptions::default(), "of 2 rows 0 would be held out"),
        (CsvOptions { label: LabelColumn::Index(3), ..CsvOptions::default() }, "the label is column 3"),
    ] {
        let text = f.csv(ok, &options).expect_err(expected);
        assert!(text.contains(expected), "{text}\nlacks: {expected}");
    }
}

#[test]
fn a_header_with_a_column_called_nan_is_a_header() {
    let options = CsvOptions { test_fraction: Some(0.25), ..CsvOptions::default() };
    let text = b"age,nan,label\n1,2,0\n1,2,1\n3,4,0\n4,4,1\n".as_slice();
    let (train, test) = Folder::new().csv(text, &options).expect("four rows below a header");
    assert_eq!((train.len(), test.len()), (3, 1));
}

#[test]
fn text_that_is_not_utf8_is_refused_with_its_place() {
    let f = Folder::new();
    let path = f.put("a.txt", b"abc\xffdef");
    let text = TextCorpus::read(&path, 2).expect_err("latin-1").to_string();
    assert!(text.contains("at byte 3: byte 0xff is not UTF-8"), "{text}");
    let path = f.put("b.txt", &gzip("größer".as_bytes()));
    assert_eq!(TextCorpus::read(&path, 2).expect("reads").tokens().len(), 8);
}
