//! A model of Raft by its guarantees: committed entries stay; a leader has every committed entry; of the
//! uncommitted proposals of a lost leader, its successor has a prefix or nothing.
//!
//! The test decides when to commit, apply and elect.

use crate::{
    raft::{Leadership, ProposeError, RawImage, Replicated, Role},
    shard::{
        Command, Contribution, Outcome, Proposal, Shard,
        leader::{
            Counters, Effect, Event, GroupStatus, Input, Leader, Now,
            run::{EVENT_QUEUE, ReplySenders},
        },
    },
};
use paraft_common::{BucketId, ServerId, SessionId, ShardId, Step, WorkerId};
use paraft_trace::Moment;
use parking_lot::Mutex;
use std::{
    collections::{BTreeSet, VecDeque},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};
use tokio::sync::mpsc;

/// More inputs than this at one moment mean that a leader never becomes idle.
const MAX_INPUTS: usize = 100_000;

/// A push that was not applied because it, or another of its round, had no gradient.
pub type Skipped = (BucketId, WorkerId, SessionId, Step);

/// The origin of a proposal: the node, its incarnation, and the proposal's number there.
type Source = (usize, u64, u64);

#[derive(Clone)]
pub struct Entry {
    term: u64,
    /// `None`: the first entry of a term.
    change: Option<Proposal>,
    source: Source,
}

/// A replica: its state, its leader, and its role in the group.
pub struct Node {
    pub shard: Arc<Shard>,
    /// The channel for its streams' events.
    pub events: mpsc::Sender<Event>,
    /// Counts its incarnations.
    pub incarnation: u64,
    /// Number of entries that it has applied.
    pub applied: usize,
    /// The term in which it believes that it leads.
    pub believes: Option<u64>,
    leader: Leader,
    pub counters: Arc<Counters>,
    came: mpsc::Receiver<Event>,
    lines: ReplySenders,
    /// The next inputs of its leader: outcomes.
    inputs: VecDeque<Input>,
    standing: KnownLeader,
    /// Its leader was not notified of the current leadership.
    news: bool,
    /// Numbers of proposals whose outcomes it does not know.
    waiting: BTreeSet<u64>,
    /// Pending confirmations: the term, the number of entries to apply, and the confirmation's number.
    barriers: Vec<(u64, usize, u64)>,
}

/// The leadership as a node knows it.
struct KnownLeader {
    node: usize,
    leadership: Leadership,
}

impl GroupStatus for KnownLeader {
    fn leads(&self) -> bool {
        self.leadership.leads
    }

    fn leader_address(&self) -> Option<String> {
        self.leadership.leader.map(|l| address(l.0 as usize)).filter(|a| *a != address(self.node))
    }

    fn is_asleep(&self) -> bool {
        false
    }

    fn has_slept(&self) -> bool {
        false
    }
}

/// The group.
pub struct Group {
    pub nodes: Vec<Node>,
    pub committed: Vec<Entry>,
    /// Proposals of the leader that are not committed.
    open: VecDeque<Entry>,
    pub term: u64,
    pub leader: usize,
    /// The index of the term's first entry, once it is committed.
    first: Option<usize>,
    /// A shard that applies every entry on commit: the true state.
    pub truth: Shard,
    /// Skipped pushes by bucket: entry by entry, and all of them.
    pub skipped: (Vec<(BucketId, Vec<Contribution>)>, BTreeSet<Skipped>),
    /// The digest of the true state after each entry.
    pub digests: Vec<u64>,
    /// Session ids drawn by all its leaders.
    sessions: Arc<AtomicU64>,
    began: Instant,
    now: Instant,
}

#[derive(Clone)]
pub struct Cluster(pub Arc<Mutex<Group>>);

fn shard() -> Shard {
    Shard::new(ShardId(0), 1)
}

pub fn address(node: usize) -> String {
    format!("n{node}")
}

impl Cluster {
    /// Replicas with empty logs; the first one leads.
    pub fn new(nodes: usize) -> Self {
        let now = Instant::now(); // only differences between two times matter
        let group = Group {
            nodes: Vec::new(),
            committed: Vec::new(),
            skipped: Default::default(),
            open: VecDeque::new(),
            term: 0,
            leader: 0,
            first: None,
            truth: shard(),
            digests: vec![shard().cut().digest()],
            sessions: Arc::default(),
            began: now,
            now,
        };
        let cluster = Self(Arc::new(Mutex::new(group)));
        for node in 0..nodes {
            let new = cluster.node(node, 1);
            cluster.0.lock().nodes.push(new);
        }
        cluster.elect(0, 0);
        cluster
    }

