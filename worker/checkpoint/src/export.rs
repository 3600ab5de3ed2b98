//! Rows of a table in a folder, for programs that serve them: all, or what has changed since an earlier export.
//!
//! ```text
//!  items-1200/
//!    table-items.safetensors     the rows, as in a checkpoint
//!    removed.safetensors         ids I64 [n]: rows that are gone since the earlier export
//!    export.json                 table, versions, counts, checksums; written last
//! ```

use crate::{
    CHUNK_BYTES, CheckpointError,
    manifest::FileStamp,
    table::{TableFile, TableWriter, file_name},
    tensors::{TensorFile, header},
    weights::notes,
};
use paraft_common::TableSpec;
use safetensors::Dtype;
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::Write,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

/// The file with the rest.
pub const EXPORT_FILE: &str = "export.json";
const REMOVED_FILE: &str = "removed.safetensors";
const FORMAT: u32 = 1;

/// What an export is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ExportManifest {
    /// 1.
    pub format: u32,
    /// The job's name.
    pub job: String,
    /// The table.
    pub table: TableSpec,
    /// The founding of each shard's state.
    pub foundings: BTreeMap<u32, u64>,
    /// The version of each partition's rows.
    pub versions: BTreeMap<u32, u64>,
    /// The versions of the export that this one adds to; `None`: all rows are here.
    pub since: Option<BTreeMap<u32, u64>>,
    /// Rows here.
    pub rows: u64,
    /// Removed ids here.
    pub removed: u64,
    /// The files.
    pub files: BTreeMap<String, FileStamp>,
}

/// An export in progress: a folder beside the final one, which is removed unless [`Self::finish`] renames it.
#[derive(Debug)]
pub struct ExportWriter {
    folder: PathBuf,
    to: PathBuf,
    /// Whole rows, as they came.
    rows: File,
    bytes: u64,
    removed: Vec<u64>,
    /// Bytes of rows, and removed ids, of the shards that are read whole.
    whole: (u64, usize),
}

impl ExportWriter {
    /// An export to a folder that is not there yet.
    ///
    /// # Errors
    /// It is there, or its parent cannot be written.
    pub fn create(to: &Path) -> Result<Self, CheckpointError> {
        if fs::symlink_metadata(to).is_ok() {
            return Err(CheckpointError::bad(to, "is there already: name a new folder"));
        }
        let name = to.file_name().unwrap_or_default().to_string_lossy();
        let folder = to.with_file_name(format!(".tmp-{name}-{}", std::process::id()));
        fs::create_dir_all(&folder).map_err(CheckpointError::io(&folder))?;
        let path = folder.join("rows");
        let rows = File::options().read(true).write(true).create_new(true).open(&path);
        let rows = rows.map_err(CheckpointError::io(&path))?;
        Ok(Self { folder, to: to.into(), rows, bytes: 0, removed: Vec::new(), whole: (0, 0) })
    }

    /// The next shard is whole: what came so far stays.
    pub fn keep(&mut self) {
        self.whole = (self.bytes, self.removed.len());
    }

    /// Forgets what came since the last [`Self::keep`].
    pub fn restart(&mut self) {
        self.bytes = self.whole.0;
        self.removed.truncate(self.whole.1);
    }

    /// Whole rows, as a server keeps them.
    ///
    /// # Errors
    /// The disk.
    pub fn rows(&mut self, rows: &[u8]) -> Result<(), CheckpointError> {
        self.rows.write_all_at(rows, self.bytes).map_err(CheckpointError::io(&self.folder))?;
        self.bytes += rows.len() as u64;
        Ok(())
    }

    /// Ids of removed rows.
    pub fn removed(&mut self, ids: &[u64]) {
        self.removed.extend(ids);
    }

