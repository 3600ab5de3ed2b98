//! A process's certificate and key, and the authorities that it trusts: three files, read again when they
//! change.

mod configs;

use crate::{
    authority::{CA_CERT, CERT, Issued, KEY},
    role::{Need, Rights},
    verify::Expected,
};
use configs::{client_config, server_config};
use parking_lot::Mutex;
use rustls::{
    ClientConfig, RootCertStore, ServerConfig,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
};
use std::{
    fmt, fs,
    io::{self, Read},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

/// Minimum interval between checks of the files, on a connection or a call.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// A certificate that expires sooner than this gets a warning.
const EXPIRY_WARNING: Duration = Duration::from_secs(7 * 24 * 3600);

/// Maximum bytes of such a file: some hundred certificates.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// Why a process has no credentials.
#[derive(Debug, thiserror::Error)]
pub enum CredentialsError {
    /// A file cannot be read.
    #[error("{}: {cause}", .path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The error of the system.
        cause: io::Error,
    },
    /// Other users may read the key.
    #[error("{}: others may read this key (mode {mode:o}); only its owner should: chmod 600 {}", .path.display(), .path.display())]
    Open {
        /// The key.
        path: PathBuf,
        /// The mode of its file.
        mode: u32,
    },
    /// The contents are wrong.
    #[error("{from}: {why}")]
    Bad {
        /// Their source.
        from: String,
        /// What is wrong.
        why: String,
    },
}

/// The kind of process, if a folder has a certificate for each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum As {
    /// A server of the fleet.
    Peer,
    /// A worker, or a rank of one.
    Worker,
    /// A command of a person.
    Admin,
}

impl As {
    /// The folder's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Peer => "peer",
            Self::Worker => "worker",
            Self::Admin => "admin",
        }
    }

    /// The certificate folder for this kind of process: its own subfolder, or `certs` itself, which then
    /// belongs to it alone.
    pub fn folder(self, certs: &Path) -> PathBuf {
        let own = certs.join(self.name());
        if !certs.join(CERT).is_file() && own.join(CERT).is_file() { own } else { certs.into() }
    }
}

/// The source of credentials.
enum Source {
    /// The folder, and the named one, which may have a subfolder for each kind of process.
    Folder { own: PathBuf, named: PathBuf },
    /// From a pipe, or made by this process.
    Text(String),
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Folder { own, .. } => write!(f, "{}", own.display()),
            Self::Text(from) => f.write_str(from),
        }
    }
}

/// The three texts.
struct PemTexts {
    authorities: Vec<u8>,
    cert: Vec<u8>,
    key: Vec<u8>,
}

/// The TLS configurations made of them.
struct TlsConfigs {
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
    roots: Arc<RootCertStore>,
    authorities: Vec<CertificateDer<'static>>,
    rights: Rights,
    /// For any peer with a role, over HTTP/2 or a protocol other than HTTP.
    accepts: Arc<ServerConfig>,
    /// For any peer with a role, over HTTP/1.1.
    accepts_http1: Arc<ServerConfig>,
    /// For connections to a server.
    dials: Arc<ClientConfig>,
}

struct State {
    loaded: Arc<TlsConfigs>,
    looked: Instant,
    seen: Vec<(u64, u64, i64, i64)>,
    /// Counts how often trust was withdrawn from an authority.
    withdrawn: u64,
    warned: bool,
    /// The required purpose of the certificate.
    must: Option<Need>,
}

/// The credentials of a process. See the module.
pub struct Credentials {
    source: Source,
    state: Mutex<State>,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "credentials of {}", self.source)
    }
}

impl Credentials {
    /// Reads a folder with `ca.crt`, `tls.crt` and `tls.key`, or its subfolder for this kind of process.
    ///
    /// # Errors
    /// A file is missing, other users may read the key, or the contents are wrong.
    pub fn of_folder(named: &Path, shows: As) -> Result<Arc<Self>, CredentialsError> {
        let own = shows.folder(named);
        let (seen, texts) = (stamps(&own), texts_in(&own)?);
        Self::new(Source::Folder { own, named: named.into() }, &texts, seen)
    }

