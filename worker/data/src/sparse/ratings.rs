//! Ratings: user, item and rating a line, and perhaps a time: MovieLens' `ratings.csv` (with a header), `u.data` (tabs)
//! and `ratings.dat` (`::`), and others of this form.
//!
//! A rating of 0 is a rating, not a gap. The time is not used.

use super::SparseBatch;
use super::lines::{Fault, fault, number, read_samples, shown, whole};
use crate::DataError;
use serde::{Deserialize, Serialize};
use std::path::Path;
use xxhash_rust::xxh3::xxh3_64;

/// What a file's ids are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Ids {
    /// Whole numbers, which stay what they are.
    #[default]
    Numbers,
    /// Texts, of which a 64-bit hash is the id; digits alone are a text too.
    Texts,
}

impl Ids {
    fn id(self, field: &[u8], at: usize) -> Result<u64, Fault> {
        let field = unquoted(field);
        let is_float =
            field.contains(&b'.') && std::str::from_utf8(field).is_ok_and(|f| f.parse::<f64>().is_ok());
        if is_float || field.is_empty() || field.eq_ignore_ascii_case(b"nan") {
            return fault(
                at,
                format!("id {} is no whole number and no name", shown(field)),
                "write ids as whole numbers; pandas writes 1 as 1.0 where a column has gaps, so remove rows with gaps first",
            );
        }
        match (self, whole(field)) {
            (Self::Texts, _) => Ok(xxh3_64(field)),
            (Self::Numbers, Some(id)) => Ok(id),
            (Self::Numbers, None) => fault(
                at,
                format!("id {} is no whole number from 0 to {}", shown(field), u64::MAX),
                "read ids as texts with ids = \"texts\", in all files of the data set",
            ),
        }
    }
}

/// Reads all ratings from a file, plain or gzip: two fields of one id a sample, the user and the item; the label is the
/// rating.
///
/// # Errors
/// [`DataError::Malformed`] with line and column; [`DataError::Read`], [`DataError::TooLarge`].
pub fn read_ratings(path: &Path, ids: Ids) -> Result<SparseBatch, DataError> {
    let mut form: Option<(&[u8], usize)> = None;
    read_samples(path, 2, |line, samples| {
        let is_first = form.is_none();
        let (separator, width) = *form.get_or_insert_with(|| {
            let found =
                [b"::".as_slice(), b"\t"].into_iter().find(|s| line.windows(s.len()).any(|w| w == *s));
            let separator = found.unwrap_or(b",");
            (separator, fields(line, separator).count())
        });
        let mut row = [(0, &[][..]); 3];
        let mut found = 0;
        for (to, field) in row.iter_mut().zip(fields(line, separator)) {
            *to = field;
        }
        fields(line, separator).for_each(|_| found += 1);
        if !(3..=4).contains(&width) || found != width {
            let what = if is_first {
                format!("{found} fields where user, item, rating and perhaps a time belong")
            } else {
                format!("{found} fields where the first row has {width}")
            };
            return fault(0, what, "separate the fields by commas, tabs or `::`");
        }
        let [(user_at, user), (item_at, item), (at, rating)] = row;
        let Some(label) = number(unquoted(rating)) else {
            if is_first && unquoted(rating).first().is_some_and(u8::is_ascii_alphabetic) {
                return header(unquoted(user), unquoted(item), unquoted(rating));
            }
            let what = format!("rating {} is no finite number", shown(rating));
            return fault(at, what, "write a number, or remove the row");
        };
        let (user, item) = (ids.id(user, user_at)?, ids.id(item, item_at)?);
        samples.fields[0].push(user, 1.0);
        samples.fields[1].push(item, 1.0);
        Ok(Some((label, 1.0)))
    })
}

/// Refuses names that say that the columns are others.
fn header(user: &[u8], item: &[u8], rating: &[u8]) -> Result<Option<(f32, f32)>, Fault> {
    let says = |field: &[u8], word: &str| String::from_utf8_lossy(field).to_ascii_lowercase().contains(word);
    if !says(user, "user") || says(item, "user") || !says(rating, "rating") {
        let what = format!("columns {}, {}, {}", shown(user), shown(item), shown(rating));
        return fault(0, what, "order the columns as user, item, rating, and name them so");
    }
    Ok(None)
}

/// The fields of a line, each with its place.
fn fields<'a>(line: &'a [u8], separator: &'a [u8]) -> impl Iterator<Item = (usize, &'a [u8])> {
    let mut from = Some(0);
    std::iter::from_fn(move || {
        let at = from?;
        let rest = &line[at..];
        let len = rest.windows(separator.len()).position(|w| w == separator);
        from = len.map(|len| at + len + separator.len());
        Some((at, rest[..len.unwrap_or(rest.len())].trim_ascii()))
    })
}

fn unquoted(field: &[u8]) -> &[u8] {
    match field {
        [b'"', inner @ .., b'"'] => inner,
        _ => field,
    }
}

#[cfg(test)]
#[path = "ratings_tests.rs"]
mod tests;
