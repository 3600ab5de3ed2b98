//! The bootstrap of a fleet from an engine's tasks. Each task connects to the first task, which waits
//! for all of them, sends each the job, and forwards the servers' addresses.
//!
//! The protocol is lines of JSON over TCP. It runs until the servers know each other, and again at the
//! end, so that no server exits before the last worker. In between no message passes, and the first
//! task may fail: the others continue to train.

use crate::failure::Failure;
use paraft_engines::Place;
use paraft_tls::{
    Access, Need,
    access::Expected,
    blocking::{ReadHalf, Wire, WriteHalf},
};
use paraft_worker::exit;
use parking_lot::{Condvar, Mutex};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::{
    collections::{BTreeMap, BTreeSet},
    io::{self, BufRead, BufReader, Read, Write},
    net::{IpAddr, Ipv4Addr, Shutdown, TcpListener, TcpStream, ToSocketAddrs},
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicI32, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

/// How long the first task waits for all tasks: an engine starts tasks when resources are free.
const TASKS_TIMEOUT: Duration = Duration::from_secs(300);

/// After this time a waiting task logs what it waits for and the last error: an unknown host name does
/// not fix itself.
const LOG_WAIT_AFTER: Duration = Duration::from_secs(5);

/// An unauthenticated connection may last this long.
const HELLO_TIMEOUT: Duration = Duration::from_secs(10);

/// Maximal bytes of a line: the longest contains the job file.
const MAX_LINE_BYTES: u64 = 1 << 20;

/// The certificate that a task must show.
const TASK_CERTIFICATE: Expected = Expected { need: Need::Worker, job: None };

/// A message from a task to the first task.
#[derive(Serialize, Deserialize)]
enum ToFirst {
    Hello {
        id: String,
        rank: u32,
        tasks: u32,
    },
    /// The address of its server.
    Listens(String),
    /// The exit code of its worker; 128 plus the signal after a signal.
    Ended(i32),
}

/// A message from the first task to a task.
#[derive(Serialize, Deserialize)]
enum FromFirst {
    Plan(Plan),
    Servers(Vec<String>),
    /// All workers have ended, or one has failed with this code: the task may end.
    Over(Option<(u32, i32)>),
    Refused(String),
}

/// The plan of the fleet, and the address of one task.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Plan {
    pub run_dir: PathBuf,
    /// The job file.
    pub job: String,
    pub resume: Option<PathBuf>,
    /// The first tasks, up to this number, run a server.
    pub servers: u32,
    /// A port on the first task's host, for the script's own processes.
    pub port: u16,
    /// The address of this task for other hosts.
    pub host: String,
    /// The fleet already runs: the task rejoins and starts no server. These are its servers.
    pub founded: Vec<String>,
}

/// The first task's side. Drop closes all connections.
pub(crate) struct First {
    shared: Arc<Shared>,
}

struct Shared {
    place: Place,
    plan: Plan,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Connections of the connected tasks.
    here: BTreeMap<u32, WriteHalf>,
    /// Addresses of all tasks that have connected so far.
    hosts: BTreeMap<u32, IpAddr>,
    /// The first task's address for other hosts.
    outside: Option<IpAddr>,
    listens: BTreeMap<u32, String>,
    ended: BTreeSet<u32>,
    /// Why the bootstrap failed.
    failed: Option<String>,
    over: bool,
}

impl First {
    /// Listens for the other tasks, and for this process's own task.
    pub(crate) fn listen(place: &Place, plan: Plan) -> Result<Self, Failure> {
        let at = (Ipv4Addr::UNSPECIFIED, place.port);
        let listener = TcpListener::bind(at).map_err(|e| {
            let why = format!("the tasks cannot meet at port {} of {}: {e}", place.port, place.first);
            Failure::new(exit::CONFIG, why)
                .help("set MASTER_PORT for all of them: they meet at the port after it")
        })?;
        let shared =
            Arc::new(Shared { place: place.clone(), plan, state: Mutex::default(), changed: Condvar::new() });
        let (accepts, gives_up) = (shared.clone(), shared.clone());
        let accept = move || {
            for stream in listener.incoming().flatten() {
                let one = accepts.clone();
                if accepts.state.lock().over {
                    return;
                }
                // Without a thread the connection closes, and the task dials again.
                let _ = thread::Builder::new().name("task".into()).spawn(move || one.serve(stream));
            }
        };
        let wait = move || gives_up.give_up(Instant::now() + TASKS_TIMEOUT);
        for (name, work) in
            [("tasks", Box::new(accept) as Box<dyn FnOnce() + Send>), ("patience", Box::new(wait))]
        {
            let thread = thread::Builder::new().name(name.into()).spawn(work);
            thread.map_err(|e| Failure::new(exit::IO, format!("no thread: {e}")))?;
        }
        Ok(Self { shared })
    }

