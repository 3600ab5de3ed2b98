//! Raft, modelled by what it promises: what is committed stays; a leader has everything that is committed; of what a
//! leader that is lost had proposed and not committed, its successor has a beginning, or nothing.
//!
//! It is told when to commit, apply, elect; it decides nothing.

use crate::{
    raft::{Applied, Change, Leadership, ProposeError, RawImage, Replicated, Replication, Role, Waits},
    shard::{
        Shard,
        leader::{self, Counters, Event},
    },
};
use futures::{FutureExt, future::BoxFuture};
use paraft_common::{ServerId, SessionId, ShardId};
use parking_lot::Mutex;
use std::{
    collections::{BTreeMap, VecDeque},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};
use tokio::sync::{mpsc, oneshot, watch};

/// Who made a proposal: the node, in which life, and its number there.
type Source = (usize, u64, u64);

#[derive(Clone)]
pub struct Entry {
    term: u64,
    /// `None`: the first entry of a term.
    change: Option<Change>,
    source: Source,
}

/// Hears whether leadership was confirmed.
type Confirm = oneshot::Sender<Result<(), ProposeError>>;

/// A replica: its state, its owner, and its part in the group.
pub struct Node {
    pub shard: Arc<Shard>,
    pub owner: mpsc::Sender<Event>,
    /// Counts its lives.
    pub life: u64,
    /// Entries that it has applied.
    pub applied: usize,
    /// The term in which it believes to lead.
    pub believes: Option<u64>,
    leadership: watch::Sender<Leadership>,
    proposals: u64,
    waiting: BTreeMap<u64, oneshot::Sender<Result<Applied, ProposeError>>>,
    /// In which term, after how many entries, who waits.
    barriers: Vec<(u64, usize, Confirm)>,
}

/// The group.
pub struct Group {
    pub nodes: Vec<Node>,
    pub committed: Vec<Entry>,
    /// What the leader has proposed and not committed.
    open: VecDeque<Entry>,
    pub term: u64,
    pub leader: usize,
    /// The index of the term's first entry, once it is committed.
    first: Option<usize>,
    /// Applies every entry as it is committed: what is true.
    pub truth: Shard,
    /// What the truth was after each entry.
    pub digests: Vec<u64>,
    /// Sessions given out by all its leaders.
    sessions: Arc<AtomicU64>,
}

#[derive(Clone)]
pub struct Cluster(pub Arc<Mutex<Group>>);

struct Handle {
    cluster: Cluster,
    node: usize,
    life: u64,
    leadership: watch::Receiver<Leadership>,
}

fn shard() -> Shard {
    Shard::new(ShardId(0), 1)
}

pub fn address(node: usize) -> String {
    format!("n{node}")
}

impl Cluster {
    /// Replicas with empty logs, of which the first leads.
    pub fn new(nodes: usize) -> Self {
        let group = Group {
            nodes: Vec::new(),
            committed: Vec::new(),
            open: VecDeque::new(),
            term: 0,
            leader: 0,
            first: None,
            truth: shard(),
            digests: vec![shard().image().digest()],
            sessions: Arc::default(),
        };
        let cluster = Self(Arc::new(Mutex::new(group)));
        for node in 0..nodes {
            let new = cluster.node(node, 1);
            cluster.0.lock().nodes.push(new);
        }
        cluster.elect(0, 0);
        cluster
    }

    fn node(&self, node: usize, life: u64) -> Node {
        let shard = Arc::new(shard());
        let (leadership, follow) = watch::channel(Leadership::default());
        let handle = Handle { cluster: self.clone(), node, life, leadership: follow };
        let sessions = self.0.lock().sessions.clone();
        let draw = Box::new(move || SessionId(sessions.fetch_add(1, Relaxed) + 1));
        let owner = leader::spawn(shard.clone(), Arc::new(handle), Arc::new(Counters::default()), 1, draw);
        Node {
            shard,
            owner,
            life,
            applied: 0,
            believes: None,
            leadership,
            proposals: 0,
            waiting: BTreeMap::new(),
            barriers: Vec::new(),
        }
    }

    /// Commits so many of the leader's open entries.
    pub fn commit(&self, count: usize) {
        let mut g = self.0.lock();
        for _ in 0..count {
            let Some(entry) = g.open.pop_front() else { return };
            match &entry.change {
                Some(change) => _ = Replicated::apply(&g.truth, change).expect("memory has no end"),
                None => g.first = Some(g.committed.len() + 1),
            }
            g.committed.push(entry);
            let digest = g.truth.image().digest();
            g.digests.push(digest);
        }
    }

