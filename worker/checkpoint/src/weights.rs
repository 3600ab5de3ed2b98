//! Weights in separate files, with PyTorch's names: `load_state_dict(load_file(path))` accepts them.

use crate::{
    CheckpointError,
    tensors::{TensorFile, header},
};
use half::{bf16, f16};
use paraft_common::{Layout, TensorKind, TensorSpec, codec::put_f32_le};
use safetensors::Dtype;
use std::{
    collections::BTreeMap,
    fs::File,
    io::{BufWriter, Write},
    ops::DerefMut,
    path::Path,
    str::FromStr,
};

/// The type of exported weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Precision {
    /// Unchanged.
    #[default]
    F32,
    /// IEEE half precision: 11 bits of mantissa, largest value 65504.
    F16,
    /// The upper half of an `f32`: 8 bits of mantissa.
    Bf16,
}

impl FromStr for Precision {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        match s {
            "f32" => Ok(Self::F32),
            "f16" => Ok(Self::F16),
            "bf16" => Ok(Self::Bf16),
            _ => Err(format!("`{s}` is none of f32, f16, bf16")),
        }
    }
}

impl Precision {
    fn dtype(self) -> Dtype {
        match self {
            Self::F32 => Dtype::F32,
            Self::F16 => Dtype::F16,
            Self::Bf16 => Dtype::BF16,
        }
    }

    /// Appends the values, rounded to the nearest, ties to even.
    fn put(self, values: &[f32], out: &mut Vec<u8>) {
        match self {
            Self::F32 => put_f32_le(values, out),
            Self::F16 => out.extend(values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes())),
            Self::Bf16 => out.extend(values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes())),
        }
    }
}

/// BatchNorm's counter, which PyTorch's strict load requires in addition to the running statistics: one per layer
/// with a running mean.
pub fn counters(tensors: &[TensorSpec]) -> Vec<String> {
    let counter = |t: &TensorSpec| {
        let layer = t.name.strip_suffix("running_mean").filter(|_| t.kind == TensorKind::Buffer)?;
        Some(format!("{layer}num_batches_tracked"))
    };
    tensors.iter().filter_map(counter).collect()
}

/// Whether a name is a counter's. Our models have no such tensor.
pub(crate) fn is_counter(name: &str) -> bool {
    name == "num_batches_tracked" || name.ends_with(".num_batches_tracked")
}

/// The tensors of a model file. The counters come first: they are eight bytes wide, and readers expect a tensor at
/// a multiple of its width.
pub(crate) fn model_tensors(tensors: &[TensorSpec], dtype: Dtype) -> Vec<(String, Dtype, Vec<usize>)> {
    let counters = counters(tensors).into_iter().map(|name| (name, Dtype::I64, Vec::new()));
    counters.chain(tensors.iter().map(|t| (t.name.clone(), dtype, t.shape.clone()))).collect()
}

pub(crate) fn notes(step: u64) -> BTreeMap<String, String> {
    let version = env!("CARGO_PKG_VERSION").to_string();
    let pairs = [("format", "pt".to_string()), ("step", step.to_string()), ("paraft", version)];
    pairs.map(|(k, v)| (k.to_string(), v)).into()
}

/// Values converted at a time: one tensor may be most of a large model.
const CHUNK_VALUES: usize = 1 << 18;

/// Writes all tensors, including buffers. An existing file is replaced completely or not at all.
///
/// `steps` becomes BatchNorm's `num_batches_tracked`.
pub fn save(path: &Path, layout: &Layout, weights: &[f32], steps: u64) -> Result<(), CheckpointError> {
    let fill = |i: usize, out: &mut dyn FnMut(&[f32])| {
        weights[layout.tensor_range(i)].chunks(CHUNK_VALUES).for_each(out);
        Ok(())
    };
    write(path, layout.tensors(), steps, Precision::F32, fill)
}

/// Writes the weights of a model file or a checkpoint in another precision.
pub fn export(
    from: &TensorFile,
    tensors: &[TensorSpec],
    steps: u64,
    path: &Path,
    precision: Precision,
) -> Result<(), CheckpointError> {
    let fill = |i: usize, out: &mut dyn FnMut(&[f32])| from.chunks(&tensors[i].name, out);
    write(path, tensors, steps, precision, fill)
}

/// Writes tensors whose values have the form of `precision` already, little-endian. The header gets `more`, too.
///
/// # Errors
/// The file cannot be written, or `values` has none for a tensor.
pub fn save_as(
    path: &Path,
    tensors: &[TensorSpec],
    steps: u64,
    precision: Precision,
    more: BTreeMap<String, String>,
    values: impl Fn(usize) -> Option<Vec<u8>>,
) -> Result<(), CheckpointError> {
    let mut notes = notes(steps);
    notes.extend(more);
    write_bytes(path, tensors, steps, precision, notes, |i, out| {
        let missing = || CheckpointError::bad(path, format!("there are no values of `{}`", tensors[i].name));
        out(&values(i).ok_or_else(missing)?);
        Ok(())
    })
}

/// Writes vectors of bytes as tensors of type U8, for formats that keep encoded tensors in a safetensors file. The header
/// gets `notes`. An existing file is replaced completely or not at all.
///
/// # Errors
/// The file cannot be written, or two tensors have one name.
pub fn save_encoded(
    path: &Path,
    tensors: &[(String, Vec<u8>)],
    notes: BTreeMap<String, String>,
) -> Result<(), CheckpointError> {
    let shapes: Vec<_> = tensors.iter().map(|(name, v)| (name.clone(), Dtype::U8, vec![v.len()])).collect();
    let head = header(&shapes, notes).map_err(|e| CheckpointError::bad(path, e))?;
    replace(path, |file| {
        file.write_all(&head)?;
        tensors.iter().try_for_each(|(_, bytes)| file.write_all(bytes))
    })
}

