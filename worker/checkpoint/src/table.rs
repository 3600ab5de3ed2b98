//! The file of a sparse table: a tensor for each part of its rows, so that other programs read it.
//!
//! | tensor | type | shape |
//! |---|---|---|
//! | `ids` | I64 | `[rows]`: ids from 2^63 on are negative here |
//! | `updates` | I32 | `[rows]`: how often each row was updated |
//! | `touched` | I32 | `[rows]`: its partition's version at the last update |
//! | `weights` | F32, BF16 or F16, as the table's `dtype` | `[rows, dim]` |
//! | `state` | F32 | `[rows, state values]`; missing if the optimizer keeps none |
//! | `history` | U8 | `[bytes]`: what its partitions know of ids that are no rows, for a resume; missing in exports |

use crate::{
    CheckpointError,
    manifest::FileStamp,
    tensors::{TensorFile, header},
    weights::notes,
};
use crc32fast::Hasher;
use paraft_common::{Payload, TableSpec, table::RowType};
use safetensors::Dtype;
use std::{
    fs::File,
    ops::Range,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

/// The tensor with what partitions know of ids that are no rows.
const HISTORY: &str = "history";

/// The name of a table's file.
pub fn file_name(table: &str) -> String {
    format!("table-{table}.safetensors")
}

/// Why tables of a checkpoint are not those of a job.
pub(crate) fn differences(old: &[TableSpec], new: &[TableSpec]) -> Vec<String> {
    let mut found = Vec::new();
    for t in new {
        match old.iter().find(|o| o.name == t.name) {
            None => found.push(format!("the job's table `{}` is not in it", t.name)),
            Some(o) if o.kind_of_rows() != t.kind_of_rows() => found.push(format!(
                "table `{}` has rows of {} in it, the job's of {}",
                t.name,
                o.kind_of_rows(),
                t.kind_of_rows()
            )),
            Some(_) => {}
        }
    }
    let gone = old.iter().filter(|o| !new.iter().any(|t| t.name == o.name));
    found.extend(gone.map(|t| format!("its table `{}` is not in the job", t.name)));
    if found.is_empty() && old.iter().zip(new).any(|(a, b)| a.name != b.name) {
        found.push("the same tables in another order".into());
    }
    found
}

/// The tensors: name, type, values of a row.
fn columns(table: &TableSpec) -> Vec<(&'static str, Dtype, usize)> {
    let weights = match table.dtype {
        RowType::F32 => Dtype::F32,
        RowType::Bf16 => Dtype::BF16,
        RowType::F16 => Dtype::F16,
    };
    let all = [
        ("ids", Dtype::I64, 1),
        ("updates", Dtype::I32, 1),
        ("touched", Dtype::I32, 1),
        ("weights", weights, table.dim),
        ("state", Dtype::F32, table.slots()),
    ];
    all.into_iter().filter(|(_, _, width)| *width > 0).collect()
}

fn bytes_of((_, dtype, width): (&str, Dtype, usize)) -> usize {
    width * dtype.bitsize() / 8
}

/// A table's file in progress.
#[derive(Debug)]
pub(crate) struct TableWriter {
    path: PathBuf,
    file: File,
    head: Hasher,
    /// For each tensor: its place in the file, bytes of a row, and the checksum of what is written.
    columns: Vec<(u64, usize, Hasher)>,
    rows: u64,
    next: u64,
    /// The place of `history`, its missing bytes, and the checksum of what is written.
    history: (u64, u64, Hasher),
}

impl TableWriter {
    /// The file of so many rows, and so many bytes of `history`.
    pub fn create(
        folder: &Path,
        step: u64,
        table: &TableSpec,
        (rows, history): (u64, u64),
    ) -> Result<Self, CheckpointError> {
        let path = folder.join(file_name(&table.name));
        let bad = |e: String| CheckpointError::bad(&path, e);
        let count = usize::try_from(rows).map_err(|e| bad(e.to_string()))?;
        let shape = |width: usize, name: &str| match name {
            "weights" | "state" => vec![count, width],
            _ => vec![count],
        };
        let columns = columns(table);
        let mut tensors: Vec<_> =
            columns.iter().map(|(name, dtype, w)| (name.to_string(), *dtype, shape(*w, name))).collect();
        if history > 0 {
            tensors.push((HISTORY.to_string(), Dtype::U8, vec![history as usize]));
        }
        let head = header(&tensors, notes(step)).map_err(bad)?;
        let file = File::create(&path).map_err(CheckpointError::io(&path))?;
        file.write_all_at(&head, 0).map_err(CheckpointError::io(&path))?;
        let mut at = head.len() as u64;
        let columns = columns.into_iter().map(|column| {
            let bytes = bytes_of(column);
            let place = at;
            at += rows * bytes as u64;
            (place, bytes, Hasher::new())
        });
        let columns = columns.collect();
        let mut crc = Hasher::new();
        crc.update(&head);
        let history = (at, history, Hasher::new());
        Ok(Self { path, file, head: crc, columns, rows, next: 0, history })
    }

    /// The next bytes of `history`.
    pub fn put_history(&mut self, bytes: &Payload) -> Result<(), CheckpointError> {
        let (at, missing, crc) = &mut self.history;
        if bytes.len() as u64 > *missing {
            let why =
                format!("{} bytes of history are more than the {missing} that are missing", bytes.len());
            return Err(CheckpointError::bad(&self.path, why));
        }
        for piece in bytes.pieces() {
            self.file.write_all_at(piece, *at).map_err(CheckpointError::io(&self.path))?;
            crc.update(piece);
            (*at, *missing) = (*at + piece.len() as u64, *missing - piece.len() as u64);
        }
        Ok(())
    }

    /// The next rows as a server keeps them, of which the columns follow one another.
    pub fn put(&mut self, rows: &Payload) -> Result<(), CheckpointError> {
        let bytes = rows.to_bytes();
        let row: usize = self.columns.iter().map(|(_, bytes, _)| bytes).sum();
        let count = (bytes.len() / row) as u64;
        if !bytes.len().is_multiple_of(row) || self.next + count > self.rows {
            let why =
                format!("{} bytes behind row {} of {} are out of place", bytes.len(), self.next, self.rows);
            return Err(CheckpointError::bad(&self.path, why));
        }
        let mut from = 0;
        for (at, width, crc) in &mut self.columns {
            let column: Vec<u8> =
                bytes.chunks_exact(row).flat_map(|row| &row[from..from + *width]).copied().collect();
            let at = *at + self.next * *width as u64;
            self.file.write_all_at(&column, at).map_err(CheckpointError::io(&self.path))?;
            crc.update(&column);
            from += *width;
        }
        self.next += count;
        Ok(())
    }

    /// Makes the file durable; returns its name, size and checksum.
    pub fn finish(&self) -> Result<(String, FileStamp), CheckpointError> {
        let missing = self.history.1;
        if self.next != self.rows || missing > 0 {
            let why = format!(
                "it ends after {} of {} rows, {missing} bytes of history early",
                self.next, self.rows
            );
            return Err(CheckpointError::bad(&self.path, why));
        }
        self.file.sync_all().map_err(CheckpointError::io(&self.path))?;
        let bytes = self.file.metadata().map_err(CheckpointError::io(&self.path))?.len();
        let mut crc = self.head.clone();
        self.columns.iter().for_each(|(_, _, column)| crc.combine(column));
        crc.combine(&self.history.2);
        let name = self.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        Ok((name, FileStamp { bytes, crc32: format!("{:08x}", crc.finalize()) }))
    }
}

/// The file of a table's rows.
#[derive(Debug)]
pub struct TableFile {
    file: TensorFile,
    table: TableSpec,
    rows: u64,
}

impl TableFile {
    pub(crate) fn open(checkpoint: &Path, table: &TableSpec) -> Result<Self, CheckpointError> {
        let path = checkpoint.join(file_name(&table.name));
        let file = TensorFile::open(&path)?;
        let ids = file.entries().into_iter().find(|e| e.name == "ids");
        let rows = ids.ok_or_else(|| CheckpointError::bad(&path, "has no tensor `ids`"))?.len() as u64;
        Ok(Self { file, table: table.clone(), rows })
    }

    /// How many rows it has.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// The ids of some rows.
    pub fn ids(&self, rows: Range<u64>) -> Result<Vec<u64>, CheckpointError> {
        let mut bytes = Vec::new();
        self.file.read_rows("ids", Dtype::I64, 1, rows.start as usize..rows.end as usize, &mut bytes)?;
        Ok(bytes.as_chunks().0.iter().map(|id| u64::from_le_bytes(*id)).collect())
    }

    /// What each partition knows of ids that are no rows, in pieces. It is the servers' own, and for the same partitions.
    pub fn history(&self) -> Result<Vec<Vec<Vec<u8>>>, CheckpointError> {
        let mut partitions = vec![Vec::new(); self.table.partitions as usize];
        let entry = self.file.entries().into_iter().find(|e| e.name == HISTORY);
        let (mut bytes, len) = (Vec::new(), entry.map_or(0, |e| e.len()));
        if len > 0 {
            self.file.read_rows(HISTORY, Dtype::U8, 1, 0..len, &mut bytes)?;
        }
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            let next = rest.split_first_chunk().and_then(|(number, rest)| {
                let (len, rest) = rest.split_first_chunk()?;
                let (piece, rest) = rest.split_at_checked(u32::from_le_bytes(*len) as usize)?;
                Some((u32::from_le_bytes(*number), piece, rest))
            });
            let of = next.and_then(|(number, piece, after)| {
                rest = after;
                partitions.get_mut(number as usize).map(|pieces| pieces.push(piece.to_vec()))
            });
            of.ok_or_else(|| CheckpointError::bad(self.file.path(), "its tensor `history` is damaged"))?;
        }
        Ok(partitions)
    }

    /// Some rows as a server keeps them, one after another.
    pub fn read(&self, rows: Range<u64>) -> Result<Vec<u8>, CheckpointError> {
        let rows = rows.start as usize..rows.end as usize;
        let columns = columns(&self.table);
        let len: usize = columns.iter().map(|column| bytes_of(*column)).sum();
        let (mut all, mut bytes, mut from) = (vec![0; rows.len() * len], Vec::new(), 0);
        for column in columns {
            let (name, dtype, values) = column;
            self.file.read_rows(name, dtype, values, rows.clone(), &mut bytes)?;
            let width = bytes_of(column);
            for (row, part) in all.chunks_exact_mut(len).zip(bytes.chunks_exact(width)) {
                row[from..from + width].copy_from_slice(part);
            }
            from += width;
        }
        Ok(all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use paraft_common::table::RowOptimizer;

    #[test]
    fn rows_come_back_as_they_were_written() {
        let folder = tempfile::tempdir().expect("scratch");
        let adagrad = RowOptimizer::Adagrad { lr: 1.0, eps: 1e-10 };
        for (optimizer, dtype, dim) in [
            (RowOptimizer::Sgd { lr: 1.0 }, RowType::F32, 3),
            (adagrad, RowType::F32, 3),
            (adagrad, RowType::Bf16, 6),
            (RowOptimizer::Sgd { lr: 1.0 }, RowType::F16, 2),
        ] {
            let table = TableSpec { optimizer, dtype, ..TableSpec::new("t", dim, 100) };
            let len = table.row_bytes() as usize;
            let rows: Vec<u8> = (0..7 * len).map(|i| (i % 251) as u8).collect();
            let mut writer = TableWriter::create(folder.path(), 5, &table, (7, 25)).expect("created");
            writer.put(&rows[..3 * len].to_vec().into()).expect("three rows");
            writer.finish().expect_err("four are missing");
            writer.put(&rows[3 * len..].to_vec().into()).expect("the rest");
            writer.put(&rows[..len].to_vec().into()).expect_err("one too many");
            writer.finish().expect_err("the history is missing");
            let pieces: [&[u8]; 2] =
                [&[2, 0, 0, 0, 3, 0, 0, 0, 7, 8, 9], &[2, 0, 0, 0, 6, 0, 0, 0, 1, 2, 3, 4, 5, 6]];
            pieces.iter().for_each(|piece| writer.put_history(&piece.to_vec().into()).expect("a piece"));
            writer.put_history(&vec![1].into()).expect_err("one too many");
            let (name, stamp) = writer.finish().expect("whole");
            let file = std::fs::read(folder.path().join(name)).expect("the file");
            let stamped = (stamp.bytes, stamp.crc32);
            assert_eq!(stamped, (file.len() as u64, format!("{:08x}", crc32fast::hash(&file))));
            let back = TableFile::open(folder.path(), &table).expect("opens");
            assert_eq!((back.rows(), back.read(0..7).expect("all")), (7, rows.clone()));
            assert_eq!(back.read(2..4).expect("some"), rows[2 * len..4 * len]);
            let id = u64::from_le_bytes(rows[len..len + 8].try_into().expect("eight bytes"));
            assert_eq!(back.ids(1..2).expect("one"), [id]);
            let history = back.history().expect("whole");
            assert_eq!(
                (history.len(), &history[2]),
                (table.partitions as usize, &vec![vec![7, 8, 9], (1..=6).collect()])
            );
        }
    }
}