    /// Reads one PEM text: the certificate with its intermediate authorities, its key, and after the key the
    /// trusted authorities. It comes once, through a pipe.
    ///
    /// # Errors
    /// The contents are wrong.
    pub fn of_text(text: &str, from: &str) -> Result<Arc<Self>, CredentialsError> {
        let bad = |why: &str| CredentialsError::Bad { from: from.into(), why: why.into() };
        let begins = text.find("PRIVATE KEY-----").and_then(|at| text[..at].rfind("-----BEGIN"));
        let (cert, rest) = text.split_at(begins.ok_or_else(|| bad("there is no private key in it"))?);
        let ends = rest.find("-----END").and_then(|at| Some(at + rest[at..].find('\n')?));
        let (key, authorities) = rest.split_at(ends.ok_or_else(|| bad("the private key has no end"))?);
        let texts = PemTexts { authorities: authorities.into(), cert: cert.into(), key: key.into() };
        Self::new(Source::Text(from.into()), &texts, Vec::new())
    }

    /// Takes credentials that this process just made.
    ///
    /// # Errors
    /// None that is known.
    pub fn of_issued(issued: &Issued) -> Result<Arc<Self>, CredentialsError> {
        let Issued { authorities, cert, key } = issued;
        let texts = PemTexts {
            authorities: authorities.clone().into(),
            cert: cert.clone().into(),
            key: key.clone().into(),
        };
        Self::new(Source::Text("a certificate of this process's own".into()), &texts, Vec::new())
    }

    fn new(
        source: Source,
        texts: &PemTexts,
        seen: Vec<(u64, u64, i64, i64)>,
    ) -> Result<Arc<Self>, CredentialsError> {
        let loaded = load(texts).map_err(|why| CredentialsError::Bad { from: source.to_string(), why })?;
        let looked = Instant::now();
        let state = State { loaded: Arc::new(loaded), looked, seen, withdrawn: 0, warned: false, must: None };
        Ok(Arc::new(Self { source, state: Mutex::new(state) }))
    }

    /// The named folder, from which another process may take its own credentials; `None`: they came through a
    /// pipe, or were made here.
    pub fn folder(&self) -> Option<&Path> {
        match &self.source {
            Source::Folder { named, .. } => Some(named),
            Source::Text(_) => None,
        }
    }

    /// Requires from now on a certificate for this purpose.
    ///
    /// # Errors
    /// The current one has another purpose.
    pub fn must_be_for(&self, need: Need) -> Result<(), String> {
        let rights = self.rights();
        if !rights.are_enough_for(need, None) {
            return Err(format!("the certificate is of {rights}, and this needs the role {need}"));
        }
        self.state.lock().must = Some(need);
        Ok(())
    }

    /// What the certificate permits.
    pub fn rights(&self) -> Rights {
        self.now().rights.clone()
    }

    /// Counts how often trust was withdrawn from an authority: earlier connections must then be made again.
    pub fn withdrawn(&self) -> u64 {
        self.now();
        self.state.lock().withdrawn
    }

    /// For an incoming connection; `from`: the expected peer.
    pub(crate) fn accepts(&self, from: &Expected, http1: bool) -> Result<Arc<ServerConfig>, String> {
        let now = self.now();
        if *from == Expected::ANY_ROLE {
            return Ok(if http1 { now.accepts_http1.clone() } else { now.accepts.clone() });
        }
        server_config(&now.chain, &now.key, &now.roots, from.clone()).map(Arc::new)
    }

    /// For an outgoing connection; `to`: the expected peer.
    pub(crate) fn dials(&self, to: &Expected) -> Result<Arc<ClientConfig>, String> {
        let now = self.now();
        if *to == Expected::SERVER {
            return Ok(now.dials.clone());
        }
        client_config(&now.chain, &now.key, &now.roots, to.clone()).map(Arc::new)
    }

    /// The current credentials; files that cannot be read, or do not match yet, change nothing.
    fn now(&self) -> Arc<TlsConfigs> {
        let mut state = self.state.lock();
        if let Source::Folder { own: dir, .. } = &self.source
            && state.looked.elapsed() >= CHECK_INTERVAL
        {
            state.looked = Instant::now();
            let seen = stamps(dir);
            if seen != state.seen {
                let fit =
                    |l: TlsConfigs| match state.must.filter(|need| !l.rights.are_enough_for(*need, None)) {
                        Some(need) => Err(format!("it is of {}, and this needs the role {need}", l.rights)),
                        None => Ok(l),
                    };
                match texts_in(dir).map_err(|e| e.to_string()).and_then(|t| load(&t)).and_then(fit) {
                    Ok(loaded) => {
                        let gone = |c| !loaded.authorities.contains(c);
                        if state.loaded.authorities.iter().any(gone) {
                            state.withdrawn += 1;
                        }
                        tracing::info!(folder = %dir.display(), now = %loaded.rights, "the certificate has changed");
                        *state = State { loaded: Arc::new(loaded), seen, warned: false, ..*state };
                    }
                    Err(why) => {
                        tracing::warn!(folder = %dir.display(), %why, "the certificate there cannot be used yet; the previous one stays in use");
                    }
                }
            }
        }
        if !state.warned
            && let Some(ends) = state.loaded.rights.ends()
            && ends <= SystemTime::now() + EXPIRY_WARNING
        {
            state.warned = true;
            let hours = ends.duration_since(SystemTime::now()).map_or(0, |d| d.as_secs() / 3600);
            // A certificate with a shorter lifetime needs no warning.
            if hours > 0 {
                tracing::warn!(from = %self.source, hours, "this certificate ends soon: `paraft certs renew`");
            }
        }
        state.loaded.clone()
    }
}

