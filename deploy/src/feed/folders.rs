//! One Hugging Face folder a version, which engines of this host load: `v000042`. The newest two stay, and each that an engine
//! may have.

use crate::pull::{
    disk::{Shelf, sync, write},
    export::Export,
    hf::Base,
};
use paraft_checkpoint::MODEL_FILE;
use paraft_client::reader::WholeVersion;
use paraft_fleet::failure::Failure;
use serde_json::json;
use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

/// Folders that stay.
const KEPT: usize = 2;
/// The engines that may be half loaded: a JSON list of URLs.
const NOTE: &str = "half-loaded.json";

/// The folders of a feed.
#[derive(Debug)]
pub struct Folders {
    shelf: Shelf,
    base: Base,
    /// Those of this process, the newest last.
    made: Vec<Made>,
    /// Those of processes before it.
    before: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Made {
    name: String,
    step: u64,
    digest: u64,
}

impl Folders {
    /// Opens the folder, makes it unless it is there.
    ///
    /// # Errors
    /// Another process writes into it, or the disk fails.
    pub fn open(path: &Path, base: Base) -> Result<Self, Failure> {
        let shelf = Shelf::open(path)?;
        let before = shelf.names()?.into_iter().filter(|name| is_version(name)).collect();
        Ok(Self { shelf, base, made: Vec::new(), before })
    }

    /// Writes a version into a folder of its own, unless it is the last one that was written. Returns its path.
    ///
    /// # Errors
    /// The disk fails.
    pub fn stage(&mut self, export: &Export, version: &WholeVersion) -> Result<PathBuf, Failure> {
        let same = |made: &&Made| (made.step, made.digest) == (version.step, version.digest);
        if let Some(made) = self.made.last().filter(same) {
            return Ok(self.shelf.path().join(&made.name));
        }
        let name = self.free(version.step);
        let folder = self.shelf.make(&name, |folder| {
            self.base.copy(folder)?;
            export.save(version, &folder.join(MODEL_FILE))?;
            sync(folder)
        })?;
        self.made.push(Made { name, step: version.step, digest: version.digest });
        Ok(folder)
    }

    /// Writes down which engines may be half loaded. It is on the disk before this returns.
    ///
    /// # Errors
    /// The disk fails.
    pub fn note<'a>(&self, urls: impl Iterator<Item = &'a str>) -> Result<(), Failure> {
        let urls = json!(urls.collect::<Vec<_>>());
        write(&self.shelf.path().join(NOTE), urls.to_string().as_bytes())?;
        sync(self.shelf.path())
    }

    /// Which engines may be half loaded, as the process before this one wrote down.
    pub fn noted(&self) -> Vec<String> {
        let text = fs::read(self.shelf.path().join(NOTE)).unwrap_or_default();
        serde_json::from_slice(&text).unwrap_or_default()
    }

    /// A name that no folder has: engines may have read one of another process under the first.
    fn free(&self, step: u64) -> String {
        let name = |n: u64| if n == 1 { format!("v{step:06}") } else { format!("v{step:06}-{n}") };
        let mut names = (1..).map(name);
        names.find(|name| !self.shelf.path().join(name).exists()).unwrap_or_default()
    }

    /// Removes what is not kept: `used` are folders that engines were last told to load. With `all_loaded` all engines have
    /// loaded one of this process.
    ///
    /// # Errors
    /// The disk fails.
    pub fn clear(&mut self, used: &BTreeSet<PathBuf>, all_loaded: bool) -> Result<(), Failure> {
        for name in self.before.extract_if(.., |_| all_loaded) {
            self.shelf.remove(&name)?;
        }
        let old = self.made.len().saturating_sub(KEPT);
        let goes = |made: &Made| !used.contains(&self.shelf.path().join(&made.name));
        let names: Vec<_> = self.made[..old].iter().filter(|made| goes(made)).cloned().collect();
        for made in names {
            self.shelf.remove(&made.name)?;
            self.made.retain(|other| *other != made);
        }
        Ok(())
    }
}

/// Whether a folder's name is one of a version.
fn is_version(name: &str) -> bool {
    let rest = name.strip_prefix('v').unwrap_or_default();
    let (step, again) = rest.split_once('-').unwrap_or((rest, "2"));
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    step.len() >= 6 && is_number(step) && is_number(again)
}
