//! The live pages of the servers that a launcher starts. Successive fleets use the same addresses, so
//! an open page continues with the next fleet.

use crate::ask::ask_all;
use std::{
    net::{Ipv4Addr, TcpListener},
    path::Path,
    process::Command,
    sync::{
        OnceLock,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

/// The time for the first reply of a fleet, and the poll interval.
const REPLY_TIMEOUT: Duration = Duration::from_secs(30);
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// The pages of this process's servers.
#[derive(Debug)]
pub struct Pages {
    /// The variable with the token, for the servers.
    variable: &'static str,
    token: String,
    /// The address of each server's page.
    at: Vec<String>,
}

static PAGES: OnceLock<Pages> = OnceLock::new();
static ANNOUNCED: AtomicBool = AtomicBool::new(false);

/// Lets the servers of later fleets serve pages, with the token in this variable.
pub fn serve(servers: u32, variable: &'static str, token: String) {
    // These ports are free now; a server whose port is in use later takes another one.
    let held: Vec<TcpListener> =
        (0..servers).filter_map(|_| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).ok()).collect();
    let at = held.iter().filter_map(|l| Some(l.local_addr().ok()?.to_string())).collect();
    let _ = PAGES.set(Pages { variable, token, at });
}

/// Sets the address of a server's page, and the folder of runs for comparison.
pub(crate) fn tell(command: &mut Command, id: u32, run_dir: &Path) {
    if let Some(pages) = PAGES.get()
        && let Some(at) = pages.at.get(id as usize)
    {
        command.args(["--dashboard", at]).env(pages.variable, &pages.token);
        if let Some(runs) = run_dir.parent() {
            command.arg("--runs").arg(runs);
        }
    }
}

/// Prints the page's address once, as soon as a server of the fleet serves it. The server reports the
/// address, since its port may have been in use.
pub(crate) fn say(servers: &[String]) {
    let Some(pages) = PAGES.get() else { return };
    if ANNOUNCED.swap(true, Relaxed) {
        return;
    }
    let servers = servers.to_vec();
    let look = move || {
        let began = Instant::now();
        while began.elapsed() < REPLY_TIMEOUT {
            let mut served = ask_all(&servers, false).into_iter().flatten().map(|s| s.page);
            if let Some(at) = served.find(|page| !page.is_empty()) {
                eprintln!("page    http://{at}/#token={}", pages.token);
                return;
            }
            thread::sleep(POLL_INTERVAL);
        }
    };
    // Without the thread the page still works.
    let _ = thread::Builder::new().name("paraft-page".into()).spawn(look);
}
