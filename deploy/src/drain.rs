//! `paraft drain`: empties a server, so that it can be stopped.

use clap::Args;
use paraft_client::Order;
use paraft_common::ServerId;
use paraft_fleet::{ask::agreeing, failure::Failure, orders, out, targets::FleetArg};
use paraft_proto::DescribeReply;
use paraft_worker::exit;
use std::time::{Duration, Instant};

#[derive(Args)]
pub struct DrainArgs {
    /// The server's id: 2 or s2.
    pub server: String,
    #[command(flatten)]
    pub fleet: FleetArg,
    /// Take the draining back: the server gets leaders and replicas again.
    #[arg(long)]
    pub undo: bool,
    /// Wait at most this many seconds until the server is empty.
    #[arg(long, default_value_t = 60)]
    pub wait: u64,
}

/// The server that a user names, as 2 or s2.
pub fn server_id(named: &str) -> Result<ServerId, Failure> {
    let id = named.trim_start_matches('s').parse();
    id.map(ServerId).map_err(|_| {
        Failure::new(exit::USAGE, format!("`{named}` is no server id"))
            .help("write a number, as `paraft status` shows it")
    })
}

pub fn run(args: &DrainArgs) -> Result<i32, Failure> {
    let server = server_id(&args.server)?;
    let servers = args.fleet.to_change()?.servers()?;
    let unable = |why: String| Failure::new(exit::UNAVAILABLE, why);
    orders::given(&servers, &Order::Drain { server, undo: args.undo })?;
    if args.undo {
        out!("{server} takes part again");
        return Ok(exit::OK);
    }
    let deadline = Instant::now() + Duration::from_secs(args.wait);
    let mut noted = false;
    loop {
        let fleet = match agreeing(&servers) {
            Ok(fleet) => fleet,
            Err(_) if Instant::now() < deadline => continue, // an election may take longer
            Err(e) => return Err(e.into()),
        };
        let Some(now) = progress(&fleet, server) else {
            return Err(Failure::new(exit::CONFIG, format!("{server} is gone")));
        };
        match now {
            DrainProgress::Done(what) => {
                out!("{what}");
                return Ok(exit::OK);
            }
            DrainProgress::Goes(what) if Instant::now() > deadline => {
                return Err(unable(what).help("it continues; ask again, or see `paraft status`"));
            }
            DrainProgress::Needed(what) if Instant::now() > deadline => {
                return Err(unable(what).help(format!(
                    "start the silent servers again, each with its own --data, and ask again; `paraft drain {} --undo` \
                     takes the draining back",
                    server.0
                )));
            }
            DrainProgress::Needed(what) if !noted && fleet.silent().next().is_some() => {
                eprintln!("{what}; waiting for that to change");
                noted = true;
            }
            DrainProgress::Goes(_) | DrainProgress::Needed(_) => {}
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Drains a server that is about to end, as far as possible in the time; returns the result as text. It
/// never fails: the server ends anyway.
pub fn empty(servers: &[String], server: ServerId, within: Duration) -> String {
    let deadline = Instant::now() + within;
    let left = || deadline.saturating_duration_since(Instant::now());
    let mut needed_since = None;
    let mut last = format!("{server} has handed nothing over: no server could take the order");
    let (order, token, mut ordered) = (Order::Drain { server, undo: false }, orders::token(), false);
    while !left().is_zero() {
        let Ok(fleet) = agreeing(servers) else {
            if needed_since.get_or_insert_with(Instant::now).elapsed() > NEEDED_TIMEOUT {
                return format!("{server} ends without a majority of the others");
            }
            continue;
        };
        if !ordered {
            ordered = orders::given_again(servers, &order, token, left().min(NEEDED_TIMEOUT)).is_ok();
        }
        match progress(&fleet, server).filter(|_| ordered) {
            Some(DrainProgress::Done(what)) => return what,
            // Other servers end too, or have ended: no server would return in time.
            Some(DrainProgress::Needed(what)) => {
                if needed_since.get_or_insert_with(Instant::now).elapsed() > NEEDED_TIMEOUT {
                    return what;
                }
                last = what;
            }
            Some(DrainProgress::Goes(what)) => {
                // All servers end: none is left to take over.
                if !fleet.servers.iter().any(|s| s.server != server.0 && s.state == "up")
                    && needed_since.get_or_insert_with(Instant::now).elapsed() > NEEDED_TIMEOUT
                {
                    return format!("{what}, and nobody is left to take them");
                }
                last = what;
            }
            None => {}
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    last
}

/// How long an ending server waits for the return of others that need it for a majority.
const NEEDED_TIMEOUT: Duration = Duration::from_secs(3);

/// Undoes the drain of a server that has returned, and that may still be listed as silent; returns
/// whether that is done. One attempt, so that the caller can do other work between attempts.
pub fn take_back(servers: &[String], server: ServerId) -> bool {
    let order = Order::Drain { server, undo: true };
    orders::given_again(servers, &order, orders::token(), Duration::ZERO).is_ok()
}

/// The progress of a drain, as text.
#[derive(Debug, PartialEq)]
enum DrainProgress {
    /// The server can be stopped.
    Done(String),
    /// It still holds something that other servers can take.
    Goes(String),
    /// Nothing more can be moved, but a group needs it for its majority.
    Needed(String),
}

/// `None`: the server does not exist.
fn progress(fleet: &DescribeReply, server: ServerId) -> Option<DrainProgress> {
    let info = fleet.servers.iter().find(|s| s.server == server.0)?;
    let wanted = fleet.shape.as_ref().map_or(1, |s| s.replicas) as usize;
    let others = fleet.servers.iter().filter(|s| s.state == "up").count();
    let silent: Vec<String> = fleet
        .silent()
        .filter(|s| s.server != server.0)
        .map(|s| format!("s{} ({})", s.server, s.address))
        .collect();
    let is = if silent.len() == 1 { "is" } else { "are" };
    // The last report of a silent server may be old; the others know whether they rely on it.
    let (leads, holds) = match info.state.as_str() {
        "silent" => (0, fleet.shards.iter().filter(|s| s.voters.contains(&server.0)).count() as u32),
        _ => (info.leads, info.holds),
    };
    let stays = leads == 0 && others < wanted;
    if leads > 0 || holds > 0 && !stays {
        return Some(DrainProgress::Goes(format!("{server} still leads {leads} and holds {holds} replicas")));
    }
    let has = match holds {
        0 => format!("{server} is empty"),
        _ => format!(
            "{server} leads nothing any more; its {holds} replicas stay, since {others} other servers cannot hold \
             {wanted} replicas of a shard"
        ),
    };
    let groups = fleet.depend_on(server.0, &[]);
    if !groups.is_empty() {
        let why = match silent.is_empty() {
            true => String::new(),
            false => format!("{} {is} silent, and ", silent.join(", ")),
        };
        let groups = groups.join(", ");
        return Some(DrainProgress::Needed(format!(
            "{has}, but do not stop it: {why}without it there is no majority for {groups}"
        )));
    }
    let alone = together(fleet, server);
    Some(DrainProgress::Done(match (silent.is_empty(), holds, alone) {
        (true, _, Some(alone)) => format!("{has}. It can be stopped, but {alone}"),
        (true, 0, None) => format!("{has}: it can be stopped"),
        (true, _, None) => format!("{has}. It can be stopped: the others continue"),
        (false, _, alone) => {
            let but = alone.map_or(String::new(), |a| format!("; but {a}"));
            format!(
                "{has}. It can be stopped, though {} {is} silent: the others are a majority{but}",
                silent.join(", ")
            )
        }
    }))
}

/// The drained servers that must not stop together with this one, and why.
fn together(fleet: &DescribeReply, server: ServerId) -> Option<String> {
    let drained: Vec<u64> = fleet.draining().map(|s| s.server).filter(|s| *s != server.0).collect();
    let pairs: Vec<u64> =
        drained.iter().copied().filter(|d| !fleet.depend_on(server.0, &[*d]).is_empty()).collect();
    // Each of them alone may stop beside it, but all of them may be too many.
    let (which, or) = if pairs.is_empty() { (drained, " and ") } else { (pairs, " or ") };
    let groups = fleet.depend_on(server.0, &which);
    if groups.is_empty() {
        return None;
    }
    let names: Vec<String> = which.iter().map(|s| format!("s{s}")).collect();
    let are = if which.len() == 1 { "is" } else { "are" };
    let both = if which.len() == 1 || or == " or " { "both" } else { "all of them" };
    Some(format!(
        "not together with {}, which {are} drained too: without {both} there is no majority for {}",
        names.join(or),
        groups.join(", ")
    ))
}

#[cfg(test)]
#[path = "drain_tests.rs"]
mod tests;
