//! Observes the other ranks: a thread with a connection to each, which carries only heartbeats. When a process
//! dies, the kernel closes its connections, and this thread ends every wait for that rank.

use super::{
    GroupError,
    rendezvous::{Neighbours, Rendezvous},
};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use paraft_tls::blocking::Wire;
use std::{
    collections::BTreeMap,
    fmt,
    io::{ErrorKind, Read, Write},
    net::Shutdown,
    os::{fd::AsFd, unix::net::UnixStream},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

/// The interval of heartbeats.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(1);
/// A rank without a heartbeat for this long counts as dead: its process or host is stopped.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(10);
/// A reader notices the end of its connection first, and this thread a moment later.
const REASON_TIMEOUT: Duration = Duration::from_secs(2);

const ALIVE: u8 = b'.';
/// The rank leaves in order: what it sent still counts.
const LEAVING: u8 = b'L';
/// The rank has seen the group break; the rank at fault follows.
const BROKEN: u8 = b'B';

type Ending = Box<dyn Fn() + Send>;

#[derive(Default)]
struct State {
    broken: Option<GroupError>,
    /// The last rank that left in order. That is an error only if another rank waits for it.
    left: Option<u32>,
    /// Called when the group breaks.
    endings: Vec<Ending>,
}

impl fmt::Debug for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("State").field("broken", &self.broken).finish_non_exhaustive()
    }
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn end(&self, why: GroupError) {
        let mut state = self.lock();
        if state.broken.is_some() {
            return;
        }
        state.broken = Some(why);
        let endings = std::mem::take(&mut state.endings);
        drop(state);
        self.changed.notify_all();
        for end in endings {
            end();
        }
    }
}

/// See the module. Dropping it leaves the group.
#[derive(Debug)]
pub struct Watch {
    shared: Arc<Shared>,
    /// Wakes the thread when this rank leaves or breaks the group.
    wake: UnixStream,
    thread: Option<thread::JoinHandle<()>>,
}

impl Watch {
    pub(super) fn start(
        rendezvous: &Rendezvous,
        peers: BTreeMap<usize, Wire>,
        rings: [&Option<Neighbours>; 2],
    ) -> Result<Self, GroupError> {
        let cannot = |e: std::io::Error| GroupError::Broken(format!("its ranks cannot be watched: {e}"));
        let shared = Arc::new(Shared::default());
        for pair in rings.into_iter().flatten() {
            for stream in [&pair.next, &pair.previous] {
                let stream = stream.socket().try_clone().map_err(cannot)?;
                // Wakes every waiting thread.
                shared.lock().endings.push(Box::new(move || drop(stream.shutdown(Shutdown::Both))));
            }
        }
        let (wake, woken) = UnixStream::pair().map_err(cannot)?;
        let mut others = Vec::with_capacity(peers.len());
        for (place, stream) in peers {
            stream.socket().set_nonblocking(true).map_err(cannot)?;
            let rank = rendezvous.ranks[place].rank;
            others.push(Other {
                rank,
                stream,
                heard: Instant::now(),
                leaving: false,
                noted: false,
                blames: None,
            });
        }
        let thread = {
            let shared = shared.clone();
            let work = move || Watcher { others, woken, shared }.run();
            thread::Builder::new().name("paraft-group".into()).spawn(work).map_err(cannot)?
        };
        Ok(Self { shared, wake, thread: Some(thread) })
    }

    /// The error that broke the group, if it is broken.
    pub fn broken(&self) -> Option<GroupError> {
        self.shared.lock().broken.clone()
    }

    /// Whether the group is broken, or found broken within a moment.
    pub fn breaks(&self) -> bool {
        let state = self.shared.lock();
        let wait = self.shared.changed.wait_timeout_while(state, REASON_TIMEOUT, |s| s.broken.is_none());
        wait.is_ok_and(|(s, _)| s.broken.is_some())
    }

    /// The reason for a failed call: what this thread finds out within a moment, or what the caller saw. Breaks the
    /// group for all ranks.
    pub fn reason(&self, seen: GroupError) -> GroupError {
        let state = self.shared.lock();
        let unknown = |s: &mut State| s.broken.is_none() && s.left.is_none();
        let wait = self.shared.changed.wait_timeout_while(state, REASON_TIMEOUT, unknown);
        let (broken, left) = wait.map_or((None, None), |(s, _)| (s.broken.clone(), s.left));
        let lost = left.map(|rank| GroupError::Lost { rank, how: "it has left".into() });
        broken.unwrap_or_else(|| {
            let why = lost.unwrap_or(seen);
            self.break_with(why.clone());
            why
        })
    }

