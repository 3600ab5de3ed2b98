//! The first task's side: it waits for all tasks, and sends each the plan.

use super::{FromFirst, HELLO_TIMEOUT, Plan, TASK_CERTIFICATE, TASKS_TIMEOUT, ToFirst, hear, say};
use crate::failure::Failure;
use paraft_engines::Place;
use paraft_tls::{
    Access,
    blocking::{Wire, WriteHalf},
};
use paraft_worker::exit;
use parking_lot::{Condvar, Mutex};
use std::{
    collections::{BTreeMap, BTreeSet},
    io::{self, BufRead, BufReader},
    net::{IpAddr, Ipv4Addr, Shutdown, TcpListener, TcpStream},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

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

/// The first task cannot bootstrap the fleet: notifies the others of the reason as they connect.
pub(crate) fn refuse(place: &Place, why: &Failure) {
    let why = FromFirst::Refused(format!("task {}: {}", place.rank, why.message()));
    let Ok(listener) = TcpListener::bind((Ipv4Addr::UNSPECIFIED, place.port)) else { return };
    let Ok(()) = listener.set_nonblocking(true) else { return };
    let (until, mut notified) = (Instant::now() + HELLO_TIMEOUT, 1);
    while notified < place.tasks && Instant::now() < until {
        match listener.accept() {
            Ok((stream, _)) => {
                let notify = || {
                    stream.set_nonblocking(false)?;
                    stream.set_read_timeout(Some(HELLO_TIMEOUT))?;
                    let (_, stream) = Wire::accept(stream, &Access::ours(), &TASK_CERTIFICATE)?.into_split();
                    say(&stream, &why)
                };
                notified += u32::from(notify().is_ok());
            }
            Err(_) => thread::sleep(Duration::from_millis(50)),
        }
    }
}