    /// Applies so many committed entries on a node.
    pub fn apply(&self, node: usize, count: usize) {
        let mut g = self.0.lock();
        for _ in 0..count {
            let at = g.nodes[node].applied;
            let Some(entry) = g.committed.get(at).cloned() else { break };
            let n = &mut g.nodes[node];
            n.shard.in_term(entry.term);
            let applied = entry
                .change
                .map_or(Applied::None, |c| Replicated::apply(&*n.shard, &c).expect("memory has no end"));
            n.applied += 1;
            let (from, life, number) = entry.source;
            if (from, life) == (node, n.life)
                && let Some(waits) = n.waiting.remove(&number)
            {
                let _ = waits.send(Ok(applied)); // its owner may have forgotten it
            }
        }
        g.pass_barriers();
    }

    /// Another node, or the same one again, leads in a new term; `kept` of the open entries were in its log.
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
        g.nodes[node].leadership.send_replace(lead);
    }

    /// A node that does not lead hears who does.
    pub fn hears(&self, node: usize) {
        let mut g = self.0.lock();
        if node == g.leader {
            return;
        }
        let (term, leader) = (g.term, Some(ServerId(g.leader as u64)));
        let n = &mut g.nodes[node];
        n.believes = None;
        n.refuse("another leads");
        n.leadership.send_replace(Leadership { term, leader, leads: false, role: Role::Follower });
    }

    /// The outcomes of a node's proposals become unknown to it, whatever becomes of them.
    pub fn doubt(&self, node: usize) {
        self.0.lock().nodes[node].refuse("no answer");
    }

    /// A node loses its memory and begins again as a follower.
    pub fn crash(&self, node: usize) {
        let life = self.0.lock().nodes[node].life + 1;
        let new = self.node(node, life);
        let old = std::mem::replace(&mut self.0.lock().nodes[node], new);
        old.leadership.send_replace(Leadership { role: Role::Stopped, ..Leadership::default() });
        drop(old); // its owner ends as its leadership closes
        self.hears(node);
    }

    /// A node that does not lead gets the state instead of the entries, through the bytes of a snapshot.
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
    fn refuse(&mut self, why: &str) {
        for waits in std::mem::take(&mut self.waiting).into_values() {
            let _ = waits.send(Err(ProposeError::new(why)));
        }
        for (_, _, waits) in std::mem::take(&mut self.barriers) {
            let _ = waits.send(Err(ProposeError::new(why)));
        }
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
            let passed = if asked == term { Ok(()) } else { Err(ProposeError::new("of another term")) };
            let _ = waits.send(passed);
        }
    }
}

impl Replication for Handle {
    fn propose(&self, change: Change) -> BoxFuture<'_, Result<Waits, ProposeError>> {
        let mut g = self.cluster.0.lock();
        let term = g.term;
        let n = &mut g.nodes[self.node];
        let (Some(believes), true) = (n.believes, n.life == self.life) else {
            return async { Err(ProposeError::new("it does not lead")) }.boxed();
        };
        n.proposals += 1;
        let number = n.proposals;
        let (tx, rx) = oneshot::channel();
        n.waiting.insert(number, tx);
        // Those of a leader that was deposed without its knowing reach nobody.
        if believes == term {
            g.open.push_back(Entry { term, change: Some(change), source: (self.node, self.life, number) });
        }
        let waits = async move { rx.await.unwrap_or_else(|_| Err(ProposeError::new("it has crashed"))) };
        async move { Ok(waits.boxed()) }.boxed()
    }

    fn barrier(&self) -> BoxFuture<'static, Result<(), ProposeError>> {
        let mut g = self.cluster.0.lock();
        let after = g.committed.len();
        let n = &mut g.nodes[self.node];
        let (tx, rx) = oneshot::channel();
        if let (Some(believes), true) = (n.believes, n.life == self.life) {
            n.barriers.push((believes, after, tx));
        }
        g.pass_barriers();
        async move { rx.await.unwrap_or_else(|_| Err(ProposeError::new("it does not lead"))) }.boxed()
    }

    fn leadership(&self) -> watch::Receiver<Leadership> {
        self.leadership.clone()
    }

    fn leader_address(&self) -> Option<String> {
        self.leadership.borrow().leader.map(|l| address(l.0 as usize)).filter(|a| *a != address(self.node))
    }

    fn others(&self) -> usize {
        self.cluster.0.lock().nodes.len() - 1
    }
}
