//! What final weights say of the pushes that made them.

/// What became of a push, as its worker knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It was acknowledged: it must be in once.
    Acknowledged,
    /// It was made and not acknowledged: it may be applied once.
    Unknown,
    /// It was never made.
    Unmade,
}

/// What the final weights say.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Pushes that were acknowledged.
    pub acknowledged: u64,
    /// Of these, such as are not in.
    pub lost: u64,
    /// Pushes that are in more than once, or were never made.
    pub doubled: u64,
    /// Pushes that were made and not acknowledged.
    pub unknown: u64,
    /// Of these, such as are in.
    pub unknown_applied: u64,
    /// Acknowledged additions to rows of a table.
    pub rows: u64,
    /// Places that hold no sum of entries at all.
    pub damaged: u64,
    /// The first few entries that are wrong, in words.
    pub wrong: Vec<String>,
}

impl Tally {
    pub(crate) fn enter(&mut self, fate: Fate, times: u32, who: impl Fn() -> String) {
        match fate {
            Fate::Acknowledged => {
                self.acknowledged += 1;
                self.lost += u64::from(times == 0);
            }
            Fate::Unknown => {
                self.unknown += 1;
                self.unknown_applied += u64::from(times > 0);
            }
            Fate::Unmade => {}
        }
        let most = if fate == Fate::Unmade { 0 } else { 1 };
        self.doubled += u64::from(times > most);
        if times > most || fate == Fate::Acknowledged && times == 0 {
            self.note(|| format!("{} ({fate:?})", who()));
        }
    }

    pub(crate) fn note(&mut self, what: impl Fn() -> String) {
        const MAX_NOTES: usize = 10;
        if self.wrong.len() < MAX_NOTES {
            self.wrong.push(what());
        }
    }
}