fn stamps(dir: &Path) -> Vec<(u64, u64, i64, i64)> {
    let of = |name: &str| {
        fs::metadata(dir.join(name)).map_or((0, 0, 0, 0), |m| (m.ino(), m.len(), m.mtime(), m.mtime_nsec()))
    };
    [CA_CERT, CERT, KEY].map(of).into()
}

fn texts_in(dir: &Path) -> Result<PemTexts, CredentialsError> {
    let read = |name: &str| {
        let path = dir.join(name);
        whole_file(&path).map_err(|cause| CredentialsError::File { path, cause })
    };
    let path = dir.join(KEY);
    if let Ok(meta) = fs::metadata(&path) {
        let ours = fs::metadata("/proc/self").is_ok_and(|me| me.uid() == meta.uid());
        // Files from Kubernetes or systemd may belong to another user and be readable by our group.
        let closed = if ours { 0o077 } else { 0o007 };
        if meta.mode() & closed != 0 {
            return Err(CredentialsError::Open { path, mode: meta.mode() & 0o777 });
        }
    }
    Ok(PemTexts { authorities: read(CA_CERT)?, cert: read(CERT)?, key: read(KEY)? })
}

/// The contents of a regular file. A read of a pipe would block, and one of an endless file would never end.
fn whole_file(path: &Path) -> io::Result<Vec<u8>> {
    if !fs::metadata(path)?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "this is no file"));
    }
    let mut text = Vec::new();
    fs::File::open(path)?.take(MAX_FILE_BYTES).read_to_end(&mut text)?;
    match text.len() as u64 {
        MAX_FILE_BYTES.. => {
            Err(io::Error::new(io::ErrorKind::FileTooLarge, "this is too large for certificates"))
        }
        _ => Ok(text),
    }
}

fn load(texts: &PemTexts) -> Result<TlsConfigs, String> {
    let certs = |text: &[u8], what: &str| {
        let all: Result<Vec<CertificateDer<'static>>, _> =
            CertificateDer::pem_slice_iter(text).map(|c| c.map(CertificateDer::into_owned)).collect();
        match all.map_err(|e| format!("{what}: {e}"))? {
            none if none.is_empty() => Err(format!("{what}: there is no certificate in it")),
            all => Ok(all),
        }
    };
    let chain = certs(&texts.cert, CERT)?;
    let authorities = certs(&texts.authorities, CA_CERT)?;
    let key = PrivateKeyDer::from_pem_slice(&texts.key).map_err(|e| format!("{KEY}: {e}"))?;
    let mut roots = RootCertStore::empty();
    for authority in &authorities {
        roots.add(authority.clone()).map_err(|e| format!("{CA_CERT}: {e}"))?;
    }
    let roots = Arc::new(roots);
    let rights = Rights::of_certificate(&chain[0]).map_err(|e| format!("{CERT}: {e}"))?;
    if rights.have_ended(SystemTime::now()) {
        return Err(format!("{CERT}: this certificate has ended: `paraft certs renew`"));
    }
    let speaks = |protocol: &[u8]| {
        let mut config = server_config(&chain, &key, &roots, Expected::ANY_ROLE)?;
        // Libraries ask for a protocol; our own connections do not.
        config.alpn_protocols = vec![protocol.to_vec()];
        Ok::<_, String>(Arc::new(config))
    };
    let (accepts, accepts_http1) = (speaks(b"h2")?, speaks(b"http/1.1")?);
    let dials = Arc::new(client_config(&chain, &key, &roots, Expected::SERVER)?);
    Ok(TlsConfigs { chain, key, roots, authorities, rights, accepts, accepts_http1, dials })
}
