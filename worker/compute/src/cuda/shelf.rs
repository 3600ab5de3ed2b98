//! A device that holds some layers of a model at a time.
//!
//! ```text
//!  host's weights ─▶ pinned, two pieces in turn ─copy─▶ cell [─cast─▶ 16 bits] ─event─▶ operators
//!  operators ─▶ cell of the gradient ─event─▶ Outbox: copy ─▶ pinned ─▶ host's gradient
//! ```
//!
//! A cell is memory for a part of the flat vector; layers consist of whole parts. A cell is reused for another part
//! when the device has finished with it. The streams wait for that, the host does not: it is one layer ahead of the
//! device, and uploads the next one meanwhile.

mod parts;

use crate::{
    cuda::{
        device::CudaDevice,
        driver::{Context, Event, Stream},
        flat::{Gradient, Params, Run, Runs},
        kernels::Unit,
        launch::{Arg, Geometry, Launcher, long},
        memory::{Buffer, Staging, copy},
        outbox::{GradientPart, Outbox, PinnedBytes},
    },
    error::{DeviceError, Result},
};
use parts::parts;
use std::{collections::VecDeque, ops::Range, sync::Arc};

/// Values per copy: one piece is filled while the other is copied.
const PIECE: usize = 4 << 20;

/// Places in cells are rounded to this many values, so that a part has the same alignment as in the flat vector.
const ALIGNED: usize = 64;

/// Gradient parts by which the device may be ahead of the host.
const PARCELS: usize = 2;

/// How much of the weights stays on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// This many values, and the current layer.
    Values(usize),
    /// All weights, in this many editions, with rising numbers.
    Editions(usize),
}

/// See the module.
#[derive(Debug)]
pub struct Shelf {
    /// The parts of each layer.
    layers: Vec<Vec<Range<usize>>>,
    keep: Keep,
    context: Arc<Context>,
    compute: Arc<Stream>,
    stream: Arc<Stream>,
    launcher: Arc<Launcher>,
    /// The kernel that converts values to 16 bits.
    cast: Option<&'static str>,
    staging: Staging<f32>,
    /// The present layers, the last used at the end.
    cells: Vec<Cell>,
    free: Vec<Cell>,
    params: Params,
    /// Recorded after copies and conversions.
    copied: Event,
    /// The current layer, with its edition.
    at: Option<(usize, u64)>,
    gradients: Vec<Cell>,
    free_gradients: Vec<Cell>,
    gradient: Gradient,
    outbox: Outbox,
    sent: VecDeque<SentPart>,
}

/// Memory for a part of the flat vector.
#[derive(Debug)]
struct Cell {
    range: Range<usize>,
    edition: u64,
    values: Buffer<f32>,
    half: Option<Buffer<u16>>,
    /// Recorded after its last use on the device.
    used: Arc<Event>,
}

impl Cell {
    /// Offset of the part in the cell.
    fn begin(&self) -> usize {
        self.range.start % ALIGNED
    }

    fn run(&self) -> Run {
        let wide = self.values.at(self.begin());
        let narrow = self.half.as_ref().map_or(wide, |half| half.at(self.begin()));
        Run { range: self.range.clone(), wide, narrow }
    }
}

/// Number of values that a part needs.
fn room(part: &Range<usize>) -> usize {
    part.len().next_multiple_of(ALIGNED) + ALIGNED
}

/// A part of the gradient in transfer to the host.
#[derive(Debug)]
struct SentPart {
    cell: Cell,
    parcel: GradientPart,
}

/// A part of the gradient that has arrived on the host.
#[derive(Debug)]
pub struct ReceivedPart {
    cell: Cell,
    bytes: PinnedBytes,
}

impl ReceivedPart {
    /// Writes its values to their place in the flat vector.
    pub fn write(&self, gradient: &mut [f32]) {
        copy(self.bytes.values(), &mut gradient[self.cell.range.clone()]);
    }
}

impl Shelf {
    /// For a model whose layers have these parameters.
    pub fn new(device: &CudaDevice, layers: &[Vec<Range<usize>>], keep: Keep) -> Result<Self> {
        let context = device.context();
        let none = || Buffer::new(context, 0, "no parameters");
        Ok(Self {
            layers: parts(layers),
            keep,
            context: context.clone(),
            compute: device.stream().clone(),
            stream: Stream::new(context, 0)?,
            launcher: device.launcher().clone(),
            cast: device.precision().cast(),
            staging: Staging::new(),
            cells: Vec::new(),
            free: Vec::new(),
            params: Params { master: none()?, half: None, runs: Some(Runs::default()) },
            copied: Event::new(context)?,
            at: None,
            gradients: Vec::new(),
            free_gradients: Vec::new(),
            gradient: Gradient { values: none()?, runs: Some(Runs::default()) },
            outbox: Outbox::new(device)?,
            sent: VecDeque::new(),
        })
    }

