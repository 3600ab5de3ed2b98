//! Values of flags that benchmarks share.

use paraft_common::{codec::F32_BYTES, need::Bytes};

/// How often a case is measured: at least once.
pub fn repeats(given: &str) -> Result<usize, String> {
    match given.parse() {
        Ok(n) if (1..=10_000).contains(&n) => Ok(n),
        _ => Err("a number from 1 to 10000".into()),
    }
}

/// Replicas of a shard: 1 to 1023, an odd number.
pub fn replicas(given: &str) -> Result<u32, String> {
    match given.parse() {
        Ok(n) if (1..1024).contains(&n) && n % 2 == 1 => Ok(n),
        _ => Err("an odd number from 1 to 1023".into()),
    }
}

const UNITS: [(&str, usize); 3] = [("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10)];

/// Parses a payload's size.
pub fn size(text: &str) -> Result<usize, String> {
    let bytes = text.parse::<Bytes>().ok().and_then(|Bytes(n)| usize::try_from(n).ok());
    bytes
        .filter(|b| (F32_BYTES..=1 << 30).contains(b) && b.is_multiple_of(F32_BYTES))
        .ok_or_else(|| "write a number of bytes such as 64K or 4M: a multiple of 4, at most 1G".into())
}

/// Formats a payload's size.
pub fn named(bytes: usize) -> String {
    match UNITS.iter().find(|(_, factor)| bytes.is_multiple_of(*factor)) {
        Some((letter, factor)) => format!("{} {letter}iB", bytes / factor),
        None => format!("{bytes} B"),
    }
}
