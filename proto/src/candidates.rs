//! Which server one request is sent to next.

use std::collections::{BTreeSet, VecDeque};

/// The servers that a request is tried at, each once: those that the caller knows, and those that they name.
///
/// It does no I/O:
///
/// ```
/// use paraft_proto::Candidates;
///
/// let mut servers = Candidates::of(["a:1".into(), "b:1".into()]);
/// assert_eq!(servers.next().as_deref(), Some("a:1"));
/// servers.failed("a:1", "it does not lead", "c:1"); // it names the leader, which is asked next
/// assert_eq!(servers.next().as_deref(), Some("c:1"));
/// ```
#[derive(Clone, Debug, Default)]
pub struct Candidates {
    waiting: VecDeque<String>,
    asked: BTreeSet<String>,
    named: usize,
    causes: Vec<(String, String)>,
}

impl Candidates {
    /// At most this many servers are added because another server named them: names of wrong or hostile servers end.
    pub const MAX_NAMED: usize = 64;

    /// Begins with these addresses, in this order.
    pub fn of(servers: impl IntoIterator<Item = String>) -> Self {
        Self { waiting: servers.into_iter().collect(), ..Self::default() }
    }

    /// The address to ask now; `None` if all were asked.
    #[allow(clippy::should_implement_trait)]
    pub fn next(&mut self) -> Option<String> {
        let address = std::iter::from_fn(|| self.waiting.pop_front()).find(|a| !self.asked.contains(a))?;
        self.asked.insert(address.clone());
        Some(address)
    }

    /// The server at `address` did not do it. `leader` is the address that it names, which is asked before the others,
    /// or empty.
    pub fn failed(&mut self, address: &str, why: impl Into<String>, leader: &str) {
        self.causes.push((address.into(), why.into()));
        if !leader.is_empty() && !self.asked.contains(leader) && self.named < Self::MAX_NAMED {
            self.named += 1;
            self.waiting.push_front(leader.into());
        }
    }

    /// Why each asked server did not do it, in the order of the tries.
    pub fn causes(&self) -> &[(String, String)] {
        &self.causes
    }
}

#[cfg(test)]
#[path = "candidates_tests.rs"]
mod tests;
