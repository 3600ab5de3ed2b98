//! What the shards of a job have said of their modes, for a worker of it.

use crate::{Mode, ShardId};
use std::collections::BTreeMap;

/// The mode in force on each shard, with the number of the switch that brought it.
#[derive(Clone, Debug)]
pub struct Modes {
    first: Mode,
    said: BTreeMap<ShardId, (u64, Mode)>,
}

impl Modes {
    /// Before any shard has said anything: the mode that the job begins with.
    pub fn new(first: Mode) -> Self {
        Self { first, said: BTreeMap::new() }
    }

    /// A shard says of its mode.
    pub fn hear(&mut self, shard: ShardId, number: u64, mode: Mode) {
        self.said.insert(shard, (number, mode));
    }

    /// The number of the last switch that a shard has said, and its mode.
    pub fn latest(&self) -> (u64, Mode) {
        self.said.values().copied().max_by_key(|(number, _)| *number).unwrap_or((0, self.first))
    }

    /// The mode of a shard.
    pub fn of(&self, shard: ShardId) -> Mode {
        self.said.get(&shard).map_or(self.first, |(_, mode)| *mode)
    }

    /// The shards that have not come to the last switch.
    pub fn behind(&self) -> impl Iterator<Item = ShardId> {
        let (last, _) = self.latest();
        self.said.iter().filter(move |(_, (number, _))| *number < last).map(|(shard, _)| *shard)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_switch_counts_and_those_behind_it_are_known() {
        let mut modes = Modes::new(Mode::Bsp);
        assert_eq!((modes.latest(), modes.of(ShardId(3))), ((0, Mode::Bsp), Mode::Bsp));
        modes.hear(ShardId(0), 2, Mode::Asp);
        modes.hear(ShardId(1), 1, Mode::Ssp(4));
        assert_eq!((modes.latest(), modes.of(ShardId(1))), ((2, Mode::Asp), Mode::Ssp(4)));
        assert_eq!(modes.behind().collect::<Vec<_>>(), [ShardId(1)]);
        modes.hear(ShardId(1), 2, Mode::Asp);
        assert_eq!(modes.behind().count(), 0);
    }
}
