//! The fingerprint of a job.

/// A worker's fingerprint has a few hundred bytes.
pub(super) const MAX_FINGERPRINT: usize = 4096;

/// The facts of the fingerprint `of` that `from` lacks, for people. A worker chooses this text, so its
/// length is bounded.
pub fn facts_missing(of: &str, from: &str) -> String {
    const MAX_FACTS: usize = 8;
    const MAX_CHARS: usize = 120;
    let others: Vec<&str> = from.split(", ").collect();
    let facts = of.split(", ").filter(|f| !others.contains(f));
    let facts: Vec<String> = facts.take(MAX_FACTS).map(|f| f.chars().take(MAX_CHARS).collect()).collect();
    facts.join(", ")
}
