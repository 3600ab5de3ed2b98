//! A run's folder, which one launcher at a time holds.

use crate::{failure::Failure, fleet::server_data};
use paraft_record::{
    METRICS_FILE,
    begin::{LAUNCHER_LOCK as LOCK_FILE, is_held, set_aside},
    follow,
};
use paraft_worker::{checkpoints::CHECKPOINTS, exit};
use std::{
    fs::{self, File, OpenOptions, TryLockError},
    io::{self, Read, Seek, SeekFrom},
    ops::Deref,
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

/// A lock that stays held for this many checks, with this delay, belongs to a launcher.
const LOCK_CHECKS: u32 = 3;
const LOCK_CHECK_DELAY: Duration = Duration::from_millis(20);

/// A run's folder, locked by this process until drop. A folder that was created for a run that did not
/// start is removed.
#[derive(Debug)]
pub struct RunDir {
    path: PathBuf,
    _lock: Option<File>,
    made: bool,
    /// Where the previous record of a resumed run is.
    aside: Option<PathBuf>,
}

impl Drop for RunDir {
    fn drop(&mut self) {
        if self.made {
            let _ = fs::remove_dir(self.path.join(CHECKPOINTS)); // if it is empty
        }
        let is_lock = |e: io::Result<fs::DirEntry>| e.is_ok_and(|e| e.file_name() == LOCK_FILE);
        if self.made && fs::read_dir(&self.path).is_ok_and(|mut all| all.all(is_lock)) {
            let _ = fs::remove_file(self.path.join(LOCK_FILE));
            let _ = fs::remove_dir(&self.path);
        }
        let record = self.path.join(METRICS_FILE);
        if let Some(aside) = self.aside.take().filter(|_| !record.exists()) {
            match fs::rename(&aside, &record) {
                Ok(()) => eprintln!("nothing has begun: the record is {} again", record.display()),
                Err(e) => eprintln!("warning: {}: {e}; the record is {}", record.display(), aside.display()),
            }
        }
    }
}

impl Deref for RunDir {
    type Target = Path;

    fn deref(&self) -> &Path {
        &self.path
    }
}

impl RunDir {
    /// A folder for a new run, or for a resumed one.
    pub fn of(given: Option<&Path>, name: &str, resumed: bool) -> Result<Self, Failure> {
        match given.filter(|_| resumed) {
            Some(dir) => Self::again(dir),
            None => Self::new(given, name),
        }
    }

    /// Creates a folder for a new run: the given one, or `runs/NAME-N`. A folder with a run is refused:
    /// the two records would mix.
    pub fn new(given: Option<&Path>, name: &str) -> Result<Self, Failure> {
        if let Some(dir) = given {
            let held = Self::comparison(dir)?;
            // The runs of a comparison are in subfolders.
            let below = |e: io::Result<fs::DirEntry>| e.is_ok_and(|e| e.path().join(METRICS_FILE).exists());
            if fs::read_dir(dir).is_ok_and(|mut all| all.any(below)) {
                return Err(Failure::new(exit::CONFIG, format!("{} holds a comparison", dir.display()))
                    .help("choose another --run-dir"));
            }
            return Ok(held);
        }
        Self::free(name)
    }

    /// A folder for a new or resumed comparison: the given one, or `runs/NAME-N`. A folder with its own
    /// run is refused.
    pub fn of_comparison(given: Option<&Path>, name: &str) -> Result<Self, Failure> {
        given.map_or_else(|| Self::free(name), Self::comparison)
    }

    fn comparison(dir: &Path) -> Result<Self, Failure> {
        let held = Self::hold(dir)?;
        // A run that was killed before it resumed has its record set aside.
        let aside = |e: io::Result<fs::DirEntry>| {
            e.is_ok_and(|e| {
                e.file_name().to_str().is_some_and(|n| n.starts_with("metrics.") && n.ends_with(".jsonl"))
            })
        };
        if fs::read_dir(dir).is_ok_and(|mut all| all.any(aside)) {
            return Err(Failure::new(exit::CONFIG, format!("{} holds another run", dir.display()))
                .help("choose another --run-dir, or remove it"));
        }
        Ok(held)
    }

    /// The first free folder `runs/NAME-N`.
    fn free(name: &str) -> Result<Self, Failure> {
        let runs = Path::new("runs");
        fs::create_dir_all(runs).map_err(|e| Failure::write(runs, e))?;
        for n in 1.. {
            let dir = runs.join(format!("{name}-{n}"));
            match fs::create_dir(&dir) {
                Ok(()) => {
                    let mut held = Self::hold(&dir)?;
                    held.made = true;
                    return Ok(held);
                }
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
                Err(e) => return Err(Failure::write(&dir, e)),
            }
        }
        Err(Failure::new(exit::IO, "no free folder in runs/"))
    }

    /// As [`Self::of`], for another launcher that takes it soon: its content stays unchanged.
    pub fn for_another(given: Option<&Path>, name: &str, resumed: bool) -> Result<Self, Failure> {
        match given.filter(|_| resumed) {
            Some(dir) => Self::hold(dir),
            None => Self::new(given, name),
        }
    }

    /// The folder of a resumed run. The run starts a new record on a new fleet and sets the old ones
    /// aside. A launcher's servers listen on new ports each time, so those of the old fleet would
    /// search for each other in vain. Their data also differs from the checkpoint.
    pub fn again(dir: &Path) -> Result<Self, Failure> {
        let mut held = Self::hold(dir)?;
        // The TensorBoard files of a killed run may be incomplete.
        if was_killed(&dir.join(METRICS_FILE))
            && let Err(e) = follow::export(dir)
        {
            eprintln!("warning: TensorBoard will not show the end of the run so far: {e}");
        }
        held.aside = set_aside(dir)?;
        if let Some(kept) = &held.aside {
            eprintln!("the record of the run so far is {}", kept.display());
        }
        // Nothing is to be asked of the servers of the run so far.
        let _ = fs::remove_file(dir.join(crate::files::SERVERS_FILE));
        for folder in (0..).map(|id| server_data(dir, id)).take_while(|f| f.exists()) {
            move_aside(&folder)?;
        }
        Ok(held)
    }

    /// Creates the folder if needed, and locks it before any other access.
    fn hold(dir: &Path) -> Result<Self, Failure> {
        let made = !dir.exists();
        fs::create_dir_all(dir).map_err(|e| Failure::write(dir, e))?;
        let path = dir.join(LOCK_FILE);
        let file = OpenOptions::new().create(true).truncate(false).write(true).open(&path);
        let file = file.map_err(|e| Failure::write(&path, e))?;
        // A process that checks the lock holds it for a moment.
        let mut tried = file.try_lock();
        for _ in 0..LOCK_CHECKS {
            if matches!(tried, Err(TryLockError::WouldBlock)) {
                thread::sleep(LOCK_CHECK_DELAY);
                tried = file.try_lock();
            }
        }
        let lock = match tried {
            Ok(()) => Some(file),
            Err(TryLockError::WouldBlock) => {
                return Err(Failure::new(exit::CONFIG, format!("a run is going on in {}", dir.display()))
                    .help("choose another --run-dir, or wait for its end"));
            }
            // Some network file systems have no locks, and a run works without.
            Err(TryLockError::Error(e)) if e.kind() == io::ErrorKind::Unsupported => {
                eprintln!("warning: {} cannot be locked ({e}): start no second run in it", dir.display());
                None
            }
            Err(TryLockError::Error(e)) => return Err(Failure::write(&path, e)),
        };
        Ok(Self { path: dir.to_path_buf(), _lock: lock, made, aside: None })
    }
}

/// The folder that a launcher holds: this one or its parent, which is the locked one for a comparison
/// or a sweep.
pub fn held(dir: &Path) -> Option<PathBuf> {
    let dir = std::path::absolute(dir).ok()?;
    let above = dir.parent().map(Path::to_path_buf);
    [Some(dir), above].into_iter().flatten().find(|dir| is_held(dir))
}

/// Whether a record exists without a final summary.
fn was_killed(record: &Path) -> bool {
    let end = || {
        let mut file = File::open(record)?;
        let len = file.metadata()?.len();
        file.seek(SeekFrom::Start(len.saturating_sub(MAX_SUMMARY)))?;
        let mut end = Vec::new();
        file.read_to_end(&mut end)?;
        Ok::<_, io::Error>(String::from_utf8_lossy(&end).into_owned())
    };
    end().is_ok_and(|end| !end.is_empty() && !end.contains(r#""event":"summary""#))
}

/// Maximal bytes of a summary line.
const MAX_SUMMARY: u64 = 1 << 16;

/// Renames a folder to the first free name with a number.
fn move_aside(folder: &Path) -> Result<(), Failure> {
    let name = |n: u64| folder.with_extension(n.to_string());
    let free = (1..).map(name).find(|p| !p.exists()).unwrap_or_else(|| folder.with_extension("old"));
    fs::rename(folder, &free).map_err(|e| Failure::write(&free, e))
}

#[cfg(test)]
#[path = "run_dir_tests.rs"]
mod tests;
