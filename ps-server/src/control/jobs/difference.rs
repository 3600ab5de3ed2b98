//! Changes of a job's checkpoints.

use super::Job;
use paraft_changes::job::Difference;
use paraft_common::checkpoint::{KnownCheckpoint, MAX_KNOWN_CHECKPOINTS};
use std::{collections::BTreeSet, path::Path};

/// Whether `path` is directly in `folder`.
pub fn is_in(path: &str, folder: &str) -> bool {
    Path::new(path).parent() == Some(Path::new(folder))
}

impl Job {
    /// The change after which this job's checkpoints in `folder` are `held`. What `held` does not know (the
    /// writer of one, its loss) stays.
    pub(super) fn difference(&self, folder: &str, mut held: Vec<KnownCheckpoint>) -> Difference {
        for h in &mut held {
            if let Some(known) = self.checkpoints.iter().find(|k| k.is_same(h)) {
                h.worker = h.worker.or(known.worker);
                h.loss = h.loss.or(known.loss);
            }
        }
        let gone = self.gone(folder, &held).cloned().collect();
        held.retain(|h| !self.checkpoints.contains(h));
        // A checkpoint that would be dropped at once is not worth a log entry.
        if self.checkpoints.len() >= MAX_KNOWN_CHECKPOINTS {
            let oldest = self.checkpoints.iter().filter(|k| !k.best).map(|k| k.written_ms).min();
            let known = |h: &KnownCheckpoint| self.checkpoints.iter().any(|k| k.path == h.path);
            held.retain(|h| h.best || known(h) || Some(h.written_ms) > oldest);
        }
        Difference { held, gone }
    }

    /// Those in `folder` that are not among `held`.
    pub(super) fn gone(&self, folder: &str, held: &[KnownCheckpoint]) -> impl Iterator<Item = &String> {
        let there: BTreeSet<&str> = held.iter().map(|h| h.path.as_str()).collect();
        let gone = move |p: &&String| is_in(p, folder) && !there.contains(p.as_str());
        self.checkpoints.iter().map(|k| &k.path).filter(gone)
    }

    /// Applies a change of the folder that another job reported, if this job has written there as well.
    pub(super) fn heed(&mut self, d: &Difference) {
        self.checkpoints.retain_mut(|c| {
            let told = d.held.iter().find(|h| h.path == c.path);
            c.best = told.map_or(c.best, |h| h.best);
            !d.gone.contains(&c.path) && told.is_none_or(|h| h.is_same(c))
        });
    }

    /// Applies a change that this job's workers reported.
    pub(super) fn change(&mut self, d: &Difference) {
        self.checkpoints.retain(|c| !d.gone.contains(&c.path));
        for h in &d.held {
            // One list may name a path twice: it comes from the network.
            self.checkpoints.retain(|c| c.path != h.path);
            self.checkpoints.push(h.clone());
        }
        self.checkpoints
            .sort_by(|a, b| (a.written_ms, a.step, &a.path).cmp(&(b.written_ms, b.step, &b.path)));
        while self.checkpoints.len() > MAX_KNOWN_CHECKPOINTS {
            let oldest = self.checkpoints.iter().position(|c| !c.best).unwrap_or(0);
            self.checkpoints.remove(oldest);
        }
    }
}
