//! The flags of `paraft server`.

use clap::Args;
use paraft_common::{Durability, need::Bytes};
use paraft_fleet::targets::FleetArg;
use paraft_trace::{DEFAULT_STEPS, MAX_STEPS};
use std::{net::SocketAddr, path::PathBuf};

#[derive(Args, Clone, Default)]
pub struct ServerArgs {
    /// The job file; gives addresses, shards and replicas where the flags do not.
    pub job: Option<PathBuf>,
    /// This server's place in the list of servers, from 0.
    #[arg(long, required_unless_present = "join")]
    pub id: Option<u64>,
    /// Join a running fleet (--fleet) as a new server. Needs --listen.
    #[arg(long, requires = "listen", conflicts_with_all = ["id", "servers", "job"])]
    pub join: bool,
    #[command(flatten)]
    pub fleet: FleetArg,
    /// Where to listen. Default: its own address of the list. Port 0: any.
    #[arg(long)]
    pub listen: Option<String>,
    /// host:port by which the others reach this server, where that is not --listen.
    #[arg(long)]
    pub advertise: Option<String>,
    /// Folder for what must survive this process: who it is, the fleet's agreements and, with `quorum-disk`, the
    /// log. Default: paraft-data/HOST-PORT.
    #[arg(long)]
    pub data: Option<PathBuf>,
    /// All servers as host:port, comma-separated, in the order of their ids. Default: PARAFT_SERVERS, else
    /// cluster.addresses.
    #[arg(long, value_delimiter = ',')]
    pub servers: Vec<String>,
    /// Raft groups that share the model, the same number on each server.
    #[arg(long)]
    pub shards: Option<u32>,
    /// Replicas of each shard, an odd number, the same on each server.
    #[arg(long)]
    pub replicas: Option<u32>,
    /// What an acknowledged push survives, the same on each server: quorum-disk, quorum-memory or leader.
    #[arg(long)]
    pub durability: Option<Durability>,
    /// A follower that hears nothing for three to four times so many milliseconds stands for election; the same on
    /// each server, 50 to 60000.
    #[arg(long, value_parser = clap::value_parser!(u64).range(50..=60_000))]
    pub election_ms: Option<u64>,
    /// The most memory that one job may need on this server, for example 24GiB. Default: what is free.
    #[arg(long, value_name = "SIZE")]
    pub job_memory: Option<Bytes>,
    /// Overrides a key of the job file; may be given often.
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// Serve Prometheus' /metrics here, for example 127.0.0.1:9100 (port 0: any).
    #[arg(long)]
    pub metrics: Option<SocketAddr>,
    /// Serve the fleet's live page here, for example 127.0.0.1:8080 (port 0: any). Who has the token in its address may act there; it is
    /// in PARAFT_DASHBOARD_TOKEN, the same on all servers, or else in the data folder.
    #[arg(long, value_name = "ADDR")]
    pub dashboard: Option<SocketAddr>,
    /// The runs in this folder can be compared on the page.
    #[arg(long, value_name = "FOLDER", requires = "dashboard")]
    pub runs: Option<PathBuf>,
    /// Record the stages of gradients on this server in this folder, as server-ID.jsonl; `paraft trace` merges what the
    /// processes of a job have recorded.
    #[arg(long, value_name = "FOLDER")]
    pub trace: Option<PathBuf>,
    /// With --trace: so many steps, from the first.
    #[arg(long, value_name = "N", default_value_t = DEFAULT_STEPS, requires = "trace",
        value_parser = clap::value_parser!(u64).range(1..=MAX_STEPS))]
    pub trace_steps: u64,
    /// Log as JSON lines into this file. Default: to standard error.
    #[arg(long)]
    pub log_file: Option<PathBuf>,
    /// Have fault points: follow this file, which `paraft chaos` or a person writes. Never in
    /// production.
    #[arg(long, value_name = "FILE")]
    pub faults: Option<PathBuf>,
    /// With --join and --faults: by which number the file names this server.
    #[arg(long, hide = true)]
    pub place: Option<u32>,
    /// The process to end with, where that is not the one that holds standard input; set by `paraft chaos`.
    #[arg(long, value_name = "PID", hide = true)]
    pub until: Option<u32>,
    /// Say the address on standard output, read the list of servers from standard input, and end when that
    /// ends; set by the launcher.
    #[arg(long, hide = true)]
    pub supervised: bool,
}
