//! Logs: human text to standard error, or JSON to a file of the run.

use std::{fs::File, io::IsTerminal, path::Path, sync::Mutex};
use tracing_subscriber::{EnvFilter, fmt, layer::SubscriberExt, util::SubscriberInitExt};

/// Starts logging. The level comes from `PARAFT_LOG` (the syntax of tracing's EnvFilter), default `info` in
/// files and `warn` on the terminal. A second call changes nothing.
pub fn start(file: Option<&Path>) -> std::io::Result<()> {
    let filter = |default: &str| {
        // openraft tells each heartbeat at info; its warnings repeat while a peer is down.
        let quiet = format!("{default},openraft=error");
        EnvFilter::try_from_env("PARAFT_LOG").unwrap_or_else(|_| EnvFilter::new(quiet))
    };
    match file {
        Some(path) => {
            let file = File::options().create(true).append(true).open(path)?;
            let layer = fmt::layer().json().with_writer(Mutex::new(file));
            let _ = tracing_subscriber::registry().with(filter("info")).with(layer).try_init();
        }
        None => {
            let layer = fmt::layer().with_writer(std::io::stderr).with_target(false);
            let layer = layer.with_ansi(std::io::stderr().is_terminal());
            let _ = tracing_subscriber::registry().with(filter("warn")).with(layer).try_init();
        }
    }
    Ok(())
}
