//! Folders `weight_v000001`, `weight_v000002` and so on, as SGLang's `/pull_weights` and slime read them: a whole version
//! first, after it differences.
//!
//! What is written follows what the readers of these do: <https://github.com/sgl-project/sglang/pull/30367>,
//! <https://github.com/THUDM/slime/pull/2181>:
//!
//! - Numbers have no gaps: a reader that is at N takes N + 1. So a folder's number is not a step; the index has the step.
//! - A *full* folder is one of Hugging Face's. A reader copies it whatever it has.
//! - The index of a *delta* names in its `metadata` `delta_encoding` = `overwrite`, `compression_format` = `zstd`,
//!   `checksum_format` = `blake3`, `version` and `base_version`, of six digits. Its weights' file has a tensor of type U8 for
//!   each that has changed ([`delta`]), and in `__metadata__` the checksum of each one's new state.
//!
//! A folder gets its name when all of it is on the disk, and its index is written last. A delta builds on what this process
//! wrote, so that a process begins with a full one; so does a new founding.

use super::{
    delta,
    disk::{self, Shelf},
    export::{Export, founding},
    hf::Base,
};
use paraft_checkpoint::{MODEL_FILE, weights::save_encoded};
use paraft_client::reader::WholeVersion;
use paraft_fleet::failure::Failure;
use paraft_worker::exit;
use serde_json::{Map, Value, json};
use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

const INDEX: &str = "model.safetensors.index.json";
const PREFIX: &str = "weight_v";
/// Folders from one full to the next.
const FULL_EACH: usize = 10;

/// One folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Entry {
    number: u64,
    full: bool,
}

/// The version that a folder has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Newest {
    /// The founding of its job.
    pub founding: u64,
    /// Its step.
    pub step: u64,
    digest: String,
    tensors: String,
}

/// What was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Written {
    /// The folder.
    pub folder: PathBuf,
    /// Its number.
    pub number: u64,
    /// Whether it is a full one.
    pub full: bool,
}

/// The folder with all of them.
#[derive(Debug)]
pub struct Chain {
    shelf: Shelf,
    base: Base,
    /// Fulls whose chains are kept.
    keep: usize,
    entries: Vec<Entry>,
    newest: Option<Newest>,
    /// What the last folder has, if this process wrote it.
    previous: Option<WholeVersion>,
    /// The longest tensor that is written as a difference, in bytes.
    longest: u64,
}

impl Chain {
    /// Opens the folder, makes it unless it is there.
    ///
    /// # Errors
    /// It has folders of another job or program; another process writes into it; or the disk fails.
    pub fn open(path: &Path, export: &Export, base: Base, keep: usize) -> Result<Self, Failure> {
        let shelf = Shelf::open(path)?;
        let (mut entries, mut newest) = (Vec::new(), None);
        for name in shelf.names()? {
            let Some(number) = name.strip_prefix(PREFIX).and_then(|n| n.parse().ok()) else { continue };
            let index = shelf.path().join(&name).join(INDEX);
            let Some((of, full)) = read(&index, export.job()) else {
                let why = format!("{}: is no index of job `{}`", index.display(), export.job());
                return Err(Failure::new(exit::CONFIG, why).help("give another folder, one for each job"));
            };
            entries.push((Entry { number, full }, of));
        }
        entries.sort_by_key(|(entry, _)| entry.number);
        if let Some((_, of)) = entries.last() {
            newest = Some(of.clone());
        }
        let entries = entries.into_iter().map(|(entry, _)| entry).collect();
        Ok(Self { shelf, base, keep, entries, newest, previous: None, longest: delta::MOST_BYTES })
    }

    /// The version of the newest folder.
    pub fn newest(&self) -> Option<&Newest> {
        self.newest.as_ref()
    }

    /// Whether the newest folder has this version already.
    pub fn has(&self, export: &Export, version: &WholeVersion) -> bool {
        self.newest.as_ref() == Some(&identity(export, version))
    }

    /// Writes a version; removes folders that are not kept.
    ///
    /// # Errors
    /// The disk fails. Nothing is there under the new name then.
    pub fn put(&mut self, export: &Export, version: &WholeVersion) -> Result<Written, Failure> {
        let number = self.entries.last().map_or(1, |last| last.number + 1);
        let since = self.entries.iter().rev().take_while(|entry| !entry.full).count();
        let delta = match &self.previous {
            Some(before) if since + 1 < FULL_EACH => self.difference(export, before, version)?,
            _ => None,
        };
        let full = delta.is_none();
        let (name, base) = (format!("{PREFIX}{number:06}"), &self.base);
        let folder = self.shelf.make(&name, |folder| match delta {
            None => whole(folder, base, export, version, number),
            Some(tensors) => difference(folder, tensors, export, version, number),
        })?;
        self.entries.push(Entry { number, full });
        self.newest = Some(identity(export, version));
        self.previous = Some(version.clone());
        self.clear()?;
        Ok(Written { folder, number, full })
    }

