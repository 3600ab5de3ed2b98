//! One checkpoint: verification and content.

use crate::{
    CHUNK_BYTES, CheckpointError, Folder, MANIFEST_FILE, MODEL_FILE, Manifest, OPTIMIZER_FILE,
    manifest::{FORMAT, is_sealed},
    table::{self, TableFile},
    tensors::TensorFile,
    weights::differences,
};
use crc32fast::Hasher;
use paraft_common::{ParamGroup, TableSpec, TensorKind, TensorSpec, optim::OptimizerConfig};
use std::{
    collections::BTreeSet,
    fs::{self, File},
    io::Read,
    ops::DerefMut,
    path::{Path, PathBuf},
};

/// A checkpoint with its manifest. [`Checkpoint::verify`] checks the rest.
#[derive(Clone, Debug, PartialEq)]
pub struct Checkpoint {
    path: PathBuf,
    manifest: Manifest,
    /// CRC-32 of `checkpoint.json`, which identifies the whole checkpoint, because it has the other files'
    /// checksums.
    crc: u32,
}

/// A checkpoint's values, as flat vectors.
#[derive(Clone, Debug, PartialEq)]
pub struct State {
    /// All weights, including buffers.
    pub weights: Vec<f32>,
    /// The optimizer's state vectors, each as long as the parameters.
    pub slots: Vec<Vec<f32>>,
}

/// A job's optimizers: its own, then those of groups.
fn optimizers<'a>(
    own: &'a OptimizerConfig,
    groups: &'a [ParamGroup],
) -> impl Iterator<Item = &'a OptimizerConfig> {
    std::iter::once(own).chain(groups.iter().filter_map(|g| g.optimizer.as_ref()))
}

/// The kinds of a job's optimizers, each once.
fn kinds(own: &OptimizerConfig, groups: &[ParamGroup]) -> Vec<&'static str> {
    optimizers(own, groups).map(OptimizerConfig::kind).collect::<BTreeSet<_>>().into_iter().collect()
}

impl Checkpoint {
    /// Reads the manifest and checks the existence and lengths of the other files. An incomplete checkpoint is
    /// refused; the error names the newest complete one in the folder.
    pub fn open(path: &Path) -> Result<Self, CheckpointError> {
        Self::open_alone(path).map_err(offer)
    }

    pub(crate) fn open_alone(path: &Path) -> Result<Self, CheckpointError> {
        let broken = |why: String| not_whole(path, MANIFEST_FILE, why);
        let file = path.join(MANIFEST_FILE);
        let json = match fs::read(&file) {
            Ok(json) => json,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Err(broken("is missing".into())),
            Err(e) => return Err(CheckpointError::io(&file)(e)),
        };
        // First the format number: a later format may differ in everything else.
        let format = serde_json::from_slice::<serde_json::Value>(&json);
        let format = format.map_err(|e| {
            let how = if e.is_eof() { "is cut off" } else { "cannot be read" };
            broken(format!("{how}: {e}"))
        })?;
        match format["format"].as_u64() {
            Some(n) if n > u64::from(FORMAT) => {
                let why = format!("is of format {n}, this paraft reads up to {FORMAT}: use a newer paraft");
                return Err(CheckpointError::NoCheckpoint { path: path.to_path_buf(), why });
            }
            Some(_) => {}
            None => return Err(broken("names no format".into())),
        }
        if !std::str::from_utf8(&json).is_ok_and(is_sealed) {
            return Err(broken("is damaged or was changed: its CRC-32 is not the one in its `seal`".into()));
        }
        let manifest: Manifest =
            serde_json::from_slice(&json).map_err(|e| broken(format!("cannot be read: {e}")))?;
        // Check now that the layout can be computed, so that it does not fail later.
        manifest.layout().map_err(|e| broken(format!("names no model: {e}")))?;
        manifest.optimizer.validate().map_err(|e| broken(format!("names no optimizer: {e}")))?;
        let checkpoint = Self { path: path.to_path_buf(), manifest, crc: crc32fast::hash(&json) };
        for piece in checkpoint.pieces() {
            checkpoint.look_at(&piece)?;
        }
        Ok(checkpoint)
    }

    /// The checkpoint's folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its manifest.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// A name derived from its content, for a job that resumes from it.
    pub fn identity(&self) -> String {
        format!("checkpoint of step {}, crc32 {:08x}", self.manifest.step, self.crc)
    }

