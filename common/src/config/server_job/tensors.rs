//! The names and shapes of a job's tensors, which readers need.

use super::{ServerJob, ServerJobError};
use crate::layout::{Layout, LayoutError, TensorKind, TensorSpec};

/// See [`ServerJob::tensors`].
const MAX_NAMES_BYTES: usize = 120 << 10;

impl ServerJob {
    /// Whether workers of both may train together. Some do not name their tensors.
    pub fn is_same(&self, other: &Self) -> bool {
        if self == other {
            return true;
        }
        let unnamed = |job: &Self| Self { tensors: Vec::new(), ..job.clone() };
        (self.tensors.is_empty() || other.tensors.is_empty()) && unnamed(self) == unnamed(other)
    }

    /// About the bytes that tensors take in the job's text; with more than [`MAX_NAMES_BYTES`] a job has none.
    fn names_bytes(tensors: &[TensorSpec]) -> usize {
        tensors.iter().map(|t| t.name.len() + 8 * t.shape.len() + 12).sum()
    }

    /// The tensors for [`Self::tensors`]; none if their names are too long to travel with each request to join.
    pub fn named(tensors: &[TensorSpec]) -> Vec<TensorSpec> {
        if Self::names_bytes(tensors) > MAX_NAMES_BYTES { Vec::new() } else { tensors.to_vec() }
    }

    /// The layout with the tensors' names; `None` if the servers do not know them.
    ///
    /// # Errors
    /// They are of another length than the job.
    pub fn named_layout(&self) -> Result<Option<Layout>, LayoutError> {
        if self.tensors.is_empty() {
            return Ok(None);
        }
        Layout::cut(self.tensors.clone(), self.cuts(), self.bucket_len)?.with_tables(&self.tables).map(Some)
    }

    pub(super) fn validate_tensors(&self) -> Result<(), ServerJobError> {
        let bytes = Self::names_bytes(&self.tensors);
        if bytes > MAX_NAMES_BYTES {
            let why = format!("its tensors' names take {bytes} bytes; at most {MAX_NAMES_BYTES}");
            return Err(ServerJobError(why));
        }
        if let Some(t) = self.tensors.iter().find(|t| t.name.chars().any(char::is_control)) {
            return Err(ServerJobError(format!("tensor {:?} has control characters in its name", t.name)));
        }
        let layout = self.named_layout().map_err(|e| ServerJobError(e.to_string()))?;
        let Some(layout) = layout else { return Ok(()) };
        let of =
            |kind| layout.tensors().iter().filter(|t| t.kind == kind).map(TensorSpec::len).sum::<usize>();
        let lengths = [TensorKind::Param, TensorKind::Buffer, TensorKind::Result].map(of);
        match lengths == [self.params_len, self.buffers_len, self.results_len] {
            true => Ok(()),
            false => {
                Err(ServerJobError(format!("its tensors hold {lengths:?} values, and not those of the job")))
            }
        }
    }
}

/// Tensors as texts: `param 128x784 0.weight`. A scalar's shape is `-`.
pub(super) mod names {
    use super::{TensorKind, TensorSpec};
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub fn serialize<S: Serializer>(tensors: &[TensorSpec], to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq(tensors.iter().map(|t| {
            let kind = match t.kind {
                TensorKind::Param => "param",
                TensorKind::Buffer => "buffer",
                TensorKind::Result => "result",
                TensorKind::Rows => "rows",
            };
            let shape: Vec<_> = t.shape.iter().map(ToString::to_string).collect();
            let shape = if shape.is_empty() { "-".into() } else { shape.join("x") };
            format!("{kind} {shape} {}", t.name)
        }))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<TensorSpec>, D::Error> {
        let texts = Vec::<String>::deserialize(from)?;
        texts
            .iter()
            .map(|text| read(text).ok_or_else(|| Error::custom(format!("`{text}` is no tensor"))))
            .collect()
    }

    fn read(text: &str) -> Option<TensorSpec> {
        let (kind, rest) = text.split_once(' ')?;
        let (shape, name) = rest.split_once(' ')?;
        let kind = match kind {
            "param" => TensorKind::Param,
            "buffer" => TensorKind::Buffer,
            "result" => TensorKind::Result,
            _ => return None,
        };
        let shape = match shape {
            "-" => Vec::new(),
            shape => shape.split('x').map(|n| n.parse().ok()).collect::<Option<_>>()?,
        };
        Some(TensorSpec { name: name.into(), shape, kind })
    }
}