    fn node(&self, node: usize, incarnation: u64) -> Node {
        let shard = Arc::new(shard());
        let sessions = self.0.lock().sessions.clone();
        let draw = Box::new(move || SessionId(sessions.fetch_add(1, Relaxed) + 1));
        let (events, came) = mpsc::channel(EVENT_QUEUE);
        let counters = Arc::new(Counters::default());
        Node {
            leader: Leader::new(shard.clone(), counters.clone(), 1, draw),
            counters,
            shard,
            events,
            incarnation,
            applied: 0,
            believes: None,
            came,
            lines: ReplySenders::default(),
            inputs: VecDeque::new(),
            standing: KnownLeader { node, leadership: Leadership::default() },
            news: true,
            waiting: BTreeSet::new(),
            barriers: Vec::new(),
        }
    }

    /// Lets every node do its pending work.
    pub fn run_pending(&self) {
        self.0.lock().run_pending();
    }

    /// Advances time; every node handles its deadlines.
    pub fn advance_time(&self, ms: u64) {
        let g = &mut *self.0.lock();
        let until = g.now + Duration::from_millis(ms);
        loop {
            g.run_pending();
            let next = g.nodes.iter().filter_map(|n| n.leader.deadline()).min().filter(|at| *at <= until);
            let Some(next) = next else { break };
            g.now = g.now.max(next);
        }
        g.now = until;
    }

    /// Commits this many of the leader's open entries.
    pub fn commit(&self, count: usize) {
        let mut g = self.0.lock();
        for _ in 0..count {
            let Some(entry) = g.open.pop_front() else { return };
            match &entry.change {
                Some(change) => {
                    let outcome = Replicated::apply(&g.truth, change).expect("memory has no end");
                    if let (
                        Command::Skip { bucket, contributions, .. },
                        Outcome::Updated { applied: true, .. },
                    ) = (&change.command, outcome)
                    {
                        g.skipped.0.push((*bucket, contributions.clone()));
                        let all = contributions.iter().map(|c| (*bucket, c.worker, c.session, c.step));
                        g.skipped.1.extend(all);
                    }
                }
                None => g.first = Some(g.committed.len() + 1),
            }
            g.committed.push(entry);
            let digest = g.truth.cut().digest();
            g.digests.push(digest);
        }
    }

    /// Applies this many committed entries on a node.
    pub fn apply(&self, node: usize, count: usize) {
        let mut g = self.0.lock();
        for _ in 0..count {
            let at = g.nodes[node].applied;
            let Some(entry) = g.committed.get(at).cloned() else { break };
            let n = &mut g.nodes[node];
            n.shard.in_term(entry.term);
            let applied = entry
                .change
                .map_or(Outcome::None, |c| Replicated::apply(&*n.shard, &c).expect("memory has no end"));
            n.applied += 1;
            let (from, incarnation, number) = entry.source;
            if (from, incarnation) == (node, n.incarnation) && n.waiting.remove(&number) {
                n.inputs.push_back(Input::Outcome(number, Ok(applied)));
            }
        }
        g.pass_barriers();
    }

    /// Elects a node, possibly the same one, in a new term; its log had `kept` of the open entries.
    pub fn elect(&self, node: usize, kept: usize) {
        let mut g = self.0.lock();
        g.term += 1;
        g.open.truncate(kept);
        let term = g.term;
        g.open.push_back(Entry { term, change: None, source: (usize::MAX, 0, 0) });
        g.first = None;
        g.leader = node;
        g.nodes[node].refuse("deposed, and elected again");
        g.nodes[node].believes = Some(term);
        let lead = Leadership { term, leader: Some(ServerId(node as u64)), leads: true, role: Role::Leader };
        g.nodes[node].hears(lead);
    }

    /// Notifies a node that does not lead of the leader.
    pub fn hears(&self, node: usize) {
        let mut g = self.0.lock();
        if node == g.leader {
            return;
        }
        let (term, leader) = (g.term, Some(ServerId(g.leader as u64)));
        let n = &mut g.nodes[node];
        n.believes = None;
        n.refuse("another leads");
        n.hears(Leadership { term, leader, leads: false, role: Role::Follower });
    }

    /// Makes the outcomes of a node's proposals unknown to it.
    pub fn lose_outcomes(&self, node: usize) {
        self.0.lock().nodes[node].refuse("no answer");
    }

    /// Restarts a node as a follower without its memory.
    pub fn crash(&self, node: usize) {
        let incarnation = self.0.lock().nodes[node].incarnation + 1;
        let new = self.node(node, incarnation);
        self.0.lock().nodes[node] = new;
        self.hears(node);
    }

