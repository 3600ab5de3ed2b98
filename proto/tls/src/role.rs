//! Roles: what a certificate permits.
//!
//! A role is a URI among the certificate's subject alternative names, so that any authority can issue one:
//! `paraft:worker:mnist`. A certificate may name several. `submit`, `worker` and `reader` apply to jobs: one
//! name, all names with a prefix (`alice-*`), or all (`*`).

use std::{
    fmt::{self, Display},
    str::FromStr,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

/// The prefix of our URIs.
const SCHEME: &str = "paraft:";

/// What a certificate permits.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    /// Everything except to be a server.
    Admin,
    /// To be a server of the fleet.
    Peer,
    /// To submit these jobs, and everything else with them.
    Submit(Jobs),
    /// To train these jobs.
    Worker(Jobs),
    /// To read of these jobs: weights, state and metrics.
    Reader(Jobs),
}

/// Jobs by name: one, a prefix (`alice-*`), or all (`*`).
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Jobs(String);

impl Jobs {
    /// The jobs of this pattern.
    pub fn named(pattern: impl Into<String>) -> Self {
        Self(pattern.into())
    }

    /// Whether a job is among them.
    pub fn have(&self, job: &str) -> bool {
        match self.0.strip_suffix('*') {
            Some(start) => job.starts_with(start),
            None => self.0 == job,
        }
    }
}

impl Display for Jobs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// What a request needs of its caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Need {
    /// To be a server of the fleet.
    Peer,
    /// To administer the fleet.
    Admin,
    /// To administer the fleet, or to be a server of it.
    Operate,
    /// To have submitted the job.
    Submit,
    /// To train the job.
    Worker,
    /// To read of the job.
    Reader,
    /// Any role. The answer covers the jobs of that role.
    Any,
}

impl Need {
    /// All needs.
    pub const ALL: [Self; 7] =
        [Self::Peer, Self::Admin, Self::Operate, Self::Submit, Self::Worker, Self::Reader, Self::Any];
}

impl Display for Need {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Peer => "peer",
            Self::Admin => "admin",
            Self::Operate => "admin or peer",
            Self::Submit => "submit",
            Self::Worker => "worker",
            Self::Reader => "reader",
            Self::Any => "any role",
        })
    }
}

impl Role {
    /// Whether this role is enough for this job or, if the job is not known yet, for some job.
    pub fn is_enough_for(&self, need: Need, job: Option<&str>) -> bool {
        let of = |jobs: &Jobs| job.is_none_or(|job| jobs.have(job));
        match (self, need) {
            // A server has the weights of all jobs, and gives them to another server that needs them.
            (Self::Peer, need) => matches!(need, Need::Peer | Need::Operate | Need::Reader | Need::Any),
            (Self::Admin, need) => need != Need::Peer,
            (_, Need::Peer | Need::Admin | Need::Operate) => false,
            (Self::Submit(jobs), _) => of(jobs),
            (Self::Worker(jobs), need) => need != Need::Submit && of(jobs),
            (Self::Reader(jobs), need) => matches!(need, Need::Reader | Need::Any) && of(jobs),
        }
    }

    /// Its jobs; `None`: it is not limited to jobs.
    pub fn jobs(&self) -> Option<&Jobs> {
        match self {
            Self::Admin | Self::Peer => None,
            Self::Submit(jobs) | Self::Worker(jobs) | Self::Reader(jobs) => Some(jobs),
        }
    }

    /// Its URI in a certificate.
    pub fn uri(&self) -> String {
        let jobs = |word: &str, jobs: &Jobs| format!("{SCHEME}{word}:{}", encoded(&jobs.0));
        match self {
            Self::Admin => format!("{SCHEME}admin"),
            Self::Peer => format!("{SCHEME}peer"),
            Self::Submit(of) => jobs("submit", of),
            Self::Worker(of) => jobs("worker", of),
            Self::Reader(of) => jobs("reader", of),
        }
    }

    /// The role of a certificate's URI; `None`: not a URI of ours.
    pub fn of_uri(uri: &str) -> Option<Self> {
        let (word, jobs) = match uri.strip_prefix(SCHEME)?.split_once(':') {
            Some((word, jobs)) => (word, Some(decoded(jobs)?)),
            None => (uri.strip_prefix(SCHEME)?, None),
        };
        Self::of(word, jobs)
    }

    fn of(word: &str, jobs: Option<String>) -> Option<Self> {
        Some(match (word, jobs.filter(|j| !j.is_empty()).map(Jobs)) {
            ("admin", None) => Self::Admin,
            ("peer", None) => Self::Peer,
            ("submit", Some(jobs)) => Self::Submit(jobs),
            ("worker", Some(jobs)) => Self::Worker(jobs),
            ("reader", Some(jobs)) => Self::Reader(jobs),
            _ => return None,
        })
    }
}

