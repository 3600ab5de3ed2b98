//! Answers which digit an image shows, with the newest weights of a job that trains meanwhile:
//!
//! ```sh
//! paraft train examples/digits.toml --epochs 2000 --run-dir runs/serve &
//! target/release/paraft-example-serve-digits "$(cat runs/serve/servers)" 127.0.0.1:8000
//! curl 127.0.0.1:8000/digit -d '[0,0,5,13,9,1, ...]'        # 64 pixels from 0 to 16; {"digit":0,"version":1234}
//! ```
//!
//! `PARAFT_CERTS=runs/serve/certs` says who it is.

use paraft_example_serve_digits::{follow, router};
use paraft_tls::{Access, access::As};
use std::sync::Arc;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [servers, listen] = &arguments[..] else {
        anyhow::bail!("give the servers and an address to listen at: HOST:PORT,HOST:PORT 127.0.0.1:8000")
    };
    Access::of_environment(As::Worker)?.set();
    let servers: Vec<String> = servers.split(',').map(str::to_string).collect();
    let (digits, following) = follow(&servers, "demo").await?;
    let listener = tokio::net::TcpListener::bind(listen).await?;
    println!("http://{}/digit", listener.local_addr()?);
    tokio::select! {
        served = axum::serve(listener, router(Arc::clone(&digits))) => served?,
        ended = following => ended??,
        _ = tokio::signal::ctrl_c() => {}
    }
    Ok(())
}
