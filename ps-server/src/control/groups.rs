//! Who is in the group of ranks that act as one worker.
//!
//! Known to the leader of the control group only, and lost with the leadership: the leaders of groups say again and again what
//! they lead, ranks say who was with them, and nothing about a gradient depends on it. A rank that is wrong about its group finds
//! nobody to reduce with, and asks again; of two leaders of the same worker the shards refuse the second.
//!
//! ```text
//!  ask ─▶ waiting ──all of the group before are here or lost, or it took too long──▶ seated, in the next generation
//! ```
//!
//! Who led before leads again: its session with the servers goes on.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

/// Ranks of a group at most.
pub const MAX_RANKS: u32 = 1024;
/// Groups at most: a leader's memory must not grow with what anyone sends.
const MAX_GROUPS: usize = 4096;
/// Bytes of an address at most.
const MAX_ADDRESS: usize = 256;
/// Bytes of a job's name for this purpose at most.
const MAX_JOB: usize = 512;
/// Survivors notice a lost rank at once, unless they are in the middle of a step. Who takes longer is taken in again later.
pub const GATHERING: Duration = Duration::from_secs(5);
/// Who waits asks again and again; who has not for this long has hung up.
const HUNG_UP: Duration = Duration::from_millis(700);
/// A leader that speaks is waited for, however long its step takes: its session with the servers goes on.
const SPEAKS: Duration = Duration::from_secs(3);
/// A group whose leader says nothing for this long is over.
const SILENT: Duration = Duration::from_secs(15);
/// Who comes back to a job that is done hears so, for this long.
const REMEMBERED: Duration = Duration::from_secs(60);

/// The worker that the ranks are.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key {
    /// The job, as its workers name it among themselves.
    pub job: String,
    /// The worker.
    pub worker: u32,
}

/// A rank that asks for a seat.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Asks {
    /// Ranks of a whole group.
    pub size: u32,
    /// Its rank, below `size`.
    pub rank: u32,
    /// Names its process.
    pub token: u64,
    /// Where the others reach it.
    pub address: String,
    /// The group that it was in last, and its place there; generation 0: none.
    pub last: (u64, u32),
    /// Ranks of that group which are gone.
    pub lost: Vec<u32>,
    /// How long to wait for ranks that have never come.
    pub patience: Duration,
    /// Who was in `last`.
    pub last_ranks: Vec<Seated>,
    /// What must be the same on all ranks.
    pub settings: String,
}

/// Why a rank gets no seat.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    /// In words.
    pub why: String,
    /// Asking again is of no use.
    pub for_good: bool,
}

impl From<String> for Refused {
    fn from(why: String) -> Self {
        Self { why, for_good: false }
    }
}

/// A rank in a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seated {
    /// Its rank.
    pub rank: u32,
    /// Its process.
    pub token: u64,
    /// Where it is reached.
    pub address: String,
}

/// A group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seating {
    /// Counted from 1.
    pub generation: u64,
    /// In order; the first leads.
    pub ranks: Vec<Seated>,
}

impl Seating {
    /// A number that only its ranks know, the same for all of them.
    pub fn secret(&self) -> u64 {
        let mix = |h: u64, v: u64| (h ^ v).wrapping_mul(0x100_0000_01b3).rotate_left(29);
        self.ranks.iter().fold(mix(0xcbf2_9ce4_8422_2325, self.generation), |h, r| mix(h, r.token))
    }

    /// Whether it can be a group: what comes off the wire is kept only then.
    fn is_sound(&self) -> bool {
        let sound = |r: &Seated| r.address.len() <= MAX_ADDRESS && r.rank < MAX_RANKS;
        self.generation > 0
            && !self.ranks.is_empty()
            && self.ranks.len() <= MAX_RANKS as usize
            && self.ranks.iter().all(sound)
    }

    fn has(&self, token: u64) -> bool {
        self.ranks.iter().any(|r| r.token == token)
    }
}

#[derive(Debug)]
struct Waiting {
    asks: Asks,
    since: Instant,
    /// When it asked last.
    asked: Instant,
}