    /// Reads every byte and compares checksums. An incomplete checkpoint is refused; the error names the newest
    /// complete one in the folder.
    pub fn verify(&self) -> Result<(), CheckpointError> {
        self.verify_alone().map_err(offer)
    }

    pub(crate) fn verify_alone(&self) -> Result<(), CheckpointError> {
        for piece in self.pieces() {
            let path = self.path.join(&piece);
            let expected = self.look_at(&piece)?;
            let mut file = File::open(&path).map_err(CheckpointError::io(&path))?;
            let (mut crc, mut buffer) = (Hasher::new(), vec![0; CHUNK_BYTES]);
            loop {
                match file.read(&mut buffer).map_err(CheckpointError::io(&path))? {
                    0 => break,
                    n => crc.update(&buffer[..n]),
                }
            }
            let got = format!("{:08x}", crc.finalize());
            if got != expected {
                // The file's own step distinguishes a mixed checkpoint from a damaged one.
                let of = TensorFile::open(&path).ok().and_then(|f| f.notes().remove("step"));
                let step = self.manifest.step.to_string();
                let why = match of.filter(|of| *of != step) {
                    Some(of) => format!("is of step {of}, {MANIFEST_FILE} of step {step}"),
                    None => format!("is damaged: its CRC-32 is {got} instead of {expected}"),
                };
                return Err(not_whole(&self.path, &piece, why));
            }
        }
        Ok(())
    }

    /// The files beside the manifest.
    fn pieces(&self) -> Vec<String> {
        let tables = self.manifest.tables.iter().map(|t| table::file_name(&t.name));
        [MODEL_FILE.to_string(), OPTIMIZER_FILE.to_string()].into_iter().chain(tables).collect()
    }

    /// Checks that the file exists and has the right length; returns its expected checksum.
    fn look_at(&self, piece: &str) -> Result<&str, CheckpointError> {
        let broken = |why: String| not_whole(&self.path, piece, why);
        let stamp = self.manifest.files.get(piece);
        let stamp =
            stamp.ok_or_else(|| not_whole(&self.path, MANIFEST_FILE, format!("does not name {piece}")))?;
        let path = self.path.join(piece);
        let len = match fs::metadata(&path) {
            Ok(m) => m.len(),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Err(broken("is missing".into())),
            Err(e) => return Err(CheckpointError::io(&path)(e)),
        };
        if len < stamp.bytes {
            return Err(broken(format!("is cut off: {len} of {} bytes", stamp.bytes)));
        }
        if len > stamp.bytes {
            return Err(broken(format!("has {len} bytes instead of {}", stamp.bytes)));
        }
        Ok(&stamp.crc32)
    }

    /// The weights' file.
    pub fn model(&self) -> Result<TensorFile, CheckpointError> {
        TensorFile::open(&self.path.join(MODEL_FILE))
    }

    /// The file of the optimizer's state vectors.
    pub fn optimizer(&self) -> Result<TensorFile, CheckpointError> {
        TensorFile::open(&self.path.join(OPTIMIZER_FILE))
    }

    /// Refuses another model or other optimizers than the job's, and lists the differences. Another rate, or other
    /// options of the same optimizer, are accepted.
    pub fn fits(
        &self,
        tensors: &[TensorSpec],
        optimizer: &OptimizerConfig,
        groups: &[ParamGroup],
        tables: &[TableSpec],
    ) -> Result<(), CheckpointError> {
        let mut differences = Vec::new();
        let (old, new) = (&self.manifest.tensors, tensors);
        let find = |list: &[TensorSpec], name: &str| list.iter().find(|t| t.name == name).cloned();
        for t in new {
            match find(old, &t.name) {
                None => differences.push(format!("the model's `{}` {:?} is not in it", t.name, t.shape)),
                Some(o) if o != *t => differences.push(format!(
                    "`{}` is a {:?} {:?} in it, the model's is a {:?} {:?}",
                    t.name, o.kind, o.shape, t.kind, t.shape
                )),
                Some(_) => {}
            }
        }
        let gone = old.iter().filter(|t| find(new, &t.name).is_none());
        differences.extend(gone.map(|t| format!("its `{}` {:?} is not in the model", t.name, t.shape)));
        if differences.is_empty() && old != new {
            differences.push("the same tensors in another order".into());
        }
        let (a, b) = (&self.manifest.optimizer, optimizer);
        let (of_a, of_b) = (kinds(a, &self.manifest.groups), kinds(b, groups));
        let b = optimizers(b, groups).fold(b, |most, o| if o.slots() > most.slots() { o } else { most });
        if of_a != of_b {
            let (was, is) = (of_a.join(", "), of_b.join(", "));
            let path = self.path.join(MODEL_FILE);
            differences.push(format!("it was trained with {was}, the job says optimizer.kind = \"{is}\" (to take only its weights: train.init = \"{}\")", path.display()));
        } else if self.manifest.slots != b.slot_names() {
            differences.push(format!(
                "the optimizer's state is {:?} in it, {:?} in the job",
                self.manifest.slots,
                b.slot_names()
            ));
        }
        differences.extend(table::differences(&self.manifest.tables, tables));
        if differences.is_empty() {
            return Ok(());
        }
        Err(CheckpointError::Misfit { path: self.path.clone(), differences })
    }

