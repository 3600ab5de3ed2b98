//! Numbers separated by commas: one sample per row; all columns except the label are features. Plain or gzip.
//!
//! Every field must be a finite number, and every row as long as the first. Others are refused with their line,
//! because a silent NaN would end as a silent NaN in the weights.

use crate::input::{self, Input, MAX_BYTES};
use crate::{DataError, Dataset, Place, Samples, Split};
use csv::ByteRecord;
use serde::de::{Deserializer, Error, Unexpected, Visitor};
use serde::{Deserialize, Serialize, Serializer};
use std::collections::BTreeSet;
use std::io::Read;
use std::path::Path;

/// With more classes, the column is not a label; a model would have an output for each.
const MAX_CLASSES: u32 = 1 << 16;
/// The default part that is held out.
const TEST_FRACTION: f64 = 0.2;

/// How to read a table.
#[derive(Clone, Debug, PartialEq)]
pub struct CsvOptions {
    /// The label's column. Default last.
    pub label: LabelColumn,
    /// Whether the first row has names. Default auto.
    pub header: Header,
    /// Part of the rows held out, above 0 and below 1, spread evenly (0.2: rows 5, 10, 15, ...). Default 0.2.
    /// Not with a test file.
    pub test_fraction: Option<f64>,
    /// Multiplies every feature. Default 1.
    pub scale: f64,
}

impl Default for CsvOptions {
    fn default() -> Self {
        Self { label: LabelColumn::default(), header: Header::default(), test_fraction: None, scale: 1.0 }
    }
}

/// The label's column: an integer from 0, the class. As text `first`, `last`, `none` or the index.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LabelColumn {
    /// Column 0.
    First,
    /// The last column.
    #[default]
    Last,
    /// No column: all are features.
    None,
    /// This column, counted from 0.
    Index(usize),
}

/// Whether the first row has names rather than numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Header {
    /// The first row has names.
    Yes,
    /// The first row has numbers.
    No,
    /// The first row has names if none of its fields is a finite number.
    #[default]
    Auto,
}

impl Serialize for LabelColumn {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::First => s.serialize_str("first"),
            Self::Last => s.serialize_str("last"),
            Self::None => s.serialize_str("none"),
            Self::Index(i) => s.serialize_u64(*i as u64),
        }
    }
}

/// Written by hand, because an untagged enum's error is only "did not match any variant".
impl<'de> Deserialize<'de> for LabelColumn {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct Column;
        impl Visitor<'_> for Column {
            type Value = LabelColumn;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("\"first\", \"last\", \"none\" or the index of a column")
            }

            fn visit_str<E: Error>(self, s: &str) -> Result<LabelColumn, E> {
                match s {
                    "first" => Ok(LabelColumn::First),
                    "last" => Ok(LabelColumn::Last),
                    "none" => Ok(LabelColumn::None),
                    _ => Err(E::invalid_value(Unexpected::Str(s), &self)),
                }
            }

            fn visit_u64<E: Error>(self, i: u64) -> Result<LabelColumn, E> {
                let index =
                    usize::try_from(i).map_err(|_| E::invalid_value(Unexpected::Unsigned(i), &self))?;
                Ok(LabelColumn::Index(index))
            }

            fn visit_i64<E: Error>(self, i: i64) -> Result<LabelColumn, E> {
                let index = u64::try_from(i).map_err(|_| E::invalid_value(Unexpected::Signed(i), &self))?;
                self.visit_u64(index)
            }
        }
        d.deserialize_any(Column)
    }
}

impl CsvOptions {
    /// Checks the ranges; the error names the key.
    pub fn validate(&self) -> Result<(), DataError> {
        let option = |key, why: String| Err(DataError::Option { key, why });
        if self.test_fraction.is_some_and(|f| !(f > 0.0 && f < 1.0)) {
            return option("test_fraction", format!("{:?} is not above 0 and below 1", self.test_fraction));
        }
        if self.scale == 0.0 || !(self.scale as f32).is_finite() {
            return option("scale", format!("{} is not a finite number other than 0", self.scale));
        }
        Ok(())
    }
}