#[derive(Debug, Default)]
struct Gathering {
    seating: Option<Seating>,
    /// When its leader was heard last.
    heard: Option<Instant>,
    /// Of the seated, those that others have lost.
    lost: BTreeSet<u32>,
    /// By rank.
    waiting: BTreeMap<u32, Waiting>,
    /// When its leader said that the job is done.
    over: Option<Instant>,
    /// Those of the ranks that were seated last, where this leader has seated them.
    settings: Option<String>,
}

/// All groups.
#[derive(Debug, Default)]
pub struct Groups {
    all: BTreeMap<Key, Gathering>,
}

/// What a rank that asks hears.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// It is in this group.
    Seated(Seating),
    /// So many ranks are here; it should go on waiting.
    Wait(u32),
    /// The job is done.
    Over,
}

impl Groups {
    /// A rank asks, as it does several times a second until it is seated. `Err` says what is wrong with what it says.
    pub fn ask(&mut self, key: &Key, asks: Asks, now: Instant) -> Result<(), Refused> {
        let Asks { size, rank, ref address, .. } = asks;
        if size == 0 || size > MAX_RANKS {
            return Err(format!("a group of {size} ranks; 1 to {MAX_RANKS} go").into());
        }
        if rank >= size || asks.lost.iter().any(|r| *r >= size) {
            return Err(format!("rank {rank} (lost: {:?}) of a group of {size}", asks.lost).into());
        }
        if address.len() > MAX_ADDRESS || !address.contains(':') || key.job.len() > MAX_JOB {
            return Err(format!(
                "`{address}` is no address (write host:port), or the job's name is too long"
            )
            .into());
        }
        if !self.all.contains_key(key) && self.all.len() >= MAX_GROUPS {
            self.all.retain(|_, g| !g.waiting.is_empty() || g.speaks(now));
            if self.all.len() >= MAX_GROUPS {
                return Err(format!("there are {MAX_GROUPS} groups already").into());
            }
        }
        let g = self.all.entry(key.clone()).or_default();
        g.forget(now);
        // The next job of that name.
        if g.over.is_some() && g.settings.as_ref() != Some(&asks.settings) {
            *g = Gathering::default();
        }
        // A leader of the control group that knows nothing of a group learns it from those who were in it.
        let known = g.seating.as_ref().map_or(0, |s| s.generation);
        let last = Seating { generation: asks.last.0, ranks: asks.last_ranks.clone() };
        if last.generation > known && last.is_sound() {
            g.seating = Some(last);
            g.heard = Some(now);
        }
        let different = |w: &&Waiting| w.asks.rank != rank && w.asks.settings != asks.settings;
        if let Some(other) = g.waiting.values().find(different) {
            let why = format!(
                "the ranks of worker {} were started with different settings: rank {rank} with {}, rank {} with {}",
                key.worker, asks.settings, other.asks.rank, other.asks.settings
            );
            return Err(Refused { why, for_good: true });
        }
        // Who is in the group goes before a second process of the same rank.
        let seated = |token| g.seating.as_ref().is_some_and(|s| g.speaks(now) && s.has(token));
        let other = g.waiting.get(&rank).filter(|w| w.asks.token != asks.token);
        if let Some(other) = other.filter(|w| seated(w.asks.token) || !seated(asks.token)) {
            return Err(format!(
                "rank {rank} of worker {} is waiting already, at {}: two processes have the same rank",
                key.worker, other.asks.address
            )
            .into());
        }
        if g.seating.as_ref().is_some_and(|s| s.generation == asks.last.0) {
            g.lost.extend(&asks.lost);
        }
        let since = g.waiting.get(&rank).map_or(now, |w| w.since);
        g.waiting.insert(rank, Waiting { asks, since, asked: now });
        Ok(())
    }

    /// What to say to a process that asked.
    pub fn answer(&mut self, key: &Key, token: u64, now: Instant) -> Answer {
        let Some(g) = self.all.get_mut(key) else { return Answer::Wait(0) };
        let asker = g.waiting.values().find(|w| w.asks.token == token);
        if g.over.is_some_and(|o| now.saturating_duration_since(o) < REMEMBERED)
            && asker.is_some_and(|w| g.settings.as_ref() == Some(&w.asks.settings))
        {
            return Answer::Over;
        }
        g.seat(now);
        let waits = g.waiting.values().any(|w| w.asks.token == token);
        match &g.seating {
            Some(s) if !waits && s.has(token) => Answer::Seated(s.clone()),
            _ => Answer::Wait(g.waiting.len() as u32),
        }
    }

