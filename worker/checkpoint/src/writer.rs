//! Writes one checkpoint to disk.
//!
//! ```text
//!  create: .tmp-step-N-...  ─put, put, ...─▶  finish: fsync files ─▶ checkpoint.json ─▶ fsync ─▶ rename to step-N
//!                                                    ─▶ fsync of the folder ─▶ `latest` ─▶ old ones go
//! ```
//!
//! Pieces are written to their places as they arrive, so memory is bounded by one piece. A writer that is dropped
//! before it has finished removes its files. A killed writer leaves a `.tmp-` folder, which is never read and which
//! the next writer removes.

use crate::{
    CheckpointError, Folder, MANIFEST_FILE, MODEL_FILE, Manifest, OPTIMIZER_FILE,
    folder::{sync_dir, write_file},
    manifest::{FileStamp, to_json},
    table::TableWriter,
    tensors::header,
    weights::{counters, model_tensors, notes},
};
use crc32fast::Hasher;
use paraft_common::{Payload, TableSpec, TensorKind, TensorSpec, codec::F32_BYTES};
use safetensors::Dtype;
use std::{
    fs::{self, File},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

/// A checkpoint in progress.
#[derive(Debug)]
pub struct Writer {
    folder: Folder,
    name: String,
    tmp: PathBuf,
    files: [Part; 2],
    tables: Vec<TableWriter>,
    /// Regions of the weights, then of each slot.
    regions: Vec<Region>,
    step: u64,
    done: bool,
}

/// A file, and the checksum of the bytes before its regions.
#[derive(Debug)]
struct Part {
    path: PathBuf,
    file: File,
    head: Hasher,
}

/// A range of values in a file, filled from its start.
#[derive(Debug)]
struct Region {
    at: u64,
    len: usize,
    next: usize,
    crc: Hasher,
}

impl Writer {
    /// Starts the checkpoint of `step`, for a model with these tensors, an optimizer with these state vectors, and tables
    /// of so many rows and so many bytes of what they know of other ids.
    pub fn create(
        folder: &Folder,
        step: u64,
        tensors: &[TensorSpec],
        slots: &[&str],
        tables: &[(TableSpec, (u64, u64))],
    ) -> Result<Self, CheckpointError> {
        folder.make()?;
        folder.clean();
        let name = Folder::name(step);
        let tmp = folder.path().join(format!(".tmp-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&tmp); // of an earlier process with our id
        fs::create_dir(&tmp).map_err(CheckpointError::io(&tmp))?;
        // From here on, `drop` removes the files.
        let bad = |e: String| CheckpointError::bad(&tmp, e);
        let params: Vec<_> = tensors.iter().filter(|t| t.kind == TensorKind::Param).collect();
        let params_len = params.iter().map(|t| t.len()).sum();
        let len = tensors.iter().map(TensorSpec::len).sum();
        let counter = (step as i64).to_le_bytes().repeat(counters(tensors).len());
        let model = header(&model_tensors(tensors, Dtype::F32), notes(step)).map_err(bad)?;
        let of_slot = |slot: &&str| {
            let slot = slot.to_string();
            params.iter().map(move |t| (format!("{slot}.{}", t.name), Dtype::F32, t.shape.clone()))
        };
        let state = header(&slots.iter().flat_map(of_slot).collect::<Vec<_>>(), notes(step)).map_err(bad)?;
        let mut regions = vec![Region::new((model.len() + counter.len()) as u64, len)];
        for slot in 0..slots.len() {
            regions.push(Region::new((state.len() + slot * params_len * F32_BYTES) as u64, params_len));
        }
        let files = [
            Part::create(tmp.join(MODEL_FILE), &[&model[..], &counter].concat()),
            Part::create(tmp.join(OPTIMIZER_FILE), &state),
        ];
        let [model, optimizer] = files;
        let files = match (model, optimizer) {
            (Ok(m), Ok(o)) => [m, o],
            (Err(e), _) | (_, Err(e)) => {
                let _ = fs::remove_dir_all(&tmp);
                return Err(e);
            }
        };
        let tables = tables.iter().map(|(table, sizes)| TableWriter::create(&tmp, step, table, *sizes));
        match tables.collect() {
            Ok(tables) => {
                Ok(Self { folder: folder.clone(), name, tmp, files, tables, regions, step, done: false })
            }
            Err(e) => {
                let _ = fs::remove_dir_all(&tmp);
                Err(e)
            }
        }
    }

    /// Writes the next values of a part, little-endian: part 0 is the weights, part n the optimizer's slot n.
    /// `offset` is their place in the flat vector; each part must arrive in order.
    pub fn put(&mut self, part: usize, offset: usize, le: &Payload) -> Result<(), CheckpointError> {
        let file = &self.files[usize::from(part > 0)];
        let values = le.len() / F32_BYTES;
        let region = self
            .regions
            .get_mut(part)
            .filter(|r| r.next == offset && le.len().is_multiple_of(F32_BYTES) && values <= r.len - r.next);
        let Some(region) = region else {
            let why = format!("part {part} at value {offset} with {values} values is out of place");
            return Err(CheckpointError::bad(&file.path, why));
        };
        let mut at = region.at + (offset * F32_BYTES) as u64;
        for piece in le.pieces() {
            file.file.write_all_at(piece, at).map_err(CheckpointError::io(&file.path))?;
            region.crc.update(piece);
            at += piece.len() as u64;
        }
        region.next += values;
        Ok(())
    }

    /// Writes the next rows of a table, as a server keeps them.
    pub fn put_rows(&mut self, table: usize, rows: &Payload) -> Result<(), CheckpointError> {
        self.table(table)?.put(rows)
    }

    /// Writes more of what a table's partitions know of ids that are no rows.
    pub fn put_history(&mut self, table: usize, bytes: &Payload) -> Result<(), CheckpointError> {
        self.table(table)?.put_history(bytes)
    }

    fn table(&mut self, table: usize) -> Result<&mut TableWriter, CheckpointError> {
        let missing = || CheckpointError::bad(&self.tmp, format!("there is no table {table}"));
        self.tables.get_mut(table).ok_or_else(missing)
    }

    /// Completes the checkpoint and makes it the latest one. Keeps `keep` checkpoints, including this one. It adds
    /// the files' stamps to `manifest`. Returns the checkpoint's folder.
    pub fn finish(mut self, mut manifest: Manifest, keep: usize) -> Result<PathBuf, CheckpointError> {
        if let Some(part) = self.regions.iter().position(|r| r.next != r.len) {
            let r = &self.regions[part];
            let why = format!("part {part} ends after {} of {} values", r.next, r.len);
            return Err(CheckpointError::bad(&self.files[usize::from(part > 0)].path, why));
        }
        let (model, slots) = self.regions.split_at(1);
        for (file, regions) in self.files.iter().zip([model, slots]) {
            file.file.sync_all().map_err(CheckpointError::io(&file.path))?;
            let bytes = file.file.metadata().map_err(CheckpointError::io(&file.path))?.len();
            let mut crc = file.head.clone();
            regions.iter().for_each(|r| crc.combine(&r.crc));
            let name = file.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            manifest.files.insert(name, FileStamp { bytes, crc32: format!("{:08x}", crc.finalize()) });
        }
        for table in &self.tables {
            let (name, stamp) = table.finish()?;
            manifest.files.insert(name, stamp);
        }
        let path = self.tmp.join(MANIFEST_FILE);
        let json =
            to_json(&manifest).map_err(|e| CheckpointError::bad(&path, format!("cannot be written: {e}")))?;
        write_file(&path, json.as_bytes())?;
        sync_dir(&self.tmp)?;
        let path = self.folder.path().join(&self.name);
        self.folder.forget_other(&path, &manifest)?;
        self.replace(&path)?;
        self.done = true;
        sync_dir(self.folder.path())?;
        self.folder.set_latest(self.step)?;
        self.folder.prune(keep);
        Ok(path)
    }

    /// A folder cannot be renamed onto an existing one, which exists when a job resumes from an earlier step. So
    /// that one is moved away first. A crash in between leaves it complete under its `.tmp-` name, and one
    /// checkpoint less.
    fn replace(&self, path: &Path) -> Result<(), CheckpointError> {
        let old = self.folder.path().join(format!(".tmp-old-{}-{}", self.name, std::process::id()));
        if path.exists() {
            fs::rename(path, &old).map_err(CheckpointError::io(path))?;
        }
        fs::rename(&self.tmp, path).map_err(CheckpointError::io(path))?;
        let _ = fs::remove_dir_all(&old);
        Ok(())
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        if !self.done {
            let _ = fs::remove_dir_all(&self.tmp);
        }
    }
}

impl Part {
    fn create(path: PathBuf, head: &[u8]) -> Result<Self, CheckpointError> {
        let file = File::create(&path).map_err(CheckpointError::io(&path))?;
        file.write_all_at(head, 0).map_err(CheckpointError::io(&path))?;
        let mut crc = Hasher::new();
        crc.update(head);
        Ok(Self { path, file, head: crc })
    }
}

impl Region {
    fn new(at: u64, len: usize) -> Self {
        Self { at, len, next: 0, crc: Hasher::new() }
    }
}
