//! Groups of ranks to the wire and back.

use crate::{GroupAssignment, GroupRank};
use paraft_common::group::{Assigned, Assignment};

impl From<Assignment> for GroupAssignment {
    fn from(s: Assignment) -> Self {
        let rank = |r: Assigned| GroupRank { rank: r.rank, token: r.token, address: r.address };
        Self { generation: s.generation, ranks: s.ranks.into_iter().map(rank).collect() }
    }
}

impl From<GroupAssignment> for Assignment {
    fn from(s: GroupAssignment) -> Self {
        let rank = |r: GroupRank| Assigned { rank: r.rank, token: r.token, address: r.address };
        Self { generation: s.generation, ranks: s.ranks.into_iter().map(rank).collect() }
    }
}