    /// The leader of a group is there; or, if it is `over`, its job is done. How many ranks wait to be taken in.
    pub fn hold(&mut self, key: &Key, seating: Seating, over: bool, now: Instant) -> Result<u32, String> {
        if !seating.is_sound() || key.job.len() > MAX_JOB {
            return Err("that is no group".into());
        }
        if !self.all.contains_key(key) && self.all.len() >= MAX_GROUPS {
            return Err(format!("there are {MAX_GROUPS} groups already"));
        }
        let g = self.all.entry(key.clone()).or_default();
        // Of another leader's time, or what this one knows itself. An older one has been replaced.
        if g.seating.as_ref().is_none_or(|s| s.generation <= seating.generation) {
            g.seating = Some(seating);
            g.heard = Some(now);
            g.over = if over { Some(now) } else { g.over };
        }
        g.forget(now);
        // A process of the same rank as one that is there waits until that one is gone.
        let newcomer =
            |rank: &&u32| g.seating.as_ref().is_none_or(|s| s.ranks.iter().all(|r| r.rank != **rank));
        Ok(g.waiting.keys().filter(newcomer).count() as u32)
    }

    /// What to say to a process when ranks have never come, and patience is over: it waits no longer then.
    pub fn incomplete(&mut self, key: &Key, token: u64, now: Instant) -> Option<String> {
        let g = self.all.get_mut(key).filter(|g| g.seating.is_none())?;
        let first = g.waiting.values().min_by_key(|w| w.since)?;
        if now.saturating_duration_since(first.since) < first.asks.patience {
            return None;
        }
        let missing: Vec<String> =
            (0..first.asks.size).filter(|r| !g.waiting.contains_key(r)).map(|r| r.to_string()).collect();
        let why = format!(
            "{} of {} ranks of worker {} have come within {:?}; missing: {} (start them, or a job with a smaller \
             train.group_size; cluster.patience_ms is how long to wait)",
            g.waiting.len(),
            first.asks.size,
            key.worker,
            first.asks.patience,
            missing.join(", ")
        );
        g.waiting.retain(|_, w| w.asks.token != token);
        Some(why)
    }

    /// Whether the process waits for one of its own rank to be gone, and what to say to it then.
    pub fn in_the_way(&self, key: &Key, token: u64, now: Instant) -> Option<String> {
        let g = self.all.get(key).filter(|g| g.speaks(now))?;
        let asks = &g.waiting.values().find(|w| w.asks.token == token)?.asks;
        let seated = g.seating.as_ref()?.ranks.iter().find(|r| r.rank == asks.rank && r.token != token)?;
        Some(format!(
            "rank {} of worker {} is in the group already, at {}: two processes have the same rank, or that one has \
             died a moment ago",
            asks.rank, key.worker, seated.address
        ))
    }
}

/// A group, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Overview {
    /// Whose it is.
    pub key: Key,
    /// Who is in it; nobody while the first forms.
    pub seating: Seating,
    /// Ranks that want to be taken in.
    pub waiting: u32,
    /// `forming`, `training`, `silent`, `done`
    pub state: &'static str,
}

impl Groups {
    /// All groups.
    pub fn overview(&self, now: Instant) -> Vec<Overview> {
        let of = |(key, g): (&Key, &Gathering)| Overview {
            key: key.clone(),
            seating: g.seating.clone().unwrap_or(Seating { generation: 0, ranks: Vec::new() }),
            waiting: g.waiting.len() as u32,
            state: match &g.seating {
                _ if g.over.is_some() => "done",
                None => "forming",
                Some(_) if g.speaks(now) => "training",
                Some(_) => "silent",
            },
        };
        self.all.iter().map(of).collect()
    }
}

