//! `paraft mode`: the live switch between synchronous and asynchronous training.
//!
//! Shard 0 is asked first; the number that it gives to the switch is the same on every shard.

use clap::Args;
use paraft_common::ModeChoice;
use paraft_fleet::{ask, failure::Failure, out, whose};
use paraft_proto::{PROTOCOL, Refused, ShardStatus, SwitchModeRequest};
use paraft_worker::exit;
use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    time::{Duration, Instant},
};
use tokio::runtime::Runtime;

#[derive(Args)]
pub struct ModeArgs {
    /// The job's name, as `paraft status` shows it.
    pub job: String,
    /// The mode in which it goes on: bsp, ssp:S, asp, or auto (a rule chooses the staleness bound).
    pub mode: ModeChoice,
    /// A run's folder, or a job file with cluster.addresses.
    #[arg(long)]
    pub of: Option<PathBuf>,
    /// Servers of the fleet as host:port, comma-separated.
    #[arg(long, env = "PARAFT_SERVERS", value_delimiter = ',')]
    pub servers: Vec<String>,
    /// Wait at most this many seconds until every shard has switched.
    #[arg(long, default_value_t = 30)]
    pub wait: u64,
}

/// A switch waits for a majority.
const ANSWER: Duration = Duration::from_secs(10);

pub fn run(args: &ModeArgs) -> Result<i32, Failure> {
    let servers = whose::addresses(args.of.as_deref(), &args.servers)?;
    // Somebody answers, or it is said why nobody does.
    ask::jobs(&servers).map_err(|none| none.help("nothing has changed"))?;
    let deadline = Instant::now() + Duration::from_secs(args.wait);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|e| Failure::new(exit::UNAVAILABLE, format!("no runtime: {e}")))?;
    let ask = |shard, switch: &Switch| ask(&runtime, &args.job, &servers, shard, switch, deadline);
    let (first, before) = ask(0, &Switch { number: 0, mode: args.mode.to_string() })?;
    let by = if args.mode == ModeChoice::Auto { ", and a rule chooses from here on" } else { "" };
    out!("{}: {} -> {} (switch {}){by}", args.job, before.mode, first.mode, first.number);
    if args.mode != ModeChoice::Auto && first.mode != args.mode.to_string() {
        let why = format!("{} goes on in {}: somebody else has switched it", args.job, first.mode);
        return Err(Failure::new(exit::UNAVAILABLE, why).help("ask again"));
    }
    for shard in before.shards.iter().filter(|s| **s > 0) {
        ask(*shard, &first)?;
    }
    let switched = before.shards.len().max(1);
    out!("{switched} shard{} switched", if switched == 1 { "" } else { "s" });
    Ok(exit::OK)
}

/// What is known of the job before the switch.
pub(crate) struct Before {
    mode: String,
    /// Those with a part of the model: a small one may leave some without.
    shards: BTreeSet<u32>,
}

/// A switch of the mode.
struct Switch {
    /// 0: the next.
    number: u64,
    /// As the protocol writes it.
    mode: String,
}

/// Asks the shard's leader until it has switched; gives what is in force then.
fn ask(
    runtime: &Runtime,
    job: &str,
    servers: &[String],
    shard: u32,
    Switch { number, mode }: &Switch,
    deadline: Instant,
) -> Result<(Switch, Before), Failure> {
    loop {
        let (leaders, before) = leaders(servers, job);
        let why = match leaders.get(&shard) {
            None if leaders.is_empty() => "no server that answers leads a shard".to_string(),
            None => format!("shard {shard} has no leader"),
            Some(address) => {
                let (job, mode, number) = (job.to_string(), mode.clone(), *number);
                let request = SwitchModeRequest { protocol: PROTOCOL, shard, job, mode, number };
                match runtime.block_on(paraft_client::switch_mode(address, request, ANSWER)) {
                    Ok((number, mode)) => return Ok((Switch { number, mode }, before)),
                    Err(refused) if is_final(&refused) => {
                        return Err(Failure::new(
                            exit::CONFIG,
                            format!("shard {shard}: {}", refused.message),
                        ));
                    }
                    Err(refused) => format!("shard {shard} at {address}: {}", refused.message),
                }
            }
        };
        if Instant::now() > deadline {
            let failure = Failure::new(exit::UNAVAILABLE, format!("not switched: {why}"));
            return Err(match shard {
                0 => failure.help("nothing has changed; `paraft status` shows which servers answer"),
                _ => failure.help(
                    "shards before it have switched, and the workers tell the others; ask again to be sure",
                ),
            });
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Whether asking again would not help.
fn is_final(refused: &Refused) -> bool {
    use paraft_proto::Advice;
    matches!(refused.advice(), Advice::Fix | Advice::Stop | Advice::Lost)
}

/// The address of the leader of each of the job's shards, as the servers of the fleet say that answer, given ones and others.
pub(crate) fn leaders(servers: &[String], job: &str) -> (BTreeMap<u32, String>, Before) {
    let mut leaders: BTreeMap<u32, (u64, String)> = BTreeMap::new();
    let mut before = Before { mode: String::new(), shards: BTreeSet::new() };
    let all = ask::describe(servers).map_or_else(|| servers.to_vec(), |fleet| ask::whom(&fleet, servers));
    let replies: Vec<_> = ask::ask_all(&all, false).into_iter().flatten().collect();
    let known = replies.iter().flat_map(|r| &r.shards).any(|s| s.job_name == job);
    for reply in &replies {
        // Where no server trains it, those of the job that the fleet was founded for say what they train.
        let ours = |s: &&ShardStatus| if known { s.job_name == job } else { s.job == 0 };
        for s in reply.shards.iter().filter(ours) {
            if s.buckets > 0 {
                before.shards.insert(s.shard);
            }
            // Of two that believe to lead, the one with the later term does.
            if s.role == "leader" && leaders.get(&s.shard).is_none_or(|(term, _)| *term < s.term) {
                leaders.insert(s.shard, (s.term, reply.address.clone()));
                if s.shard == 0 {
                    before.mode = s.mode.clone();
                }
            }
        }
    }
    (leaders.into_iter().map(|(shard, (_, address))| (shard, address)).collect(), before)
}
