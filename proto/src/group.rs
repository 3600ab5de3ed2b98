//! Groups of ranks to the wire and back.

use crate::{GroupRank, GroupSeating};
use paraft_common::group::{Seated, Seating};

impl From<Seating> for GroupSeating {
    fn from(s: Seating) -> Self {
        let rank = |r: Seated| GroupRank { rank: r.rank, token: r.token, address: r.address };
        Self { generation: s.generation, ranks: s.ranks.into_iter().map(rank).collect() }
    }
}

impl From<GroupSeating> for Seating {
    fn from(s: GroupSeating) -> Self {
        let rank = |r: GroupRank| Seated { rank: r.rank, token: r.token, address: r.address };
        Self { generation: s.generation, ranks: s.ranks.into_iter().map(rank).collect() }
    }
}
