//! The embedded data set: 1,797 images of digits, 8x8, so that a first run needs no download.
//!
//! Optical Recognition of Handwritten Digits, E. Alpaydin and C. Kaynak, 1998, UCI Machine Learning Repository,
//! CC BY 4.0; `assets/README.md` has the details.

use crate::csv_file::{self, CsvOptions, Labels};
use crate::{DataError, Dataset, Samples, Split, input};
use std::path::Path;

const FILE: &[u8] = include_bytes!("../assets/digits.csv.gz");
const CLASSES: usize = 10;
/// Pixels range from 0 to 16.
const WHITE: f32 = 16.0;

/// The digits, pixels divided by 16, shape `[1, 8, 8]`. Every fifth image from the first (indices 0, 5, 10, ...) is
/// held out: 360 images; 1,437 remain. The file is ordered by writer, so this takes some of each.
pub fn digits() -> Result<Split, DataError> {
    let name = Path::new("embedded digits.csv.gz");
    let table = csv_file::read_table(name, input::decode(name, FILE)?, &CsvOptions::default())?;
    let values = table.values.iter().map(|&v| v as u8).collect();
    let samples = Samples::Bytes { values, divisor: WHITE };
    let labels = match table.labels {
        Labels::Classes(labels) => Some((labels, CLASSES)),
        _ => None,
    };
    let all = Dataset::new(samples, vec![1, 8, 8], labels)?;
    Ok(all.split(|i| i % 5 == 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_digits_are_whole() {
        let d = digits().expect("embedded");
        assert_eq!((d.train.len(), d.test.len()), (1437, 360));
        assert_eq!((d.train.shape(), d.train.classes()), (&[1, 8, 8][..], Some(10)));
        for part in [&d.train, &d.test] {
            for class in 0..10 {
                let n = part.labels().iter().filter(|&&l| l == class).count();
                assert!(n * 100 > part.len() * 7, "class {class} has {n} of {}", part.len());
            }
        }
        let (mut x, mut y) = (Vec::new(), Vec::new());
        d.test.fill(&[0], &mut x, &mut Vec::new(), &mut y).expect("in memory");
        // The first row of the file: 0,0,5,13,9,1,0,0, ... labelled 0.
        assert_eq!((&x[..8], y[0]), (&[0.0, 0.0, 5.0, 13.0, 9.0, 1.0, 0.0, 0.0].map(|v| v / 16.0)[..], 0));
        let all: Vec<u32> = (0..1437).collect();
        d.train.fill(&all, &mut x, &mut Vec::new(), &mut y).expect("in memory");
        assert!(x.iter().all(|v| (0.0..=1.0).contains(v)));
    }
}
