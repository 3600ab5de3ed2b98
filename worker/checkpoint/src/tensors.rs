//! A safetensors file, read in pieces: memory does not grow with the file.

use crate::{CHUNK_BYTES, CheckpointError};
use half::{bf16, f16};
use paraft_common::codec::get_f32_le;
use safetensors::{
    Dtype,
    tensor::{Metadata, TensorInfo},
};
use serde_json::Value;
use std::{
    collections::BTreeMap,
    fs::File,
    ops::Range,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

/// The maximum length of a header, as in the format's own library.
const MAX_HEADER: u64 = 100_000_000;

/// The header of a file with these tensors, in this order, padded to a multiple of eight bytes. Returns the bytes
/// before the data. They are the same for the same tensors, so that equal weights give equal files.
pub(crate) fn header(
    tensors: &[(String, Dtype, Vec<usize>)],
    notes: BTreeMap<String, String>,
) -> Result<Vec<u8>, String> {
    let mut at = 0;
    let mut infos = Vec::new();
    for (name, dtype, shape) in tensors {
        let bytes = shape.iter().product::<usize>() * dtype.bitsize() / 8;
        let info = TensorInfo { dtype: *dtype, shape: shape.clone(), data_offsets: (at, at + bytes) };
        at += bytes;
        infos.push((name.clone(), info));
    }
    let json = |v: Result<Value, serde_json::Error>| v.map_err(|e| e.to_string());
    let mut keys = BTreeMap::from([("__metadata__", json(serde_json::to_value(&notes))?)]);
    for (name, info) in &infos {
        keys.insert(name, json(serde_json::to_value(info))?);
    }
    let mut json = serde_json::to_vec(&keys).map_err(|e| e.to_string())?;
    Metadata::new(None, infos).map_err(|e| e.to_string())?; // the format's own checks
    json.resize(json.len().next_multiple_of(8), b' ');
    let mut header = (json.len() as u64).to_le_bytes().to_vec();
    header.append(&mut json);
    Ok(header)
}

/// An open safetensors file.
#[derive(Debug)]
pub struct TensorFile {
    path: PathBuf,
    file: File,
    data_at: u64,
    metadata: Metadata,
}

/// One tensor of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its name.
    pub name: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Its type, in the format's notation: `F32`.
    pub dtype: Dtype,
}

impl Entry {
    /// Number of values.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether it has no values.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether [`TensorFile::chunks`] supports its type.
    pub fn is_float(&self) -> bool {
        is_float(self.dtype)
    }
}

fn is_float(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16)
}