impl Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Admin => f.write_str("admin"),
            Self::Peer => f.write_str("peer"),
            Self::Submit(jobs) => write!(f, "submit:{jobs}"),
            Self::Worker(jobs) => write!(f, "worker:{jobs}"),
            Self::Reader(jobs) => write!(f, "reader:{jobs}"),
        }
    }
}

impl FromStr for Role {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (word, jobs) = match text.split_once(':') {
            Some((word, jobs)) => (word, Some(jobs.to_string())),
            None => (text, None),
        };
        Self::of(word, jobs).ok_or_else(|| {
            format!(
                "`{text}` is no role; there are admin, peer, submit:JOBS, worker:JOBS and reader:JOBS, where JOBS is a job's \
                 name, or the beginning of names (alice-*), or *"
            )
        })
    }
}

/// Percent-encoded for a URI; the star stays.
fn encoded(name: &str) -> String {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"-._~*".contains(&b);
    let of = |b: u8| if plain(b) { char::from(b).to_string() } else { format!("%{b:02X}") };
    name.bytes().map(of).collect()
}

fn decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, after @ ..] = rest {
        rest = after;
        bytes.push(match first {
            b'%' => {
                let (hex, after) = (after.get(..2)?, after.get(2..)?);
                rest = after;
                u8::from_str_radix(std::str::from_utf8(hex).ok()?, 16).ok()?
            }
            other => *other,
        });
    }
    String::from_utf8(bytes).ok()
}

/// What the peer of a connection may do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rights {
    roles: Vec<Role>,
    /// Everything: the peer runs as the same user on the same host, or nothing is checked.
    all: bool,
    /// When they expire.
    ends: Option<SystemTime>,
    /// The holder's name, for logs.
    name: String,
}

impl Rights {
    /// All rights. `name` gives the reason.
    pub fn all(name: &str) -> Self {
        Self { roles: Vec::new(), all: true, ends: None, name: name.into() }
    }

    /// No rights.
    pub fn none() -> Self {
        Self { roles: Vec::new(), all: false, ends: None, name: "nobody".into() }
    }

    /// The rights of a valid certificate (DER).
    ///
    /// # Errors
    /// It cannot be read, or names no role.
    pub fn of_certificate(der: &[u8]) -> Result<Self, String> {
        use x509_parser::prelude::{FromDer, GeneralName, X509Certificate};
        let (_, cert) = X509Certificate::from_der(der).map_err(|e| format!("it cannot be read: {e}"))?;
        let names = cert.subject_alternative_name().map_err(|e| format!("its names cannot be read: {e}"))?;
        let uri = |name: &GeneralName<'_>| match name {
            GeneralName::URI(uri) => Role::of_uri(uri),
            _ => None,
        };
        let mut roles: Vec<Role> =
            names.iter().flat_map(|n| &n.value.general_names).filter_map(uri).collect();
        roles.sort();
        if roles.is_empty() {
            return Err("it names no role (a URI such as paraft:worker:JOB among its names)".into());
        }
        let ends = u64::try_from(cert.validity().not_after.timestamp()).unwrap_or(0);
        let said: Vec<String> = roles.iter().map(Role::to_string).collect();
        let common = cert.subject().iter_common_name().next().and_then(|n| n.as_str().ok()).unwrap_or("");
        let serial: String = cert.raw_serial_as_string().split(':').take(4).collect();
        // The name goes into log lines.
        let name = format!("{} ({common}, {serial})", said.join("+")).replace(char::is_control, "?");
        Ok(Self { roles, all: false, ends: Some(UNIX_EPOCH + Duration::from_secs(ends)), name })
    }

    /// Whether they are enough for this job or, if the job is not known yet, for some job.
    pub fn are_enough_for(&self, need: Need, job: Option<&str>) -> bool {
        self.all || self.roles.iter().any(|r| r.is_enough_for(need, job))
    }

    /// Whether they cover all jobs, now and later.
    pub fn are_for_all(&self, need: Need) -> bool {
        let all = |r: &Role| match r {
            Role::Admin | Role::Peer => r.is_enough_for(need, None),
            Role::Submit(Jobs(of)) | Role::Worker(Jobs(of)) | Role::Reader(Jobs(of)) => {
                of == "*" && r.is_enough_for(need, None)
            }
        };
        self.all || self.roles.iter().any(all)
    }

    /// Whether they permit only to read.
    pub fn only_read(&self) -> bool {
        !self.are_enough_for(Need::Worker, None) && !self.are_enough_for(Need::Operate, None)
    }

    /// The roles.
    pub fn roles(&self) -> &[Role] {
        &self.roles
    }

    /// When they expire, this second included.
    pub fn ends(&self) -> Option<SystemTime> {
        self.ends
    }

    /// Whether they have expired.
    pub fn have_ended(&self, now: SystemTime) -> bool {
        self.ends.is_some_and(|ends| ends + Duration::from_secs(1) <= now)
    }
}

impl Display for Rights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

#[cfg(test)]
#[path = "role_tests.rs"]
mod tests;
