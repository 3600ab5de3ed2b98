//! The members of each group of ranks that act as one worker.
//!
//! Only the leader of the control group knows them, and they are lost with its leadership. Leaders of groups
//! repeat what they lead, ranks say who was with them, and no gradient depends on it. A rank that is wrong
//! about its group finds no peer to reduce with, and asks again. Of two leaders of the same worker, the
//! shards refuse the second.
//!
//! ```text
//! ask ─▶ waiting ──all of the group before are here or lost, or it took too long──▶ assigned, in the next generation
//! ```
//!
//! The previous leader leads again: its session with the servers continues.

mod gathering;

use gathering::{Gathering, Waiting};
use paraft_common::{
    config::facts_missing,
    group::{Assigned, Assignment, MAX_RANKS},
};
use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

/// Maximum number of groups: a leader's memory must not grow with what clients send.
pub(super) const MAX_GROUPS: usize = 4096;
/// Maximum bytes of an address.
pub(super) const MAX_ADDRESS_BYTES: usize = 256;
/// Maximum bytes of a job's name here.
const MAX_JOB_NAME_BYTES: usize = 512;
/// Maximum bytes of a text about settings.
const MAX_SETTINGS_BYTES: usize = 4096;
/// Survivors notice a lost rank at once, except in the middle of a step. A rank that takes longer joins
/// later.
pub const GATHER_TIMEOUT: Duration = Duration::from_secs(5);
/// A waiting rank repeats its request; after this long without one it has gone.
pub(super) const REQUEST_TIMEOUT: Duration = Duration::from_millis(700);
/// A new leader of the control group receives a heartbeat of every group within this time. Until then it
/// assigns no rank that knows of no group.
pub(super) const LEARN_PERIOD: Duration = Duration::from_millis(1500);
/// A rank waits for a group leader that sends heartbeats, however long its step takes: the leader's session
/// with the servers continues.
pub(super) const LEADER_TIMEOUT: Duration = Duration::from_secs(3);
/// A group whose leader is silent for this long is over.
pub(super) const GROUP_TIMEOUT: Duration = Duration::from_secs(15);
/// For this long after a job is done, a rank that returns is told so.
pub(super) const DONE_RETENTION: Duration = Duration::from_secs(60);

/// The worker that the ranks form.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key {
    /// The job, as its workers name it among themselves.
    pub job: String,
    /// The worker.
    pub worker: u32,
}

/// A rank that asks for an assignment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JoinRequest {
    /// Number of ranks of a whole group.
    pub size: u32,
    /// Its rank, below `size`.
    pub rank: u32,
    /// Random id of its process.
    pub token: u64,
    /// Its address for the other ranks.
    pub address: String,
    /// Its last group; generation 0: none.
    pub last: Assignment,
    /// Ranks of that group that are gone.
    pub lost: Vec<u32>,
    /// How long to wait for ranks that have never come.
    pub timeout: Duration,
    /// What must be the same on all ranks.
    pub settings: String,
}

/// A heartbeat of a group's leader.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Heartbeat {
    /// Its members.
    pub assignment: Assignment,
    /// The settings that all of its ranks share.
    pub settings: String,
    /// Its current step.
    pub step: u64,
    /// The job is done.
    pub over: bool,
}

/// Why a rank gets no assignment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    /// The reason, as text.
    pub why: String,
    /// What the rank should do.
    pub then: Advice,
}

/// What a refused rank should do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Advice {
    /// Ask again.
    Again,
    /// Asking again is useless.
    GiveUp,
    /// Asking again is useless: its job is another one.
    Fix,
}

impl From<String> for Refused {
    fn from(why: String) -> Self {
        Self { why, then: Advice::Again }
    }
}

