//! A run's folder: one launcher at a time has it.

use crate::{failure::Failure, fleet::server_data};
use paraft_record::{
    METRICS_FILE,
    begin::{LAUNCHER_LOCK as LOCK_FILE, is_held, set_aside},
    follow,
};
use paraft_worker::exit;
use std::{
    fs::{self, File, OpenOptions, TryLockError},
    io::{self, Read, Seek, SeekFrom},
    ops::Deref,
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

/// A lock that is held so often, so long apart, is a launcher's.
const LOCK_CHECKS: u32 = 3;
const LOCK_CHECK_DELAY: Duration = Duration::from_millis(20);

/// A run's folder, held by this process until dropped. One that was made for a run that did not begin goes.
#[derive(Debug)]
pub struct RunDir {
    path: PathBuf,
    _lock: Option<File>,
    made: bool,
    /// Where the record is of the run that goes on here.
    aside: Option<PathBuf>,
}

impl Drop for RunDir {
    fn drop(&mut self) {
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
    /// A folder for a run that is new, or goes on where there is one.
    pub fn of(given: Option<&Path>, name: &str, goes_on: bool) -> Result<Self, Failure> {
        match given.filter(|_| goes_on) {
            Some(dir) => Self::again(dir),
            None => Self::new(given, name),
        }
    }

    /// A folder for a new run, made: the given one, or `runs/NAME-N`. One that holds a run is refused: its record would
    /// mix with the new one.
    pub fn new(given: Option<&Path>, name: &str) -> Result<Self, Failure> {
        if let Some(dir) = given {
            let held = Self::comparison(dir)?;
            // The runs of a comparison lie one below.
            let below = |e: io::Result<fs::DirEntry>| e.is_ok_and(|e| e.path().join(METRICS_FILE).exists());
            if fs::read_dir(dir).is_ok_and(|mut all| all.any(below)) {
                return Err(Failure::new(exit::CONFIG, format!("{} holds a comparison", dir.display()))
                    .help("choose another --run-dir"));
            }
            return Ok(held);
        }
        Self::free(name)
    }

    /// A folder for a comparison, made or gone on in: the given one, or `runs/NAME-N`. One that holds a run of its own is
    /// refused.
    pub fn of_comparison(given: Option<&Path>, name: &str) -> Result<Self, Failure> {
        given.map_or_else(|| Self::free(name), Self::comparison)
    }

    fn comparison(dir: &Path) -> Result<Self, Failure> {
        let held = Self::hold(dir)?;
        // One that was killed before it had gone on has its record aside.
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

    /// The first of `runs/NAME-N` that is not there yet.
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

    /// Likewise, for a launcher that takes it in a moment: what is in it stays as it is.
    pub fn for_another(given: Option<&Path>, name: &str, goes_on: bool) -> Result<Self, Failure> {
        match given.filter(|_| goes_on) {
            Some(dir) => Self::hold(dir),
            None => Self::new(given, name),
        }
    }

    /// The folder of a run that goes on in it. It begins a new record, on a new fleet: what is there already stays
    /// beside it. The servers of a launcher listen on other ports each time, so that those of the last fleet would look
    /// for each other in vain; and what they hold is not what the checkpoint begins with.
    pub fn again(dir: &Path) -> Result<Self, Failure> {
        let mut held = Self::hold(dir)?;
        // TensorBoard has not heard the last of a run that was killed.
        if was_killed(&dir.join(METRICS_FILE))
            && let Err(e) = follow::export(dir)
        {
            eprintln!("warning: TensorBoard will not show the end of the run so far: {e}");
        }
        held.aside = set_aside(dir)?;
        if let Some(kept) = &held.aside {
            eprintln!("the record of the run so far is {}", kept.display());
        }
        for folder in (0..).map(|id| server_data(dir, id)).take_while(|f| f.exists()) {
            move_aside(&folder)?;
        }
        Ok(held)
    }

    /// Makes the folder where there is none, and takes it before anything else in it is touched.
    fn hold(dir: &Path) -> Result<Self, Failure> {
        let made = !dir.exists();
        fs::create_dir_all(dir).map_err(|e| Failure::write(dir, e))?;
        let path = dir.join(LOCK_FILE);
        let file = OpenOptions::new().create(true).truncate(false).write(true).open(&path);
        let file = file.map_err(|e| Failure::write(&path, e))?;
        // Who asks whether it is held has the lock for a moment.
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
            // Some network file systems have no locks; the run itself can do without.
            Err(TryLockError::Error(e)) if e.kind() == io::ErrorKind::Unsupported => {
                eprintln!("warning: {} cannot be locked ({e}): start no second run in it", dir.display());
                None
            }
            Err(TryLockError::Error(e)) => return Err(Failure::write(&path, e)),
        };
        Ok(Self { path: dir.to_path_buf(), _lock: lock, made, aside: None })
    }
}

/// The folder that a launcher has, of this one and the one above: of a comparison or a sweep that is the one that is held.
pub fn held(dir: &Path) -> Option<PathBuf> {
    let dir = std::path::absolute(dir).ok()?;
    let above = dir.parent().map(Path::to_path_buf);
    [Some(dir), above].into_iter().flatten().find(|dir| is_held(dir))
}

/// Whether there is a record that does not say at its end that the run has come to its own.
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

/// Bytes of the line with what a run has come to, at most.
const MAX_SUMMARY: u64 = 1 << 16;

/// Gives a folder the first free name with a number.
fn move_aside(folder: &Path) -> Result<(), Failure> {
    let name = |n: u64| folder.with_extension(n.to_string());
    let free = (1..).map(name).find(|p| !p.exists()).unwrap_or_else(|| folder.with_extension("old"));
    fs::rename(folder, &free).map_err(|e| Failure::write(&free, e))
}

#[cfg(test)]
mod tests {
    use super::*;
    use paraft_common::Step;
    use paraft_record::{Event, MetricsWriter, TENSORBOARD_FOLDER, Train};

    #[test]
    fn one_launcher_has_a_folder_and_it_is_free_when_that_has_ended() {
        let scratch = tempfile::tempdir().expect("scratch");
        let dir = scratch.path().join("run");
        drop(RunDir::new(Some(&dir), "t").expect("free"));
        assert!(!dir.exists(), "nothing has begun in it");
        drop(RunDir::new(Some(scratch.path()), "t").expect("free"));
        assert!(scratch.path().exists(), "it is somebody's");
        let held = RunDir::new(Some(&dir), "t").expect("free");
        fs::write(dir.join(METRICS_FILE), "{}").expect("a record");
        for again in [RunDir::again(&dir), RunDir::new(Some(&dir), "t")] {
            let why = again.expect_err("taken");
            let said = why.message();
            assert!(said.contains("going on in") && said.contains(&dir.display().to_string()), "{said}");
        }
        assert!(dir.join(METRICS_FILE).exists(), "the record of the live run stays where it is");
        drop(held);
        for again in [RunDir::new(Some(&dir), "t"), RunDir::of_comparison(Some(&dir), "t")] {
            let why = again.expect_err("it holds a run");
            assert!(why.message().contains("holds another run"), "{}", why.message());
        }
        drop(RunDir::of_comparison(Some(scratch.path()), "t").expect("its runs lie below"));
        let why = RunDir::new(Some(scratch.path()), "t").expect_err("a comparison");
        assert!(why.message().contains("holds a comparison"), "{}", why.message());
        let aside = dir.join("metrics.1.jsonl");
        let goes_on = RunDir::again(&dir).expect("the lock file alone takes nothing");
        assert!(aside.exists() && !dir.join(METRICS_FILE).exists());
        drop(goes_on);
        assert!(!aside.exists() && dir.join(METRICS_FILE).exists(), "nothing has begun");
        let killed = [
            Event::Run(Default::default()),
            Event::Train(Train { step: Step(1), loss: 1.0, ..Train::default() }),
        ];
        fs::remove_file(dir.join(METRICS_FILE)).expect("the one before");
        let mut record = MetricsWriter::append(dir.join(METRICS_FILE)).expect("a record");
        killed.iter().for_each(|e| record.write(e).expect("written"));
        drop(record);
        drop(RunDir::again(&dir).expect("it was killed"));
        let files = fs::read_dir(dir.join(TENSORBOARD_FOLDER)).expect("event files").count();
        assert_eq!(files, 1, "TensorBoard hears what it had not");
        let goes_on = RunDir::again(&dir).expect("the lock file alone takes nothing");
        fs::write(dir.join(METRICS_FILE), "{}").expect("it has begun");
        drop(goes_on);
        assert!(aside.exists() && dir.join(METRICS_FILE).exists());
        fs::remove_file(dir.join(METRICS_FILE)).expect("as if it was killed before it had begun");
        let why = RunDir::new(Some(&dir), "t").expect_err("it holds a run");
        assert!(why.message().contains("holds another run"), "{}", why.message());
    }
}
