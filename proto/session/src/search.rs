//! Which server to ask next for a shard's leader.
//!
//! A server that does not lead names the leader that it knows: one that has died, one that has restarted
//! since, or one that names the first again. So names are hints: no server is asked twice before every server
//! was asked once.

use std::collections::BTreeSet;

/// The servers that were asked in this round, by their indices in the list.
#[derive(Debug, Default)]
pub struct Search {
    asked: BTreeSet<usize>,
}

impl Search {
    /// The next of `servers` servers, after the one at `at` did not serve, and perhaps named another.
    pub fn next(&mut self, at: usize, named: Option<usize>, servers: usize) -> usize {
        self.asked.insert(at);
        if (0..servers).all(|s| self.asked.contains(&s)) {
            self.asked = BTreeSet::from([at]);
        }
        let fresh = |s: &usize| !self.asked.contains(s);
        let after = (1..servers).map(|i| (at + i) % servers).find(fresh);
        named.filter(fresh).or(after).unwrap_or(at)
    }

    /// A server serves: starts a new round.
    pub fn found(&mut self) {
        self.asked.clear();
    }
}

#[cfg(test)]
#[path = "search_tests.rs"]
mod tests;
