//! How a process makes connections over TCP: one setting for the process, from its flags and its environment,
//! before it dials.

use crate::{
    credentials::{Credentials, CredentialsError},
    error::TlsError,
    refusals::NotedConnection,
    role::Rights,
    stream::{FailedHandshake, Stream, Wire},
    verify,
};
use parking_lot::RwLock;
use std::{
    ffi::OsString,
    io,
    io::Read,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::net::TcpStream;

pub use crate::credentials::As;
pub use verify::Expected;

/// How this process makes and accepts connections. See the module.
#[derive(Clone, Debug, Default)]
pub enum Access {
    /// No TCP: only Unix sockets, within this host and user.
    #[default]
    Closed,
    /// Under TLS.
    Certificates(Arc<Credentials>),
    /// In plain text: every client that reaches a port may do everything.
    Insecure,
}

/// The refusal of a plain-text client by a server that requires TLS.
pub const ONLY_TLS: &str =
    "this server speaks TLS only: give --certs FOLDER with a certificate of the fleet's";
/// The refusal of an admitted client without the right.
pub const DENIED: &str = "this certificate is not for that (`paraft certs show FOLDER` says what it is for)";

static OURS: RwLock<Access> = RwLock::new(Access::Closed);
static ALWAYS_SHOWN: AtomicBool = AtomicBool::new(false);

/// Timeout of an HTTP client for a connection: an unknown name, or a host that is gone, is then tried again.
const CONNECT: Duration = Duration::from_secs(2);

/// The variable with a folder of certificates; an environment holds only its path.
pub const CERTS: &str = "PARAFT_CERTS";
/// The variable that allows plain text.
pub const INSECURE: &str = "PARAFT_INSECURE";

impl Access {
    /// Sets how this process makes connections from now on.
    pub fn set(self) {
        *OURS.write() = self;
    }

    /// How this process makes connections.
    pub fn ours() -> Self {
        OURS.read().clone()
    }

    /// Makes this process show its certificate to servers of its own host too, so that the certificate decides what it
    /// may do. Over a Unix socket a server takes a process of its own user for an administrator.
    pub fn show_always() {
        ALWAYS_SHOWN.store(true, Relaxed);
    }

    /// Whether this process may use a server's Unix socket, over which it shows no certificate.
    pub fn may_use_sockets() -> bool {
        !ALWAYS_SHOWN.load(Relaxed)
    }

    /// From flags: a folder, `-` for standard input, or plain text; neither: closed.
    ///
    /// # Errors
    /// The folder is unusable.
    pub fn of(certs: Option<&Path>, insecure: bool, shows: As) -> Result<Self, CredentialsError> {
        Ok(match certs {
            _ if insecure => Self::Insecure,
            None => Self::Closed,
            Some(path) if path.as_os_str() == "-" => {
                let mut text = String::new();
                let read = io::stdin().read_to_string(&mut text);
                read.map_err(|cause| CredentialsError::File { path: "standard input".into(), cause })?;
                Self::Certificates(Credentials::of_text(&text, "standard input")?)
            }
            Some(path) => Self::Certificates(Credentials::of_folder(path, shows)?),
        })
    }

    /// From the environment.
    ///
    /// # Errors
    /// The folder is unusable.
    pub fn of_environment(shows: As) -> Result<Self, CredentialsError> {
        let given = |name| std::env::var_os(name).filter(|v: &OsString| !v.is_empty());
        let insecure = given(INSECURE).is_some_and(|v| v != "0" && v != "false");
        Self::of(given(CERTS).map(PathBuf::from).as_deref(), insecure, shows)
    }

    /// The error of a process without credentials that dials.
    pub fn no_certificate() -> io::Error {
        let why = "nothing is sent there in plain text: give --certs FOLDER with a certificate of the fleet's, or --insecure if nobody \
                   else is on this network";
        io::Error::new(io::ErrorKind::PermissionDenied, why)
    }

    /// Connects to `to`.
    ///
    /// # Errors
    /// The network fails, or one side refuses the other.
    pub async fn dial(&self, address: &str, to: &Expected) -> io::Result<Wire> {
        if matches!(self, Self::Closed) {
            return Err(Self::no_certificate());
        }
        let socket = TcpStream::connect(address).await?;
        socket.set_nodelay(true)?;
        match self {
            Self::Closed => Err(Self::no_certificate()),
            Self::Insecure => Ok(Wire::Plain(socket)),
            Self::Certificates(credentials) => {
                Ok(Wire::Tls(Box::new(Stream::dial(socket, credentials, to).await?)))
            }
        }
    }

    /// A connector to servers for an HTTP client.
    pub fn connector(
        &self,
    ) -> impl tower::Service<
        http::Uri,
        Response = hyper_util::rt::TokioIo<NotedConnection>,
        Error = io::Error,
        Future: Send,
    > + Clone
    + Send
    + use<> {
        let access = self.clone();
        tower::service_fn(move |uri: http::Uri| {
            let access = access.clone();
            async move {
                let address = uri.authority().map(http::uri::Authority::as_str).unwrap_or_default();
                // Name lookup, connection and handshake together.
                let dials = tokio::time::timeout(CONNECT, access.dial(address, &Expected::SERVER));
                let late =
                    || io::Error::new(io::ErrorKind::TimedOut, format!("no connection within {CONNECT:?}"));
                let wire = dials.await.map_err(|_| late())??;
                Ok(hyper_util::rt::TokioIo::new(NotedConnection::new(wire, address)))
            }
        })
    }

    /// Makes a connection of an accepted socket, and returns the peer's rights. `http1`: the port serves
    /// HTTP/1.1.
    ///
    /// # Errors
    /// The peer is refused, and was told why.
    pub async fn accept(&self, socket: TcpStream, http1: bool) -> Result<(Wire, Rights), FailedHandshake> {
        match self {
            Self::Closed => {
                Err(FailedHandshake { why: TlsError::Io(Self::no_certificate()), socket, said: Vec::new() })
            }
            Self::Insecure => Ok((Wire::Plain(socket), Rights::all("anybody (--insecure)"))),
            Self::Certificates(credentials) => {
                let (stream, rights) =
                    Stream::accept(socket, credentials, &Expected::ANY_ROLE, http1).await?;
                Ok((Wire::Tls(Box::new(stream)), rights))
            }
        }
    }
}
