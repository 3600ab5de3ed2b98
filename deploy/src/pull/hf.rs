//! A folder in the form of Hugging Face's: `model.safetensors`, and beside it the configuration and the tokenizer of another
//! folder, the base. Inference engines and `transformers` start from such a folder.

use super::{
    disk::{self, Shelf},
    export::Export,
};
use paraft_checkpoint::{MODEL_FILE, tensors::TensorFile};
use paraft_client::reader::WholeVersion;
use paraft_fleet::failure::Failure;
use paraft_worker::exit;
use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

/// Endings of files with weights, which are not copied from the base.
const WEIGHTS: [&str; 10] =
    ["safetensors", "bin", "pt", "pth", "gguf", "h5", "msgpack", "ot", "onnx", "part"];
/// Names that a message lists at most.
const LISTED: usize = 10;

/// What every folder gets besides the weights.
#[derive(Debug, Default)]
pub struct Base {
    files: Vec<PathBuf>,
}

impl Base {
    /// Reads the base folder, and compares the names and shapes of its weights with the job's, if it has some.
    ///
    /// # Errors
    /// It cannot be read; or the job has a tensor that its weights lack, or one of another shape.
    pub fn read(folder: Option<&Path>, export: &Export) -> Result<Self, Failure> {
        let Some(folder) = folder else { return Ok(Self::default()) };
        let entries = fs::read_dir(folder).map_err(|e| {
            Failure::new(exit::CONFIG, format!("--base {}: {e}", folder.display()))
                .help("give a folder with config.json and the tokenizer's files")
        })?;
        let mut files: Vec<_> = entries.flatten().map(|e| e.path()).filter(|path| path.is_file()).collect();
        files.sort();
        let (weights, files): (Vec<_>, Vec<_>) = files.into_iter().partition(|path| has_weights(path));
        compare(folder, &weights, export)?;
        let hidden = |path: &Path| path.file_name().is_none_or(|n| n.to_string_lossy().starts_with('.'));
        Ok(Self { files: files.into_iter().filter(|path| !hidden(path)).collect() })
    }

    /// Copies its files into a folder.
    ///
    /// # Errors
    /// One cannot be read or written.
    pub fn copy(&self, to: &Path) -> Result<(), Failure> {
        for file in &self.files {
            if let Some(name) = file.file_name() {
                disk::copy(file, &to.join(name))?;
            }
        }
        Ok(())
    }
}

fn has_weights(path: &Path) -> bool {
    let ending = path.extension().map(|e| e.to_string_lossy().to_lowercase()).unwrap_or_default();
    WEIGHTS.contains(&ending.as_str()) || path.to_string_lossy().ends_with(".index.json")
}

/// The job's tensors are compared with those of the base's weights.
fn compare(folder: &Path, weights: &[PathBuf], export: &Export) -> Result<(), Failure> {
    let mut base = BTreeMap::new();
    for path in weights.iter().filter(|path| path.extension().is_some_and(|e| e == "safetensors")) {
        let file = TensorFile::open(path).map_err(|e| Failure::new(exit::CONFIG, format!("--base: {e}")))?;
        base.extend(file.entries().into_iter().map(|e| (e.name, e.shape)));
    }
    if base.is_empty() {
        return Ok(());
    }
    let mut wrong = Vec::new();
    for spec in export.specs() {
        match base.remove(&spec.name) {
            None => wrong.push(format!("`{}` is not in the base", spec.name)),
            Some(shape) if shape != spec.shape => {
                wrong.push(format!("`{}` is {:?}, the base's is {shape:?}", spec.name, spec.shape));
            }
            Some(_) => {}
        }
    }
    if !wrong.is_empty() {
        let (all, some) = (wrong.len(), wrong.iter().take(LISTED).cloned().collect::<Vec<_>>());
        let why = format!(
            "{all} tensors of job `{}` do not fit the weights of --base {}: {}",
            export.job(),
            folder.display(),
            some.join("; ")
        );
        return Err(Failure::new(exit::CONFIG, why)
            .help("train under the names of the base, as `model.state_dict()` of transformers has them"));
    }
    if !base.is_empty() {
        let some: Vec<_> = base.keys().take(LISTED).map(String::as_str).collect();
        eprintln!(
            "note: {} tensors of --base are not trained by job `{}`, so they are not in its versions: {}",
            base.len(),
            export.job(),
            some.join(", ")
        );
    }
    Ok(())
}

/// A folder whose weights are replaced by each version.
#[derive(Debug)]
pub struct Folder {
    shelf: Shelf,
}

impl Folder {
    /// Makes the folder unless it is there, and copies the base's files into it.
    ///
    /// # Errors
    /// It has weights under other names, another process writes into it, or it cannot be written.
    pub fn open(path: &Path, base: &Base) -> Result<Self, Failure> {
        let shelf = Shelf::open(path)?;
        let part = Path::new(MODEL_FILE).with_extension("part");
        let own = |name: &String| name == MODEL_FILE || Path::new(name) == part;
        if let Some(name) = shelf.names()?.iter().find(|name| has_weights(Path::new(name)) && !own(name)) {
            let why = format!("{}: its reader would take these weights, too", path.join(name).display());
            return Err(Failure::new(exit::CONFIG, why).help("give a new folder, or remove that file"));
        }
        base.copy(shelf.path())?;
        disk::sync(shelf.path())?;
        Ok(Self { shelf })
    }

    /// The weights' file.
    pub fn file(&self) -> PathBuf {
        self.shelf.path().join(MODEL_FILE)
    }

    /// Founding and step of the version that is there.
    pub fn version(&self) -> Option<(u64, u64)> {
        let notes = TensorFile::open(&self.file()).ok()?.notes();
        Some((notes.get("founding")?.parse().ok()?, notes.get("version")?.parse().ok()?))
    }

    /// Replaces the weights.
    ///
    /// # Errors
    /// They cannot be written; the former are there then.
    pub fn put(&self, export: &Export, version: &WholeVersion) -> Result<(), Failure> {
        export.save(version, &self.file())?;
        disk::sync(self.shelf.path())
    }
}
