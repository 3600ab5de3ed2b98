//! The live page that a server serves (`--dashboard`): where, and who knows its token.

use paraft_dashboard::{LocalControl, Options, Source, TOKEN, Token};
use paraft_fleet::{failure::Failure, pages};
use paraft_worker::exit;
use std::{
    fs,
    io::{self, Write},
    net::SocketAddr,
    os::unix::fs::OpenOptionsExt,
    path::Path,
    time::Duration,
};
use tokio::{net::TcpListener, sync::oneshot, task::JoinHandle};

/// In a server's data folder, for its owner alone, where the environment has none.
const FILE: &str = "dashboard.token";

/// The time for the last words to open pages.
const END_TIMEOUT: Duration = Duration::from_secs(1);

/// A page that is about to be served.
pub struct Page {
    listener: TcpListener,
    token: Token,
    /// host:port as the others reach it.
    pub address: String,
}

/// Listens there, for the server with this address and data folder.
///
/// # Errors
/// `Ok`: the socket's. `Err`: the token's.
pub async fn bind(at: SocketAddr, server: &str, data: &Path) -> Result<Page, Result<io::Error, Failure>> {
    let token = token(data).map_err(Err)?;
    let listener = match TcpListener::bind(at).await {
        // A page port in use must not keep a server from the training.
        Err(e) if e.kind() == io::ErrorKind::AddrInUse => {
            tracing::warn!(%at, "the page's port is in use; it is served on another");
            TcpListener::bind(SocketAddr::new(at.ip(), 0)).await
        }
        bound => bound,
    }
    .map_err(Ok)?;
    let bound = listener.local_addr().map_err(Ok)?;
    // Where all addresses of this host are listened on, it is the one by which others know the server.
    let host = server.rsplit_once(':').map(|(host, _)| host).filter(|_| bound.ip().is_unspecified());
    let address = host.map_or_else(|| bound.to_string(), |host| format!("{host}:{}", bound.port()));
    Ok(Page { listener, token, address })
}

impl Page {
    /// What to open in a browser.
    pub fn link(&self) -> String {
        self.token.link(&self.address)
    }

    /// Serves it, with what the server at this address and the others of its fleet say, as long as this process lives.
    pub fn serve(self, server: String, here: LocalControl) -> ServedPage {
        let options = Options { source: Source::Servers(vec![server]), token: self.token, sweep: None, here };
        let (ends, ended) = oneshot::channel();
        let shutdown = async move { _ = ended.await };
        let serves = tokio::spawn(async move {
            if let Err(e) = paraft_dashboard::serve(self.listener, options, shutdown).await {
                tracing::error!("the page is served no more: {e}");
            }
        });
        ServedPage { ends, serves }
    }
}

/// A page that is served. Dropping it ends it, without waiting.
pub struct ServedPage {
    ends: oneshot::Sender<()>,
    serves: JoinHandle<()>,
}

impl ServedPage {
    /// Shows the end of the run on the open pages.
    pub async fn end(self) {
        _ = self.ends.send(());
        // A browser that reads nothing must not delay the end of the server.
        _ = tokio::time::timeout(END_TIMEOUT, self.serves).await;
    }
}

/// The servers of the fleets that this process starts serve pages.
///
/// # Errors
/// No random numbers.
pub fn of_fleets(servers: u32) -> Result<(), Failure> {
    let token = draw()?;
    pages::serve(servers, TOKEN, token.text().into());
    Ok(())
}

/// That of the environment, or of the data folder, where it is drawn the first time.
fn token(data: &Path) -> Result<Token, Failure> {
    if let Some(given) = Token::given() {
        return given.map_err(|e| Failure::new(exit::CONFIG, e));
    }
    let path = data.join(FILE);
    match fs::read_to_string(&path) {
        Ok(text) => Token::new(text.trim()).map_err(|e| {
            Failure::new(exit::CONFIG, format!("{}: {e}", path.display()))
                .help("remove it, and another is drawn")
        }),
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            let token = draw()?;
            let write = || -> io::Result<()> {
                fs::create_dir_all(data)?;
                let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path)?;
                file.write_all(token.text().as_bytes())
            };
            write().map_err(|e| Failure::write(&path, e))?;
            Ok(token)
        }
        Err(e) => Err(Failure::new(exit::IO, format!("{}: {e}", path.display()))),
    }
}

fn draw() -> Result<Token, Failure> {
    Token::draw().map_err(|e| Failure::new(exit::IO, format!("no random numbers: {e}")))
}
