//! The parts of layers.

use std::ops::Range;

/// Each layer's ranges, split at every layer's boundaries: shared ranges become separate parts.
pub(super) fn parts(layers: &[Vec<Range<usize>>]) -> Vec<Vec<Range<usize>>> {
    let mut cuts: Vec<usize> = layers.iter().flatten().flat_map(|r| [r.start, r.end]).collect();
    cuts.sort_unstable();
    cuts.dedup();
    let cut = |range: &Range<usize>| -> Vec<Range<usize>> {
        let inner = cuts.iter().copied().filter(|c| range.contains(c) || *c == range.end);
        let places: Vec<usize> = inner.collect();
        places.windows(2).map(|w| w[0]..w[1]).collect()
    };
    layers.iter().map(|layer| layer.iter().flat_map(cut).collect()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_layers_share_is_in_parts_of_its_own() {
        let one = |r: Range<usize>| vec![r];
        let layers = [one(0..12), one(12..20), one(20..28), vec![0..10, 28..30]];
        let cut = parts(&layers);
        assert_eq!(cut, [vec![0..10, 10..12], one(12..20), one(20..28), vec![0..10, 28..30]]);
        assert_eq!(parts(&[one(0..4), Vec::new()]), [one(0..4), Vec::new()]);
    }
}
