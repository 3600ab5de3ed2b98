//! Model files written by PyTorch (`tools/golden/model_file.py`), and ours.

use paraft_checkpoint::{
    CheckpointError, MODEL_FILE,
    tensors::TensorFile,
    weights::{self, Precision},
};
use paraft_common::{Layout, TensorSpec};
use safetensors::SafeTensors;
use std::{
    collections::BTreeMap,
    error::Error,
    fs,
    path::{Path, PathBuf},
};

type Result<T = ()> = std::result::Result<T, Box<dyn Error>>;

fn tensors() -> Vec<TensorSpec> {
    vec![
        TensorSpec::param("0.weight", &[3, 5]),
        TensorSpec::param("0.bias", &[3]),
        TensorSpec::param("1.weight", &[3]),
        TensorSpec::param("1.bias", &[3]),
        TensorSpec::param("3.weight", &[2, 3]),
        TensorSpec::param("3.bias", &[2]),
        TensorSpec::buffer("1.running_mean", &[3]),
        TensorSpec::buffer("1.running_var", &[3]),
    ]
}

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

#[test]
fn what_pytorch_wrote_is_read_in_every_type() -> Result {
    let layout = Layout::new(tensors(), 7)?;
    for kind in ["f32", "f16", "bf16"] {
        let (read, _) = weights::load(&golden(&format!("{kind}.safetensors")), &layout)?;
        let json = fs::read_to_string(golden(&format!("{kind}.json")))?;
        let expected: BTreeMap<String, Vec<f64>> = serde_json::from_str(&json)?;
        assert_eq!(expected.len(), layout.tensors().len());
        for (i, t) in layout.tensors().iter().enumerate() {
            let values: Vec<f64> = read[layout.tensor_range(i)].iter().map(|v| f64::from(*v)).collect();
            assert_eq!(values, expected[&t.name], "{kind} {}", t.name);
        }
    }
    Ok(())
}

#[test]
fn tensors_that_do_not_fit_are_named() -> Result {
    let file = golden("f32.safetensors");
    let mut other = tensors();
    other[0] = TensorSpec::param("0.weight", &[5, 3]);
    other[4].name = "2.weight".into();
    let error = weights::load(&file, &Layout::new(other, 7)?).expect_err("another model").to_string();
    for words in [
        "`0.weight` is [3, 5], the model's is [5, 3]",
        "`2.weight` [2, 3] is missing",
        "`3.weight` [2, 3] is not in the model",
    ] {
        assert!(error.contains(words), "`{words}` is not in: {error}");
    }
    assert!(!error.contains("num_batches_tracked"), "{error}");
    Ok(())
}

#[test]
fn every_tensor_is_in_our_file_under_its_name_and_comes_back() -> Result {
    let layout = Layout::new(tensors(), 5)?;
    let values: Vec<f32> = (0..layout.len()).map(|i| (i as f32 - 9.0) * 0.37).collect();
    let dir = tempfile::tempdir()?;
    let path = dir.path().join(MODEL_FILE);
    weights::save(&path, &layout, &values, 7)?;
    let bytes = fs::read(&path)?;
    let read = SafeTensors::deserialize(&bytes)?;
    assert_eq!(read.len(), tensors().len() + 1);
    let bias = read.tensor("3.bias")?;
    assert_eq!((bias.shape(), bias.data().len()), (&[2][..], 8));
    let counter = read.tensor("1.num_batches_tracked")?;
    assert_eq!((counter.shape().len(), counter.data()), (0, &7i64.to_le_bytes()[..]));
    // Readers that map the file expect each tensor at a multiple of its width.
    assert_eq!(counter.data().as_ptr() as usize % 8, bytes.as_ptr() as usize % 8);
    assert_eq!(fs::read_dir(dir.path())?.count(), 1, "nothing half-written is left");
    weights::save(&dir.path().join("again"), &layout, &values, 7)?;
    assert_eq!(fs::read(dir.path().join("again"))?, bytes, "equal weights are equal files");
    let (back, name) = weights::load(&path, &layout)?;
    assert_eq!(back, values);
    assert_ne!(name, weights::load(&golden("f32.safetensors"), &layout)?.1, "another content, another name");
    Ok(())
}

#[test]
fn exports_round_to_the_nearest() -> Result {
    let layout = Layout::new(vec![TensorSpec::param("w", &[4])], 5)?;
    let dir = tempfile::tempdir()?;
    let (from, to) = (dir.path().join("a"), dir.path().join("b"));
    // Half a unit in the last place above 1 rounds to the even neighbour, slightly more rounds up.
    let values = [1.0 + 1.0 / 2048.0, 1.0 + 1.5 / 2048.0, -0.1, 1e-8];
    weights::save(&from, &layout, &values, 1)?;
    for (precision, expected) in [
        (Precision::F32, values),
        (Precision::F16, [1.0, 1.0 + 1.0 / 1024.0, -0.099_975_586, 0.0]),
        (Precision::Bf16, [1.0, 1.0, -0.100_097_656, 1.001_171_8e-8]),
    ] {
        weights::export(&TensorFile::open(&from)?, layout.tensors(), 1, &to, precision)?;
        assert_eq!(weights::load(&to, &layout)?.0, expected, "{precision:?}");
    }
    Ok(())
}

#[test]
fn a_file_that_is_cut_off_anywhere_is_refused() -> Result {
    let layout = Layout::new(tensors(), 7)?;
    let whole = fs::read(golden("f32.safetensors"))?;
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("cut.safetensors");
    for len in 0..whole.len() {
        fs::write(&path, &whole[..len])?;
        let error = weights::load(&path, &layout).expect_err("cut off");
        assert!(matches!(error, CheckpointError::BadFile { .. }), "{len} bytes: {error}");
    }
    fs::write(&path, [&whole[..], b"x"].concat())?;
    assert!(weights::load(&path, &layout).is_err_and(|e| e.to_string().contains("longer")));
    fs::write(&path, b"PK\x03\x04 this is what torch.save writes: a zip archive")?;
    assert!(
        weights::load(&path, &layout).is_err_and(|e| e.to_string().contains("safetensors.torch.save_file"))
    );
    // A NaN would end training at its first step.
    let mut nan = whole.clone();
    let end = nan.len();
    nan[end - 4..].copy_from_slice(&f32::NAN.to_le_bytes());
    fs::write(&path, &nan)?;
    assert!(weights::load(&path, &layout).is_err_and(|e| e.to_string().contains("NaN")));
    Ok(())
}

/// A tensor with sub-byte values has no size to divide by.
#[test]
fn types_that_are_not_read_are_refused_by_name() -> Result {
    let path = tempfile::tempdir()?.keep().join("narrow");
    for (dtype, bytes) in [("F4", 2), ("F6_E2M3", 3), ("I8", 4), ("BOOL", 4), ("F64", 32), ("C64", 32)] {
        let json = format!("{{\"w\":{{\"dtype\":\"{dtype}\",\"shape\":[4],\"data_offsets\":[0,{bytes}]}}}}");
        let header = [&(json.len() as u64).to_le_bytes(), json.as_bytes()].concat();
        fs::write(&path, [header, vec![0; bytes]].concat())?;
        let file = TensorFile::open(&path)?;
        for error in [
            file.chunks("w", |_| ()).expect_err(dtype).to_string(),
            file.read("w", &mut [0.0; 4]).expect_err(dtype).to_string(),
        ] {
            assert!(error.contains("tensor `w`") && error.contains("F32, F16 and BF16 are read"), "{error}");
        }
    }
    fs::remove_dir_all(path.parent().expect("a folder"))?;
    Ok(())
}
