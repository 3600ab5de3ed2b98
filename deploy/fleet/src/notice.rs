//! A notice that this host will be taken away, as spot instances receive it: a file that appears, or a
//! page that exists. It triggers the signal that an engine would send.

use crate::failure::Failure;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use paraft_worker::exit;
use std::{
    io::{Read, Write},
    net::{TcpStream, ToSocketAddrs},
    path::PathBuf,
    thread,
    time::Duration,
};

/// The poll interval; clouds give 30 s to 2 min.
const POLL_INTERVAL: Duration = Duration::from_secs(2);

/// The source of the notice.
enum Source {
    File(PathBuf),
    /// Host with port, its name, path.
    Page(String, String, String),
}

/// Starts a thread that sends SIGTERM to this process when the notice appears.
pub fn watch(notice: &str) -> Result<(), Failure> {
    let source = parse(notice)?;
    let look = move || {
        while !is_there(&source) {
            thread::sleep(POLL_INTERVAL);
        }
        eprintln!("this host will be taken away: it has the notice");
        let _ = kill(Pid::this(), Signal::SIGTERM);
    };
    let started = thread::Builder::new().name("notice".into()).spawn(look);
    started.map(drop).map_err(|e| Failure::new(exit::IO, format!("no thread for --notice: {e}")))
}

fn parse(notice: &str) -> Result<Source, Failure> {
    if notice.starts_with("https:") {
        return Err(Failure::new(exit::USAGE, format!("--notice {notice}: only http:// is spoken here"))
            .help("a host's own metadata service speaks plain HTTP; for anything else, write a file"));
    }
    let Some(rest) = notice.strip_prefix("http://") else { return Ok(Source::File(notice.into())) };
    let (host, path) = rest.split_once('/').unwrap_or((rest, ""));
    let at = if host.contains(':') { host.to_string() } else { format!("{host}:80") };
    Ok(Source::Page(at, host.into(), format!("/{path}")))
}

fn is_there(source: &Source) -> bool {
    match source {
        Source::File(path) => path.exists(),
        Source::Page(at, host, path) => {
            // AWS wants a token first, and Google this header.
            let token = ask(
                at,
                &format!(
                    "PUT /latest/api/token HTTP/1.0\r\nHost: {host}\r\nX-aws-ec2-metadata-token-ttl-seconds: 60\r\n\r\n"
                ),
            );
            let token =
                token.map(|t| format!("X-aws-ec2-metadata-token: {}\r\n", t.trim())).unwrap_or_default();
            let page = ask(
                at,
                &format!("GET {path} HTTP/1.0\r\nHost: {host}\r\nMetadata-Flavor: Google\r\n{token}\r\n"),
            );
            page.is_some_and(|body| !matches!(body.trim(), "" | "FALSE" | "NONE"))
        }
    }
}

/// The body of a reply with status 200.
fn ask(at: &str, request: &str) -> Option<String> {
    let to = at.to_socket_addrs().ok()?.next()?;
    let mut stream = TcpStream::connect_timeout(&to, POLL_INTERVAL).ok()?;
    stream.set_read_timeout(Some(POLL_INTERVAL)).ok()?;
    stream.write_all(request.as_bytes()).ok()?;
    let mut answer = Vec::new();
    stream.take(64 << 10).read_to_end(&mut answer).ok()?;
    let answer = String::from_utf8_lossy(&answer).into_owned();
    let (head, body) = answer.split_once("\r\n\r\n")?;
    head.split_whitespace().nth(1).filter(|code| *code == "200").map(|_| body.to_string())
}

#[cfg(test)]
#[path = "notice_tests.rs"]
mod tests;
