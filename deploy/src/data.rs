//! `paraft data`: replicas' files that were quarantined, and what a person may do with them. Servers put them there and never
//! touch them again.

use crate::drain;
use clap::{Args, Subcommand};
use paraft_client::Order;
use paraft_common::JobShard;
use paraft_fleet::{failure::Failure, orders, out, table, targets::FleetArg};
use paraft_server::replicas::quarantine;
use paraft_store::{Disk, RealDisk};
use paraft_worker::exit;
use serde_json::json;
use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

#[derive(Args)]
pub struct DataArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// Show what was quarantined in servers' data folders, and whether it can be read.
    List {
        /// Data folders of servers, running or not.
        #[arg(required = true)]
        data: Vec<PathBuf>,
        /// One JSON object for each folder that was quarantined.
        #[arg(long)]
        json: bool,
    },
    /// Make a folder that was quarantined the replica again that it was. Its server must not run.
    Restore {
        /// The server's data folder.
        data: PathBuf,
        /// The folder in it, as `list` shows it: shard-0.aside-1.
        name: String,
    },
    /// Delete a folder that was quarantined, for good.
    Delete {
        /// The server's data folder.
        data: PathBuf,
        /// The folder in it, as `list` shows it: shard-0.aside-1.
        name: String,
    },
    /// Give up what a shard held, where too many of its replicas are gone for good: it is founded again, and its job continues
    /// from a checkpoint.
    Abandon {
        /// The shard: 2, or of job 7 of the fleet 7.2, as `paraft status` shows it.
        shard: JobShard,
        #[command(flatten)]
        fleet: FleetArg,
        /// Without it nothing is done but to say what would be lost.
        #[arg(long)]
        accept_loss: bool,
    },
}

#[derive(Args)]
pub struct ForgetArgs {
    /// The server's id: 2 or s2.
    pub server: String,
    #[command(flatten)]
    pub fleet: FleetArg,
}

fn disk() -> Arc<dyn Disk> {
    Arc::new(RealDisk)
}

pub fn run(args: &DataArgs) -> Result<i32, Failure> {
    match &args.what {
        What::List { data, json } => list(data, *json),
        What::Restore { data, name } => {
            quarantine::restore(&disk(), data, name).map_err(|e| Failure::new(exit::DATA, e))?;
            out!(
                "{name} is the shard's replica in {} again; start its server. If the shard was founded again since, the server \
                 puts it aside again, and its log says so",
                data.display()
            );
            Ok(exit::OK)
        }
        What::Delete { data, name } => {
            quarantine::delete(&disk(), data, name).map_err(|e| Failure::new(exit::DATA, e))?;
            out!("{name} is deleted");
            Ok(exit::OK)
        }
        What::Abandon { shard, fleet, accept_loss } => {
            let servers = fleet.to_change()?.servers()?;
            let order = Order::Abandon { shard: *shard, accept_loss: *accept_loss };
            out!("given up: {}", orders::given(&servers, &order)?.was);
            Ok(exit::OK)
        }
    }
}

fn list(data: &[PathBuf], as_json: bool) -> Result<i32, Failure> {
    let mut t =
        table::plain(["data", "quarantined", "shard", "founding", "replica", "up to log index", "bytes"]);
    let mut count = 0;
    for data in data {
        if !data.is_dir() {
            return Err(Failure::new(exit::DATA, format!("{}: there is no such folder", data.display())));
        }
        let asides = quarantine::asides(&disk(), data).map_err(|e| Failure::new(exit::DATA, e))?;
        for a in asides {
            count += 1;
            let bytes = size(&data.join(&a.name));
            let founding = a.founding.map(|o| format!("{o:016x}"));
            let replica = a.node.map(|n| n.to_string());
            if as_json {
                out!(
                    "{}",
                    json!({"data": data, "name": a.name, "job": a.shard.job().0, "shard": a.shard.shard().0, "founding": founding, "replica": replica,
                           "readable": a.last.is_ok(), "last_index": a.last.as_ref().ok(), "error": a.last.as_ref().err(),
                           "bytes": bytes})
                );
                continue;
            }
            t.add_row([
                data.display().to_string(),
                a.name,
                a.shard.name().to_string(),
                founding.unwrap_or_else(|| "-".into()),
                replica.unwrap_or_else(|| "-".into()),
                a.last.map_or_else(|e| format!("cannot be read: {e}"), |last| last.to_string()),
                table::bytes(bytes),
            ]);
        }
    }
    match (as_json, count) {
        (true, _) => {}
        (false, 0) => out!("nothing was quarantined"),
        (false, _) => out!("{t}"),
    }
    Ok(exit::OK)
}

/// Bytes of the readable files in a folder.
fn size(path: &Path) -> u64 {
    let all = std::fs::read_dir(path).into_iter().flatten().flatten();
    all.map(|f| match f.metadata() {
        Ok(m) if m.is_dir() => size(&f.path()),
        Ok(m) => m.len(),
        Err(_) => 0,
    })
    .sum()
}

/// `paraft forget`.
pub fn forget(args: &ForgetArgs) -> Result<i32, Failure> {
    let server = drain::server_id(&args.server)?;
    let servers = args.fleet.to_change()?.servers()?;
    orders::given(&servers, &Order::Forget { server })?;
    out!("{server} is forgotten: its replicas are replaced where other servers have room");
    Ok(exit::OK)
}
