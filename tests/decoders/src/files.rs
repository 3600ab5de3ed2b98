//! Checkpoints, model files, data sets: the readers that take a path. Their input is written to a folder of the process's
//! own first.

use crate::input::Input;
use paraft_checkpoint::{
    Checkpoint, Folder, MANIFEST_FILE, MODEL_FILE, OPTIMIZER_FILE,
    compare::{self, Difference},
    tensors::TensorFile,
    weights::{self, Precision},
};
use paraft_common::{Layout, TensorSpec};
use paraft_data::metrics::{ClassMetrics, NumberMetrics};
use paraft_data::{
    Column, CsvOptions, Dataset, Ids, LabelColumn, SparseBatch, SparseDataset, Task, TextCorpus, VowpalHash,
    VowpalOptions, read_criteo, read_csv, read_idx_pair, read_libsvm, read_ratings, read_vowpal,
};
use std::{
    cell::OnceCell,
    path::{Path, PathBuf},
};

thread_local! {
    static FOLDER: OnceCell<tempfile::TempDir> = const { OnceCell::new() };
}

/// The folder of this thread. Files are overwritten by the next input that names them.
#[derive(Debug)]
pub struct Scratch(PathBuf);

impl Default for Scratch {
    fn default() -> Self {
        Self::new()
    }
}