    /// Writes the files, makes them durable, and renames the folder. Fills the manifest's counts and files.
    ///
    /// # Errors
    /// The disk.
    pub fn finish(mut self, mut manifest: ExportManifest) -> Result<ExportManifest, CheckpointError> {
        let row = manifest.table.row_bytes();
        let (rows, removed) = (self.bytes / row, self.removed.len() as u64);
        let mut writer = TableWriter::create(&self.folder, 0, &manifest.table, (rows, 0))?;
        let mut chunk = vec![0; (CHUNK_BYTES as u64 / row).max(1) as usize * row as usize];
        let mut at = 0;
        while at < self.bytes {
            let len = chunk.len().min((self.bytes - at) as usize);
            self.rows.read_exact_at(&mut chunk[..len], at).map_err(CheckpointError::io(&self.folder))?;
            writer.put(&chunk[..len].to_vec().into())?;
            at += len as u64;
        }
        let mut files = BTreeMap::from([writer.finish()?]);
        files.insert(REMOVED_FILE.into(), self.write_removed()?);
        let spool = self.folder.join("rows");
        fs::remove_file(&spool).map_err(CheckpointError::io(&spool))?;
        manifest = ExportManifest { format: FORMAT, rows, removed, files, ..manifest };
        let path = self.folder.join(EXPORT_FILE);
        let json =
            serde_json::to_vec_pretty(&manifest).map_err(|e| CheckpointError::bad(&path, e.to_string()))?;
        let mut file = File::create(&path).map_err(CheckpointError::io(&path))?;
        file.write_all(&json).and_then(|()| file.sync_all()).map_err(CheckpointError::io(&path))?;
        fs::rename(&self.folder, &self.to).map_err(CheckpointError::io(&self.to))?;
        if let Some(parent) = self.to.parent().filter(|p| !p.as_os_str().is_empty()) {
            File::open(parent).and_then(|f| f.sync_all()).map_err(CheckpointError::io(parent))?;
        }
        self.folder.clear();
        Ok(manifest)
    }

    fn write_removed(&self) -> Result<FileStamp, CheckpointError> {
        let path = self.folder.join(REMOVED_FILE);
        let tensors = [("ids".to_string(), Dtype::I64, vec![self.removed.len()])];
        let mut bytes = header(&tensors, notes(0)).map_err(|e| CheckpointError::bad(&path, e))?;
        bytes.extend(self.removed.iter().flat_map(|id| id.to_le_bytes()));
        let mut file = File::create(&path).map_err(CheckpointError::io(&path))?;
        file.write_all(&bytes).and_then(|()| file.sync_all()).map_err(CheckpointError::io(&path))?;
        let crc = crc32fast::hash(&bytes);
        Ok(FileStamp { bytes: bytes.len() as u64, crc32: format!("{crc:08x}") })
    }
}

impl Drop for ExportWriter {
    fn drop(&mut self) {
        if !self.folder.as_os_str().is_empty() {
            let _ = fs::remove_dir_all(&self.folder);
        }
    }
}

/// An export that was written before.
#[derive(Debug)]
pub struct Export {
    /// What it is.
    pub manifest: ExportManifest,
    /// Its rows.
    pub rows: TableFile,
    /// The ids of removed rows.
    pub removed: Vec<u64>,
}

impl Export {
    /// Opens an export, and checks its files.
    ///
    /// # Errors
    /// It is no export, or not whole.
    pub fn open(folder: &Path) -> Result<Self, CheckpointError> {
        let manifest = Self::manifest(folder)?;
        for (name, stamp) in &manifest.files {
            let path = folder.join(name);
            let bad = |why: &str| CheckpointError::bad(&path, format!("is not as it was written: {why}"));
            let mut file = File::open(&path).map_err(CheckpointError::io(&path))?;
            let mut crc = CrcWriter(crc32fast::Hasher::new());
            let bytes = std::io::copy(&mut file, &mut crc).map_err(CheckpointError::io(&path))?;
            if bytes != stamp.bytes {
                return Err(bad(&format!("{bytes} bytes instead of {}", stamp.bytes)));
            }
            if format!("{:08x}", crc.0.finalize()) != stamp.crc32 {
                return Err(bad("its checksum differs"));
            }
        }
        let rows = TableFile::open(folder, &manifest.table)?;
        let file = TensorFile::open(&folder.join(REMOVED_FILE))?;
        let mut bytes = Vec::new();
        file.read_rows("ids", Dtype::I64, 1, 0..manifest.removed as usize, &mut bytes)?;
        let removed = bytes.as_chunks().0.iter().map(|id| u64::from_le_bytes(*id)).collect();
        Ok(Self { manifest, rows, removed })
    }

