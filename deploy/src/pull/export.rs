//! What of a job's versions is written: its tensors, their names, and what says which version they are.

use paraft_checkpoint::weights::{Precision, counters, save_as};
use paraft_client::reader::{ReadError, Reader, ValueType, Want, WholeVersion};
use paraft_common::{Layout, TensorKind, TensorSpec};
use paraft_fleet::failure::Failure;
use paraft_worker::{exit, job::matches};
use std::{collections::BTreeMap, path::Path, time::Duration};

/// Which job is read, and how.
#[derive(Clone, Debug)]
pub struct Source<'a> {
    /// Servers of the fleet.
    pub servers: &'a [String],
    /// The job's name.
    pub job: &'a str,
    /// The type of the values.
    pub dtype: ValueType,
    /// Only tensors with such names; none: all. `*` stands for any text.
    pub only: &'a [String],
    /// How long to wait for a version.
    pub within: Duration,
}

/// The tensors of a job that are written.
#[derive(Clone, Debug)]
pub struct Export {
    job: String,
    dtype: ValueType,
    layout: Layout,
    /// Their places in the layout.
    places: Vec<usize>,
    specs: Vec<TensorSpec>,
}

impl Export {
    /// The tensors of this layout with such a name; all, if `only` has none.
    pub fn new(job: &str, dtype: ValueType, layout: &Layout, only: &[String]) -> Self {
        let tensors = layout.tensors();
        let chosen = |t: &TensorSpec| t.kind != TensorKind::Rows && named(&t.name, only);
        let places: Vec<_> = (0..tensors.len()).filter(|i| chosen(&tensors[*i])).collect();
        let specs = places.iter().map(|i| tensors[*i].clone()).collect();
        Self { job: job.into(), dtype, layout: layout.clone(), places, specs }
    }

    /// The job's name.
    pub fn job(&self) -> &str {
        &self.job
    }

    /// The tensors, in the order of the file.
    pub fn specs(&self) -> &[TensorSpec] {
        &self.specs
    }

    /// The type of the values, as `bf16`.
    pub fn dtype(&self) -> &'static str {
        self.dtype.name()
    }

    /// The values of the tensor at this place of [`Self::specs`], little-endian.
    ///
    /// # Errors
    /// The version was read for other tensors.
    pub fn values(&self, version: &WholeVersion, i: usize) -> Result<Vec<u8>, Failure> {
        let values = self.places.get(i).and_then(|p| version.tensor(&self.layout, self.dtype, *p));
        values.ok_or_else(|| {
            Failure::new(exit::DATA, format!("version {} has no values of a tensor", version.step))
        })
    }

    /// What a file of this version says of it, besides the step.
    pub fn notes(&self, version: &WholeVersion) -> BTreeMap<String, String> {
        let pairs = [
            ("job", self.job.clone()),
            ("version", version.step.to_string()),
            ("digest", format!("{:016x}", version.digest)),
            ("founding", founding(version).to_string()),
            ("dtype", self.dtype().to_string()),
        ];
        pairs.map(|(key, value)| (key.to_string(), value)).into()
    }

    /// Writes a safetensors file. An existing one is replaced by a whole one or not at all.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn save(&self, version: &WholeVersion, path: &Path) -> Result<(), Failure> {
        let precision = match self.dtype {
            ValueType::F32 => Precision::F32,
            ValueType::Bf16 => Precision::Bf16,
            ValueType::F16 => Precision::F16,
        };
        let values = |i: usize| self.values(version, i).ok();
        save_as(path, &self.specs, version.step, precision, self.notes(version), values)
            .map_err(|e| Failure::new(exit::IO, e.to_string()))
    }

    /// The names of all tensors of the file, BatchNorm's counters included, and how many bytes each has.
    pub fn names(&self) -> Vec<(String, usize)> {
        let width = self.dtype.bytes();
        let counters = counters(&self.specs).into_iter().map(|name| (name, size_of::<i64>()));
        let len = |t: &TensorSpec| t.shape.iter().product::<usize>() * width;
        counters.chain(self.specs.iter().map(|t| (t.name.clone(), len(t)))).collect()
    }

    /// The bytes of the tensor at this place of [`Self::names`].
    ///
    /// # Errors
    /// As [`Self::values`]'s.
    pub fn bytes(&self, version: &WholeVersion, i: usize) -> Result<Vec<u8>, Failure> {
        match i.checked_sub(self.names_of_counters()) {
            None => Ok((version.step as i64).to_le_bytes().to_vec()),
            Some(i) => self.values(version, i),
        }
    }

    fn names_of_counters(&self) -> usize {
        counters(&self.specs).len()
    }
}