    /// Calls `end` from another thread when the group breaks; at once if it is broken.
    pub fn when_broken(&self, end: impl Fn() + Send + 'static) {
        let mut state = self.shared.lock();
        if state.broken.is_none() {
            state.endings.push(Box::new(end));
            return;
        }
        drop(state);
        end();
    }

    /// Breaks the group, for all ranks.
    pub fn break_up(&self, why: &str) {
        self.break_with(GroupError::Broken(why.to_string()));
    }

    fn break_with(&self, why: GroupError) {
        self.shared.end(why);
        let _ = (&self.wake).write(b"!");
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let _ = self.wake.shutdown(Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Other {
    rank: u32,
    stream: Wire,
    heard: Instant,
    leaving: bool,
    noted: bool,
    /// The rank has reported a broken group, and is about to name the rank at fault.
    blames: Option<Vec<u8>>,
}

struct Watcher {
    others: Vec<Other>,
    woken: UnixStream,
    shared: Arc<Shared>,
}

impl Watcher {
    fn run(mut self) {
        let mut said = Instant::now();
        loop {
            let wait = HEARTBEAT_INTERVAL.saturating_sub(said.elapsed()).as_millis() as u16;
            let mut fds = vec![PollFd::new(self.woken.as_fd(), PollFlags::POLLIN)];
            let there = |o: &&Other| !o.leaving;
            let streams = self.others.iter().filter(there);
            fds.extend(streams.map(|o| PollFd::new(o.stream.socket().as_fd(), PollFlags::POLLIN)));
            let _ = poll(&mut fds, PollTimeout::from(wait));
            let mut byte = [0];
            self.woken.set_nonblocking(true).ok();
            match self.woken.read(&mut byte) {
                // This rank leaves: the thread ends, and closes the connections.
                Ok(0) => return self.say(&[LEAVING]),
                Ok(_) => return self.spread(),
                Err(_) => {}
            }
            if said.elapsed() >= HEARTBEAT_INTERVAL {
                said = Instant::now();
                self.say(&[ALIVE]);
            }
            if let Some(why) = self.others.iter_mut().filter(|o| !o.leaving).find_map(Other::listen) {
                self.shared.end(why);
                return self.spread();
            }
            if let Some(o) = self.others.iter_mut().find(|o| o.leaving && !o.noted) {
                o.noted = true;
                self.shared.lock().left = Some(o.rank);
                self.shared.changed.notify_all();
            }
        }
    }

    /// Tells the other ranks why the group is broken: they may not see it themselves.
    fn spread(&mut self) {
        let broken = self.shared.lock().broken.clone();
        let blamed = match broken {
            Some(GroupError::Lost { rank, .. }) => rank,
            _ => u32::MAX,
        };
        let [a, b, c, d] = blamed.to_le_bytes();
        self.say(&[BROKEN, a, b, c, d]);
    }

    fn say(&mut self, what: &[u8]) {
        for o in &mut self.others {
            // A full buffer means a peer that does not read; its silence is noticed separately.
            let _ = o.stream.write(what);
        }
    }
}

impl Other {
    /// Whether the rank is alive: `Some` says why not.
    fn listen(&mut self) -> Option<GroupError> {
        let lost = |how: &str| Some(GroupError::Lost { rank: self.rank, how: how.into() });
        let mut bytes = [0; 64];
        loop {
            match self.stream.read(&mut bytes) {
                Ok(0) => return lost("its process has ended"),
                Ok(n) => {
                    self.heard = Instant::now();
                    for byte in &bytes[..n] {
                        match (&mut self.blames, *byte) {
                            (Some(blamed), byte) => {
                                blamed.push(byte);
                                if let [a, b, c, d] = blamed[..] {
                                    return Some(match u32::from_le_bytes([a, b, c, d]) {
                                        u32::MAX => GroupError::Broken(format!("rank {} says so", self.rank)),
                                        rank => {
                                            let how = format!("rank {} has noticed it", self.rank);
                                            GroupError::Lost { rank, how }
                                        }
                                    });
                                }
                            }
                            (None, LEAVING) => {
                                self.leaving = true;
                                return None;
                            }
                            (None, BROKEN) => self.blames = Some(Vec::new()),
                            (None, _) => {}
                        }
                    }
                }
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                // Under TLS an orderly end is announced.
                Err(e) if e.kind() == ErrorKind::UnexpectedEof => return lost("its process has ended"),
                Err(e) => return lost(&format!("its connection has ended: {e}")),
            }
        }
        if self.heard.elapsed() > SILENCE_TIMEOUT {
            return lost(&format!("nothing was heard of it for {SILENCE_TIMEOUT:?}"));
        }
        None
    }
}