    /// Whether this edition of a layer is present; edition 0 never is.
    pub fn has(&self, layer: usize, edition: u64) -> bool {
        edition > 0 && self.layers[layer].iter().all(|part| self.cell(part, edition).is_some())
    }

    fn cell(&self, part: &Range<usize>, edition: u64) -> Option<usize> {
        self.cells.iter().position(|c| c.edition == edition && c.range == *part)
    }

    /// Prepares a layer for operators. `weights` is the host's flat vector, required if the layer is not present
    /// ([`Self::has`]).
    pub fn bring(&mut self, layer: usize, edition: u64, weights: Option<&[f32]>) -> Result<&Params> {
        if self.at == Some((layer, edition)) && edition > 0 {
            return Ok(&self.params);
        }
        self.leave()?;
        if let Some(weights) = weights {
            let mut brought = false;
            for part in self.layers[layer].clone() {
                if edition == 0 || self.cell(&part, edition).is_none() {
                    self.fill(layer, &part, edition, weights)?;
                    brought = true;
                }
            }
            if brought {
                self.copied.record(&self.stream)?;
                self.compute.wait(&self.copied)?;
            }
        }
        let mut runs = Runs::default();
        for part in &self.layers[layer] {
            let Some(at) = self.cell(part, edition) else {
                return Err(DeviceError::Unsupported(format!("layer {layer} has not come to the device")));
            };
            // Move it to the end: last used.
            let cell = self.cells.remove(at);
            runs.0.insert(part.start, cell.run());
            self.cells.push(cell);
        }
        self.params.runs = Some(runs);
        self.at = Some((layer, edition));
        Ok(&self.params)
    }

    /// Later work does not use the current layer.
    fn leave(&mut self) -> Result {
        let Some((layer, edition)) = self.at.take() else { return Ok(()) };
        let used = Arc::new(Event::new(&self.context)?);
        used.record(&self.compute)?;
        for part in &self.layers[layer] {
            if let Some(at) = self.cells.iter().rposition(|c| c.edition == edition && c.range == *part) {
                self.cells[at].used = used.clone();
            }
        }
        // Cells without an edition are free.
        while let Some(at) = self.cells.iter().position(|c| c.edition == 0) {
            let cell = self.cells.remove(at);
            self.free.push(cell);
        }
        Ok(())
    }

    fn fill(&mut self, layer: usize, part: &Range<usize>, edition: u64, weights: &[f32]) -> Result {
        let mut cell = self.take(layer, part, edition)?;
        (cell.range, cell.edition) = (part.clone(), edition);
        // Wait for uses of the part that was there before.
        self.stream.wait(&cell.used)?;
        let mut at = cell.begin();
        for piece in weights[part.clone()].chunks(PIECE) {
            self.staging.upload_to(&self.stream, piece, (&cell.values, at))?;
            at += piece.len();
        }
        if let (Some(cast), Some(half)) = (self.cast, &cell.half) {
            let args = [
                ("x", Arg::At(cell.values.at(cell.begin()))),
                ("y", Arg::At(half.at(cell.begin()))),
                ("n", long(part.len())),
            ];
            // SAFETY: the arguments match the kernel; their buffers are as long as the lengths among them say.
            unsafe {
                self.launcher.launch(
                    &self.stream,
                    (Unit::Elementwise, cast),
                    Geometry::flat(part.len()),
                    &args,
                )
            }?;
        }
        self.cells.push(cell);
        Ok(())
    }

    /// A cell of sufficient size for this part.
    fn take(&mut self, layer: usize, part: &Range<usize>, edition: u64) -> Result<Cell> {
        let need = room(part);
        let most = match self.keep {
            Keep::Values(values) => values,
            Keep::Editions(editions) => {
                while let Some(at) =
                    self.cells.iter().position(|c| edition.saturating_sub(c.edition) >= editions as u64)
                {
                    let old = self.cells.remove(at);
                    self.free.push(old);
                }
                usize::MAX
            }
        };
        // First replace another edition of the same part; then the least recently used, preferably of the same
        // size.
        let keep = &self.layers[layer];
        let free = |c: &Cell| !keep.contains(&c.range);
        let held = |cells: &[Cell]| cells.iter().map(|c| c.range.len()).sum::<usize>();
        loop {
            let fits = |c: &Cell| c.values.len() == need;
            if let Some(at) = self.free.iter().position(fits) {
                return Ok(self.free.swap_remove(at));
            }
            if held(&self.cells) + held(&self.free) + part.len() <= most {
                return self.cell_of(need);
            }
            if let Some(other) = self.free.pop() {
                // Freed, which waits for the device: sizes change when a pass reaches a layer of another kind.
                drop(other);
                continue;
            }
            let of = |is: &dyn Fn(&Cell) -> bool| self.cells.iter().position(is);
            let at = of(&|c| c.range == *part).or_else(|| of(&|c| free(c) && fits(c))).or_else(|| of(&free));
            match at {
                Some(at) => {
                    let cell = self.cells.remove(at);
                    self.free.push(cell);
                }
                // The current layer exceeds the limit.
                None => return self.cell_of(need),
            }
        }
    }

