//! The far side of a reference: this program again, as a process of its own that answers on a TCP port and a Unix socket.

use super::load::Via;
use clap::Args;
use paraft_fleet::{
    failure::Failure,
    faults::{
        link::{Link, Links},
        proxy::Proxies,
    },
    process::Process,
};
use paraft_host::lifeline;
use paraft_worker::exit;
use std::{
    io,
    net::TcpListener,
    os::unix::net::UnixListener,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

#[derive(Args)]
pub struct FarArgs {
    /// The Unix socket to listen at, beside a TCP port of its own choice.
    socket: PathBuf,
}

impl FarArgs {
    /// Listens, says the TCP address on standard output, and sees to it that this process ends with its launcher.
    pub fn listen(&self) -> Result<(TcpListener, UnixListener), Failure> {
        let listen = || {
            let (unix, tcp) = (UnixListener::bind(&self.socket)?, TcpListener::bind("127.0.0.1:0")?);
            out!("{}", tcp.local_addr()?);
            Ok((tcp, unix))
        };
        let listeners = listen()
            .map_err(|e: io::Error| Failure::new(exit::IO, format!("the far side cannot listen: {e}")))?;
        lifeline::end_with_launcher();
        Ok(listeners)
    }
}

/// Such a process, as its launcher has it. Dropping it ends it.
pub struct FarSide {
    process: Process,
    /// host:port
    pub address: String,
    pub socket: PathBuf,
}

impl FarSide {
    /// Starts a hidden command of `paraft bench`; its socket and its words are in `dir`.
    pub fn start(command: &str, name: &str, dir: &Path) -> Result<Self, Failure> {
        let program =
            std::env::current_exe().map_err(|e| Failure::new(exit::IO, format!("own program: {e}")))?;
        let socket = dir.join(format!("{name}.sock"));
        let mut c = Command::new(program);
        c.args(["bench", command]).arg(&socket);
        let mut process = Process::start(name.into(), c, dir)?;
        let address = process.first_line()?;
        Ok(Self { process, address, socket })
    }

    /// Its process id.
    pub fn id(&self) -> u32 {
        self.process.id()
    }
}

/// Bits per second that a simulated link carries.
pub const LINK_BITS_PER_S: f64 = 1e9;

/// The simulated link with this delay of a byte, one way.
pub fn link(delay_ms: u64) -> Link {
    Link { delay: Duration::from_millis(delay_ms), bits_per_s: Some(LINK_BITS_PER_S) }
}

/// Puts far sides behind simulated links, which last as long as the result.
pub fn behind(far: &mut [FarSide], link: Link, dir: &Path) -> Result<Proxies, Failure> {
    let links = Links { workers: Some(link), servers: Some(link) };
    let proxies = Proxies::start(far.len() as u32, dir, links);
    let proxies = proxies.map_err(|e| Failure::new(exit::IO, format!("no proxies: {e}")))?;
    for (place, (side, proxy)) in (0..).zip(far.iter_mut().zip(proxies.addresses())) {
        let target = side.address.parse().map_err(|e| Failure::new(exit::FAILED, e))?;
        proxies.point(place, target);
        side.address = proxy.clone();
    }
    Ok(proxies)
}

/// An error on the way to it.
pub fn broken(via: Via, e: impl std::fmt::Display) -> Failure {
    Failure::new(exit::FAILED, format!("the far side, a process of this benchmark, over {}: {e}", via.name()))
}
