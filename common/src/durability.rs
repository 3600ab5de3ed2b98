//! What an acknowledgement of a push promises, and in which form changes enter the replicated log.
//!
//! The three levels differ in what a crash can cost; the two forms in what travels. Not every pair makes
//! sense, and [`check`] says why: the job file's validation and the servers' use the same sentences.

use crate::consistency::Mode;
use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr, time::Duration};

/// What must have happened before a push is acknowledged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Durability {
    /// The log entry that holds the push is fsynced on a majority of the shard's replicas. A crash costs nothing
    /// that was acknowledged, even where every server loses its power, as long as a majority of the disks
    /// survives.
    QuorumDisk,
    /// The log entry that holds the push is in the memory of a majority. A crash of any minority costs nothing
    /// that was acknowledged; the loss of a majority at once costs the shard.
    #[default]
    QuorumMemory,
    /// The leader has applied the push. Each change of leadership costs at most `leader_window_pushes`
    /// acknowledged pushes (the leader stops acknowledging there, and `leader_window_ms` after the oldest push
    /// that no majority holds yet); how many were lost is counted and reported.
    Leader,
}

impl Durability {
    /// Whether logs are kept on disk.
    pub fn on_disk(self) -> bool {
        self == Durability::QuorumDisk
    }

    /// The word in job files and flags.
    pub fn name(self) -> &'static str {
        match self {
            Durability::QuorumDisk => "quorum-disk",
            Durability::QuorumMemory => "quorum-memory",
            Durability::Leader => "leader",
        }
    }
}

impl fmt::Display for Durability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A text that names no level.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no durability level; write `quorum-disk`, `quorum-memory` or `leader`")]
pub struct ParseDurabilityError(String);

impl FromStr for Durability {
    type Err = ParseDurabilityError;

    fn from_str(s: &str) -> Result<Self, Self::Err> {
        [Durability::QuorumDisk, Durability::QuorumMemory, Durability::Leader]
            .into_iter()
            .find(|d| d.name() == s)
            .ok_or_else(|| ParseDurabilityError(s.to_string()))
    }
}

/// Which way into the log a job wants.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LogForm {
    /// One entry for each update: the gradient travels, and every replica runs the optimizer.
    Updates,
    /// Image cuts: the leader applies pushes to working copies, and now and then the images of the buckets that
    /// changed travel, closed by one marker. SSP and ASP only.
    Images,
    /// Update entries at first; the leader measures and changes to the form that moves fewer bytes, and back.
    #[default]
    Auto,
}

impl fmt::Display for LogForm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            LogForm::Updates => "updates",
            LogForm::Images => "images",
            LogForm::Auto => "auto",
        })
    }
}

/// How much a leader may have acknowledged that no majority holds yet; read at the level `leader`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LeaderWindow {
    /// Further pushes wait when the oldest such push is this old; 2 to 60000 ms.
    pub ms: u64,
    /// Further pushes wait when there are this many; 1 to 1000000. A push is one bucket of one step of one
    /// worker.
    pub pushes: u64,
}

impl Default for LeaderWindow {
    fn default() -> Self {
        Self { ms: 250, pushes: 256 }
    }
}

impl LeaderWindow {
    /// The bound in time.
    pub fn age(self) -> Duration {
        Duration::from_millis(self.ms)
    }
}

/// Which of a job's keys contradict each other or are out of range.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message} ({remedy})")]
pub struct DurabilityError {
    /// The key of `[cluster]` that is to blame.
    pub key: &'static str,
    /// What is wrong.
    pub message: String,
    /// What to do.
    pub remedy: &'static str,
}

/// Whether these go together.
pub fn check(
    mode: Mode,
    log: LogForm,
    durability: Durability,
    window: LeaderWindow,
) -> Result<(), DurabilityError> {
    let bad = |key, message: String, remedy| Err(DurabilityError { key, message, remedy });
    if mode.averages() && durability == Durability::Leader {
        return bad(
            "durability",
            format!("{mode} promises the weights of one process; a lost acknowledged push would break it"),
            "use durability quorum-memory or quorum-disk, or mode ssp:S or asp",
        );
    }
    if mode.averages() && log == LogForm::Images {
        return bad(
            "log",
            format!("{mode} writes one averaged update for each step already; images would only be larger"),
            "use log updates or auto, or mode ssp:S or asp",
        );
    }
    if durability == Durability::Leader && log == LogForm::Updates {
        return bad(
            "log",
            "durability leader acknowledges pushes on the leader's working copies, which log updates has not"
                .into(),
            "use log images or auto, or durability quorum-memory",
        );
    }
    if !(2..=60_000).contains(&window.ms) {
        return bad("leader_window_ms", format!("a window of {} ms", window.ms), "use 2 to 60000");
    }
    if !(1..=1_000_000).contains(&window.pushes) {
        let message = format!("a window of {} pushes", window.pushes);
        return bad("leader_window_pushes", message, "use 1 to 1000000");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contradictions_are_named_with_their_key_and_a_remedy() {
        use {Durability as D, LogForm as L};
        let w = LeaderWindow::default();
        for (mode, log, durability, window, key) in [
            (Mode::Bsp, L::Auto, D::QuorumMemory, w, None),
            (Mode::Bsp, L::Updates, D::QuorumDisk, w, None),
            (Mode::Asp, L::Images, D::QuorumMemory, w, None),
            (Mode::Ssp(2), L::Auto, D::Leader, w, None),
            (Mode::Asp, L::Images, D::Leader, w, None),
            (Mode::Bsp, L::Auto, D::Leader, w, Some("durability")),
            (Mode::Bsp, L::Images, D::QuorumMemory, w, Some("log")),
            (Mode::Asp, L::Updates, D::Leader, w, Some("log")),
            (Mode::Asp, L::Auto, D::Leader, LeaderWindow { ms: 1, ..w }, Some("leader_window_ms")),
            (Mode::Asp, L::Auto, D::Leader, LeaderWindow { pushes: 0, ..w }, Some("leader_window_pushes")),
        ] {
            let got = check(mode, log, durability, window).err().map(|e| e.key);
            assert_eq!(got, key, "{mode} {log} {durability} {window:?}");
        }
    }

    #[test]
    fn levels_and_forms_read_back_what_they_print() {
        #[derive(Deserialize)]
        struct Both {
            durability: Durability,
            log: LogForm,
        }
        for d in [Durability::QuorumDisk, Durability::QuorumMemory, Durability::Leader] {
            for l in [LogForm::Updates, LogForm::Images, LogForm::Auto] {
                let read: Both =
                    toml::from_str(&format!("durability = \"{d}\"\nlog = \"{l}\"")).expect("toml");
                assert_eq!((read.durability, read.log), (d, l));
            }
        }
    }
}