    /// Whether the workers of all tasks have ended.
    pub(crate) fn all_ended(&self) -> bool {
        self.shared.state.lock().ended.len() == self.shared.place.tasks as usize
    }

    /// Notifies all tasks that they may end, or must end since this task failed with this code.
    pub(crate) fn end(&self, failed: Option<i32>) {
        self.shared.over(failed.map(|code| (self.shared.place.rank, code)));
    }
}

impl Drop for First {
    fn drop(&mut self) {
        let mut state = self.shared.state.lock();
        state.over = true;
        state.here.values().for_each(|s| _ = s.socket().shutdown(Shutdown::Both));
    }
}

impl Shared {
    /// Serves one connection until it closes.
    fn serve(&self, stream: TcpStream) {
        let _ = stream.set_nodelay(true);
        let _ = stream.set_read_timeout(Some(HELLO_TIMEOUT));
        let (reader, stream) = match Wire::accept(stream, &Access::ours(), &TASK_CERTIFICATE) {
            Ok(wire) => wire.into_split(),
            Err(error) => return tracing::warn!(%error, "refused a connection that is no task"),
        };
        let mut reader = BufReader::new(reader);
        let Ok(ToFirst::Hello { id, rank, tasks }) = hear(&mut reader) else { return };
        let _ = stream.socket().set_read_timeout(None);
        let plan = self.admit(&stream, &id, rank, tasks);
        let founded = match plan {
            Ok(plan) => {
                let founded = !plan.founded.is_empty();
                say(&stream, &FromFirst::Plan(plan)).map(|()| founded)
            }
            Err(why) => {
                let _ = say(&stream, &FromFirst::Refused(why));
                return;
            }
        };
        let served = founded.and_then(|founded| self.found(&stream, &mut reader, rank, founded));
        if let Ok(ToFirst::Ended(code)) = served.and_then(|()| hear(&mut reader)) {
            self.state.lock().ended.insert(rank);
            if code != exit::OK && code < 128 {
                self.over(Some((rank, code)));
            }
            // Blocks until the task or this process closes the connection.
            let _ = hear::<ToFirst>(&mut reader);
        }
        self.gone(rank);
    }

    /// Waits until all are here.
    fn admit(&self, stream: &WriteHalf, id: &str, rank: u32, tasks: u32) -> Result<Plan, String> {
        let place = &self.place;
        if (id, tasks) != (&*place.id, place.tasks) || rank >= tasks {
            return Err(format!(
                "task {rank} of {tasks} of `{id}` has come to the first of the {} of `{}`",
                place.tasks, place.id
            ));
        }
        let own = |e: io::Error| format!("its connection: {e}");
        let socket = stream.socket();
        let (peer, local) = (socket.peer_addr().map_err(own)?.ip(), socket.local_addr().map_err(own)?.ip());
        let mut state = self.state.lock();
        if state.over {
            return Err("the run is over".into());
        }
        if state.here.contains_key(&rank) {
            return Err(format!("there are two tasks {rank} of `{id}`"));
        }
        if peer != local {
            state.outside = Some(local);
        }
        state.here.insert(rank, stream.clone());
        state.hosts.insert(rank, peer);
        state.ended.remove(&rank);
        self.changed.notify_all();
        while state.hosts.len() < place.tasks as usize && state.failed.is_none() {
            self.changed.wait(&mut state);
        }
        if let Some(why) = &state.failed {
            return Err(why.clone());
        }
        // Tasks on the first task's host connect from the address that they dialed.
        let host = match state.outside.filter(|_| peer == local) {
            Some(outside) => outside,
            None => peer,
        };
        let founded =
            if self.founded(&state) { state.listens.values().cloned().collect() } else { Vec::new() };
        Ok(Plan { host: host.to_string(), founded, ..self.plan.clone() })
    }

    fn founded(&self, state: &State) -> bool {
        state.listens.len() == self.plan.servers as usize
    }

