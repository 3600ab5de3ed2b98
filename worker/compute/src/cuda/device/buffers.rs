//! A device's buffers: values, f32 values, labels and tokens.

use super::{CudaDevice, room};
use crate::{
    cuda::{
        flat::{Gradient, Params},
        kernels::Unit,
        launch::{Arg, Geometry, long},
        memory::{Buffer, Pinned},
    },
    device::Buffers,
    error::Result,
};

/// A matrix on the device, in the element type of the computation.
#[derive(Debug, Default)]
pub struct Values {
    buffer: Option<Buffer<u8>>,
    pub(super) len: usize,
    /// Set if there is padding between its rows.
    rows: Option<Rows>,
}

/// Rows padded to multiples of 16 bytes, because tensor cores read only such rows as whole vectors.
#[derive(Clone, Copy, Debug)]
struct Rows {
    cols: usize,
    /// Values from one row to the next.
    pitch: usize,
}

impl Values {
    pub(super) fn at(&self) -> Arg {
        Arg::At(self.address())
    }

    /// Address of contiguous values.
    pub(super) fn address(&self) -> u64 {
        assert!(self.rows.is_none(), "logits are for losses and products");
        self.begin()
    }

    pub(super) fn begin(&self) -> u64 {
        self.buffer.as_ref().map_or(0, |b| b.at(0))
    }

    /// Distance of rows with this many columns.
    pub(super) fn pitch(&self, cols: usize) -> usize {
        self.rows.map_or(cols, |rows| rows.pitch)
    }
}

/// f32 values on the device.
#[derive(Debug, Default)]
pub struct Floats {
    buffer: Option<Buffer<f32>>,
}

impl Floats {
    pub(super) fn at(&self, index: usize) -> Arg {
        Arg::At(self.buffer.as_ref().map_or(0, |b| b.at(index)))
    }
}

/// Labels or tokens on the device and on the host. The host determines the rows that receive an embedding's
/// gradient.
#[derive(Debug, Default)]
pub struct Ids {
    buffer: Option<Buffer<u32>>,
    pub(super) host: Vec<u32>,
    /// Places by token: `order[rows]`, `starts[most + 1]`, `ids[most]`.
    pub(super) order: Option<Buffer<u32>>,
    /// The maximum number of tokens in it; `None`: not ordered since the last load.
    pub(super) most: Option<usize>,
}

impl Ids {
    pub(super) fn at(&self) -> Arg {
        Arg::At(self.buffer.as_ref().map_or(0, |b| b.at(0)))
    }
}

impl CudaDevice {
    pub(super) fn sized<'a>(&self, values: &'a mut Values, len: usize, what: &str) -> Result<&'a Values> {
        room(&self.context, &mut values.buffer, len * self.precision.bytes(), what)?;
        (values.len, values.rows) = (len, None);
        Ok(values)
    }

    /// Allocates rows that start at multiples of 16 bytes.
    pub(super) fn sized_apart(&self, values: &mut Values, n: usize, cols: usize, what: &str) -> Result {
        let pitch = cols.next_multiple_of(16 / self.precision.bytes());
        self.sized(values, n * pitch, what)?;
        values.len = n * cols;
        values.rows = (pitch > cols).then_some(Rows { cols, pitch });
        Ok(())
    }

    pub(super) fn floats<'a>(&self, floats: &'a mut Floats, len: usize, what: &str) -> Result<&'a Floats> {
        room(&self.context, &mut floats.buffer, len, what)?;
        Ok(floats)
    }
}

impl Buffers for CudaDevice {
    type Params = Params;
    type Grads = Gradient;
    type Values = Values;
    type Floats = Floats;
    type Ids = Ids;

    fn load_values(&mut self, from: &[f32], to: &mut Values) -> Result {
        self.context.bind()?;
        self.sized(to, from.len(), "a batch")?;
        if from.is_empty() {
            return Ok(());
        }
        match (self.precision.cast(), &to.buffer) {
            (None, Some(to)) => self.inputs.upload(&self.stream, from, to),
            (None, None) => Ok(()),
            (Some(cast), _) => {
                let floats = room(&self.context, &mut self.work.floats, from.len(), "a batch")?;
                self.inputs.upload(&self.stream, from, floats)?;
                let args = [("x", Arg::At(floats.at(0))), ("y", to.at()), ("n", long(from.len()))];
                // SAFETY: the arguments match the kernel; their buffers are as long as the lengths among them say.
                unsafe { self.launch(Unit::Elementwise, cast, Geometry::flat(from.len()), &args) }
            }
        }
    }

    fn load_ids(&mut self, from: &[u32], to: &mut Ids) -> Result {
        self.context.bind()?;
        to.host.clear();
        to.most = None;
        to.host.extend_from_slice(from);
        if from.is_empty() {
            return Ok(());
        }
        let buffer = room(&self.context, &mut to.buffer, from.len(), "labels")?;
        self.ids.upload(&self.stream, from, buffer)
    }

    fn read(&mut self, values: &Values) -> Result<Vec<f32>> {
        let n = values.rows.map_or(values.len, |r| values.len / r.cols * r.pitch);
        let mut to = Pinned::new(&self.context, n)?;
        match (self.precision.cast(), &values.buffer) {
            (_, None) => {}
            (None, Some(from)) => from.download(&self.stream, 0..n * 4, &mut to)?,
            (Some(_), Some(_)) if n == 0 => {}
            (Some(_), Some(_)) => {
                let wide = room(&self.context, &mut self.work.floats, n, "values to read")?;
                let name = format!("cast_{}_to_f32", self.precision.suffix());
                let args = [("x", Arg::At(values.begin())), ("y", Arg::At(wide.at(0))), ("n", long(n))];
                // SAFETY: the arguments match the kernel; their buffers are as long as the lengths among them say.
                unsafe { self.launch(Unit::Elementwise, &name, Geometry::flat(n), &args) }?;
                let wide = room(&self.context, &mut self.work.floats, n, "values to read")?;
                wide.download(&self.stream, 0..n, &mut to)?;
            }
        }
        self.stream.synchronize()?;
        let all = to.as_slice()?;
        Ok(match values.rows {
            None => all.to_vec(),
            Some(Rows { cols, pitch }) => {
                all.chunks_exact(pitch).flat_map(|row| &row[..cols]).copied().collect()
            }
        })
    }
}