    /// The file of a table's rows.
    pub fn table(&self, table: &TableSpec) -> Result<TableFile, CheckpointError> {
        TableFile::open(&self.path, table)
    }

    /// Reads the values. Verify the checkpoint first: this relies on its checksums.
    pub fn load(&self) -> Result<State, CheckpointError> {
        let (weights, slots) = self.load_into(|len| Ok::<_, CheckpointError>(vec![0.0; len]))?;
        Ok(State { weights, slots })
    }

    /// Likewise, into vectors from `room`: the weights, then the optimizer's state vectors. It takes no other
    /// memory that grows with the model.
    pub fn load_into<V, E>(&self, mut room: impl FnMut(usize) -> Result<V, E>) -> Result<(V, Vec<V>), E>
    where
        V: DerefMut<Target = [f32]>,
        E: From<CheckpointError>,
    {
        let tensors = &self.manifest.tensors;
        let layout =
            self.manifest.layout().map_err(|e| not_whole(&self.path, MANIFEST_FILE, e.to_string()))?;
        let (model, optimizer) = (self.model()?, self.optimizer()?);
        // Check before allocating memory: the files must hold what the manifest names.
        let misfit = |piece: &'static str, differences: Vec<String>| match differences.is_empty() {
            true => Ok(()),
            false => Err(E::from(CheckpointError::Misfit { path: self.path.join(piece), differences })),
        };
        misfit(MODEL_FILE, differences(tensors, &model))?;
        let params = tensors.iter().filter(|t| t.kind == TensorKind::Param);
        let of_slots: Vec<TensorSpec> = params
            .flat_map(|t| self.manifest.slots.iter().map(move |s| (format!("{s}.{}", t.name), &t.shape)))
            .map(|(name, shape)| TensorSpec::param(name, shape))
            .collect();
        misfit(OPTIMIZER_FILE, differences(&of_slots, &optimizer))?;
        let mut weights = room(layout.len())?;
        let of_slots = self.manifest.slots.iter().map(|_| room(layout.params_len()));
        let mut slots = of_slots.collect::<Result<Vec<V>, E>>()?;
        for (i, t) in tensors.iter().enumerate() {
            let range = layout.tensor_range(i);
            model.read(&t.name, &mut weights[range.clone()])?;
            if range.end <= layout.params_len() {
                for (name, slot) in self.manifest.slots.iter().zip(&mut slots) {
                    optimizer.read(&format!("{name}.{}", t.name), &mut slot[range.clone()])?;
                }
            }
        }
        Ok((weights, slots))
    }
}

fn not_whole(checkpoint: &Path, piece: &str, why: String) -> CheckpointError {
    CheckpointError::NotWhole { checkpoint: checkpoint.to_path_buf(), piece: piece.into(), why, offer: None }
}

/// Adds the newest complete checkpoint of the same folder to an error.
fn offer(e: CheckpointError) -> CheckpointError {
    match e {
        CheckpointError::NotWhole { checkpoint, piece, why, .. } => {
            let folder = checkpoint.parent().map(Folder::new);
            let offer = folder.and_then(|f| f.newest_whole(Some(&checkpoint)));
            CheckpointError::NotWhole { checkpoint, piece, why, offer }
        }
        other => other,
    }
}