    /// Reads the address of the task's server, and replies with all addresses.
    fn found(
        &self,
        stream: &WriteHalf,
        reader: &mut impl BufRead,
        rank: u32,
        founded: bool,
    ) -> io::Result<()> {
        if founded {
            return Ok(());
        }
        if rank < self.plan.servers {
            let ToFirst::Listens(at) = hear(reader)? else { return Err(io::ErrorKind::InvalidData.into()) };
            self.state.lock().listens.insert(rank, at);
            self.changed.notify_all();
        }
        let mut state = self.state.lock();
        while !self.founded(&state) && state.failed.is_none() {
            self.changed.wait(&mut state);
        }
        let all = match &state.failed {
            Some(why) => FromFirst::Refused(why.clone()),
            None => FromFirst::Servers(state.listens.values().cloned().collect()),
        };
        drop(state);
        say(stream, &all)
    }

    /// Fails the bootstrap if it is incomplete at the deadline.
    fn give_up(&self, deadline: Instant) {
        let mut state = self.state.lock();
        while !self.founded(&state) && !state.over {
            if self.changed.wait_until(&mut state, deadline).timed_out() {
                let tasks = self.place.tasks;
                let missing: Vec<_> = (0..tasks).filter(|r| !state.hosts.contains_key(r)).take(8).collect();
                let (here, after) = (state.hosts.len(), TASKS_TIMEOUT.as_secs());
                state.failed =
                    Some(format!("{here} of {tasks} tasks came within {after} s; missing: {missing:?}"));
                self.changed.notify_all();
                return;
            }
        }
    }

    fn gone(&self, rank: u32) {
        let mut state = self.state.lock();
        state.here.remove(&rank);
        state.ended.insert(rank);
        if !self.founded(&state) && state.failed.is_none() {
            state.failed = Some(format!("task {rank} has gone before the fleet stood"));
        }
        self.changed.notify_all();
    }

    fn over(&self, failed: Option<(u32, i32)>) {
        let mut state = self.state.lock();
        state.over = true;
        state.here.values().for_each(|s| _ = say(s, &FromFirst::Over(failed)));
        self.changed.notify_all();
    }
}

/// A task's connection to the first task.
pub(crate) struct Meeting {
    stream: WriteHalf,
    reader: BufReader<ReadHalf>,
}

/// The end of a fleet, for a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Over {
    /// All workers have ended.
    Well,
    /// Another task's worker has failed with this code.
    Failed(u32, i32),
    /// The first task is gone.
    Alone,
}

impl Meeting {
    /// Connects to the first task, waits with it for all tasks, and receives the plan.
    pub(crate) fn join(place: &Place, interrupted: &AtomicI32) -> Result<(Self, Plan), Failure> {
        let began = Instant::now();
        let at = (&*place.first, place.port);
        let mut told = false;
        let stream = loop {
            let dialled = at.to_socket_addrs().and_then(|mut found| {
                let found = found.find(|a| a.is_ipv4()).ok_or(io::ErrorKind::AddrNotAvailable)?;
                TcpStream::connect_timeout(&found, HELLO_TIMEOUT)
            });
            match dialled {
                Ok(stream) => break stream,
                Err(e) if began.elapsed() < TASKS_TIMEOUT => {
                    check_interrupted(interrupted)?;
                    if !told && began.elapsed() > LOG_WAIT_AFTER {
                        eprintln!(
                            "task {} waits for task 0 at {}:{}: {e}",
                            place.rank, place.first, place.port
                        );
                        told = true;
                    }
                    thread::sleep(Duration::from_millis(200));
                }
                Err(e) => {
                    let why = format!(
                        "task {} does not reach task 0 at {}:{} within {} s: {e}",
                        place.rank,
                        place.first,
                        place.port,
                        TASKS_TIMEOUT.as_secs()
                    );
                    let help = "MASTER_ADDR names the host of task 0, and the port after MASTER_PORT must be open there";
                    return Err(Failure::new(exit::UNAVAILABLE, why).help(help));
                }
            }
        };
        let _ = stream.set_nodelay(true);
        let _ = stream.set_read_timeout(Some(HELLO_TIMEOUT));
        let wire = Wire::dial(stream, &Access::ours(), &TASK_CERTIFICATE).map_err(|e| lost(e.into()))?;
        let _ = wire.socket().set_read_timeout(None);
        let (reader, stream) = wire.into_split();
        let mut meeting = Self { stream, reader: BufReader::new(reader) };
        let hello = ToFirst::Hello { id: place.id.clone(), rank: place.rank, tasks: place.tasks };
        say(&meeting.stream, &hello).map_err(lost)?;
        match meeting.hear(interrupted)? {
            FromFirst::Plan(plan) => Ok((meeting, plan)),
            _ => Err(lost(io::ErrorKind::InvalidData.into())),
        }
    }

