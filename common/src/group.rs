//! A group of ranks that act as one worker, as the control group and its ranks know it.

/// Ranks of a group at most.
pub const MAX_RANKS: u32 = 1024;

/// A rank in a group.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Assigned {
    /// Its rank, from 0 within its worker; it keeps it for life.
    pub rank: u32,
    /// Names its process.
    pub token: u64,
    /// Where the others reach it, `host:port`.
    pub address: String,
}

/// Who is in a group.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Assignment {
    /// Counted from 1; 0: there is none.
    pub generation: u64,
    /// In order; the first leads.
    pub ranks: Vec<Assigned>,
}

impl Assignment {
    /// A number that only its ranks and the control group know.
    pub fn secret(&self) -> u64 {
        let mix = |h: u64, v: u64| (h ^ v).wrapping_mul(0x100_0000_01b3).rotate_left(29);
        self.ranks.iter().fold(mix(0xcbf2_9ce4_8422_2325, self.generation), |h, r| mix(h, r.token))
    }

    /// The place of a process.
    pub fn place(&self, token: u64) -> Option<usize> {
        self.ranks.iter().position(|r| r.token == token)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_of_other_ranks_or_generations_have_other_secrets() {
        let of = |generation, tokens: &[u64]| {
            let assigned = |token: &u64| Assigned { token: *token, ..Assigned::default() };
            Assignment { generation, ranks: tokens.iter().map(assigned).collect() }
        };
        let one = of(1, &[7, 8]);
        assert_eq!(one.secret(), of(1, &[7, 8]).secret());
        assert_eq!((one.place(8), one.place(9)), (Some(1), None));
        for other in [of(2, &[7, 8]), of(1, &[8, 7]), of(1, &[7]), of(1, &[7, 9])] {
            assert_ne!(one.secret(), other.secret(), "{other:?}");
        }
    }
}
