//! `paraft doctor`: what works here, what is missing, what that disables. `paraft env`: the same facts for an
//! issue.

mod gpu;
mod row;

use clap::Args;
use paraft_common::{Durability, ServerId};
use paraft_engines::{HostContext, PlaceFlags, place, variables};
use paraft_fleet::{ask, failure::Failure, out};
use paraft_host::socket_path;
use paraft_server::{
    Server, ServerOptions, Shape, Timeouts,
    server::{Ending, Place},
};
use paraft_simd::Isa;
use paraft_store::RealDisk;
use paraft_tls::{
    Access, Credentials, Role,
    authority::{Authority, AuthorityError, CERTIFICATE_LIFETIME},
};
use paraft_worker::exit;
use row::{Row, Verdict, row};
use serde_json::json;
use std::{
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::net::TcpListener;

#[derive(Args)]
pub struct DoctorArgs {
    /// One JSON object for each row.
    #[arg(long)]
    pub json: bool,
    /// Compute every operator and a step of each model on every GPU, in every precision, and compare with the CPU. Takes
    /// some minutes where the kernels have to be compiled.
    #[arg(long)]
    pub selftest: bool,
}

#[derive(Args)]
pub struct EnvArgs {
    /// One JSON object.
    #[arg(long)]
    pub json: bool,
}

pub fn run(args: &DoctorArgs) -> Result<i32, Failure> {
    let mut rows = vec![cores(), memory(), simd(), files(), loopback(), sockets(), folder()];
    rows.extend(gpu::rows());
    if args.selftest {
        rows.extend(gpu::selftest());
    }
    for r in &rows {
        let name = match r.verdict {
            Verdict::Ok => "OK",
            Verdict::Absent => "NONE",
            Verdict::Warn => "WARN",
            Verdict::Fail => "FAIL",
        };
        if args.json {
            out!("{}", json!({"check": r.what, "verdict": name, "found": r.found, "means": r.means}));
        } else {
            let means = if r.means.is_empty() { String::new() } else { format!("  ({})", r.means) };
            out!("[{name:^4}] {:14} {}{means}", r.what, r.found);
        }
    }
    let failed = rows.iter().any(|r| r.verdict == Verdict::Fail);
    Ok(if failed { exit::FAILED } else { exit::OK })
}

fn cores() -> Row {
    match std::thread::available_parallelism().map_or(1, usize::from) {
        1 => row("cores", Verdict::Warn, 1, "servers and workers will take turns"),
        n => row("cores", Verdict::Ok, n, ""),
    }
}

fn memory() -> Row {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let kb = text
        .lines()
        .find_map(|l| l.strip_prefix("MemAvailable:")?.split_whitespace().next()?.parse::<u64>().ok());
    match kb {
        None => row("memory", Verdict::Warn, "unknown", "/proc/meminfo cannot be read"),
        Some(kb) if kb < 1 << 20 => {
            row("memory", Verdict::Warn, format!("{} MB free", kb / 1000), "small models only")
        }
        Some(kb) => row("memory", Verdict::Ok, format!("{:.1} GB free", kb as f64 / 1e6), ""),
    }
}

fn simd() -> Row {
    let what = "vector unit";
    match paraft_simd::choice() {
        Err(refused) => row(what, Verdict::Fail, refused, "no kernel runs"),
        Ok(c) if c.forced => row(what, Verdict::Ok, c.isa(), format!("forced by {}", paraft_simd::VARIABLE)),
        Ok(c) if c.isa() == Isa::Portable && cfg!(target_arch = "x86_64") => {
            row(what, Verdict::Warn, c.isa(), "no AVX2: models take twice the time or more")
        }
        Ok(c) => row(what, Verdict::Ok, c.isa(), ""),
    }
}

fn files() -> Row {
    match nix::sys::resource::getrlimit(nix::sys::resource::Resource::RLIMIT_NOFILE) {
        Ok((soft, _)) if soft < 1024 => row(
            "open files",
            Verdict::Warn,
            soft,
            "a server needs one for each worker and shard: ulimit -n 4096",
        ),
        Ok((soft, _)) => row("open files", Verdict::Ok, soft, ""),
        Err(e) => row("open files", Verdict::Warn, e, ""),
    }
}

/// A real server on a port of its own, asked over gRPC.
fn loopback() -> Row {
    let asked = || -> Result<Duration, String> {
        let data = tempfile::tempdir().map_err(|e| format!("no temporary folder: {e}"))?;
        let rt = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .map_err(|e| e.to_string())?;
        let access = closed().map_err(|e| e.to_string())?;
        access.clone().set();
        let (end, ended) = tokio::sync::oneshot::channel::<()>();
        let (address, serving) = rt.block_on(async {
            let listener = TcpListener::bind("127.0.0.1:0").await.map_err(|e| e.to_string())?;
            let address = listener.local_addr().map_err(|e| e.to_string())?.to_string();
            let election = Duration::from_millis(100);
            let options = ServerOptions {
                page: String::new(),
                place: Place::Listed(ServerId(0)),
                address: address.clone(),
                servers: vec![address.clone()],
                shape: Shape { shards: 1, replicas: 1, durability: Durability::default() },
                data: data.path().to_path_buf(),
                disk: Arc::new(RealDisk),
                election,
                timeouts: Timeouts::new(election, 10 * election),
                check_every: None,
                socket: None,
                job_memory: None,
                access: access.clone(),
            };
            let server = Server::start(options).await.map_err(|e| e.to_string())?;
            let until = async move {
                let _ = ended.await;
                Ending::AtOnce
            };
            Ok::<_, String>((address, tokio::spawn(server.run(listener, None, until))))
        })?;
        let began = Instant::now();
        let reply = ask::ask_all(std::slice::from_ref(&address), false).remove(0);
        let took = began.elapsed();
        // It writes into the folder that goes: first it ends, then what it had begun.
        drop(end);
        rt.block_on(serving).map_err(|e| e.to_string())?.map_err(|e| e.to_string())?;
        rt.shutdown_timeout(Duration::from_secs(10));
        data.close().map_err(|e| format!("its temporary folder stays: {e}"))?;
        reply.map(|_| took)
    };
    match asked() {
        Ok(t) => row(
            "gRPC loopback",
            Verdict::Ok,
            format!("a server started and answered under TLS in {:.1} ms", t.as_secs_f64() * 1e3),
            "",
        ),
        Err(e) => row(
            "gRPC loopback",
            Verdict::Fail,
            e,
            "nothing works without it: does a firewall or proxy take 127.0.0.1?",
        ),
    }
}

/// With a certificate of a temporary authority.
fn closed() -> Result<Access, AuthorityError> {
    let issued =
        Authority::new("doctor")?.issue("doctor", &[Role::Peer, Role::Admin], CERTIFICATE_LIFETIME)?;
    let ours = Credentials::of_issued(&issued).map_err(|e| AuthorityError::Make(e.to_string()))?;
    Ok(Access::Certificates(ours))
}

fn sockets() -> Row {
    match socket_path("127.0.0.1:1") {
        Some(p) => row(
            "Unix sockets",
            Verdict::Ok,
            format!("in {}", p.parent().unwrap_or(Path::new("")).display()),
            "",
        ),
        None => row(
            "Unix sockets",
            Verdict::Warn,
            "the temporary folder has no folder of one's own, or a path too long for a socket",
            "workers on a server's host use TCP; a short TMPDIR gives them shared memory",
        ),
    }
}

fn folder() -> Row {
    match tempfile::tempfile_in(".") {
        Ok(_) => row("this folder", Verdict::Ok, "can be written", ""),
        Err(e) => row("this folder", Verdict::Warn, e, "runs need --run-dir elsewhere"),
    }
}

/// What this process is among an engine's, as `paraft launch` would take it.
fn place_here() -> String {
    match place(&variables(), &PlaceFlags::default(), &HostContext::here(None)) {
        Ok(Some(place)) => place.to_string(),
        Ok(None) => "no engine's task".into(),
        Err(wrong) => wrong.to_string(),
    }
}

pub fn env(args: &EnvArgs) -> Result<i32, Failure> {
    let read = |p: &str| std::fs::read_to_string(p).unwrap_or_default();
    let cpu = read("/proc/cpuinfo")
        .lines()
        .find_map(|l| l.strip_prefix("model name")?.split(':').nth(1).map(|s| s.trim().to_string()));
    let os = read("/etc/os-release")
        .lines()
        .find_map(|l| l.strip_prefix("PRETTY_NAME=").map(|s| s.trim_matches('"').to_string()));
    let kernel = read("/proc/sys/kernel/osrelease").trim().to_string();
    let settings: Vec<String> =
        std::env::vars().filter(|(k, _)| k.starts_with("PARAFT_")).map(|(k, v)| format!("{k}={v}")).collect();
    let facts = [
        ("paraft", env!("CARGO_PKG_VERSION").to_string()),
        ("protocol", paraft_proto::PROTOCOL.to_string()),
        ("build", if cfg!(debug_assertions) { "debug" } else { "release" }.to_string()),
        ("target", format!("{}-{}", std::env::consts::ARCH, std::env::consts::OS)),
        ("system", format!("{}, kernel {kernel}", os.unwrap_or_default())),
        (
            "cpu",
            format!(
                "{}, {} cores, {}",
                cpu.unwrap_or_default(),
                std::thread::available_parallelism().map_or(1, usize::from),
                paraft_simd::choice().map_or_else(|refused| refused.to_string(), |c| c.isa().to_string())
            ),
        ),
        ("devices", gpu::devices()),
        ("place", place_here()),
        ("settings", if settings.is_empty() { "none".into() } else { settings.join(" ") }),
    ];
    if args.json {
        let map: serde_json::Map<_, _> = facts.iter().map(|(k, v)| (k.to_string(), json!(v))).collect();
        out!("{}", serde_json::Value::Object(map));
    } else {
        out!("Copy and paste this into your issue:\n");
        for (k, v) in facts {
            out!("- {k}: {v}");
        }
    }
    Ok(exit::OK)
}