    fn cell_of(&self, values: usize) -> Result<Cell> {
        let half = self.cast.map(|_| Buffer::new(&self.context, values, "a layer's weights")).transpose()?;
        let wide = Buffer::new(&self.context, values, "a layer's weights")?;
        Ok(Cell { range: 0..0, edition: 0, values: wide, half, used: Arc::new(Event::new(&self.context)?) })
    }

    /// The current layer and its gradient, which is zero unless something was added since it was sent.
    pub fn with_gradient(&mut self, layer: usize) -> Result<(&Params, &mut Gradient)> {
        for part in &self.layers[layer] {
            if self.gradients.iter().any(|c| c.range == *part) {
                continue;
            }
            let need = room(part);
            let mut cell = match self.free_gradients.iter().position(|c| c.values.len() == need) {
                Some(at) => self.free_gradients.swap_remove(at),
                None => Cell {
                    range: 0..0,
                    edition: 0,
                    values: Buffer::new(&self.context, need, "a layer's gradient")?,
                    half: None,
                    used: Arc::new(Event::new(&self.context)?),
                },
            };
            cell.range = part.clone();
            // Its last content has arrived on the host, so nothing reads it.
            cell.values.clear(&self.compute, 0..need)?;
            self.gradients.push(cell);
        }
        let runs = self.gradients.iter().map(|c| (c.range.start, c.run())).collect();
        self.gradient.runs = Some(Runs(runs));
        Ok((&self.params, &mut self.gradient))
    }

    /// Present work completes the gradient from `offset` on: starts to send the parts after it. Returns their
    /// number.
    pub fn send(&mut self, offset: usize) -> Result<usize> {
        self.send_if(|part| part.start >= offset)
    }

    /// Sends all remaining parts.
    pub fn send_all(&mut self) -> Result<usize> {
        self.send_if(|_| true)
    }

    /// The start of the complete parts when the gradient is ready from `offset` on: never within a part.
    pub fn complete_from(&self, offset: usize) -> usize {
        let across = self.gradients.iter().find(|c| c.range.start < offset && offset < c.range.end);
        across.map_or(offset, |c| c.range.end)
    }

    fn send_if(&mut self, is: impl Fn(&Range<usize>) -> bool) -> Result<usize> {
        let (mut complete, rest): (Vec<Cell>, Vec<Cell>) =
            std::mem::take(&mut self.gradients).into_iter().partition(|c| is(&c.range));
        self.gradients = rest;
        let sent = complete.len();
        if sent == 0 {
            return Ok(0);
        }
        // Last parts first, as in the backward pass.
        complete.sort_by_key(|c| std::cmp::Reverse(c.range.start));
        self.outbox.mark(&self.compute)?;
        for cell in complete {
            let part = cell.begin()..cell.begin() + cell.range.len();
            let parcel = self.outbox.send_values(&cell.values, part)?;
            self.sent.push_back(SentPart { cell, parcel });
        }
        Ok(sent)
    }

    /// Waits for the next part of the gradient. `None`: there is none; or, without `all`, the device should first
    /// compute the next layer.
    pub fn come(&mut self, all: bool) -> Result<Option<ReceivedPart>> {
        let least = if all { 0 } else { PARCELS };
        if self.sent.len() <= least {
            return Ok(None);
        }
        let Some(SentPart { cell, parcel }) = self.sent.pop_front() else { return Ok(None) };
        let bytes = parcel.wait()?;
        Ok(Some(ReceivedPart { cell, bytes }))
    }

    /// Takes back a part whose values were written.
    pub fn took(&mut self, come: ReceivedPart) {
        self.free_gradients.push(come.cell);
    }

    /// Drops the parts of an interrupted step.
    pub fn begin(&mut self) -> Result {
        while let Some(come) = self.come(true)? {
            self.took(come);
        }
        self.free_gradients.append(&mut self.gradients);
        Ok(())
    }
}

impl Drop for Shelf {
    fn drop(&mut self) {
        // Memory must not be freed during a copy.
        let _ = self.stream.synchronize();
        let _ = self.compute.synchronize();
    }
}