impl Gathering {
    fn speaks(&self, now: Instant) -> bool {
        self.over.is_none() && self.heard.is_some_and(|h| now.saturating_duration_since(h) < SILENT)
    }

    fn forget(&mut self, now: Instant) {
        self.waiting.retain(|_, w| now.saturating_duration_since(w.asked) < HUNG_UP);
    }

    /// Seats those who wait, if it is time.
    fn seat(&mut self, now: Instant) {
        self.forget(now);
        let Some(since) = self.waiting.values().map(|w| w.since).min() else { return };
        let waited = now.saturating_duration_since(since);
        let before = self.seating.as_ref().filter(|_| self.speaks(now));
        let complete = match before {
            None => {
                let size = self.waiting.values().map(|w| w.asks.size).max().unwrap_or(1);
                let patience = self.waiting.values().map(|w| w.asks.patience).min().unwrap_or_default();
                // A job does not begin without ranks that have never come; what has stood goes on with those who are left.
                self.waiting.len() as u32 >= size || (waited >= patience && self.seating.is_some())
            }
            Some(s) => {
                // A process of the group before that has asked has left it; until one has, newcomers wait.
                let here = |r: &Seated| self.waiting.contains_key(&r.rank);
                let left = |r: &Seated| self.waiting.get(&r.rank).is_some_and(|w| w.asks.token == r.token);
                let first_left =
                    s.ranks.iter().filter(|r| left(r)).map(|r| self.waiting[&r.rank].since).min();
                match first_left {
                    // Only processes that have replaced others, or are new.
                    None => s.ranks.iter().all(|r| here(r) || self.lost.contains(&r.rank)),
                    Some(first) => {
                        let gone = |r: &Seated| here(r) || self.lost.contains(&r.rank);
                        let heard = self.heard.is_some_and(|h| now.saturating_duration_since(h) < SPEAKS);
                        let leader_comes = heard && s.ranks.first().is_some_and(|l| !gone(l));
                        let late = now.saturating_duration_since(first) >= GATHERING;
                        s.ranks.iter().all(gone) || (late && !leader_comes)
                    }
                }
            }
        };
        if !complete {
            return;
        }
        self.settings = self.waiting.values().next().map(|w| w.asks.settings.clone());
        let mut ranks: Vec<Waiting> = std::mem::take(&mut self.waiting).into_values().collect();
        let last = ranks.iter().map(|w| w.asks.last.0).max().unwrap_or(0);
        let last = last.max(self.seating.as_ref().map_or(0, |s| s.generation));
        // Those of the latest group first, in their order there.
        ranks.sort_by_key(|w| (std::cmp::Reverse(w.asks.last.0), w.asks.last.1, w.asks.rank));
        let seated = |w: Waiting| Seated { rank: w.asks.rank, token: w.asks.token, address: w.asks.address };
        let ranks = ranks.into_iter().map(seated).collect();
        self.seating = Some(Seating { generation: last + 1, ranks });
        self.heard = Some(now);
        self.lost.clear();
        self.over = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(20);

    fn key() -> Key {
        Key { job: "j".into(), worker: 0 }
    }

    fn asks(rank: u32, token: u64, last: (u64, u32), lost: &[u32]) -> Asks {
        let address = format!("127.0.0.1:{token}");
        Asks {
            size: 3,
            rank,
            token,
            address,
            last,
            lost: lost.into(),
            patience: PATIENCE,
            last_ranks: Vec::new(),
            settings: String::new(),
        }
    }

    /// Asks for all of them, and gives the group that they are seated in: generation and ranks in order.
    fn seated(groups: &mut Groups, all: &[Asks], now: Instant) -> Option<(u64, Vec<u32>)> {
        for a in all {
            groups.ask(&key(), a.clone(), now).expect("sound");
        }
        let mut answers = all.iter().map(|a| groups.answer(&key(), a.token, now));
        let first = answers.next()?;
        assert!(answers.all(|a| a == first), "they disagree");
        match first {
            Answer::Seated(s) => Some((s.generation, s.ranks.iter().map(|r| r.rank).collect())),
            Answer::Wait(_) | Answer::Over => None,
        }
    }

    #[test]
    fn a_group_begins_when_all_are_there_and_says_who_is_missing() {
        let now = Instant::now();
        let mut g = Groups::default();
        assert_eq!(seated(&mut g, &[asks(2, 12, (0, 0), &[]), asks(0, 10, (0, 0), &[])], now), None);
        assert_eq!(g.answer(&key(), 10, now), Answer::Wait(2));
        assert_eq!(seated(&mut g, &[asks(1, 11, (0, 0), &[])], now), Some((1, vec![0, 1, 2])));
        let mut g = Groups::default();
        let two = [asks(2, 12, (0, 0), &[]), asks(1, 11, (0, 0), &[])];
        assert_eq!(patiently(&mut g, &two, now, PATIENCE), None);
        let why = g.incomplete(&key(), 11, now + PATIENCE).expect("it takes too long");
        assert!(why.contains("2 of 3 ranks") && why.contains("missing: 0"), "{why}");
    }

    #[test]
    fn a_new_leader_of_the_control_group_learns_of_a_group_from_who_is_left_of_it() {
        let now = Instant::now();
        let mut g = Groups::default();
        let last_ranks = seating(4, &[(0, 10), (1, 11), (2, 12)]).ranks;
        let long = Seated { rank: 0, token: 1, address: "a".repeat(MAX_ADDRESS + 1) };
        let unsound = Asks { last_ranks: vec![long], ..asks(0, 10, (4, 0), &[]) };
        g.ask(&key(), unsound, now).expect("the rest is sound");
        assert_eq!(g.overview(now)[0].seating.generation, 0, "it is not kept");
        let asks = |rank, token, place| Asks {
            last_ranks: last_ranks.clone(),
            ..asks(rank, token, (4, place), &[1])
        };
        assert_eq!(seated(&mut g, &[asks(0, 10, 0)], now), None);
        assert_eq!(seated(&mut g, &[asks(2, 12, 2)], now), Some((5, vec![0, 2])));
    }

    #[test]
    fn ranks_of_different_settings_make_no_group() {
        let now = Instant::now();
        let mut g = Groups::default();
        let with = |rank, settings: &str| Asks { settings: settings.into(), ..asks(rank, 10, (0, 0), &[]) };
        g.ask(&key(), with(0, "group_size 3"), now).expect("sound");
        let refused = g.ask(&key(), with(1, "group_size 2"), now).expect_err("another job");
        assert!(refused.for_good && refused.why.contains("rank 1 with group_size 2"), "{refused:?}");
    }

    /// Asked again and again, nobody is seated before so long has passed; then this is how.
    fn patiently(g: &mut Groups, all: &[Asks], now: Instant, long: Duration) -> Option<(u64, Vec<u32>)> {
        for quarter in 0..4 * long.as_secs() as u32 {
            assert_eq!(seated(g, all, now + Duration::from_millis(250) * quarter), None);
        }
        seated(g, all, now + long)
    }

    fn three(now: Instant) -> Groups {
        let mut g = Groups::default();
        let all = [asks(0, 10, (0, 0), &[]), asks(1, 11, (0, 0), &[]), asks(2, 12, (0, 0), &[])];
        assert_eq!(seated(&mut g, &all, now), Some((1, vec![0, 1, 2])));
        g
    }

    #[test]
    fn who_is_lost_is_not_waited_for_and_the_leader_stays() {
        let now = Instant::now();
        let mut g = three(now);
        assert_eq!(seated(&mut g, &[asks(2, 12, (1, 2), &[])], now), None, "0 and 1 may be in their step");
        assert_eq!(seated(&mut g, &[asks(1, 11, (1, 1), &[0])], now), Some((2, vec![1, 2])));
        // The first comes back, as another process: it waits until the others have left their group.
        assert_eq!(seated(&mut g, &[asks(0, 20, (0, 0), &[])], now), None);
        assert_eq!(g.hold(&key(), seating(2, &[(1, 11), (2, 12)]), false, now), Ok(1));
        let rest = [asks(1, 11, (2, 0), &[]), asks(2, 12, (2, 1), &[])];
        assert_eq!(seated(&mut g, &rest, now), Some((3, vec![1, 2, 0])), "who led leads");
        assert!(matches!(g.answer(&key(), 20, now), Answer::Seated(s) if s.generation == 3));
    }

    fn seating(generation: u64, ranks: &[(u32, u64)]) -> Seating {
        let seated =
            |(rank, token): &(u32, u64)| Seated { rank: *rank, token: *token, address: "a:1".into() };
        Seating { generation, ranks: ranks.iter().map(seated).collect() }
    }

    #[test]
    fn a_rank_that_is_only_slow_is_left_behind_and_taken_in_again() {
        let now = Instant::now();
        let mut g = three(now);
        let two = [asks(0, 10, (1, 0), &[]), asks(1, 11, (1, 1), &[])];
        let later = now + GATHERING;
        assert_eq!(patiently(&mut g, &two, now, GATHERING), Some((2, vec![0, 1])));
        assert_eq!(seated(&mut g, &[asks(2, 12, (1, 2), &[])], later), None, "the others are at work");
        let two = [asks(0, 10, (2, 0), &[]), asks(1, 11, (2, 1), &[])];
        assert_eq!(seated(&mut g, &two, later), Some((3, vec![0, 1, 2])));
    }

    #[test]
    fn a_leader_that_speaks_is_waited_for() {
        let now = Instant::now();
        let mut g = three(now);
        let two = [asks(1, 11, (1, 1), &[2]), asks(2, 12, (1, 2), &[])];
        for quarter in 0..8 * GATHERING.as_secs() as u32 {
            let now = now + Duration::from_millis(250) * quarter;
            g.hold(&key(), seating(1, &[(0, 10), (1, 11), (2, 12)]), false, now).expect("sound");
            assert_eq!(seated(&mut g, &two, now), None);
        }
        let late = now + 2 * GATHERING;
        assert_eq!(seated(&mut g, &[asks(0, 10, (1, 0), &[])], late), Some((2, vec![0, 1, 2])));
    }

    #[test]
    fn a_leader_of_the_control_group_that_knows_nothing_learns_it() {
        let now = Instant::now();
        let mut g = Groups::default();
        assert_eq!(g.hold(&key(), seating(7, &[(0, 10), (1, 11)]), false, now), Ok(0));
        // A newcomer waits, though it would be the only one who asks.
        assert_eq!(seated(&mut g, &[asks(2, 12, (0, 0), &[])], now), None);
        let rest = [asks(0, 10, (7, 0), &[]), asks(1, 11, (7, 1), &[])];
        assert_eq!(seated(&mut g, &rest, now), Some((8, vec![0, 1, 2])));
        // An older one says nothing new.
        g.hold(&key(), seating(7, &[(0, 10)]), false, now).expect("sound");
        assert!(matches!(g.answer(&key(), 12, now), Answer::Seated(s) if s.generation == 8));
        // A group that says nothing is gone: the next begins like the first.
        let long = now + SILENT;
        assert_eq!(patiently(&mut g, &[asks(1, 31, (0, 0), &[])], long, PATIENCE), Some((9, vec![1])));
    }

    #[test]
    fn who_comes_back_to_a_job_that_is_done_hears_so() {
        let now = Instant::now();
        let mut g = three(now);
        assert_eq!(seated(&mut g, &[asks(1, 21, (0, 0), &[])], now), None);
        assert_eq!(g.hold(&key(), seating(1, &[(0, 10), (2, 12)]), true, now), Ok(1));
        assert_eq!(g.answer(&key(), 21, now), Answer::Over);
        // The last sign of life may come after that.
        g.hold(&key(), seating(1, &[(0, 10), (2, 12)]), false, now).expect("sound");
        assert_eq!(g.answer(&key(), 21, now), Answer::Over);
        let all = [asks(0, 30, (0, 0), &[]), asks(1, 31, (0, 0), &[]), asks(2, 32, (0, 0), &[])];
        let now = now + HUNG_UP;
        assert_eq!(seated(&mut g, &all, now), None);
        // Another job of the same name begins at once.
        let other = all.clone().map(|a| Asks { settings: "more epochs".into(), ..a });
        assert_eq!(seated(&mut g, &other, now), Some((1, vec![0, 1, 2])));
    }

    #[test]
    fn a_second_process_of_a_rank_waits_until_the_first_is_gone() {
        let now = Instant::now();
        let mut g = three(now);
        assert_eq!(seated(&mut g, &[asks(1, 21, (0, 0), &[])], now), None);
        let all = [(0, 10), (1, 11), (2, 12)];
        assert_eq!(g.hold(&key(), seating(1, &all), false, now), Ok(0), "nobody is to make room for it");
        let why = g.in_the_way(&key(), 21, now).expect("the first is there");
        assert!(why.contains("two processes") && why.contains("a:1"), "{why}");
        assert_eq!(g.in_the_way(&key(), 11, now), None);
        // Another rank is lost: whoever was in the group stays.
        let two = [asks(0, 10, (1, 0), &[2]), asks(1, 11, (1, 1), &[])];
        assert_eq!(seated(&mut g, &two, now), Some((2, vec![0, 1])));
        g.ask(&key(), asks(1, 21, (0, 0), &[]), now).expect("sound");
        // Now it is gone.
        assert_eq!(seated(&mut g, &[asks(0, 10, (2, 0), &[1])], now), Some((3, vec![0, 1])));
        assert!(matches!(g.answer(&key(), 21, now), Answer::Seated(_)));
    }

    #[test]
    fn people_see_who_is_in_a_group() {
        let now = Instant::now();
        let mut g = Groups::default();
        assert_eq!(seated(&mut g, &[asks(2, 12, (0, 0), &[])], now), None);
        let state =
            |g: &Groups, now| g.overview(now).iter().map(|o| (o.state, o.waiting)).collect::<Vec<_>>();
        assert_eq!(state(&g, now), [("forming", 1)]);
        let mut g = three(now);
        assert_eq!(state(&g, now), [("training", 0)]);
        assert_eq!(g.overview(now)[0].seating.ranks.len(), 3);
        assert_eq!(state(&g, now + SILENT), [("silent", 0)]);
        g.hold(&key(), seating(1, &[(0, 10)]), true, now).expect("sound");
        assert_eq!(state(&g, now), [("done", 0)]);
    }

    #[test]
    fn all_have_died_and_come_back_as_others() {
        let now = Instant::now();
        let mut g = three(now);
        let all = [asks(0, 20, (0, 0), &[]), asks(1, 21, (0, 0), &[]), asks(2, 22, (0, 0), &[])];
        assert_eq!(seated(&mut g, &all, now), Some((2, vec![0, 1, 2])));
        assert_eq!(g.answer(&key(), 10, now), Answer::Wait(0), "an old process is in no group");
    }

    #[test]
    fn nonsense_is_refused_and_who_hangs_up_is_forgotten() {
        let now = Instant::now();
        let mut g = Groups::default();
        assert!(g.ask(&key(), Asks { size: 0, ..asks(0, 1, (0, 0), &[]) }, now).is_err());
        assert!(g.ask(&key(), asks(3, 1, (0, 0), &[]), now).is_err());
        assert!(g.ask(&key(), Asks { address: "x".into(), ..asks(0, 1, (0, 0), &[]) }, now).is_err());
        g.ask(&key(), asks(0, 1, (0, 0), &[]), now).expect("sound");
        let twice = g.ask(&key(), asks(0, 2, (0, 0), &[]), now).expect_err("another process");
        assert!(twice.why.contains("two processes") && !twice.for_good, "{twice:?}");
        let now = now + HUNG_UP;
        g.ask(&key(), asks(0, 2, (0, 0), &[]), now).expect("the first has hung up");
        let now = now + HUNG_UP;
        assert_eq!(g.answer(&key(), 2, now), Answer::Wait(0));
        for worker in 0..MAX_GROUPS as u32 {
            g.hold(&Key { job: "j".into(), worker }, seating(1, &[(0, 1)]), false, now).expect("sound");
        }
        let one_more = Key { job: "k".into(), worker: 0 };
        assert!(g.ask(&one_more, asks(0, 1, (0, 0), &[]), now).is_err());
        g.ask(&one_more, asks(0, 1, (0, 0), &[]), now + SILENT).expect("the others are over");
    }
}
