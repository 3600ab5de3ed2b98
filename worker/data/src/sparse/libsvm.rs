//! libsvm's text (svmlight's): `label[:importance] [qid:n] id:value ... # comment`, one sample a line.
//!
//! What others do with what the format leaves open, run on files of two lines: scikit-learn 1.9.1
//! (`load_svmlight_file`), XGBoost 3.2.0 (`DMatrix`), LIBLINEAR 2.3.0 (`train`); and what this reader does.
//!
//! | in the file | scikit-learn | XGBoost | LIBLINEAR | here |
//! |---|---|---|---|---|
//! | indices from 1 | column 0 is the first, unless an index 0 is in the file | as written | as written | as written |
//! | index 0 | no column is moved, in this file | as written | error | as written |
//! | indices not sorted | error | sorted | error | in the file's order |
//! | an index twice in a row | error | both kept | error | error |
//! | `qid:7` | ignored by default | group of the row | error | ignored |
//! | `# comment` after a row | ignored | ignored | the row ends, or an error if it has a colon | ignored |
//! | a line of comment | ignored | error, in the first line ignored | error | ignored |
//! | blank line | ignored | ignored | error | ignored |
//! | value `nan`, `inf` | kept | error; last in its row another number | kept, and the model is nan | error |
//! | `label:0.5` | error | weight of the row | error | importance of the row |
//! | ... on some rows only | error | others have memory's content | error | others have 1 |
//! | two labels `1,3` | error, unless asked for | error | error | error |
//! | label `nan` | kept | the row's values go to no row | a class -2147483648 | error |
//! | index without a value | error | error | error | error |
//! | value 0 | kept | kept | kept | kept |
//! | row without features | kept | kept | kept | kept |
//! | index 2^31 | error | as written | error | as written, up to 2^64 - 1 |
//! | no label, `1:1 2:1` | error | label 1 of weight 1 | error | label 1 of importance 1 |

use super::SparseBatch;
use super::lines::{Fault, cut_at_colon, fault, number, read_samples, shown, whole, words};
use super::targets::{Targets, importance};
use crate::{DataError, Task};
use std::path::Path;

/// Reads all samples, of one field, from a file, plain or gzip. Classes become 0 and 1, also where the file has -1 and
/// +1.
///
/// # Errors
/// [`DataError::Malformed`] with line and column; [`DataError::Read`], [`DataError::TooLarge`].
pub fn read_libsvm(path: &Path, task: Task) -> Result<SparseBatch, DataError> {
    let mut targets = Targets::new(task);
    let mut seen = Vec::new();
    read_samples(path, 1, |line, samples| sample(line, &mut targets, &mut seen, samples))
}

/// Reads a line. `seen` is scratch.
fn sample(
    line: &[u8],
    targets: &mut Targets,
    seen: &mut Vec<u64>,
    samples: &mut SparseBatch,
) -> Result<Option<(f32, f32)>, Fault> {
    let line = line.split(|b| *b == b'#').next().unwrap_or_default();
    let mut rest = words(line);
    let Some((at, first)) = rest.next() else { return Ok(None) };
    let (label, weight) = cut_at_colon(first);
    let factor = match weight {
        Some(word) => importance(word, at + label.len() + 1)?,
        None => 1.0,
    };
    let label = targets.label(label, at)?;
    let field = &mut samples.fields[0];
    let from = field.ids.len();
    let (mut last, mut sorted, mut may_be_qid) = (None, true, true);
    for (at, word) in rest {
        let (index, value) = cut_at_colon(word);
        let Some(value) = value else {
            let what = format!("{} has no value", shown(word));
            return fault(at, what, "write index:value, with value 1 for a feature that is there");
        };
        let place = at + index.len() + 1;
        if std::mem::take(&mut may_be_qid) && index == b"qid" {
            // Which list the sample belongs to, for learning to rank. The losses here look at one sample.
            if whole(value).is_none() {
                return fault(place, format!("qid {} is no whole number", shown(value)), "correct it");
            }
            continue;
        }
        let Some(id) = whole(index) else {
            let what = format!("index {} is no whole number from 0 to {}", shown(index), u64::MAX);
            return fault(at, what, "number the features, or write the file in Vowpal Wabbit's format");
        };
        let Some(value) = number(value) else {
            let what = format!("value {} is no finite number", shown(value));
            let remedy = match value {
                [] => "write the value after the colon",
                _ if value.contains(&b':') => {
                    "write index:value; LIBFFM's field:index:value is another format"
                }
                _ => "fill the gap, or leave the feature out",
            };
            return fault(place, what, remedy);
        };
        sorted &= last < Some(id);
        last = Some(id);
        field.push(id, value);
    }
    if !sorted {
        seen.clear();
        seen.extend_from_slice(&field.ids[from..]);
        seen.sort_unstable();
        if let Some(twice) = seen.windows(2).find(|pair| pair[0] == pair[1]) {
            let same = words(line).skip(1).filter(|(_, word)| whole(cut_at_colon(word).0) == Some(twice[0]));
            let at = same.map(|(at, _)| at).nth(1).unwrap_or_default();
            return fault(
                at,
                format!("index {} is there twice", twice[0]),
                "add its values up, or remove one",
            );
        }
    }
    Ok(Some((label, factor)))
}

#[cfg(test)]
#[path = "libsvm_tests.rs"]
mod tests;
