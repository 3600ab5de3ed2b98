//! The trained weights as a safetensors file, with PyTorch's names: `load_state_dict(load_file(path))` takes it.

use paraft_common::{Layout, TensorKind, TensorSpec, codec::put_f32_le};
use safetensors::{Dtype, tensor::TensorView};
use std::{collections::HashMap, io, path::Path};

/// The file's name in a run's folder.
pub const WEIGHTS_FILE: &str = "model.safetensors";

/// Writes all tensors, buffers included. A file of that name is replaced as a whole or not at all.
///
/// `steps` becomes BatchNorm's `num_batches_tracked`, which PyTorch's strict load asks for beside the running
/// statistics.
pub fn save(path: &Path, layout: &Layout, weights: &[f32], steps: u64) -> io::Result<()> {
    let invalid = |e: &dyn std::fmt::Display| io::Error::new(io::ErrorKind::InvalidData, e.to_string());
    let bytes: Vec<Vec<u8>> = (0..layout.tensors().len())
        .map(|i| {
            let mut le = Vec::new();
            put_f32_le(&weights[layout.tensor_range(i)], &mut le);
            le
        })
        .collect();
    let counter = (steps as i64).to_le_bytes();
    let mut views = Vec::new();
    for (t, le) in layout.tensors().iter().zip(&bytes) {
        let view = TensorView::new(Dtype::F32, t.shape.clone(), le).map_err(|e| invalid(&e))?;
        views.push((t.name.clone(), view));
        if let Some(name) = counter_name(t) {
            let view = TensorView::new(Dtype::I64, Vec::new(), &counter).map_err(|e| invalid(&e))?;
            views.push((name, view));
        }
    }
    let metadata = HashMap::from([("format".to_string(), "pt".to_string())]);
    let file = safetensors::serialize(views, Some(metadata)).map_err(|e| invalid(&e))?;
    let part = path.with_extension("part");
    std::fs::write(&part, file)?;
    std::fs::rename(&part, path)
}

fn counter_name(t: &TensorSpec) -> Option<String> {
    let layer = t.name.strip_suffix("running_mean").filter(|_| t.kind == TensorKind::Buffer)?;
    Some(format!("{layer}num_batches_tracked"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use safetensors::SafeTensors;

    #[test]
    fn every_tensor_is_in_the_file_under_its_name() -> io::Result<()> {
        let tensors = vec![
            TensorSpec::param("1.weight", &[2, 3]),
            TensorSpec::param("2.bias", &[2]),
            TensorSpec::buffer("2.running_mean", &[2]),
            TensorSpec::buffer("2.running_var", &[2]),
        ];
        let layout = Layout::new(tensors, 5).map_err(io::Error::other)?;
        let weights: Vec<f32> = (0..12).map(|i| i as f32 * 0.5).collect();
        let dir = tempfile::tempdir()?;
        let path = dir.path().join(WEIGHTS_FILE);
        save(&path, &layout, &weights, 7)?;
        let file = std::fs::read(&path)?;
        let read = SafeTensors::deserialize(&file).map_err(io::Error::other)?;
        assert_eq!(read.len(), 5);
        let bias = read.tensor("2.bias").map_err(io::Error::other)?;
        assert_eq!(
            (bias.shape(), bias.data()),
            (&[2][..], &[3.0f32.to_le_bytes(), 3.5f32.to_le_bytes()].concat()[..])
        );
        let counter = read.tensor("2.num_batches_tracked").map_err(io::Error::other)?;
        assert_eq!((counter.shape().len(), counter.data()), (0, &7i64.to_le_bytes()[..]));
        assert_eq!(std::fs::read_dir(dir.path())?.count(), 1, "nothing half-written is left");
        Ok(())
    }
}
