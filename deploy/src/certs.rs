//! `paraft certs`: a fleet's authority, and the certificates that it issues.

use clap::{Args, Subcommand};
use paraft_common::config::check_names;
use paraft_fleet::{existing::KeepTime, failure::Failure, out};
use paraft_tls::{
    Role,
    access::As,
    authority::{
        Authority, AuthorityError, CERT, CERTIFICATE_LIFETIME, certificate_in, folder_name, issued_in, trust,
    },
};
use paraft_worker::exit;
use std::{
    fmt::Write as _,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

#[derive(Args)]
pub struct CertsArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// Make an authority, and certificates for servers (peer), workers of all jobs (worker) and administrators (admin).
    New {
        /// A folder that is not there yet. Whoever can read its ca.key can issue any certificate.
        dir: PathBuf,
        #[command(flatten)]
        lasting: Validity,
    },
    /// Issue a certificate.
    Issue {
        /// The authority's folder.
        dir: PathBuf,
        /// What it is for: admin, peer, submit:JOBS, worker:JOBS, reader:JOBS; several may be given. JOBS is a job's name, the
        /// beginning of names (alice-*), or *.
        #[arg(required = true, value_parser = role)]
        roles: Vec<Role>,
        /// Whose it is, as logs name it. Default: the roles.
        #[arg(long)]
        name: Option<String>,
        /// Where it goes. Default: a folder in the authority's, named by the roles.
        #[arg(long, value_name = "FOLDER")]
        out: Option<PathBuf>,
        #[command(flatten)]
        lasting: Validity,
    },
    /// Renew all certificates in an authority's folder. Processes load them while they run.
    Renew {
        /// The authority's folder.
        dir: PathBuf,
        /// Other folders with certificates of this authority.
        folders: Vec<PathBuf>,
        /// First step to another authority: makes it, and has everybody trust both. Renew without this flag then issues by it.
        #[arg(long, conflicts_with = "drop_old")]
        authority: bool,
        /// Last step: trust no authority but the newest. What an older one has issued is worth nothing from then on.
        #[arg(long)]
        drop_old: bool,
        /// How long they last from now on, as 90s, 30min, 12h, 7d. Default: each as long as before.
        #[arg(long = "for", value_name = "TIME")]
        lasting: Option<KeepTime>,
    },
    /// Show what a certificate is for, and until when.
    Show {
        /// Its folder, or an authority's.
        dir: PathBuf,
    },
}

/// Parses a role.
fn role(text: &str) -> Result<Role, String> {
    let role: Role = text.parse()?;
    role.jobs().map_or(Ok(()), |jobs| check_names(&jobs.to_string()))?;
    Ok(role)
}

#[derive(Args)]
struct Validity {
    /// How long certificates last, as 90s, 30min, 12h, 7d.
    #[arg(long = "for", value_name = "TIME", default_value_t = KeepTime(Some(CERTIFICATE_LIFETIME)))]
    time: KeepTime,
}

impl Validity {
    fn time(&self) -> Result<Duration, Failure> {
        self.time.0.filter(|t| !t.is_zero()).ok_or_else(|| {
            Failure::new(exit::USAGE, "a certificate has an end")
                .help("use --for 90d, and `paraft certs renew` before")
        })
    }
}

fn failed(e: AuthorityError) -> Failure {
    let code = match &e {
        AuthorityError::File { .. } | AuthorityError::Make(_) => exit::IO,
        AuthorityError::NoAuthority { .. } => exit::CONFIG,
    };
    Failure::new(code, e)
}