/// Whether it can be a group: data from the wire is kept only then.
fn is_sound(s: &Assignment) -> bool {
    let sound = |r: &Assigned| r.address.len() <= MAX_ADDRESS_BYTES && r.rank < MAX_RANKS;
    s.generation > 0
        && !s.ranks.is_empty()
        && s.ranks.len() <= MAX_RANKS as usize
        && s.ranks.iter().all(sound)
}

/// All groups.
#[derive(Debug, Default)]
pub struct Groups {
    all: BTreeMap<Key, Gathering>,
    /// See [`LEARN_PERIOD`].
    learns_until: Option<Instant>,
}

/// The answer to a rank's request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// It is in this group.
    Assigned(Assignment),
    /// It should keep waiting.
    Wait {
        /// Number of ranks here.
        here: u32,
        /// What blocks it, besides the absence of others.
        why: Option<String>,
    },
    /// The job is done.
    Over,
}

impl Groups {
    /// For a leader of the control group that takes over `now`; groups may exist if `jobs` exist.
    pub fn taken_over(jobs: bool, now: Instant) -> Self {
        Self { all: BTreeMap::new(), learns_until: jobs.then(|| now + LEARN_PERIOD) }
    }

    /// A rank asks, as it does several times a second until it is assigned. `Err`: it never will be, with the
    /// reason.
    pub fn join(&mut self, key: &Key, asks: JoinRequest, now: Instant) -> Result<Answer, Refused> {
        let (token, last) = (asks.token, asks.last.generation);
        let learning = self.learns_until.is_some_and(|until| now < until);
        // Another rank's request may have assigned it already.
        if let Some(assignment) = self.all.get_mut(key).and_then(|g| g.assigned(token, learning, now))
            && assignment.generation > last
        {
            return Ok(Answer::Assigned(assignment));
        }
        self.ask(key, asks, now)?;
        let Some(g) = self.all.get_mut(key) else { return Ok(Answer::Wait { here: 0, why: None }) };
        if g.is_over(now) {
            return Ok(Answer::Over);
        }
        if let Some(assignment) = g.assigned(token, learning, now) {
            return Ok(Answer::Assigned(assignment));
        }
        if let Some(why) = g.incomplete(key, token, now) {
            return Err(Refused { why, then: Advice::GiveUp });
        }
        Ok(Answer::Wait { here: g.waiting.len() as u32, why: g.in_the_way(key, token, now) })
    }

