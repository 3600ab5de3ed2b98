//! The columns of a table: how a job names them, and the use of each.

use super::{CsvOptions, Fault, listed};
use csv::ByteRecord;
use serde::de::{Deserializer, Error, Unexpected, Visitor};
use serde::{Deserialize, Serialize};

const LABEL: &str = "set `label` to a column that exists, and leave one for the features";
const IGNORE: &str = "set `ignore` to columns that exist";

/// A column, by its index from 0 or by its name in the header.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum Column {
    /// The index, from 0.
    Index(usize),
    /// The name.
    Name(String),
}

/// The label's column. As text `first`, `last`, `none` or the name; as a number the index.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Column", into = "Column")]
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
    /// The column of this name.
    Name(String),
}

impl From<Column> for LabelColumn {
    fn from(column: Column) -> Self {
        match column {
            Column::Index(i) => Self::Index(i),
            Column::Name(name) if name == "first" => Self::First,
            Column::Name(name) if name == "last" => Self::Last,
            Column::Name(name) if name == "none" => Self::None,
            Column::Name(name) => Self::Name(name),
        }
    }
}

impl From<LabelColumn> for Column {
    fn from(label: LabelColumn) -> Self {
        match label {
            LabelColumn::First => Self::Name("first".into()),
            LabelColumn::Last => Self::Name("last".into()),
            LabelColumn::None => Self::Name("none".into()),
            LabelColumn::Index(i) => Self::Index(i),
            LabelColumn::Name(name) => Self::Name(name),
        }
    }
}

/// Written by hand, because an untagged enum's error is only "did not match any variant".
impl<'de> Deserialize<'de> for Column {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct NameOrIndex;
        impl Visitor<'_> for NameOrIndex {
            type Value = Column;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("the name of a column or its index from 0")
            }

            fn visit_str<E: Error>(self, name: &str) -> Result<Column, E> {
                Ok(Column::Name(name.to_owned()))
            }

            fn visit_u64<E: Error>(self, i: u64) -> Result<Column, E> {
                let index =
                    usize::try_from(i).map_err(|_| E::invalid_value(Unexpected::Unsigned(i), &self))?;
                Ok(Column::Index(index))
            }

            fn visit_i64<E: Error>(self, i: i64) -> Result<Column, E> {
                let index = u64::try_from(i).map_err(|_| E::invalid_value(Unexpected::Signed(i), &self))?;
                self.visit_u64(index)
            }
        }
        d.deserialize_any(NameOrIndex)
    }
}

/// The use of a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Use {
    Feature,
    Label,
    Ignored,
}

/// The columns of a table.
#[derive(Debug)]
pub(super) struct Columns {
    names: Option<ByteRecord>,
    pub uses: Vec<Use>,
}

impl Columns {
    /// As the options and the first row say.
    pub fn of(first: &ByteRecord, options: &CsvOptions) -> Result<Self, Fault> {
        let width = first.len();
        let names = is_header(first, options).then(|| first.clone());
        let mut columns = Self { names, uses: vec![Use::Feature; width] };
        for column in &options.ignore {
            let at = match column {
                Column::Index(i) => *i,
                Column::Name(name) => columns.named(name)?,
            };
            if at >= width {
                let what = format!("`ignore` has column {at} (from 0) but the row has {width} fields");
                return Err((what, IGNORE));
            }
            columns.uses[at] = Use::Ignored;
        }
        let label = match &options.label {
            LabelColumn::None => None,
            LabelColumn::First => Some(0),
            LabelColumn::Last => Some(width.saturating_sub(1)),
            LabelColumn::Index(i) => Some(*i),
            LabelColumn::Name(name) => Some(columns.named(name)?),
        };
        if let Some(label) = label {
            if width < 2 || label >= width {
                let what = format!("the label is column {label} (from 0) but the row has {width} fields");
                return Err((what, LABEL));
            }
            if columns.uses[label] == Use::Ignored {
                let what = format!("the label is column {label} (from 0), and `ignore` has it too");
                return Err((what, "take it out of `ignore`, or set `label` to another column"));
            }
            columns.uses[label] = Use::Label;
        }
        if columns.features() == 0 {
            return Err(("no column is left for the features".into(), "take columns out of `ignore`"));
        }
        Ok(columns)
    }

    /// Whether the first row has names.
    pub fn have_names(&self) -> bool {
        self.names.is_some()
    }

    /// Number of features.
    pub fn features(&self) -> usize {
        self.uses.iter().filter(|u| **u == Use::Feature).count()
    }

    /// A column in messages.
    pub fn shown(&self, at: usize) -> String {
        match self.names.as_ref().and_then(|names| names.get(at)) {
            Some(name) => format!("field {} ({})", at + 1, listed(&[name])),
            None => format!("field {}", at + 1),
        }
    }

    /// The first column that has another name in `other`, and both names.
    pub fn differ<'a>(&'a self, other: &'a Self) -> Option<(usize, &'a [u8], &'a [u8])> {
        let (ours, theirs) = (self.names.as_ref()?, other.names.as_ref()?);
        let pairs = ours.iter().zip(theirs.iter()).enumerate();
        pairs.map(|(at, (a, b))| (at, a, b)).find(|(_, a, b)| a != b)
    }

    /// The index of the column of this name.
    fn named(&self, name: &str) -> Result<usize, Fault> {
        let names: Vec<&[u8]> = self.names.iter().flatten().collect();
        let mut found = (0..names.len()).filter(|i| names[*i] == name.as_bytes());
        match (found.next(), found.next()) {
            (Some(at), None) => Ok(at),
            (Some(one), Some(other)) => Err((
                format!("columns {one} and {other} (from 0) are both named `{name}`"),
                "rename one of them, or give the column's index",
            )),
            (None, _) => Err((
                format!("no column is named `{name}`; the header has {}", listed(&names)),
                "give one of these names, or the column's index from 0",
            )),
        }
    }
}

/// Whether the first row has names: none of its fields is a finite number, or an option names a column.
fn is_header(row: &ByteRecord, options: &CsvOptions) -> bool {
    // A column may be named `nan` or `inf`, which Rust parses as numbers.
    options.names_a_column() || row.iter().all(|f| super::number(f).is_none_or(|v| !v.is_finite()))
}
