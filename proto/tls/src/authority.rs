//! A fleet's certificate authority: makes certificates, and writes them readable by their owner only.
//!
//! ```text
//! certs/            ca.key        signs; needed to issue and renew, by no process of the fleet
//!   │               ca.crt        trusted: the authority, and earlier ones while their certificates are in use
//!   ├─ peer/        ca.crt tls.crt tls.key
//!   ├─ admin/       ca.crt tls.crt tls.key
//!   └─ worker-mnist/ ...
//! ```
//!
//! The three names are those of a Kubernetes secret of type `kubernetes.io/tls` with its authority, as
//! cert-manager fills it.

use crate::role::{Rights, Role};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, SanType, string::Ia5String,
};
use std::{
    fs, io,
    io::Write,
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

/// The trusted authorities.
pub const CA_CERT: &str = "ca.crt";
/// The authority's key.
pub const CA_KEY: &str = "ca.key";
/// A certificate, with its intermediate authorities.
pub const CERT: &str = "tls.crt";
/// The certificate's key.
pub const KEY: &str = "tls.key";

/// Default lifetime of a certificate.
pub const CERTIFICATE_LIFETIME: Duration = Duration::from_secs(90 * DAY);
/// Lifetime of an authority.
const AUTHORITY_LIFETIME: Duration = Duration::from_secs(3650 * DAY);
const DAY: u64 = 24 * 3600;
/// The clocks of hosts differ: a certificate is valid from this long before it was made.
const CLOCK_SKEW: Duration = Duration::from_secs(3600);
/// A host name in every certificate, for tools that require one.
pub const SERVER_NAME: &str = "paraft";

/// Why a certificate was not made or written.
#[derive(Debug, thiserror::Error)]
pub enum AuthorityError {
    /// A file cannot be read or written.
    #[error("{}: {cause}", .path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The error of the system.
        cause: io::Error,
    },
    /// The folder has no authority.
    #[error("{} is no authority's folder: {why}", .path.display())]
    NoAuthority {
        /// The folder.
        path: PathBuf,
        /// What is missing.
        why: String,
    },
    /// A certificate cannot be made.
    #[error("a certificate cannot be made: {0}")]
    Make(String),
}

impl From<rcgen::Error> for AuthorityError {
    fn from(e: rcgen::Error) -> Self {
        Self::Make(e.to_string())
    }
}

fn at(path: &Path) -> impl FnOnce(io::Error) -> AuthorityError {
    move |cause| AuthorityError::File { path: path.into(), cause }
}

/// A certificate with its key and the trusted authorities: three files, as text.
pub struct Issued {
    /// The trusted authorities.
    pub authorities: String,
    /// The certificate.
    pub cert: String,
    /// Its key.
    pub key: String,
}

/// A certificate authority. See the module.
pub struct Authority {
    signs: Issuer<'static, KeyPair>,
    key: String,
    /// The trusted authorities, itself first.
    trusted: Vec<String>,
}

impl Authority {
    /// A new authority. `name` is for people who read certificates.
    ///
    /// # Errors
    /// The system gives no randomness.
    pub fn new(name: &str) -> Result<Self, AuthorityError> {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        lasts(&mut params, AUTHORITY_LIFETIME);
        let key = KeyPair::generate()?;
        // Each authority has its own name: among several trusted ones the name tells which has signed.
        let own: String = key.public_key_raw().iter().rev().take(4).map(|b| format!("{b:02x}")).collect();
        params.distinguished_name.push(DnType::CommonName, format!("Paraft authority {name} {own}"));
        let cert = params.self_signed(&key)?;
        let text = key.serialize_pem();
        Ok(Self { signs: Issuer::new(params, key), key: text, trusted: vec![cert.pem()] })
    }

    /// Reads the authority of this folder.
    ///
    /// # Errors
    /// It has none.
    pub fn open(dir: &Path) -> Result<Self, AuthorityError> {
        let read = |name: &str| {
            let path = dir.join(name);
            fs::read_to_string(&path).map_err(|e| match e.kind() {
                io::ErrorKind::NotFound => AuthorityError::NoAuthority {
                    path: dir.into(),
                    why: format!("it has no {name} (`paraft certs new {}` makes one)", dir.display()),
                },
                _ => at(&path)(e),
            })
        };
        let (key, trusted) = (read(CA_KEY)?, certificates(&read(CA_CERT)?));
        let bad = |why: String| AuthorityError::NoAuthority { path: dir.into(), why };
        let pair = KeyPair::from_pem(&key).map_err(|e| bad(format!("{CA_KEY}: {e}")))?;
        let first = trusted.first().ok_or_else(|| bad(format!("{CA_CERT} has no certificate")))?;
        let signs = Issuer::from_ca_cert_pem(first, pair).map_err(|e| bad(format!("{CA_CERT}: {e}")))?;
        Ok(Self { signs, key, trusted })
    }

    /// A new authority, which trusts this one as well.
    ///
    /// # Errors
    /// The system gives no randomness.
    pub fn next(&self, name: &str) -> Result<Self, AuthorityError> {
        let mut next = Self::new(name)?;
        next.trusted.extend(self.trusted.iter().cloned());
        Ok(next)
    }

    /// Stops trusting other authorities.
    pub fn alone(&mut self) {
        self.trusted.truncate(1);
    }

