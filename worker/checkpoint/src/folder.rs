//! A folder of checkpoints: the latest, the best, and the removal of old ones.

use crate::{Checkpoint, CheckpointError, MANIFEST_FILE, Manifest};
use std::{
    fs::{self, File, TryLockError},
    io::Write,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

/// How often a waiting process checks the folder's lock.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// The pointer to the last written checkpoint.
pub const LATEST: &str = "latest";
/// The pointer to the checkpoint with the lowest held-out loss.
pub const BEST: &str = "best";

/// A folder of checkpoints; it need not exist yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Folder(PathBuf);

impl Folder {
    /// The folder at `path`.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self(path.into())
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// The name of a step's checkpoint.
    pub fn name(step: u64) -> String {
        format!("step-{step:010}")
    }

    pub(crate) fn make(&self) -> Result<(), CheckpointError> {
        fs::create_dir_all(&self.0).map_err(CheckpointError::io(&self.0))
    }

    /// Creates the folder, and writes and removes a file in it, so that obstacles are found before any training.
    pub fn try_out(&self) -> Result<(), CheckpointError> {
        let unwritable = |why: String| CheckpointError::Unwritable { path: self.0.clone(), why };
        // The system's message does not say which part of the path is a file.
        if let Some(file) = self.0.ancestors().find(|p| p.is_file()) {
            return Err(unwritable(format!("{} is a file, not a folder", file.display())));
        }
        let file = self.0.join(format!(".tmp-try-{}", std::process::id()));
        let tried = fs::create_dir_all(&self.0)
            .and_then(|()| File::create(&file)?.write_all(b"."))
            .and_then(|()| fs::remove_file(&file));
        tried.map_err(|e| unwritable(e.to_string()))
    }

    /// Creates the folder and locks it against other writers, until the returned value is dropped. Waits for other
    /// holders, up to the timeout. On a file system without locks it excludes no writer.
    pub fn lock(&self, timeout: Duration) -> Result<Option<File>, CheckpointError> {
        self.make()?;
        let folder = File::open(&self.0).map_err(CheckpointError::io(&self.0))?;
        let began = Instant::now();
        loop {
            match folder.try_lock() {
                Ok(()) => return Ok(Some(folder)),
                Err(TryLockError::Error(_)) => return Ok(None),
                Err(TryLockError::WouldBlock) if began.elapsed() < timeout => thread::sleep(POLL_INTERVAL),
                Err(TryLockError::WouldBlock) => {
                    let why = format!("another process has been writing one for {timeout:?}");
                    return Err(CheckpointError::Unwritable { path: self.0.clone(), why });
                }
            }
        }
    }

    /// All checkpoints, complete or not, the newest first: by time of writing, then by step.
    pub fn list(&self) -> Vec<PathBuf> {
        self.manifests().into_iter().map(|(path, _)| path).collect()
    }

    /// Like [`Self::list`], with each manifest; `None` if it cannot be read.
    pub fn manifests(&self) -> Vec<(PathBuf, Option<Manifest>)> {
        let mut found: Vec<(u64, PathBuf, Option<Manifest>)> = Vec::new();
        for entry in fs::read_dir(&self.0).into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let Some(step) = name.strip_prefix("step-").and_then(|n| n.parse::<u64>().ok()) else { continue };
            let manifest = fs::read(entry.path().join(MANIFEST_FILE)).ok();
            let manifest = manifest.and_then(|m| serde_json::from_slice::<Manifest>(&m).ok());
            found.push((step, entry.path(), manifest));
        }
        let written = |m: &Option<Manifest>| m.as_ref().map_or(0.0, |m| m.written);
        found.sort_by(|a, b| written(&b.2).total_cmp(&written(&a.2)).then(b.0.cmp(&a.0)));
        found.into_iter().map(|(_, path, manifest)| (path, manifest)).collect()
    }

    /// The target of `latest`; the newest checkpoint if there is no such file.
    pub fn latest(&self) -> Option<PathBuf> {
        self.pointer(LATEST).map(|(path, _)| path).or_else(|| self.list().into_iter().next())
    }

    /// The target of `best`, and its held-out loss.
    pub fn best(&self) -> Option<(PathBuf, f64)> {
        let (path, rest) = self.pointer(BEST)?;
        Some((path, rest.trim().strip_prefix("loss ")?.parse().ok()?))
    }

    fn pointer(&self, name: &str) -> Option<(PathBuf, String)> {
        let text = fs::read_to_string(self.0.join(name)).ok()?;
        let (first, rest) = text.split_once('\n').unwrap_or((&text, ""));
        // Accept only a name in this folder: the file may come from anywhere.
        let first = first.trim();
        first.starts_with("step-").then(|| (self.0.join(first.replace('/', "_")), rest.to_string()))
    }

    /// The newest complete checkpoint except `except`. Reads checkpoints until one is complete.
    pub fn newest_whole(&self, except: Option<&Path>) -> Option<PathBuf> {
        let other = |p: &PathBuf| except.is_none_or(|e| e.file_name() != p.file_name());
        self.list()
            .into_iter()
            .filter(other)
            .find(|p| Checkpoint::open_alone(p).and_then(|c| c.verify_alone()).is_ok())
    }

    pub(crate) fn set_latest(&self, step: u64) -> Result<(), CheckpointError> {
        self.point(LATEST, &format!("{}\n", Self::name(step)))
    }

    /// Records the held-out loss of `step`'s checkpoint: `best` points to it if no earlier one had a lower loss.
    /// Returns whether it does. A missing checkpoint is ignored.
    pub fn note_loss(&self, step: u64, loss: f64) -> Result<bool, CheckpointError> {
        let best = self.best().filter(|(path, _)| path.exists());
        let better = loss.is_finite() && best.is_none_or(|(_, before)| loss < before);
        if !better || !self.0.join(Self::name(step)).join(MANIFEST_FILE).exists() {
            return Ok(false);
        }
        self.point(BEST, &format!("{}\nloss {loss}\n", Self::name(step)))?;
        Ok(true)
    }

    /// `path` is about to be replaced by `now`. If its weights differ from those with the loss in `best`, removes
    /// `best` until a loss is recorded.
    pub(crate) fn forget_other(&self, path: &Path, now: &Manifest) -> Result<(), CheckpointError> {
        let is_best = self.best().is_some_and(|(best, _)| best == path);
        let before = || serde_json::from_slice::<Manifest>(&fs::read(path.join(MANIFEST_FILE)).ok()?).ok();
        if !is_best || before().is_some_and(|before| before.files == now.files) {
            return Ok(());
        }
        let best = self.0.join(BEST);
        match fs::remove_file(&best) {
            // Another writer removed it first.
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(CheckpointError::io(&best)(e)),
            _ => sync_dir(&self.0),
        }
    }

    fn point(&self, name: &str, text: &str) -> Result<(), CheckpointError> {
        let tmp = self.0.join(format!(".tmp-{name}-{}", std::process::id()));
        write_file(&tmp, text.as_bytes())?;
        let path = self.0.join(name);
        fs::rename(&tmp, &path).map_err(CheckpointError::io(&path))?;
        sync_dir(&self.0)
    }

    /// Removes all but the newest `keep`, `latest` and `best`. A failure is logged, and does not stop training.
    pub fn prune(&self, keep: usize) {
        let kept = [self.latest(), self.best().map(|(p, _)| p)];
        for path in self.list().into_iter().skip(keep.max(1)) {
            if kept.iter().flatten().any(|k| *k == path) {
                continue;
            }
            // Rename it first: under its own name it would be an incomplete checkpoint during the removal.
            let gone = self.0.join(format!(
                ".tmp-old-{}-{}",
                path.file_name().unwrap_or_default().to_string_lossy(),
                std::process::id()
            ));
            let removed = fs::rename(&path, &gone).and_then(|()| fs::remove_dir_all(&gone));
            if let Err(error) = removed {
                tracing::warn!(checkpoint = %path.display(), %error, "cannot remove an old checkpoint");
            }
        }
    }

    /// Removes the leftovers of killed writers.
    pub(crate) fn clean(&self) {
        for entry in fs::read_dir(&self.0).into_iter().flatten().flatten() {
            if entry.file_name().to_string_lossy().starts_with(".tmp-") {
                let path = entry.path();
                let _ = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
            }
        }
    }

    /// The checkpoint for a user's path: a checkpoint itself; a folder of checkpoints (its latest); or a run's
    /// folder (the latest of its `checkpoints`).
    pub fn find(path: &Path) -> Result<PathBuf, CheckpointError> {
        // A checkpoint without a manifest is still the intended one, and is refused with that reason.
        let named = path.file_name().is_some_and(|n| n.to_string_lossy().starts_with("step-"));
        if path.is_dir() && (named || path.join(MANIFEST_FILE).exists()) {
            return Ok(path.to_path_buf());
        }
        let none = |why: &str| CheckpointError::NoCheckpoint { path: path.to_path_buf(), why: why.into() };
        if !path.exists() {
            return Err(none("there is no such checkpoint, nor a folder of checkpoints"));
        }
        let inner = path.join("checkpoints");
        let folder = Folder::new(if inner.is_dir() { inner } else { path.to_path_buf() });
        folder.latest().ok_or_else(|| none("there is no checkpoint in it"))
    }
}

pub(crate) fn write_file(path: &Path, bytes: &[u8]) -> Result<(), CheckpointError> {
    let write = || {
        let mut f = File::create(path)?;
        f.write_all(bytes)?;
        f.sync_all()
    };
    write().map_err(CheckpointError::io(path))
}

/// A rename in a folder survives a crash only once the folder itself is on disk.
pub(crate) fn sync_dir(path: &Path) -> Result<(), CheckpointError> {
    File::open(path).and_then(|f| f.sync_all()).map_err(CheckpointError::io(path))
}