/// Reads a table. A part of it is held out, or a second file is.
pub fn read_csv(path: &Path, test_path: Option<&Path>, options: &CsvOptions) -> Result<Split, DataError> {
    options.validate()?;
    let table = read_table(path, input::open(path)?, options)?;
    let Some(test_path) = test_path else {
        let n = table.rows;
        let held_out = (n as f64 * options.test_fraction.unwrap_or(TEST_FRACTION)).round() as usize;
        if held_out == 0 || held_out >= n {
            let why =
                format!("of {n} rows {held_out} would be held out; training and test need one each at least");
            return Err(DataError::Option { key: "test_fraction", why });
        }
        let classes = classes(path, &[&table])?;
        // Row i is held out when the running share passes an integer: evenly spread, in integer arithmetic.
        let share = |i: usize| (i as u128 * held_out as u128) / n as u128;
        return Ok(table.dataset(classes)?.split(|i| share(i + 1) > share(i)));
    };
    if options.test_fraction.is_some() {
        let why = "it has no meaning beside `test_path`; leave one of them out".into();
        return Err(DataError::Option { key: "test_fraction", why });
    }
    let test = read_table(test_path, input::open(test_path)?, options)?;
    if table.columns != test.columns {
        return Err(DataError::Mismatch(format!(
            "{} has {} feature columns but {} has {}",
            path.display(),
            table.columns,
            test_path.display(),
            test.columns
        )));
    }
    let classes = classes(path, &[&table, &test])?;
    Ok(Split { train: table.dataset(classes)?, test: test.dataset(classes)? })
}

/// The number of classes of these tables; 0 without labels. The model has an output for each.
fn classes(path: &Path, tables: &[&Table]) -> Result<usize, DataError> {
    let labels: BTreeSet<u32> = tables.iter().filter_map(|t| t.labels.as_ref()).flatten().copied().collect();
    let Some(&last) = labels.last() else { return Ok(0) };
    let classes = last as usize + 1;
    if labels.len() < classes / 2 {
        let what = format!(
            "labels up to {last} are {classes} classes, and only {} of these have a sample",
            labels.len()
        );
        let remedy = "number the classes from 0 without gaps, or set `label` to the right column";
        return Err(DataError::Malformed { path: path.to_owned(), at: Place::File, what, remedy });
    }
    Ok(classes)
}

/// A file's rows; the label's column is removed from `values`.
pub(crate) struct Table {
    pub(crate) values: Vec<f32>,
    pub(crate) labels: Option<Vec<u32>>,
    columns: usize,
    rows: usize,
}

impl Table {
    fn dataset(self, classes: usize) -> Result<Dataset, DataError> {
        let labels = self.labels.map(|l| (l, classes));
        Dataset::new(Samples::Floats(self.values), vec![self.columns], labels)
    }
}