    /// Issues a certificate with these roles. `name` is for logs.
    ///
    /// # Errors
    /// The name is not valid in a certificate.
    pub fn issue(&self, name: &str, roles: &[Role], lasting: Duration) -> Result<Issued, AuthorityError> {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        params.subject_alt_names.push(SanType::DnsName(Ia5String::try_from(SERVER_NAME)?));
        for role in roles {
            params.subject_alt_names.push(SanType::URI(Ia5String::try_from(role.uri())?));
        }
        params.use_authority_key_identifier_extension = true;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        // Ranks of a group are clients and servers of each other.
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        lasts(&mut params, lasting);
        let key = KeyPair::generate()?;
        let cert = params.signed_by(&key, &self.signs)?;
        Ok(Issued { authorities: self.trusted.concat(), cert: cert.pem(), key: key.serialize_pem() })
    }

    /// Writes the authority, with its key.
    ///
    /// # Errors
    /// The folder's.
    pub fn save(&self, dir: &Path) -> Result<(), AuthorityError> {
        folder(dir)?;
        write(&dir.join(CA_CERT), &self.trusted.concat())?;
        write(&dir.join(CA_KEY), &self.key)
    }
}

impl Issued {
    /// Writes the three files, each atomically.
    ///
    /// # Errors
    /// The folder's.
    pub fn save(&self, dir: &Path) -> Result<(), AuthorityError> {
        folder(dir)?;
        // A reader in between finds a key that does not match its certificate, and keeps its current
        // credentials.
        write(&dir.join(CA_CERT), &self.authorities)?;
        write(&dir.join(KEY), &self.key)?;
        write(&dir.join(CERT), &self.cert)
    }
}

/// The name of a certificate's folder within its authority's: `worker-mnist`.
pub fn folder_name(roles: &[Role]) -> String {
    let fits = |c: char| if c.is_ascii_alphanumeric() || "-._".contains(c) { c } else { '_' };
    let name =
        |r: &Role| r.to_string().replace(":*", "").replace(':', "-").chars().map(fits).collect::<String>();
    roles.iter().map(name).collect::<Vec<_>>().join("+")
}

/// The certificate folders within an authority's.
///
/// # Errors
/// The folder's.
pub fn issued_in(dir: &Path) -> Result<Vec<PathBuf>, AuthorityError> {
    let mut all: Vec<PathBuf> = fs::read_dir(dir)
        .map_err(at(dir))?
        .filter_map(|e| Some(e.ok()?.path()))
        .filter(|p| p.join(CERT).is_file())
        .collect();
    all.sort();
    Ok(all)
}

/// Name, rights and lifetime of the certificate in a folder.
///
/// # Errors
/// There is none.
pub fn certificate_in(dir: &Path) -> Result<(String, Rights, Duration), AuthorityError> {
    use x509_parser::{
        pem::Pem,
        prelude::{FromDer, X509Certificate},
    };
    let path = dir.join(CERT);
    let text = fs::read(&path).map_err(at(&path))?;
    let bad = |why: String| AuthorityError::File {
        path: path.clone(),
        cause: io::Error::new(io::ErrorKind::InvalidData, why),
    };
    let pem = Pem::iter_from_buffer(&text).next().and_then(Result::ok);
    let der = pem.ok_or_else(|| bad("it has no certificate".into()))?.contents;
    let rights = Rights::of_certificate(&der).map_err(bad)?;
    let (_, cert) = X509Certificate::from_der(&der).map_err(|e| bad(e.to_string()))?;
    let name = cert.subject().iter_common_name().next().and_then(|n| n.as_str().ok()).unwrap_or_default();
    let validity = cert.validity();
    let seconds = validity.not_after.timestamp() - validity.not_before.timestamp();
    let lasting = Duration::from_secs(u64::try_from(seconds).unwrap_or(0)).saturating_sub(CLOCK_SKEW);
    Ok((name.to_string(), rights, lasting))
}

/// Sets the validity: from now, or a little earlier for clocks that are behind.
fn lasts(params: &mut CertificateParams, lasting: Duration) {
    let now = SystemTime::now();
    params.not_before = (now - CLOCK_SKEW).into();
    params.not_after = (now + lasting).into();
}

/// The certificates in a text, each with its lines.
fn certificates(text: &str) -> Vec<String> {
    const END: &str = "-----END CERTIFICATE-----";
    let begins = |part: &str| part.find("-----BEGIN CERTIFICATE-----").map(|at| part[at..].to_string());
    text.split_inclusive(END).filter_map(begins).map(|c| c + "\n").collect()
}

fn folder(dir: &Path) -> Result<(), AuthorityError> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(at(dir))
}

/// Replaces a file atomically, readable by its owner only.
fn write(path: &Path, text: &str) -> Result<(), AuthorityError> {
    let new = path.with_extension("new");
    let _ = fs::remove_file(&new);
    let mut file =
        fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&new).map_err(at(&new))?;
    file.write_all(text.as_bytes()).and_then(|()| file.sync_all()).map_err(at(&new))?;
    // A renewed file keeps its owner, if the renewing user may set it.
    if let Ok(before) = fs::metadata(path) {
        let _ = std::os::unix::fs::chown(&new, Some(before.uid()), Some(before.gid()));
    }
    fs::rename(&new, path).map_err(at(path))
}

/// Makes the certificate in a folder trust this authority, and the earlier ones.
///
/// # Errors
/// The folder's.
pub fn trust(dir: &Path, authority: &Authority) -> Result<(), AuthorityError> {
    write(&dir.join(CA_CERT), &authority.trusted.concat())
}