    /// Sends the address of this task's server, if it has one, and receives all addresses.
    pub(crate) fn servers(
        &mut self,
        own: Option<String>,
        interrupted: &AtomicI32,
    ) -> Result<Vec<String>, Failure> {
        if let Some(at) = own {
            say(&self.stream, &ToFirst::Listens(at)).map_err(lost)?;
        }
        match self.hear(interrupted)? {
            FromFirst::Servers(all) => Ok(all),
            _ => Err(lost(io::ErrorKind::InvalidData.into())),
        }
    }

    fn hear(&mut self, interrupted: &AtomicI32) -> Result<FromFirst, Failure> {
        let _ = self.stream.socket().set_read_timeout(Some(Duration::from_millis(100)));
        while let Err(e) = self.reader.fill_buf() {
            use io::ErrorKind::{Interrupted, TimedOut, WouldBlock};
            if !matches!(e.kind(), WouldBlock | TimedOut | Interrupted) {
                return Err(lost(e));
            }
            check_interrupted(interrupted)?;
        }
        let _ = self.stream.socket().set_read_timeout(None);
        match hear(&mut self.reader).map_err(lost)? {
            FromFirst::Refused(why) => Err(Failure::new(exit::UNAVAILABLE, why)),
            said => Ok(said),
        }
    }

    /// Reports the exit code of this task's worker. If the first task is gone, the report is not
    /// needed.
    pub(crate) fn ended(&self, code: i32) {
        let _ = say(&self.stream, &ToFirst::Ended(code));
    }

    /// Whether the end has come; does not block.
    pub(crate) fn over(&mut self) -> Option<Over> {
        let _ = self.stream.socket().set_read_timeout(Some(Duration::from_millis(1)));
        match hear(&mut self.reader) {
            Ok(FromFirst::Over(None)) => Some(Over::Well),
            Ok(FromFirst::Over(Some((rank, code)))) => Some(Over::Failed(rank, code)),
            Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => None,
            _ => Some(Over::Alone),
        }
    }
}

/// Fails if the user has interrupted this task.
pub(crate) fn check_interrupted(interrupted: &AtomicI32) -> Result<(), Failure> {
    match interrupted.load(Relaxed) {
        0 => Ok(()),
        number => Err(Failure::new(128 + number, "interrupted; this task has ended")),
    }
}

/// The first task cannot bootstrap the fleet: notifies the others of the reason as they connect.
pub(crate) fn refuse(place: &Place, why: &Failure) {
    let why = FromFirst::Refused(format!("task {}: {}", place.rank, why.message()));
    let Ok(listener) = TcpListener::bind((Ipv4Addr::UNSPECIFIED, place.port)) else { return };
    let Ok(()) = listener.set_nonblocking(true) else { return };
    let (until, mut told) = (Instant::now() + HELLO_TIMEOUT, 1);
    while told < place.tasks && Instant::now() < until {
        match listener.accept() {
            Ok((stream, _)) => {
                let told_so = || {
                    stream.set_nonblocking(false)?;
                    stream.set_read_timeout(Some(HELLO_TIMEOUT))?;
                    let (_, stream) = Wire::accept(stream, &Access::ours(), &TASK_CERTIFICATE)?.into_split();
                    say(&stream, &why)
                };
                told += u32::from(told_so().is_ok());
            }
            Err(_) => thread::sleep(Duration::from_millis(50)),
        }
    }
}

fn lost(e: io::Error) -> Failure {
    let why = format!("the connection to task 0 is lost before the fleet stood: {e}");
    Failure::new(exit::UNAVAILABLE, why).help("what task 0 says has the reason")
}

fn say(mut stream: &WriteHalf, what: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_string(what)?;
    line.push('\n');
    stream.write_all(line.as_bytes())?;
    stream.flush()
}

/// Messages with a read timeout are short and arrive in one piece.
fn hear<T: DeserializeOwned>(reader: &mut impl BufRead) -> io::Result<T> {
    let mut line = String::new();
    match reader.take(MAX_LINE_BYTES).read_line(&mut line)? {
        0 => Err(io::ErrorKind::UnexpectedEof.into()),
        _ => Ok(serde_json::from_str(&line)?),
    }
}