    /// What an export is, without a look at its rows.
    ///
    /// # Errors
    /// It is no export.
    pub fn manifest(folder: &Path) -> Result<ExportManifest, CheckpointError> {
        let path = folder.join(EXPORT_FILE);
        let json = fs::read(&path).map_err(CheckpointError::io(&path))?;
        let manifest: ExportManifest =
            serde_json::from_slice(&json).map_err(|e| CheckpointError::bad(&path, e.to_string()))?;
        manifest.table.check().map_err(|e| CheckpointError::bad(&path, e.to_string()))?;
        let files = [file_name(&manifest.table.name), REMOVED_FILE.into()];
        if manifest.format != FORMAT || !files.iter().all(|file| manifest.files.contains_key(file)) {
            return Err(CheckpointError::bad(&path, "is no export of this release's format"));
        }
        Ok(manifest)
    }
}

struct CrcWriter(crc32fast::Hasher);

impl Write for CrcWriter {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.update(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn manifest() -> ExportManifest {
        ExportManifest {
            format: FORMAT,
            job: "job".into(),
            table: TableSpec::new("t", 2, 100),
            foundings: BTreeMap::from([(0, 7)]),
            versions: BTreeMap::from([(0, 3)]),
            since: None,
            rows: 0,
            removed: 0,
            files: BTreeMap::new(),
        }
    }

    #[test]
    fn export_comes_back_whole_without_what_a_broken_shard_sent() {
        let scratch = tempfile::tempdir().expect("scratch");
        let to = scratch.path().join("out");
        let row = manifest().table.row_bytes() as usize;
        let rows = |n: u8| vec![n; row];
        let mut writer = ExportWriter::create(&to).expect("created");
        writer.rows(&rows(1)).expect("written");
        writer.removed(&[5]);
        writer.keep();
        writer.rows(&[rows(9), rows(9)].concat()).expect("written");
        writer.removed(&[6, 7]);
        writer.restart();
        writer.rows(&rows(2)).expect("written");
        writer.keep();
        let done = writer.finish(manifest()).expect("whole");
        let export = Export::open(&to).expect("opens");
        assert_eq!((done.rows, done.removed, &export.removed[..]), (2, 1, &[5][..]));
        assert_eq!(export.rows.read(0..2).expect("rows"), [rows(1), rows(2)].concat());
        assert_eq!(export.manifest, done);
        ExportWriter::create(&to).expect_err("it is there");
        assert_eq!(fs::read_dir(scratch.path()).expect("a folder").count(), 1, "nothing else is left");
    }

    #[test]
    fn damaged_export_is_refused_and_abandoned_one_removed() {
        let scratch = tempfile::tempdir().expect("scratch");
        let to = scratch.path().join("out");
        drop(ExportWriter::create(&to).expect("created"));
        assert_eq!(fs::read_dir(scratch.path()).expect("a folder").count(), 0);
        ExportWriter::create(&to).and_then(|writer| writer.finish(manifest())).expect("whole");
        for file in ["table-t.safetensors", REMOVED_FILE, EXPORT_FILE] {
            let path = to.join(file);
            let bytes = fs::read(&path).expect("a file");
            fs::write(&path, &bytes[..bytes.len() - 1]).expect("cut");
            Export::open(&to).expect_err(file);
            fs::write(&path, &bytes).expect("whole again");
        }
        Export::open(&to).expect("whole");
    }
}
