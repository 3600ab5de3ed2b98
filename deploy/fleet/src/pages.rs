//! The live pages of the servers that a launcher starts: at the same addresses for one fleet after the other, so that a page that somebody
//! has opened goes on with the next.

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

/// So long a fleet has until one of its servers answers, and between two questions.
const REPLY_TIMEOUT: Duration = Duration::from_secs(30);
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// See the module.
#[derive(Debug)]
pub struct Pages {
    /// The variable in which a server finds the token.
    variable: &'static str,
    token: String,
    /// Of each server.
    at: Vec<String>,
}

static PAGES: OnceLock<Pages> = OnceLock::new();
static ANNOUNCED: AtomicBool = AtomicBool::new(false);

/// The servers of fleets that this process starts from now on serve pages, whose token is in this variable of theirs.
pub fn serve(servers: u32, variable: &'static str, token: String) {
    // Nobody has these ports now; a server whose page's port is taken by then takes another.
    let held: Vec<TcpListener> =
        (0..servers).filter_map(|_| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).ok()).collect();
    let at = held.iter().filter_map(|l| Some(l.local_addr().ok()?.to_string())).collect();
    let _ = PAGES.set(Pages { variable, token, at });
}

/// Tells a server where its page is to be, and that the runs beside this one can be compared there.
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

/// Says, once, where the page of a fleet with servers at these addresses is, as soon as one of them serves it: not this
/// process's own choice, since somebody may have had the port by then.
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
    // Without a thread the page is there all the same.
    let _ = thread::Builder::new().name("paraft-page".into()).spawn(look);
}