/// The founding of a version's job. A job that is started again under its name has another one.
pub fn founding(version: &WholeVersion) -> u64 {
    version.foundings.first_key_value().map_or(0, |(_, founding)| *founding)
}

fn named(name: &str, only: &[String]) -> bool {
    only.is_empty() || only.iter().any(|only| matches(only, name))
}

/// The versions of a job, until it has ended.
#[derive(Debug)]
pub struct Versions {
    reader: Reader,
    within: Duration,
    export: Export,
    want: Want,
    /// `None`: one version is all.
    every: Option<u64>,
    given: Option<u64>,
}

impl Versions {
    /// Finds the job. The first version will be `want`; with `every`, after each version comes one that is at least so many
    /// steps later, and the last one.
    ///
    /// # Errors
    /// The fleet does not answer, has no such job, or the job has no tensor with such a name.
    pub async fn open(source: &Source<'_>, want: Want, every: Option<u64>) -> Result<Self, Failure> {
        let Source { servers, job, dtype, only, within } = source.clone();
        let mut reader = Reader::open(servers, job, dtype, within).await.map_err(failure)?;
        if !only.is_empty() && reader.only(|name| named(name, only)) == 0 {
            let names: Vec<_> = reader.layout().tensors().iter().take(10).map(|t| t.name.as_str()).collect();
            let why = format!("no tensor of job `{job}` is named {}", only.join(" or "));
            return Err(
                Failure::new(exit::CONFIG, why).help(format!("some of its names: {}", names.join(", ")))
            );
        }
        let export = Export::new(job, dtype, reader.layout(), only);
        Ok(Self { reader, within, export, want, every, given: None })
    }

    /// What is written of them.
    pub fn export(&self) -> &Export {
        &self.export
    }

    /// The next version; `None`: the job has ended, and its last version was given.
    ///
    /// # Errors
    /// No version comes in time, or it is not kept, or the job is another one now.
    pub async fn next(&mut self) -> Result<Option<WholeVersion>, Failure> {
        loop {
            match self.reader.next(self.want, self.within).await {
                Ok(version) => {
                    self.given = Some(version.step);
                    self.want = Want::AtLeast(version.step + self.every.unwrap_or(1));
                    return Ok(Some(version));
                }
                Err(ReadError::Ended { last, .. }) if self.every.is_some() && self.given == Some(last) => {
                    return Ok(None);
                }
                // Its last version is given, however soon it comes.
                Err(ReadError::Ended { last, .. }) if self.every.is_some() && self.given < Some(last) => {
                    self.want = Want::AtLeast(last);
                }
                Err(error) => return Err(failure(error)),
            }
        }
    }

    /// Asks for the last version again, or a newer one if there is one.
    pub fn again(&mut self) {
        self.want = Want::AtLeast(self.given.take().unwrap_or(0));
    }

    /// Asks for a version of this step or a later one, which was given before, by another process.
    pub fn not_before(&mut self, step: u64) {
        self.given = Some(step);
        self.want = Want::AtLeast(step);
    }
}

/// What a command ends with that got no version.
pub fn failure(error: ReadError) -> Failure {
    let code = match error {
        ReadError::Timeout(_) | ReadError::NotKept { .. } | ReadError::Ended { .. } => exit::UNAVAILABLE,
        ReadError::OtherFounding(_) | ReadError::Refused(_) => exit::CONFIG,
        ReadError::Damaged(_) => exit::DATA,
    };
    Failure::new(code, error.to_string())
}
