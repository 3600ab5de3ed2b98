//! Bootstrap or join: the rule for a server that an engine has started, perhaps after a restart,
//! perhaps on another host.
//!
//! 1. A server with an identity in its data folder rejoins.
//! 2. Without a fleet, it bootstraps one with the other servers of the list. The first server that sees
//!    all addresses writes the list (`fleet.id`), which never changes.
//! 3. With a list and without an identity, it takes its place in the list if no server had it before.
//!    Before it starts, a server writes the token of its data folder once into `begun/N`. A server with
//!    that token has the folder in which no identity was written yet. A server without it has lost the
//!    promises of that folder, and may only join as a new server.
//! 4. If no server answers, it cannot join: exit 69, and the engine restarts it.
//!
//! So no fleet is bootstrapped twice. A bootstrap needs a majority of the list that has never been in a
//! fleet, and only the folder that took a place first may take it without an identity.

use super::folder::Folder;
use crate::failure::Failure;
use crate::files::{put, read, token};
use paraft_worker::exit;
use std::{io, path::Path};

/// A running fleet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunningFleet {
    /// Its id.
    pub fleet: u64,
    /// Its servers.
    pub servers: Vec<String>,
}

/// How a server joins its fleet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JoinDecision {
    /// As a server of this list: it bootstraps the fleet with the others, or rejoins.
    Listed(Vec<String>),
    /// As a new server of the fleet of these addresses, or as one that has joined earlier.
    Joins(Vec<String>),
    /// Not yet, for this reason: the engine starts the other servers when resources are free.
    Wait(String),
    /// Not yet, for this reason, and with a time limit: something that existed is missing.
    Missed(String),
}

/// In a server's data folder: proof that it has taken a place in the list.
const TOKEN: &str = "founder";

impl Folder {
    /// The next action of server `me` of `servers`. `data` is its folder, with or without an
    /// `identity`; its address is published. `ask` finds a fleet at one of these addresses.
    pub fn way(
        &self,
        me: u32,
        servers: u32,
        data: &Path,
        identity: bool,
        ask: impl FnOnce(&[String]) -> Option<RunningFleet>,
    ) -> Result<JoinDecision, Failure> {
        let known = self.servers()?;
        let Some(list) = self.read("fleet.id")? else {
            if identity {
                let why = format!(
                    "{} has been in a fleet that {} does not know",
                    data.display(),
                    self.dir().display()
                );
                return Err(Failure::new(exit::CONFIG, why).help("give a new run new data folders"));
            }
            let first: Vec<_> = (0..servers).filter_map(|n| Some(known.get(&n)?.address.clone())).collect();
            if first.len() < servers as usize {
                let missing: Vec<_> =
                    (0..servers).filter(|n| !known.contains_key(n)).map(|n| format!("s{n}")).collect();
                return Ok(JoinDecision::Wait(format!(
                    "{} of {servers} servers are there; missing: {}",
                    first.len(),
                    missing.join(", ")
                )));
            }
            self.put_once("fleet.id", &first.join(","))?;
            return Ok(JoinDecision::Wait("the list was just agreed on".into()));
        };
        // The current address of each.
        let places = list.trim().split(',').map(str::to_string).enumerate();
        let now: Vec<_> =
            places.map(|(n, then)| known.get(&(n as u32)).map_or(then, |at| at.address.clone())).collect();
        let io = |e: io::Error| Failure::new(exit::IO, format!("{}: {e}", data.join(TOKEN).display()));
        let token_here = read(&data.join(TOKEN)).map_err(io)?;
        if identity {
            return Ok(match token_here {
                Some(_) => JoinDecision::Listed(now),
                None => JoinDecision::Joins(now),
            });
        }
        if (me as usize) < now.len() {
            let begun = format!("begun/{me}");
            let there = match (self.read(&begun)?, &token_here) {
                (None, _) => {
                    let mine = format!("{:016x}", token());
                    // In the folder first: a server that finds its token in `begun` must also find it
                    // in its folder.
                    put(&data.join(TOKEN), &mine).map_err(io)?;
                    return Ok(match self.put_once(&begun, &mine)? == mine {
                        true => JoinDecision::Listed(now),
                        false => JoinDecision::Wait("another process has this server's place".into()),
                    });
                }
                (Some(there), _) => there,
            };
            if token_here.as_ref() == Some(&there) {
                return Ok(JoinDecision::Listed(now));
            }
        }
        // A token without a place must not make the folder look like one of the list.
        if token_here.is_some() {
            std::fs::remove_file(data.join(TOKEN)).map_err(io)?;
        }
        let Some(number) = self.fleet()? else {
            return Ok(JoinDecision::Missed("the fleet is being founded without this server, whose data folder is not the one that it began with".into()));
        };
        let others: Vec<_> = known.into_iter().filter(|(n, _)| *n != me).map(|(_, at)| at.address).collect();
        Ok(match ask(&others) {
            // The fleet may not know the new addresses of moved servers yet.
            Some(fleet) if fleet.fleet == number => {
                let more: Vec<_> = fleet.servers.into_iter().filter(|a| !others.contains(a)).collect();
                JoinDecision::Joins(others.into_iter().chain(more).collect())
            }
            Some(other) => JoinDecision::Missed(format!("another fleet answers, {:016x}, not {number:016x}", other.fleet)),
            None => JoinDecision::Missed("a fleet was founded, this server's data folder is not the one that it began with, and no server answers that it could join".into()),
        })
    }

    /// The fleet's id, after the bootstrap.
    pub fn fleet(&self) -> Result<Option<u64>, Failure> {
        Ok(self.read("fleet.number")?.and_then(|n| u64::from_str_radix(n.trim(), 16).ok()))
    }

    /// Records that this server is in this fleet. Fails if the run has another fleet: then two were
    /// bootstrapped.
    pub fn belongs(&self, fleet: u64) -> Result<(), Failure> {
        let there = self.put_once("fleet.number", &format!("{fleet:016x}"))?;
        match u64::from_str_radix(there.trim(), 16) == Ok(fleet) {
            true => Ok(()),
            false => Err(Failure::new(
                exit::CONFIG,
                format!("this server is in the fleet {fleet:016x}, and the run's is {}", there.trim()),
            )
            .help("its data folder is of another run: give it another --data")),
        }
    }
}

#[cfg(test)]
#[path = "bootstrap_tests.rs"]
mod tests;