    fn ask(&mut self, key: &Key, asks: JoinRequest, now: Instant) -> Result<(), Refused> {
        let JoinRequest { size, rank, ref address, .. } = asks;
        if size == 0 || size > MAX_RANKS {
            return Err(format!("a group of {size} ranks; 1 to {MAX_RANKS} go").into());
        }
        if rank >= size || asks.lost.len() > size as usize || asks.lost.iter().any(|r| *r >= size) {
            return Err(format!("rank {rank}, {} ranks lost, of a group of {size}", asks.lost.len()).into());
        }
        // Other ranks are shown a rank's texts.
        let too_long = address.len() > MAX_ADDRESS_BYTES
            || key.job.len() > MAX_JOB_NAME_BYTES
            || asks.settings.len() > MAX_SETTINGS_BYTES;
        if too_long || has_control([address, &key.job, &asks.settings]) {
            return Err(
                "the address, the job's name or the settings are too long, or have control characters"
                    .to_string()
                    .into(),
            );
        }
        if !address.contains(':') {
            return Err(format!("`{address}` is no address: write host:port").into());
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
        // A leader of the control group that does not know a group learns it from its former members.
        let known = g.assignment.as_ref().map_or(0, |s| s.generation);
        if asks.last.generation > known && is_sound(&asks.last) {
            g.assignment = Some(asks.last.clone());
            g.heard = Some(now);
        }
        let different = |w: &&Waiting| w.asks.rank != rank && w.asks.settings != asks.settings;
        if let Some(other) = g.waiting.values().find(different) {
            let (own, others) = (&asks.settings, &other.asks.settings);
            let why = format!(
                "the ranks of worker {} were started with different settings: rank {rank} with {}, rank {} with {}",
                key.worker,
                facts_missing(own, others),
                other.asks.rank,
                facts_missing(others, own)
            );
            g.turned_away = Some(why.clone());
            return Err(Refused { why, then: Advice::Fix });
        }
        // A member of the group has priority over a second process of the same rank.
        let assigned =
            |token| g.assignment.as_ref().is_some_and(|s| g.speaks(now) && s.place(token).is_some());
        let other = g.waiting.get(&rank).filter(|w| w.asks.token != asks.token);
        if let Some(other) = other.filter(|w| assigned(w.asks.token) || !assigned(asks.token)) {
            return Err(format!(
                "rank {rank} of worker {} is waiting already, at {}: two processes have the same rank",
                key.worker, other.asks.address
            )
            .into());
        }
        if g.assignment.as_ref().is_some_and(|s| s.generation == asks.last.generation) {
            g.lost.extend(&asks.lost);
        }
        let since = g.waiting.get(&rank).map_or(now, |w| w.since);
        g.waiting.insert(rank, Waiting { asks, since, asked: now });
        Ok(())
    }

    /// The leader of a group is alive; or, if it is `over`, its job is done. Returns the number of ranks that
    /// wait to join.
    pub fn hold(&mut self, key: &Key, holds: Heartbeat, now: Instant) -> Result<u32, String> {
        let Heartbeat { assignment, settings, step, over } = holds;
        let too_long = key.job.len() > MAX_JOB_NAME_BYTES || settings.len() > MAX_SETTINGS_BYTES;
        let addresses = assignment.ranks.iter().map(|r| &r.address);
        if !is_sound(&assignment) || too_long || has_control(addresses.chain([&key.job, &settings])) {
            return Err("that is no group".into());
        }
        if !self.all.contains_key(key) && self.all.len() >= MAX_GROUPS {
            return Err(format!("there are {MAX_GROUPS} groups already"));
        }
        let g = self.all.entry(key.clone()).or_default();
        // Assigned under another leader, or by this one. An older group has been replaced, unless the leader
        // of the replacement is silent.
        if !g.speaks(now) || g.assignment.as_ref().is_none_or(|s| s.generation <= assignment.generation) {
            g.assignment = Some(assignment);
            g.settings = Some(settings);
            g.step = step;
            g.heard = Some(now);
            g.over = if over { Some(now) } else { g.over };
        }
        g.forget(now);
        // A second process of a live process's rank waits until the first is gone.
        let newcomer =
            |rank: &&u32| g.assignment.as_ref().is_none_or(|s| s.ranks.iter().all(|r| r.rank != **rank));
        Ok(g.waiting.keys().filter(newcomer).count() as u32)
    }
}

fn has_control<'a>(texts: impl IntoIterator<Item = &'a String>) -> bool {
    texts.into_iter().any(|text| text.contains(char::is_control))
}

/// A group, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Overview {
    /// The worker that it forms.
    pub key: Key,
    /// Its members; empty while the first group forms.
    pub assignment: Assignment,
    /// Ranks that want to join.
    pub waiting: u32,
    /// `forming`, `training`, `silent`, `done`
    pub state: &'static str,
    /// Its current step, as its leader last reported.
    pub step: u64,
}

impl Groups {
    /// All groups.
    pub fn overview(&self, now: Instant) -> Vec<Overview> {
        let of = |(key, g): (&Key, &Gathering)| Overview {
            key: key.clone(),
            assignment: g.assignment.clone().unwrap_or_default(),
            waiting: g.waiting.len() as u32,
            step: g.step,
            state: match &g.assignment {
                _ if g.over.is_some() => "done",
                None => "forming",
                Some(_) if g.speaks(now) => "training",
                Some(_) => "silent",
            },
        };
        self.all.iter().map(of).collect()
    }
}
