//! What a run of the ledger came to.

use crate::{fault_schedule::Kind, statistics::quantile};
use comfy_table::{Table, presets};
use paraft_common::{Durability, Mode};
use paraft_proof::Tally;
use paraft_worker::exit;
use serde_json::json;
use std::collections::BTreeMap;

/// Faults that were put.
#[derive(Clone, Debug, Default)]
pub struct Counts {
    /// Processes killed.
    pub kills: u64,
    /// Of these, such as led a shard.
    pub leader_kills: u64,
    /// Processes that ended for want of memory.
    pub ended_for_memory: u64,
    /// Snapshots that were seen to be installed, by servers that came back or joined.
    pub snapshots: u64,
    /// Faults injected.
    pub faults: BTreeMap<Kind, u64>,
}

/// Everything that is said.
#[derive(Debug)]
pub struct Verdict {
    pub tally: Tally,
    /// All clients pulled the same final weights.
    pub clients_agree: bool,
    /// The replicas are the same bits.
    pub replicas: Result<(), String>,
    pub counts: Counts,
    pub seconds: f64,
    pub pushes_per_s: f64,
    pub floor: f64,
    /// Pulls that did not show the worker's own push.
    pub unseen: Vec<String>,
    /// Seconds without an ack after a leader's death.
    pub gaps: Vec<f64>,
    pub mode: Mode,
    pub durability: Durability,
    pub seed: u64,
    pub servers: u32,
    pub workers: u32,
    pub per_place: u32,
    /// What the servers say that the level `leader` has lost.
    pub reported_lost: u64,
    /// The most that it may have lost.
    pub bound: u64,
}

impl Verdict {
    /// Why the promise is broken; empty: it held.
    pub fn broken(&self) -> Vec<String> {
        let t = &self.tally;
        let mut why = Vec::new();
        let mut say = |is: bool, what: String| {
            if is {
                why.push(what);
            }
        };
        let allowed = match self.durability {
            Durability::Leader => self.reported_lost.min(self.bound),
            Durability::QuorumDisk | Durability::QuorumMemory => 0,
        };
        say(
            t.lost > allowed,
            format!("{} acknowledged pushes are lost; {allowed} were allowed and reported", t.lost),
        );
        say(t.doubled > 0, format!("{} pushes are in more than once, or were never made", t.doubled));
        say(t.damaged > 0, format!("{} places hold no sum of pushes", t.damaged));
        if let Some(first) = self.unseen.first() {
            say(true, format!("{} pulls did not show the worker's own push: {first}", self.unseen.len()));
        }
        say(!self.clients_agree, "the clients pulled different final weights".into());
        if let Err(e) = &self.replicas {
            say(true, format!("the replicas differ: {e}"));
        }
        why
    }

    /// The promise held.
    pub fn held(&self) -> bool {
        self.broken().is_empty()
    }

    fn counts(&self) -> bool {
        self.pushes_per_s >= self.floor
    }

    pub fn exit_code(&self) -> i32 {
        match (self.held(), self.counts()) {
            (false, _) => exit::FAILED,
            (true, false) => exit::DOES_NOT_COUNT,
            (true, true) => exit::OK,
        }
    }

    fn gaps(&self) -> [Option<f64>; 3] {
        let mut sorted = self.gaps.clone();
        sorted.sort_by(f64::total_cmp);
        [quantile(&sorted, 0.5), quantile(&sorted, 0.99), sorted.last().copied()]
    }

    fn verdict(&self) -> &'static str {
        match self.exit_code() {
            exit::OK => "held",
            exit::DOES_NOT_COUNT => "does not count",
            _ => "BROKEN",
        }
    }

    pub fn json(&self) -> serde_json::Value {
        let [p50, p99, max] = self.gaps();
        let faults: BTreeMap<String, u64> = self.counts.faults.iter().map(|(k, n)| (k.name(), *n)).collect();
        let mut all = json!({
            "verdict": self.verdict(), "kills": self.counts.leader_kills, "processes_killed": self.counts.kills,
            "acknowledged": self.tally.acknowledged, "lost": self.tally.lost, "doubled": self.tally.doubled,
            "unacknowledged": self.tally.unknown, "unacknowledged_applied": self.tally.unknown_applied,
            "damaged": self.tally.damaged, "rows": self.tally.rows, "pushes_per_s": self.pushes_per_s, "floor": self.floor,
            "unavailable_p50_s": p50, "unavailable_p99_s": p99, "unavailable_max_s": max,
            "unavailable_samples": self.gaps.len(), "seconds": self.seconds, "mode": self.mode.to_string(),
            "durability": self.durability.name(), "seed": self.seed,
            "servers": self.servers, "workers": self.workers, "pushes_per_place": self.per_place,
            "snapshots_installed": self.counts.snapshots, "ended_for_memory": self.counts.ended_for_memory, "faults": faults, "broken": self.broken(), "wrong": self.tally.wrong,
        });
        if self.durability.is_leader() {
            all["pushes_lost"] = self.reported_lost.into();
            all["bound"] = self.bound.into();
        }
        all
    }

    pub fn table(&self) -> String {
        let [p50, p99, max] = self.gaps();
        let s = |v: Option<f64>| v.map_or("-".into(), |v| format!("{v:.3} s"));
        let mut t = Table::new();
        t.load_style(presets::NOTHING);
        let mut row = |name: &str, value: String| _ = t.add_row([name.to_string(), value]);
        let t_ = &self.tally;
        row("job", format!("{}, {}, seed {}", self.mode, self.durability, self.seed));
        let killed = self.counts.kills;
        row("leaders killed", format!("{} ({killed} processes in all)", self.counts.leader_kills));
        for (kind, n) in self.counts.faults.iter().filter(|(k, _)| **k != Kind::Kill) {
            row(&kind.name(), n.to_string());
        }
        if self.counts.ended_for_memory > 0 {
            row("ended for want of memory", self.counts.ended_for_memory.to_string());
        }
        row("snapshots installed", self.counts.snapshots.to_string());
        row("acknowledged", t_.acknowledged.to_string());
        if t_.rows > 0 {
            row("of rows", t_.rows.to_string());
        }
        row("lost", t_.lost.to_string());
        if self.durability.is_leader() {
            row("reported as lost", format!("{}, bound {}", self.reported_lost, self.bound));
        }
        row("doubled", t_.doubled.to_string());
        row("unacknowledged", format!("{}, of which {} are in", t_.unknown, t_.unknown_applied));
        row(
            "pushes/s",
            format!("{:.0} (floor {:.0}) in {:.1} s", self.pushes_per_s, self.floor, self.seconds),
        );
        row("unavailable", format!("p50 {}  p99 {}  max {}", s(p50), s(p99), s(max)));
        row("replicas", self.replicas.as_ref().map_or_else(Clone::clone, |()| "the same bits".into()));
        let mut text = t.to_string();
        match self.exit_code() {
            exit::OK => text.push_str("\nthe promise held"),
            exit::DOES_NOT_COUNT => text.push_str(
                "\nthe promise held, but the run does not count: too few pushes a second for its kills to hit any",
            ),
            _ => {
                for line in self.broken().iter().chain(&self.tally.wrong) {
                    text.push_str(&format!("\nBROKEN: {line}"));
                }
            }
        }
        text
    }
}

#[cfg(test)]
#[path = "verdict_tests.rs"]
mod tests;