impl Scratch {
    /// Makes it, or takes the one that is there.
    pub fn new() -> Self {
        Self(FOLDER.with(|f| f.get_or_init(|| tempfile::tempdir().expect("a folder")).path().to_path_buf()))
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Writes a file.
    pub fn file(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.0.join(name);
        std::fs::write(&path, bytes).expect("a scratch file");
        path
    }
}

/// The tensors of [`model`].
pub fn tensors() -> Vec<TensorSpec> {
    vec![
        TensorSpec::param("0.weight", &[2, 3]),
        TensorSpec::param("0.bias", &[2]),
        TensorSpec::buffer("1.running_mean", &[2]),
    ]
}

/// A safetensors file of tensors of one type, zeros all.
pub fn model(tensors: &[(&str, &[usize])], dtype: &str, bytes: usize) -> Vec<u8> {
    let mut at = 0;
    let infos: Vec<String> = tensors
        .iter()
        .map(|(name, shape)| {
            let from = at;
            at += shape.iter().product::<usize>() * bytes;
            format!("\"{name}\":{{\"dtype\":\"{dtype}\",\"shape\":{shape:?},\"data_offsets\":[{from},{at}]}}")
        })
        .collect();
    let mut json = format!("{{{}}}", infos.join(","));
    while json.len() % 8 > 0 {
        json.push(' ');
    }
    let mut out = (json.len() as u64).to_le_bytes().to_vec();
    out.extend(json.bytes());
    out.resize(out.len() + at, 0);
    out
}

/// A checkpoint's two other files.
fn other_files() -> [(&'static str, Vec<u8>); 2] {
    let all = tensors();
    let shapes: Vec<(&str, &[usize])> = all.iter().map(|t| (t.name.as_str(), t.shape.as_slice())).collect();
    let slots: [(&str, &[usize]); 2] = [("velocity.0.weight", &[2, 3]), ("velocity.0.bias", &[2])];
    [(MODEL_FILE, model(&shapes, "F32", 4)), (OPTIMIZER_FILE, model(&slots, "F32", 4))]
}

/// `checkpoint.json` beside two files that are whole. The first byte says whether to put their lengths and checksums
/// into it, and to seal it.
pub fn manifest(data: &[u8]) {
    let mut input = Input(data);
    let mends = input.byte() & 1 > 0;
    let mut json = input.rest().to_vec();
    if mends {
        json = seal(&json).unwrap_or(json);
    }
    let scratch = Scratch::new();
    let folder = scratch.path().join("checkpoints");
    let path = folder.join(Folder::name(7));
    std::fs::create_dir_all(&path).expect("a scratch folder");
    for (name, bytes) in other_files() {
        std::fs::write(path.join(name), bytes).expect("a scratch file");
    }
    std::fs::write(path.join(MANIFEST_FILE), &json).expect("a scratch file");
    let _ = Folder::new(&folder).manifests();
    let Ok(checkpoint) = Checkpoint::open(&path) else { return };
    let m = checkpoint.manifest();
    let _ = (m.step_in(10, 64), m.step_in(m.steps_per_epoch, u64::from(m.workers)), m.epochs());
    let _ = paraft_common::config::Stopping::from(&m.early_stop);
    let other = Layout::new(tensors(), 3).expect("a layout");
    assert_eq!(m.stamps_for(&other).len(), other.buckets().len());
    let _ = checkpoint.fits(&tensors(), &m.optimizer, &m.groups, &m.tables);
    if checkpoint.verify().is_ok()
        && let Ok(state) = checkpoint.load()
    {
        assert!(state.slots.len() == m.slots.len() && !state.weights.is_empty());
    }
}

/// With the stamps of the files that are there, and its seal.
pub fn seal(json: &[u8]) -> Option<Vec<u8>> {
    let mut value: serde_json::Value = serde_json::from_slice(json).ok()?;
    let object = value.as_object_mut()?;
    let stamp = |bytes: &[u8]| serde_json::json!({ "bytes": bytes.len(), "crc32": format!("{:08x}", crc32fast::hash(bytes)) });
    let files = other_files().map(|(name, bytes)| (name.to_string(), stamp(&bytes)));
    object.insert("files".into(), serde_json::Value::Object(files.into_iter().collect()));
    object.insert("seal".into(), "00000000".into());
    let open = serde_json::to_string_pretty(&value).ok()?;
    let sum = format!("\"seal\": \"{:08x}\"", crc32fast::hash(open.as_bytes()));
    let (before, after) = open.rsplit_once("\"seal\": \"00000000\"")?;
    Some([before, &sum, after].concat().into_bytes())
}

/// A model file.
pub fn weights(data: &[u8]) {
    let scratch = Scratch::new();
    let path = scratch.file("weights", data);
    let layout = Layout::new(tensors(), 4).expect("a layout");
    if let Ok((values, _)) = weights::load(&path, &layout) {
        assert!(values.len() == layout.len() && values.iter().all(|v| v.is_finite()));
    }
    let Ok(file) = TensorFile::open(&path) else { return };
    let _ = file.notes();
    for entry in file.entries() {
        let stats = compare::stats(&file, &entry.name);
        assert_eq!(stats.is_ok(), entry.is_float() || entry.is_empty(), "{entry:?}: {stats:?}");
        if entry.is_float() {
            let mut values = vec![0.0; entry.len()];
            file.read(&entry.name, &mut values).expect("as before");
        }
    }
    let same = compare::diff(&file, &file).expect("as before");
    assert!(same.iter().all(|(_, d)| *d == Difference::Equal));
    let floats: Vec<TensorSpec> = file
        .entries()
        .iter()
        .filter(|e| e.is_float() && !e.is_empty())
        .map(|e| TensorSpec::param(&*e.name, &e.shape))
        .collect();
    for (precision, name) in [(Precision::F32, "f32"), (Precision::F16, "f16"), (Precision::Bf16, "bf16")] {
        let to = scratch.path().join(name);
        // A name that the format keeps for itself cannot be written.
        if weights::export(&file, &floats, 3, &to, precision).is_ok() {
            assert!(TensorFile::open(&to).is_ok(), "what was written can be read");
        }
    }
}

fn batches(d: &Dataset) {
    let (mut inputs, mut labels) = (Vec::new(), Vec::new());
    for i in 0..d.len().min(100) as u32 {
        d.fill(&[i], &mut inputs, &mut Vec::new(), &mut labels).expect("it is there");
        assert_eq!(inputs.len(), d.input_len());
        assert!(labels.iter().all(|l| match d.classes() {
            Some(classes) => (*l as usize) < classes,
            None => f32::from_bits(*l).is_finite(),
        }));
    }
}

/// Images and their labels.
pub fn idx(data: &[u8]) {
    let mut input = Input(data);
    let scratch = Scratch::new();
    let images = scratch.file("images", input.part());
    let labels = scratch.file("labels", input.rest());
    if let Ok(d) = read_idx_pair(&images, &labels) {
        assert_eq!(d.labels().len(), d.len());
        batches(&d);
    }
}

/// A table, with or without a second one to evaluate on.
pub fn csv(data: &[u8]) {
    let mut input = Input(data);
    let how = input.byte();
    let label = [LabelColumn::First, LabelColumn::Last, LabelColumn::None, LabelColumn::Index(1)];
    let options = CsvOptions {
        label: label[usize::from(how & 3)].clone(),
        task: if how & 128 > 0 { Task::Regression } else { Task::Classification },
        ignore: if how & 3 == 3 { vec![Column::Index(2)] } else { Vec::new() },
        test_fraction: (how & 16 > 0).then_some(0.5),
        scale: if how & 32 > 0 { 0.5 } else { 1e30 },
    };
    let scratch = Scratch::new();
    let table = scratch.file("table", input.part());
    let test = (how & 64 > 0).then(|| scratch.file("test", input.rest()));
    if let Ok(split) = read_csv(&table, test.as_deref(), &options) {
        for d in [&split.train, &split.test] {
            batches(d);
            let (mut inputs, mut labels) = (Vec::new(), Vec::new());
            let all: Vec<u32> = (0..d.len() as u32).collect();
            d.fill(&all, &mut inputs, &mut Vec::new(), &mut labels).expect("it is there");
            assert!(inputs.iter().all(|v| v.is_finite()));
        }
    }
}

/// A text.
pub fn text(data: &[u8]) {
    let mut input = Input(data);
    let context = usize::from(input.byte());
    let path = Scratch::new().file("text", input.rest());
    let Ok(corpus) = TextCorpus::read(&path, context) else { return };
    assert!(corpus.tokens().iter().all(|t| *t < 256));
    if let Ok((train, test)) = corpus.split(0.25) {
        assert!(train.tokens().len() > context && test.tokens().len() > context);
    }
}

/// Sparse data in each of its formats, and a worker's parts of metrics; the first byte says which.
pub fn sparse(data: &[u8]) {
    let mut input = Input(data);
    let how = input.byte();
    let other = how & 8 > 0;
    if how & 7 > 3 {
        let bytes = input.rest();
        if let Ok(part) = ClassMetrics::from_bytes(bytes) {
            assert_eq!(part.to_bytes(), bytes);
            let _ = (part.auc(), part.log_loss(), part.normalized_entropy());
        }
        if let Ok(part) = NumberMetrics::from_bytes(bytes) {
            assert_eq!(part.to_bytes(), bytes);
            let _ = part.rmse();
        }
        return;
    }
    let path = Scratch::new().file("sparse", input.rest());
    let task = if other { Task::Regression } else { Task::Classification };
    let read = match how & 7 {
        0 => read_libsvm(&path, task),
        1 => {
            let hash = if how & 16 > 0 { VowpalHash::All } else { VowpalHash::Strings };
            read_vowpal(&path, &VowpalOptions { bits: 22, hash, constant: how & 32 > 0, task })
        }
        2 => read_criteo(&path),
        _ => read_ratings(&path, if other { Ids::Texts } else { Ids::Numbers }),
    };
    let Ok(samples) = read else { return };
    let finite = |values: &[f32]| values.iter().all(|v| v.is_finite());
    assert!(finite(&samples.labels) && finite(&samples.importance) && finite(&samples.dense));
    assert!(samples.fields.iter().all(|f| finite(&f.weights)));
    let all: Vec<u32> = (0..samples.len() as u32).collect();
    let data = SparseDataset::new(samples.clone()).expect("what was read fits");
    let mut batch = SparseBatch::default();
    data.fill(&all, &mut batch);
    assert_eq!(batch, samples);
}