    /// Gives a node that does not lead the state instead of the entries, through the bytes of a snapshot.
    pub fn snapshot(&self, node: usize) {
        let mut g = self.0.lock();
        if g.nodes[node].believes.is_some() {
            return;
        }
        let image: RawImage = Replicated::image(&g.truth);
        g.nodes[node].shard.in_term(g.committed.last().map_or(0, |e| e.term));
        Replicated::install(&*g.nodes[node].shard, &image).expect("the group's own snapshot");
        g.nodes[node].applied = g.committed.len();
    }
}

impl Node {
    fn hears(&mut self, leadership: Leadership) {
        self.standing.leadership = leadership;
        self.news = true;
    }

    fn refuse(&mut self, why: &str) {
        let proposals = std::mem::take(&mut self.waiting).into_iter();
        let barriers = std::mem::take(&mut self.barriers).into_iter().map(|(.., number)| number);
        let lost = |number| Input::Outcome(number, Err(ProposeError::new(why)));
        self.inputs.extend(proposals.chain(barriers).map(lost));
    }

    /// The next input of its leader, if there is any.
    fn next(&mut self, now: Instant) -> Option<Input> {
        if let Some(input) = self.inputs.pop_front() {
            return Some(input);
        }
        if std::mem::take(&mut self.news) {
            return Some(Input::Leadership(self.standing.leadership));
        }
        if let Ok(event) = self.came.try_recv() {
            return Some(self.lines.input(event));
        }
        self.leader.deadline().filter(|at| *at <= now).map(|_| Input::Time)
    }
}

impl Group {
    fn pass_barriers(&mut self) {
        let (term, leader) = (self.term, self.leader);
        let Some(first) = self.first else { return };
        let n = &mut self.nodes[leader];
        for (asked, after, waits) in std::mem::take(&mut n.barriers) {
            if n.applied < first.max(after) {
                n.barriers.push((asked, after, waits));
                continue;
            }
            let passed =
                if asked == term { Ok(Outcome::Done) } else { Err(ProposeError::new("of another term")) };
            n.inputs.push_back(Input::Outcome(waits, passed));
        }
    }

    fn run_pending(&mut self) {
        for _ in 0..MAX_INPUTS {
            let nodes = 0..self.nodes.len();
            if nodes.filter(|node| self.turn(*node)).count() == 0 {
                return;
            }
        }
        panic!("a leader does not come to rest");
    }

    /// Handles one input of a node, if there is any, and those that its effects return at once.
    fn turn(&mut self, node: usize) -> bool {
        let moment = Moment((self.now - self.began).as_nanos() as u64);
        let now = Now { at: self.now, moment };
        let mut inputs: Vec<Input> = self.nodes[node].next(now.at).into_iter().collect();
        let any = !inputs.is_empty();
        while let Some(input) = inputs.pop() {
            let n = &mut self.nodes[node];
            n.leader.handle(now, &n.standing, input);
            while let Some(effect) = self.nodes[node].leader.next_effect() {
                inputs.extend(self.carry_out(node, effect));
            }
        }
        any
    }

    fn carry_out(&mut self, node: usize, effect: Effect) -> Option<Input> {
        let (term, committed) = (self.term, self.committed.len());
        let n = &mut self.nodes[node];
        match effect {
            Effect::Send(conn, reply) => {
                return (!n.lines.send(conn, reply)).then_some(Input::Closed(conn));
            }
            Effect::Close(conn) => n.lines.close(conn),
            Effect::Propose(number, proposal) => match n.believes {
                None => n.inputs.push_back(not_leading(number)),
                Some(believes) => {
                    n.waiting.insert(number);
                    // Proposals of a leader that was deposed without its knowledge reach no other node.
                    if believes == term {
                        let (change, source) = (Some(proposal), (node, n.incarnation, number));
                        self.open.push_back(Entry { term, change, source });
                    }
                }
            },
            Effect::Confirm(number) => {
                match n.believes {
                    None => n.inputs.push_back(not_leading(number)),
                    Some(believes) => n.barriers.push((believes, committed, number)),
                }
                self.pass_barriers();
            }
            Effect::Compute(_, work) => return Some(Input::Computed(Ok(work()))),
            Effect::SwitchResult(asker, switched) => asker.answer(switched),
            Effect::EditResult(asker, edited) => asker.answer(edited),
            Effect::FetchResult(asker, fetched) => asker.answer(fetched),
            Effect::Sleep | Effect::Wake => n.inputs.push_back(Input::SleepOrWake),
        }
        None
    }
}

fn not_leading(number: u64) -> Input {
    Input::Outcome(number, Err(ProposeError::new("it does not lead")))
}
