//! The space of records that are no longer needed: segments without any are removed, and the last records of an old
//! segment are moved to the end.

use super::{
    format::Kind,
    groups::Group,
    record::Record,
    segments::{Item, MAX_SPARES, Sealed, Segments},
};
use crate::error::named;
use std::io;

/// Records are moved out of the oldest segment if the log takes more than twice its records plus this many
/// segments.
const SLACK_SEGMENTS: u64 = 4;
/// Bytes that are moved between two batches.
const MOVE_BYTES: u64 = 4 << 20;

impl Segments {
    /// Whether the oldest segment can be removed.
    fn is_retirable(&self) -> bool {
        // The next segment's table contains what this one knew.
        let followed = self.sealed.len() > 1 || self.active.is_some();
        followed && self.sealed.front().is_some_and(|s| self.live.is_empty(s.first))
    }

    /// Removes segments without needed records from the log: some become spares, the others are deleted. While a
    /// group is damaged none is removed, because any may contain its records.
    pub fn retire(&mut self) -> io::Result<()> {
        if !self.is_retirable() || self.groups.any_damaged() {
            return Ok(());
        }
        self.sync()?; // makes the items durable that released the records
        let groups = self.groups.clone();
        let _alone = groups.alone();
        let mut spares = Vec::new();
        while self.is_retirable() {
            let Some(Sealed { first, bytes }) = self.sealed.front().copied() else { break };
            let path = self.path(first);
            let room = self.spares.len() + spares.len() < MAX_SPARES;
            // One long record must not leave a long file forever.
            if room && bytes <= 2 * self.options.segment_bytes {
                let spare = path.with_extension("spare");
                self.disk.rename(&path, &spare).map_err(named("rename", &path))?;
                spares.push(spare);
            } else {
                self.disk.remove(&path).map_err(named("remove", &path))?;
            }
            self.sealed.pop_front();
            // After a crash the old name may reappear until the folder is synced. If a segment removed later stays
            // gone, that is a gap that looks like damage.
            self.sync_dir()?;
        }
        self.spares.extend(spares.into_iter().filter(|s| !self.spares.contains(s)).collect::<Vec<_>>());
        Ok(())
    }

    /// Whether there is something to move now.
    pub fn is_crowded(&self) -> bool {
        let most = 2 * self.live.bytes + SLACK_SEGMENTS * self.options.segment_bytes;
        self.sealed_bytes() > most && self.moving_failed != Some(self.next) && !self.groups.any_damaged()
    }

    /// If a few records keep segments that are otherwise useless, copies some of them to the end, so that their
    /// segment can be removed. Over time this writes no more than was given up.
    pub fn tidy(&mut self) -> io::Result<()> {
        self.retire()?;
        if !self.is_crowded() {
            return Ok(());
        }
        let Some(oldest) = self.sealed.front().map(|s| s.first) else { return Ok(()) };
        if self.to_move.is_empty() {
            let known = self.groups.known();
            let there = known.iter().flat_map(|(key, g)| {
                let there = g.places.iter().filter(|(_, p)| p.segment == oldest);
                there.map(|(index, _)| (*key, *index))
            });
            self.to_move = there.collect();
        }
        let mut bytes = 0;
        while let Some((key, index)) = self.to_move.pop_front() {
            bytes += self.move_one(oldest, key, index)?;
            if bytes >= MOVE_BYTES {
                break;
            }
        }
        self.retire()
    }

    /// Copies a record of the oldest segment to the end; returns its bytes.
    fn move_one(&mut self, oldest: u64, key: u64, index: u64) -> io::Result<u64> {
        let is_there = |g: &Group| g.places.get(&index).is_some_and(|p| p.segment == oldest);
        if !self.groups.known().get(&key).is_some_and(is_there) {
            return Ok(0); // given up meanwhile
        }
        let read = self.groups.read(self.disk.as_ref(), &self.dir, key, index..index + 1, 0);
        let record = match read {
            Ok(mut records) => records.pop(),
            // The damage concerns this group only, and is reported when its log is next used.
            Err(e) if self.groups.note_damage(key, &e) => None,
            // A transient error, and nothing depends on the move.
            Err(_) => {
                self.moving_failed = Some(self.next);
                self.to_move.clear();
                None
            }
        };
        let Some(Record { index, header, payload }) = record else { return Ok(0) };
        let item = Item { kind: Kind::Moved, index, header: &header, payload: &payload };
        let bytes = item.bytes();
        for place in self.write(key, self.turn(key), &[item])? {
            self.live.add(place);
            if let Some(group) = self.groups.known().get_mut(&key) {
                group.turn += 1;
                self.live.remove(group.moved(index, place));
            }
        }
        self.moved += 1;
        Ok(bytes)
    }
}