impl TensorFile {
    /// Opens a file and checks that its header fits it.
    pub fn open(path: &Path) -> Result<Self, CheckpointError> {
        let bad = |why: String| CheckpointError::bad(path, why);
        let file = File::open(path).map_err(CheckpointError::io(path))?;
        let len = file.metadata().map_err(CheckpointError::io(path))?.len();
        let mut n = [0; 8];
        if len < 8 {
            return Err(bad(format!("{len} bytes are no safetensors file")));
        }
        file.read_exact_at(&mut n, 0).map_err(CheckpointError::io(path))?;
        let n = u64::from_le_bytes(n);
        if n > MAX_HEADER {
            return Err(bad("is no safetensors file (PyTorch's .pt and .pth are another format: save with safetensors.torch.save_file)".into()));
        }
        if len < 8 + n {
            return Err(bad(format!("is cut off: {len} bytes, the header alone takes {}", 8 + n)));
        }
        let mut json = vec![0; n as usize];
        file.read_exact_at(&mut json, 8).map_err(CheckpointError::io(path))?;
        let metadata: Metadata = serde_json::from_slice(&json)
            .map_err(|e| bad(format!("is no safetensors file: its header cannot be read: {e}")))?;
        let whole = 8 + n + metadata.data_len() as u64;
        if len != whole {
            let how = if len < whole { "is cut off" } else { "is longer than its header says" };
            return Err(bad(format!("{how}: {len} bytes instead of {whole}")));
        }
        Ok(Self { path: path.to_path_buf(), file, data_at: 8 + n, metadata })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The tensors, in the order of the file.
    pub fn entries(&self) -> Vec<Entry> {
        let info = |name: String| {
            let info = self.metadata.info(&name)?;
            Some(Entry { shape: info.shape.clone(), dtype: info.dtype, name })
        };
        self.metadata.offset_keys().into_iter().filter_map(info).collect()
    }

    /// The header's other entries.
    pub fn notes(&self) -> BTreeMap<String, String> {
        self.metadata.metadata().iter().flatten().map(|(k, v)| (k.clone(), v.clone())).collect()
    }

    /// Passes the values of one tensor in order, in pieces, as `f32`.
    pub fn chunks(&self, name: &str, mut each: impl FnMut(&[f32])) -> Result<(), CheckpointError> {
        let bad = |why: String| CheckpointError::bad(&self.path, why);
        let info = self.metadata.info(name).ok_or_else(|| bad(format!("has no tensor `{name}`")))?;
        // Includes types narrower than a byte.
        if !is_float(info.dtype) {
            return Err(bad(format!("tensor `{name}` is {:?}; F32, F16 and BF16 are read", info.dtype)));
        }
        let size = info.dtype.bitsize() / 8;
        let (mut at, end) = info.data_offsets;
        let mut bytes = vec![0; CHUNK_BYTES.min(end - at)];
        let mut values = vec![0.0; bytes.len() / size];
        while at < end {
            let n = bytes.len().min(end - at);
            let (bytes, values) = (&mut bytes[..n], &mut values[..n / size]);
            self.file
                .read_exact_at(bytes, self.data_at + at as u64)
                .map_err(CheckpointError::io(&self.path))?;
            match info.dtype {
                Dtype::F16 => halves(bytes, values, |b| f16::from_le_bytes(b).to_f32()),
                Dtype::BF16 => halves(bytes, values, |b| bf16::from_le_bytes(b).to_f32()),
                _ => get_f32_le(bytes, values),
            }
            each(values);
            at += n;
        }
        Ok(())
    }

    /// Reads some rows of a tensor of this type and shape `[n, width]` (or `[n]`), as bytes.
    pub(crate) fn read_rows(
        &self,
        name: &str,
        dtype: Dtype,
        width: usize,
        rows: Range<usize>,
        into: &mut Vec<u8>,
    ) -> Result<(), CheckpointError> {
        let bad = |why: String| CheckpointError::bad(&self.path, why);
        let info = self.metadata.info(name).ok_or_else(|| bad(format!("has no tensor `{name}`")))?;
        let has = (info.dtype, info.shape.iter().skip(1).product::<usize>());
        let row = width * dtype.bitsize() / 8;
        if has != (dtype, width) || info.data_offsets.0 + rows.end * row > info.data_offsets.1 {
            return Err(bad(format!("tensor `{name}` is {:?} {:?}", info.dtype, info.shape)));
        }
        into.resize(rows.len() * row, 0);
        let at = self.data_at + (info.data_offsets.0 + rows.start * row) as u64;
        self.file.read_exact_at(into, at).map_err(CheckpointError::io(&self.path))
    }

    /// Reads one tensor completely. The lengths must match.
    pub fn read(&self, name: &str, into: &mut [f32]) -> Result<(), CheckpointError> {
        let len = self.metadata.info(name).map_or(0, |i| i.shape.iter().product::<usize>());
        if len != into.len() {
            let why = format!("tensor `{name}` has {len} values instead of {}", into.len());
            return Err(CheckpointError::bad(&self.path, why));
        }
        let mut at = 0;
        self.chunks(name, |c| {
            into[at..at + c.len()].copy_from_slice(c);
            at += c.len();
        })
    }
}

fn halves(bytes: &[u8], values: &mut [f32], read: impl Fn([u8; 2]) -> f32) {
    for (v, b) in values.iter_mut().zip(bytes.as_chunks::<2>().0) {
        *v = read(*b);
    }
}