/// Reads all rows of an opened file; `path` is for messages.
pub(crate) fn read_table(path: &Path, file: Input<'_>, options: &CsvOptions) -> Result<Table, DataError> {
    let mut reader = csv::ReaderBuilder::new()
        .has_headers(false)
        .flexible(true) // our own message for ragged rows
        .trim(csv::Trim::All)
        .from_reader(file.take(MAX_BYTES));
    let (mut row, mut shape, mut first) = (ByteRecord::new(), None, true);
    let mut table = Table { values: Vec::new(), labels: None, columns: 0, rows: 0 };
    while read_row(&mut reader, &mut row)? {
        let at = Place::Line(row.position().map_or(0, |p| p.line()));
        let bad = |what: String, remedy| DataError::Malformed { path: path.to_owned(), at, what, remedy };
        let is_first = std::mem::take(&mut first);
        if is_first && let Some(other) = other_separator(&row) {
            let what = format!("the first row is one field, with {other} in it");
            return Err(bad(what, "separate the fields by commas, and write decimal points"));
        }
        if is_first && is_header(&row, options.header) {
            shape = Some((row.len(), label_index(row.len(), options.label).map_err(|w| bad(w, LABEL))?));
            continue;
        }
        let (width, label) = match shape {
            Some(s) => s,
            None => {
                let label = label_index(row.len(), options.label).map_err(|w| bad(w, LABEL))?;
                *shape.insert((row.len(), label))
            }
        };
        if row.len() != width {
            let what = format!("{} fields where the first row has {width}", row.len());
            return Err(bad(what, "give every row as many fields"));
        }
        for (column, field) in row.iter().enumerate() {
            let shown = || String::from_utf8_lossy(&field[..field.len().min(40)]).into_owned();
            if label == Some(column) {
                let class = class(field).ok_or_else(|| {
                    let what =
                        format!("label `{}` is no whole number from 0 to {}", shown(), MAX_CLASSES - 1);
                    bad(what, "number the classes from 0, or set `label` to the right column")
                })?;
                table.labels.get_or_insert_default().push(class);
                continue;
            }
            let value = number(field).ok_or_else(|| {
                let remedy = match field {
                    [] => "fill the gap, or remove the row",
                    _ if is_first => "write a number; if this row holds names, set header = \"yes\"",
                    _ => "write a number, or remove the row",
                };
                bad(format!("field {} is `{}`, not a number", column + 1, shown()), remedy)
            })?;
            let value = value * options.scale as f32;
            if !value.is_finite() {
                let what = format!("field {} is `{}`: not finite after scaling", column + 1, shown());
                return Err(bad(what, "remove the row or fill the gap"));
            }
            table.values.push(value);
        }
        table.columns = width - usize::from(label.is_some());
        table.rows += 1;
    }
    let input = reader.get_ref().get_ref();
    if input.at() >= MAX_BYTES {
        return Err(input.too_large(input.at(), MAX_BYTES));
    }
    if table.rows == 0 {
        return Err(input.malformed(Place::File, "no row of numbers", "check that it is the right file"));
    }
    Ok(table)
}

const LABEL: &str = "set `label` to a column that exists, and leave one for the features";

type Reader<'a> = csv::Reader<std::io::Take<Input<'a>>>;

fn read_row(reader: &mut Reader<'_>, row: &mut ByteRecord) -> Result<bool, DataError> {
    reader.read_byte_record(row).map_err(|e| match e.into_kind() {
        csv::ErrorKind::Io(e) => reader.get_ref().get_ref().failed(e),
        other => reader.get_ref().get_ref().failed(std::io::Error::other(format!("{other:?}"))),
    })
}

/// The probable separator of a row without commas.
fn other_separator(row: &ByteRecord) -> Option<&'static str> {
    let only = row.get(0).filter(|_| row.len() == 1)?;
    [(b';', "semicolons"), (b'\t', "tabs")].into_iter().find(|(s, _)| only.contains(s)).map(|(_, name)| name)
}

fn is_header(row: &ByteRecord, header: Header) -> bool {
    match header {
        Header::Yes => true,
        Header::No => false,
        // A column may be named `nan` or `inf`, which Rust parses as numbers.
        Header::Auto => row.iter().all(|f| number(f).is_none_or(|v| !v.is_finite())),
    }
}

/// The label's index in a row of `width` fields.
fn label_index(width: usize, label: LabelColumn) -> Result<Option<usize>, String> {
    let index = match label {
        LabelColumn::None => return Ok(None),
        LabelColumn::First => 0,
        LabelColumn::Last => width.saturating_sub(1),
        LabelColumn::Index(i) => i,
    };
    if width < 2 || index >= width {
        return Err(format!("the label is column {index} (from 0) but the row has {width} fields"));
    }
    Ok(Some(index))
}

fn number(field: &[u8]) -> Option<f32> {
    std::str::from_utf8(field).ok()?.parse().ok()
}

/// A class, even if written as `3.0`.
fn class(field: &[u8]) -> Option<u32> {
    let value: f64 = std::str::from_utf8(field).ok()?.parse().ok()?;
    (value.fract() == 0.0 && (0.0..f64::from(MAX_CLASSES)).contains(&value)).then_some(value as u32)
}
