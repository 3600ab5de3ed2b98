//! Where the learner takes fragments from: a listener, and a thread for each actor.

use crate::fragment::{Answer, Fragment};
use std::{
    io,
    net::{SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst},
        mpsc::{Receiver, SyncSender, sync_channel},
    },
    thread,
    time::Duration,
};

/// Actors at a time. Each takes a thread.
const MAX_ACTORS: usize = 256;
/// How often the listener looks whether training is over.
const POLL: Duration = Duration::from_millis(20);

/// What the threads of the intake share.
#[derive(Debug, Default)]
struct Shared {
    updates: AtomicU64,
    over: AtomicBool,
    actors: AtomicUsize,
}

/// Receives the fragments of all actors. Training is over for them once it is dropped.
#[derive(Debug)]
pub struct Intake {
    address: SocketAddr,
    fragments: Receiver<Fragment>,
    shared: Arc<Shared>,
}

impl Intake {
    /// Listens for actors. At most `waiting` fragments wait here; then actors do.
    ///
    /// # Errors
    /// The address is none of this host's, or in use.
    pub fn listen(address: &str, waiting: usize) -> io::Result<Self> {
        let listener = TcpListener::bind(address)?;
        let address = listener.local_addr()?;
        listener.set_nonblocking(true)?;
        let (sender, fragments) = sync_channel(waiting);
        let shared = Arc::new(Shared::default());
        let of_listener = shared.clone();
        thread::Builder::new()
            .name("intake".into())
            .spawn(move || accept(&listener, &sender, &of_listener))?;
        Ok(Self { address, fragments, shared })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Says how many updates there were; the next answers carry it.
    pub fn updated(&self, updates: u64) {
        self.shared.updates.store(updates, SeqCst);
    }

    /// The next fragment; `None`: none came within the time.
    pub fn next(&self, within: Duration) -> Option<Fragment> {
        self.fragments.recv_timeout(within).ok()
    }
}

impl Drop for Intake {
    fn drop(&mut self) {
        self.shared.over.store(true, SeqCst);
    }
}

fn accept(listener: &TcpListener, sender: &SyncSender<Fragment>, shared: &Arc<Shared>) {
    while !shared.over.load(SeqCst) {
        // An error is of one connection, which its actor makes again.
        let Ok((stream, actor)) = listener.accept() else {
            thread::sleep(POLL);
            continue;
        };
        if shared.actors.fetch_add(1, SeqCst) >= MAX_ACTORS {
            shared.actors.fetch_sub(1, SeqCst);
            eprintln!("actor {actor} is refused: there are {MAX_ACTORS}");
            continue;
        }
        let (sender, of_actor) = (sender.clone(), shared.clone());
        let serve = move || {
            if let Err(error) = serve(stream, &sender, &of_actor) {
                eprintln!("actor {actor} is disconnected: {error}");
            }
            of_actor.actors.fetch_sub(1, SeqCst);
        };
        if let Err(error) = thread::Builder::new().name("actor".into()).spawn(serve) {
            shared.actors.fetch_sub(1, SeqCst);
            eprintln!("actor {actor} is refused: no thread for it: {error}");
        }
    }
}

fn serve(
    mut stream: TcpStream,
    sender: &SyncSender<Fragment>,
    shared: &Shared,
) -> Result<(), crate::fragment::WireError> {
    stream.set_nonblocking(false)?;
    stream.set_nodelay(true)?;
    loop {
        let fragment = match Fragment::read(&mut stream) {
            Ok(fragment) => fragment,
            Err(error) if error.is_end() => return Ok(()),
            Err(error) => return Err(error),
        };
        // It waits while the learner has enough; the learner is gone once training is over.
        let over = sender.send(fragment).is_err() || shared.over.load(SeqCst);
        Answer { updates: shared.updates.load(SeqCst), over }.write(&mut stream)?;
        if over {
            return Ok(());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fragment::Step;
    use std::io::{Read, Write};

    fn fragment(version: u64) -> Fragment {
        let step = Step { observation: [0.0; 4], log_probability: -0.7, right: true, over: false };
        Fragment { version, steps: vec![step], ..Fragment::default() }
    }

    #[test]
    fn learner_gets_fragments_and_actors_its_updates() -> anyhow::Result<()> {
        let intake = Intake::listen("127.0.0.1:0", 4)?;
        intake.updated(9);
        let mut actor = TcpStream::connect(intake.address())?;
        fragment(7).write(&mut actor)?;
        assert_eq!(Answer::read(&mut actor)?, Answer { updates: 9, over: false });
        assert_eq!(intake.next(Duration::from_secs(10)), Some(fragment(7)));
        drop(intake);
        fragment(8).write(&mut actor)?;
        assert!(Answer::read(&mut actor)?.over);
        Ok(())
    }

    #[test]
    fn connection_with_other_bytes_ends_alone() -> anyhow::Result<()> {
        let intake = Intake::listen("127.0.0.1:0", 4)?;
        let mut other = TcpStream::connect(intake.address())?;
        let mut actor = TcpStream::connect(intake.address())?;
        other.write_all(b"GET / HTTP/1.1\r\n\r\n")?;
        // It is closed with bytes unread, which is an error to the other side on some systems.
        assert!(matches!(other.read(&mut [0; 16]), Ok(0) | Err(_)));
        fragment(7).write(&mut actor)?;
        assert_eq!(intake.next(Duration::from_secs(10)), Some(fragment(7)));
        Ok(())
    }
}