pub fn run(args: &CertsArgs) -> Result<i32, Failure> {
    match &args.what {
        What::New { dir, lasting } => new(dir, lasting.time()?)?,
        What::Issue { dir, roles, name, out, lasting } => {
            let folder = out.clone().unwrap_or_else(|| dir.join(folder_name(roles)));
            let same = |a: &Path, b: &Path| {
                a.canonicalize().ok().zip(b.canonicalize().ok()).is_some_and(|(a, b)| a == b)
            };
            if same(&folder, dir) {
                let what = format!(
                    "{} is the authority's own folder: a certificate has one of its own",
                    folder.display()
                );
                return Err(Failure::new(exit::USAGE, what).help("leave --out out, or choose another folder"));
            }
            if folder.join(CERT).exists() {
                let what = format!("{} has a certificate already", folder.display());
                return Err(Failure::new(exit::USAGE, what)
                    .help("choose another folder with --out; `paraft certs renew` issues another"));
            }
            let said: Vec<String> = roles.iter().map(Role::to_string).collect();
            let name = name.clone().unwrap_or_else(|| said.join("+"));
            let authority = Authority::open(dir).map_err(failed)?;
            authority.issue(&name, roles, lasting.time()?).and_then(|i| i.save(&folder)).map_err(failed)?;
            show(&[folder])?;
        }
        What::Renew { dir, folders, authority, drop_old, lasting } => {
            let lasting = lasting.map(|time| Validity { time }.time()).transpose()?;
            renew(dir, folders, *authority, *drop_old, lasting)?;
        }
        What::Show { dir } => match issued_in(dir).map_err(failed)? {
            none if none.is_empty() => show(std::slice::from_ref(dir))?,
            all => show(&all)?,
        },
    }
    Ok(exit::OK)
}

fn new(dir: &Path, lasting: Duration) -> Result<(), Failure> {
    if dir.exists() {
        let what = format!("{} is there already", dir.display());
        return Err(Failure::new(exit::USAGE, what)
            .help("`paraft certs renew` keeps an authority in use; take another folder for a new one"));
    }
    let authority = Authority::new(&dir.file_name().unwrap_or_default().to_string_lossy()).map_err(failed)?;
    authority.save(dir).map_err(failed)?;
    let all = "worker:*".parse().map_err(|e| Failure::new(exit::FAILED, e))?;
    let mut folders = Vec::new();
    for (shows, role) in [(As::Peer, Role::Peer), (As::Worker, all), (As::Admin, Role::Admin)] {
        let folder = dir.join(shows.name());
        authority.issue(shows.name(), &[role], lasting).and_then(|i| i.save(&folder)).map_err(failed)?;
        folders.push(folder);
    }
    show(&folders)
}

fn renew(
    dir: &Path,
    others: &[PathBuf],
    next: bool,
    alone: bool,
    lasting: Option<Duration>,
) -> Result<(), Failure> {
    let mut authority = Authority::open(dir).map_err(failed)?;
    let mut folders = issued_in(dir).map_err(failed)?;
    folders.extend(others.iter().cloned());
    // All certificates are checked before one changes.
    let known = folders.iter().map(|f| certificate_in(f).map_err(failed)).collect::<Result<Vec<_>, _>>()?;
    if next {
        authority = authority.next(&dir.file_name().unwrap_or_default().to_string_lossy()).map_err(failed)?;
        for folder in &folders {
            trust(folder, &authority).map_err(failed)?;
        }
        authority.save(dir).map_err(failed)?;
        out!(
            "{} has another authority, which is trusted beside the one before. When every process has seen that (a second where they \
             read these folders, else when you have copied them), `paraft certs renew` issues by it",
            dir.display()
        );
        return Ok(());
    }
    if alone {
        authority.alone();
        authority.save(dir).map_err(failed)?;
    }
    for (folder, (name, rights, before)) in folders.iter().zip(&known) {
        authority
            .issue(name, rights.roles(), lasting.unwrap_or(*before))
            .and_then(|i| i.save(folder))
            .map_err(failed)?;
    }
    show(&folders)
}

/// Prints each certificate: its folder, what it may do, and when it ends.
fn show(folders: &[PathBuf]) -> Result<(), Failure> {
    let mut text = String::new();
    for folder in folders {
        let (_, rights, _) = certificate_in(folder).map_err(failed)?;
        let now = SystemTime::now();
        let left = rights.ends().and_then(|e| e.duration_since(now).ok()).map_or(0, |d| d.as_secs());
        let left = match left {
            0 => "has ended".to_string(),
            s if s < 7200 => format!("ends in {s} s"),
            s if s < 2 * 86_400 => format!("ends in {} h", s / 3600),
            s => format!("ends in {} days", s / 86_400),
        };
        let _ = writeln!(text, "{}: {rights}, {left}", folder.display());
    }
    out!("{}", text.trim_end());
    Ok(())
}
