//! A task's side: it meets the first task, and receives the plan.

use super::{
    FromFirst, HELLO_TIMEOUT, Plan, TASK_CERTIFICATE, TASKS_TIMEOUT, ToFirst, check_interrupted, hear, say,
};
use crate::failure::Failure;
use paraft_engines::Place;
use paraft_tls::{
    Access,
    blocking::{ReadHalf, Wire, WriteHalf},
};
use paraft_worker::exit;
use std::{
    io::{self, BufRead, BufReader},
    net::{TcpStream, ToSocketAddrs},
    sync::atomic::AtomicI32,
    thread,
    time::{Duration, Instant},
};

/// After this time a waiting task logs what it waits for and the last error: an unknown host name does
/// not fix itself.
const LOG_WAIT_AFTER: Duration = Duration::from_secs(5);

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
        let mut logged = false;
        let stream = loop {
            let dialled = at.to_socket_addrs().and_then(|mut found| {
                let found = found.find(|a| a.is_ipv4()).ok_or(io::ErrorKind::AddrNotAvailable)?;
                TcpStream::connect_timeout(&found, HELLO_TIMEOUT)
            });
            match dialled {
                Ok(stream) => break stream,
                Err(e) if began.elapsed() < TASKS_TIMEOUT => {
                    check_interrupted(interrupted)?;
                    if !logged && began.elapsed() > LOG_WAIT_AFTER {
                        eprintln!(
                            "task {} waits for task 0 at {}:{}: {e}",
                            place.rank, place.first, place.port
                        );
                        logged = true;
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

fn lost(e: io::Error) -> Failure {
    let why = format!("the connection to task 0 is lost before the fleet stood: {e}");
    Failure::new(exit::UNAVAILABLE, why).help("what task 0 says has the reason")
}