fn write(
    path: &Path,
    tensors: &[TensorSpec],
    steps: u64,
    precision: Precision,
    fill: impl Fn(usize, &mut dyn FnMut(&[f32])) -> Result<(), CheckpointError>,
) -> Result<(), CheckpointError> {
    let mut bytes = Vec::new();
    write_bytes(path, tensors, steps, precision, notes(steps), |i, out| {
        fill(i, &mut |values| {
            bytes.clear();
            precision.put(values, &mut bytes);
            out(&bytes);
        })
    })
}

fn write_bytes(
    path: &Path,
    tensors: &[TensorSpec],
    steps: u64,
    precision: Precision,
    notes: BTreeMap<String, String>,
    mut fill: impl FnMut(usize, &mut dyn FnMut(&[u8])) -> Result<(), CheckpointError>,
) -> Result<(), CheckpointError> {
    let head = header(&model_tensors(tensors, precision.dtype()), notes)
        .map_err(|e| CheckpointError::bad(path, e))?;
    let mut filled = Ok(());
    let written = replace(path, |file| {
        file.write_all(&head)?;
        for _ in counters(tensors) {
            file.write_all(&(steps as i64).to_le_bytes())?;
        }
        for i in 0..tensors.len() {
            let mut result = Ok(());
            filled = fill(i, &mut |bytes| {
                if result.is_ok() {
                    result = file.write_all(bytes);
                }
            });
            if filled.is_err() {
                // What is written is not renamed.
                return Err(std::io::ErrorKind::InvalidData.into());
            }
            result?;
        }
        Ok(())
    });
    filled.and(written)
}

/// Writes a file under a temporary name, and renames it once it is on the disk.
fn replace(
    path: &Path,
    write: impl FnOnce(&mut BufWriter<File>) -> std::io::Result<()>,
) -> Result<(), CheckpointError> {
    let part = path.with_extension("part");
    // Name the requested file, not the temporary one.
    let failed = |error| CheckpointError::Io { path: path.to_path_buf(), error };
    if std::fs::symlink_metadata(path).is_ok_and(|there| !there.is_file() && !there.is_symlink()) {
        return Err(CheckpointError::bad(path, "is there and no file: nothing is written"));
    }
    let mut file = BufWriter::new(File::create(&part).map_err(failed)?);
    write(&mut file).map_err(failed)?;
    let file = file.into_inner().map_err(|e| failed(e.into_error()))?;
    file.sync_all().map_err(failed)?;
    std::fs::rename(&part, path).map_err(|error| {
        let _ = std::fs::remove_file(&part);
        failed(error)
    })
}

/// Reads a model file, for example of PyTorch, for these tensors: names and shapes must match. BatchNorm's counters
/// are ignored. Returns the flat vector, and a name of the file derived from its content.
pub fn load(path: &Path, layout: &Layout) -> Result<(Vec<f32>, String), CheckpointError> {
    load_into(path, layout, |len| Ok(vec![0.0; len]))
}

/// Likewise, into a vector from `room`.
pub fn load_into<V: DerefMut<Target = [f32]>, E: From<CheckpointError>>(
    path: &Path,
    layout: &Layout,
    room: impl FnOnce(usize) -> Result<V, E>,
) -> Result<(V, String), E> {
    let file = TensorFile::open(path)?;
    let differences = differences(layout.tensors(), &file);
    if !differences.is_empty() {
        return Err(CheckpointError::Misfit { path: path.to_path_buf(), differences }.into());
    }
    let mut weights = room(layout.len())?;
    for (i, t) in layout.tensors().iter().enumerate() {
        file.read(&t.name, &mut weights[layout.tensor_range(i)])?;
    }
    if let Some(i) = weights.iter().position(|v| !v.is_finite()) {
        let at = (0..layout.tensors().len()).find(|t| layout.tensor_range(*t).contains(&i)).unwrap_or(0);
        let why = format!("tensor `{}` holds {}", layout.tensors()[at].name, weights[i]);
        return Err(CheckpointError::bad(path, why).into());
    }
    let mut crc = crc32fast::Hasher::new();
    crc.update(bytemuck::cast_slice(&weights));
    Ok((weights, format!("model file, crc32 {:08x}", crc.finalize())))
}

/// The differences between the model's and the file's tensors, as text.
pub(crate) fn differences(tensors: &[TensorSpec], file: &TensorFile) -> Vec<String> {
    let there: BTreeMap<_, _> = file.entries().into_iter().map(|e| (e.name.clone(), e)).collect();
    let mut out = Vec::new();
    for t in tensors {
        match there.get(&t.name) {
            None => out.push(format!("`{}` {:?} is missing", t.name, t.shape)),
            Some(e) if e.shape != t.shape => {
                out.push(format!("`{}` is {:?}, the model's is {:?}", t.name, e.shape, t.shape));
            }
            Some(e) if !e.is_float() => {
                out.push(format!("`{}` is {:?}; F32, F16 and BF16 are read", t.name, e.dtype));
            }
            Some(_) => {}
        }
    }
    let known = |name: &String| tensors.iter().any(|t| t.name == *name) || is_counter(name);
    let extra = there.values().filter(|e| !known(&e.name));
    out.extend(extra.map(|e| format!("`{}` {:?} is not in the model", e.name, e.shape)));
    out
}