    /// The tensors that have changed, with their checksums; `None`: the whole version is not longer, or one of them is longer
    /// than positions reach.
    fn difference(
        &self,
        export: &Export,
        before: &WholeVersion,
        version: &WholeVersion,
    ) -> Result<Option<Vec<Changed>>, Failure> {
        let (names, mut all) = (export.names(), Vec::new());
        let whole: usize = names.iter().map(|(_, len)| len).sum();
        let (mut differ, mut written) = (0, 0);
        for (i, (name, _)) in names.into_iter().enumerate() {
            let (old, new) = (export.bytes(before, i)?, export.bytes(version, i)?);
            let count = delta::changed(&old, &new);
            differ += count;
            // Half of the bytes with their positions are longer than all.
            if new.len() as u64 > self.longest && count > 0 || differ > whole / 2 {
                return Ok(None);
            }
            if count > 0 {
                let bytes = delta::encode(&old, &new, count)?;
                written += bytes.len();
                if written >= whole {
                    return Ok(None);
                }
                all.push(Changed { checksum: delta::checksum(&new), name, bytes });
            }
        }
        Ok(Some(all))
    }

    /// Removes the chains that are not kept. A difference goes before what it builds on.
    fn clear(&mut self) -> Result<(), Failure> {
        let fulls: Vec<u64> = self.entries.iter().filter(|e| e.full).map(|e| e.number).collect();
        let Some(first) = fulls.iter().rev().nth(self.keep.saturating_sub(1)).copied() else { return Ok(()) };
        for entry in self.entries.iter().rev().filter(|entry| entry.number < first) {
            self.shelf.remove(&format!("{PREFIX}{:06}", entry.number))?;
        }
        self.entries.retain(|entry| entry.number >= first);
        Ok(())
    }
}

/// A tensor that has changed.
#[derive(Debug)]
struct Changed {
    name: String,
    bytes: Vec<u8>,
    checksum: String,
}

fn identity(export: &Export, version: &WholeVersion) -> Newest {
    let names = export.specs().iter().map(|t| format!("{} {:?}\n", t.name, t.shape));
    let tensors = delta::checksum((names.collect::<String>() + export.dtype()).as_bytes());
    let digest = format!("{:016x}", version.digest);
    Newest { founding: founding(version), step: version.step, digest, tensors }
}

/// What an index says of a folder, and whether it is a full one; `None`: it is not of this job.
fn read(index: &Path, job: &str) -> Option<(Newest, bool)> {
    let index: Value = serde_json::from_slice(&fs::read(index).ok()?).ok()?;
    let text = |key: &str| index["metadata"][key].as_str().map(str::to_string);
    let newest = Newest {
        founding: text("founding")?.parse().ok()?,
        step: text("step")?.parse().ok()?,
        digest: text("digest")?,
        tensors: text("tensors")?,
    };
    (text("job")? == job).then(|| (newest, text("delta_encoding").is_none()))
}

fn whole(
    folder: &Path,
    base: &Base,
    export: &Export,
    version: &WholeVersion,
    number: u64,
) -> Result<(), Failure> {
    base.copy(folder)?;
    export.save(version, &folder.join(MODEL_FILE))?;
    let names = export.names();
    let bytes: usize = names.iter().map(|(_, len)| len).sum();
    let more = Map::from_iter([("total_size".to_string(), json!(bytes))]);
    index(folder, names.iter().map(|(name, _)| name.as_str()), more, export, version, number)
}

fn difference(
    folder: &Path,
    changed: Vec<Changed>,
    export: &Export,
    version: &WholeVersion,
    number: u64,
) -> Result<(), Failure> {
    let checksums: BTreeMap<_, _> = changed.iter().map(|c| (c.name.clone(), c.checksum.clone())).collect();
    let tensors: Vec<_> = changed.into_iter().map(|c| (c.name, c.bytes)).collect();
    save_encoded(&folder.join(MODEL_FILE), &tensors, checksums)
        .map_err(|e| Failure::new(exit::IO, e.to_string()))?;
    let pairs = [
        ("base_version", format!("{:06}", number - 1)),
        ("delta_encoding", "overwrite".into()),
        ("compression_format", "zstd".into()),
        ("checksum_format", "blake3".into()),
    ];
    let more = pairs.map(|(key, value)| (key.to_string(), Value::String(value)));
    let names = tensors.iter().map(|(name, _)| name.as_str());
    index(folder, names, Map::from_iter(more), export, version, number)
}

fn index<'a>(
    folder: &Path,
    names: impl Iterator<Item = &'a str>,
    mut metadata: Map<String, Value>,
    export: &Export,
    version: &WholeVersion,
    number: u64,
) -> Result<(), Failure> {
    let of = identity(export, version);
    metadata.extend(export.notes(version).into_iter().map(|(key, value)| (key, Value::String(value))));
    let own =
        [("version", format!("{number:06}")), ("step", version.step.to_string()), ("tensors", of.tensors)];
    metadata.extend(own.map(|(key, value)| (key.to_string(), Value::String(value))));
    let map: Map<String, Value> = names.map(|name| (name.to_string(), json!(MODEL_FILE))).collect();
    let index = json!({ "metadata": metadata, "weight_map": map });
    disk::write(&folder.join(INDEX), index.to_string().as_bytes())
}

#[cfg(test)]
#[path = "weight_v_tests.rs"]
mod tests;
