//! What the items of a log say about its groups, read one by one: their records, and what damage affects.

use super::{
    format::{Entry, Kind, UNLISTED_KEY},
    groups::{Fault, Group, Place},
    segment::FoundItem,
};
use std::{collections::BTreeMap, path::Path};

/// The recovered state of a group, updated item by item.
#[derive(Default)]
struct GroupScan {
    group: Group,
    /// An unreadable place that may contain items of this group, until its next turn shows otherwise.
    doubt: Option<Fault>,
    /// Some of it is missing; the next record's index is not known yet.
    open_gap: Option<Fault>,
    /// Missing parts before these records: harmless if everything before them is purged.
    gaps: Vec<(u64, Fault)>,
}

impl GroupScan {
    /// Processes an item of turn `turn`, or a table with this turn.
    fn turn(&mut self, turn: u64, before: impl FnOnce() -> Fault) {
        let doubt = self.doubt.take();
        if self.group.turn != turn {
            self.open_gap.get_or_insert(doubt.unwrap_or_else(before));
            self.group.turn = turn;
        }
    }

    fn close_gap(&mut self, index: Option<u64>) {
        if let Some(fault) = self.open_gap.take() {
            self.gaps.push((index.unwrap_or(0), fault));
            self.group.begin_again(index);
        }
    }

    fn is_damaged(&mut self, fault: impl FnOnce() -> Fault) {
        self.group.damage.get_or_insert_with(fault);
    }

    /// The final state. `before`: why records may be missing from before everything that was read.
    fn finish(mut self, before: &Fault) -> Group {
        let after = self.group.purged.as_ref().map_or(0, |(upto, _)| upto + 1);
        let harm = self.gaps.into_iter().find(|(index, _)| *index > after).map(|(_, fault)| fault);
        let fault = self.doubt.or(self.open_gap).or(harm).or_else(|| {
            let index = self.group.missing()?;
            let what = match before.what.is_empty() {
                true => format!("record {index}, which was before it, is missing"),
                false => format!("{}; record {index} is missing", before.what),
            };
            Some(Fault { what, ..before.clone() })
        });
        self.group.damage = self.group.damage.or(fault);
        self.group
    }
}

/// The results of reading so far.
#[derive(Default)]
pub(super) struct Scan {
    groups: BTreeMap<u64, GroupScan>,
    /// An unreadable place since the last table: a group may have started there.
    unseen: Option<Fault>,
    /// Some item is damaged.
    pub damaged: bool,
    /// According to a table, an unknown group may have started before it.
    unlisted: Option<Fault>,
    /// The first unreadable place.
    wrong: Option<Fault>,
    /// The start of the oldest segment.
    pub oldest: Option<Fault>,
}

impl Scan {
    /// The place at `fault` is unreadable, and may belong to any group.
    pub fn lost(&mut self, fault: Fault) {
        for seen in self.groups.values_mut() {
            seen.doubt.get_or_insert_with(|| fault.clone());
        }
        self.damaged = true;
        self.wrong.get_or_insert_with(|| fault.clone());
        self.unseen.get_or_insert(fault);
    }

    /// Processes the table at the start of a segment.
    pub fn table(&mut self, entries: Vec<Entry>, path: &Path) {
        let at = |what: &str| Fault { path: path.into(), offset: 0, what: what.into() };
        self.groups.retain(|key, _| entries.iter().any(|e| e.key == *key));
        self.unlisted = None;
        for e in &entries {
            if e.key == UNLISTED_KEY {
                self.unlisted = Some(at("a group may have begun before it, where it cannot be told"));
                continue;
            }
            let new = || GroupScan { group: Group::of(e), ..GroupScan::default() };
            let seen = self.groups.entry(e.key).or_insert_with(new);
            seen.turn(e.turn, || at("what a group wrote before it is missing"));
            if seen.open_gap.is_some() {
                seen.close_gap(e.next);
                seen.group.first = e.first;
            }
            if let Some((upto, tag)) = &e.purged {
                seen.group.purge(*upto, tag.clone());
            }
            if e.damaged {
                seen.is_damaged(|| {
                    at("what a group wrote before it was damaged already when this was begun")
                });
            }
        }
        self.unseen = None;
    }

    /// Processes a valid item.
    pub fn item(&mut self, item: &FoundItem, place: Place, tag: bytes::Bytes, path: &Path) {
        let head = item.head;
        let at = |what: String| Fault { path: path.into(), offset: item.at, what };
        let unseen = &self.unseen;
        let new = || GroupScan { doubt: unseen.clone(), ..GroupScan::default() };
        let seen = self.groups.entry(head.group).or_insert_with(new);
        seen.turn(head.turn, || at("what its group wrote before it is missing".into()));
        let group = &mut seen.group;
        group.turn += 1;
        match head.kind {
            Kind::Record => {
                seen.close_gap(Some(head.index));
                let expected = seen.group.next.unwrap_or(head.index);
                if expected != head.index {
                    seen.is_damaged(|| at(format!("record {} where {expected} is next", head.index)));
                    seen.group.begin_again(Some(head.index));
                }
                seen.group.put(head.index, place);
            }
            Kind::Moved => _ = group.moved(head.index, place),
            // The missing records may have been before.
            Kind::Truncate if !seen.gaps.is_empty() && head.index <= group.first => {
                group.begin_again(Some(head.index));
                seen.gaps.iter_mut().for_each(|(before, _)| *before = head.index.min(*before));
            }
            Kind::Truncate => _ = group.truncate(head.index),
            Kind::Purge => _ = group.purge(head.index, tag),
            Kind::Remove => _ = self.groups.remove(&head.group),
            Kind::Mark => {}
        }
    }

    /// Processes an item whose body has a wrong checksum.
    pub fn bad_body(&mut self, item: &FoundItem, path: &Path) {
        self.damaged = true;
        if let Some(seen) = self.groups.get_mut(&item.head.group) {
            let what = format!("record {} fails its checksum", item.head.index);
            seen.is_damaged(|| Fault { path: path.into(), offset: item.at, what });
        }
    }

    /// The groups, and why an unknown group may have been there.
    pub fn finish(self) -> (BTreeMap<u64, Group>, Option<Fault>) {
        let unlisted = self.unseen.or(self.unlisted);
        // Without either nothing was read.
        let Some(before) = self.wrong.or(self.oldest) else { return (BTreeMap::new(), unlisted) };
        (self.groups.into_iter().map(|(key, seen)| (key, seen.finish(&before))).collect(), unlisted)
    }
}
