//! Layers of a model of which a device holds some at a time.
//!
//! ```text
//!  host's weights ─▶ pinned, two pieces in turn ─copy─▶ cell [─cast─▶ 16 bits] ─event─▶ operators
//!  operators ─▶ cell of the gradient ─event─▶ Outbox: copy ─▶ pinned ─▶ host's gradient
//! ```
//!
//! A cell is memory for a part of the flat vector that whole layers are made of. It goes to another part once nothing on the device uses it
//! any more, which the streams wait for and the host doesn't: the host is a layer ahead of the device, and brings the next one meanwhile.

use crate::{
    cuda::{
        device::CudaDevice,
        driver::{Context, Event, Stream},
        flat::{Gradient, GradientPart, Outbox, Params, PinnedBytes, Run, Runs},
        kernels::Unit,
        launch::{Arg, Geometry, Launcher, long},
        memory::{Buffer, Staging, copy},
    },
    error::{DeviceError, Result},
};
use std::{collections::VecDeque, ops::Range, sync::Arc};

/// Values that are copied at a time: one piece is filled while the other is on its way.
const PIECE: usize = 4 << 20;

/// Values to which places in cells are rounded, so that a part is aligned there as it is in the flat vector.
const ALIGNED: usize = 64;

/// Parcels of gradients that the device may be ahead of the host.
const PARCELS: usize = 2;

/// How much of the weights is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// So many values, and the layer in hand.
    Values(usize),
    /// Everything, of so many editions, whose numbers rise.
    Editions(usize),
}

/// See the module.
#[derive(Debug)]
pub struct Shelf {
    /// The parts that each layer is made of.
    layers: Vec<Vec<Range<usize>>>,
    keep: Keep,
    context: Arc<Context>,
    compute: Arc<Stream>,
    stream: Arc<Stream>,
    launcher: Arc<Launcher>,
    /// The kernel that makes 16 bits of values.
    cast: Option<&'static str>,
    staging: Staging<f32>,
    /// The layers that are here, those used last behind.
    cells: Vec<Cell>,
    free: Vec<Cell>,
    params: Params,
    /// Behind copies and casts.
    copied: Event,
    /// The layer in hand, with its edition.
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
    /// Behind its last use on the device.
    used: Arc<Event>,
}

impl Cell {
    /// Where the part begins in it.
    fn begin(&self) -> usize {
        self.range.start % ALIGNED
    }

    fn run(&self) -> Run {
        let wide = self.values.at(self.begin());
        let narrow = self.half.as_ref().map_or(wide, |half| half.at(self.begin()));
        Run { range: self.range.clone(), wide, narrow }
    }
}

/// What a part takes.
fn room(part: &Range<usize>) -> usize {
    part.len().next_multiple_of(ALIGNED) + ALIGNED
}

/// A part of the gradient on its way to the host.
#[derive(Debug)]
struct SentPart {
    cell: Cell,
    parcel: GradientPart,
}

/// A part of the gradient that has come.
#[derive(Debug)]
pub struct ReceivedPart {
    cell: Cell,
    bytes: PinnedBytes,
}

impl ReceivedPart {
    /// Writes its values where they are in the flat vector.
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

    /// Whether this edition of a layer is here; 0 is none that was seen before.
    pub fn has(&self, layer: usize, edition: u64) -> bool {
        edition > 0 && self.layers[layer].iter().all(|part| self.cell(part, edition).is_some())
    }

    fn cell(&self, part: &Range<usize>, edition: u64) -> Option<usize> {
        self.cells.iter().position(|c| c.edition == edition && c.range == *part)
    }

    /// Has a layer ready for operators; `weights` is the host's flat vector, where it has to be brought ([`Self::has`]).
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
            // Used last.
            let cell = self.cells.remove(at);
            runs.0.insert(part.start, cell.run());
            self.cells.push(cell);
        }
        self.params.runs = Some(runs);
        self.at = Some((layer, edition));
        Ok(&self.params)
    }

    /// The layer in hand is used by nothing that is begun from now on.
    fn leave(&mut self) -> Result {
        let Some((layer, edition)) = self.at.take() else { return Ok(()) };
        let used = Arc::new(Event::new(&self.context)?);
        used.record(&self.compute)?;
        for part in &self.layers[layer] {
            if let Some(at) = self.cells.iter().rposition(|c| c.edition == edition && c.range == *part) {
                self.cells[at].used = used.clone();
            }
        }
        // What has no edition is nobody's again.
        while let Some(at) = self.cells.iter().position(|c| c.edition == 0) {
            let cell = self.cells.remove(at);
            self.free.push(cell);
        }
        Ok(())
    }

    fn fill(&mut self, layer: usize, part: &Range<usize>, edition: u64, weights: &[f32]) -> Result {
        let mut cell = self.take(layer, part, edition)?;
        (cell.range, cell.edition) = (part.clone(), edition);
        // Where another part lay before, what used that.
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
            // SAFETY: as the kernel declares them; what they point to is as long as its lengths say.
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

    /// A cell that this part fits in.
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
        // Another edition of the same part goes first; then what was used longest ago, of the same size where there is some.
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
                // Given back, which waits for the device: sizes change where a pass comes to a layer of another kind.
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
                // The layer in hand is larger than what is to be kept.
                None => return self.cell_of(need),
            }
        }
    }

    fn cell_of(&self, values: usize) -> Result<Cell> {
        let half = self.cast.map(|_| Buffer::new(&self.context, values, "a layer's weights")).transpose()?;
        let wide = Buffer::new(&self.context, values, "a layer's weights")?;
        Ok(Cell { range: 0..0, edition: 0, values: wide, half, used: Arc::new(Event::new(&self.context)?) })
    }

    /// The layer in hand, with its gradient: zero where nothing was added to it since it was sent.
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
            // Its parcel has come: nothing reads what was in it.
            cell.values.clear(&self.compute, 0..need)?;
            self.gradients.push(cell);
        }
        let runs = self.gradients.iter().map(|c| (c.range.start, c.run())).collect();
        self.gradient.runs = Some(Runs(runs));
        Ok((&self.params, &mut self.gradient))
    }

    /// What was begun completes the gradient from `offset` on: parts that lie behind it begin their way to the host. Says how many.
    pub fn send(&mut self, offset: usize) -> Result<usize> {
        self.send_if(|part| part.start >= offset)
    }

    /// All that is left.
    pub fn send_all(&mut self) -> Result<usize> {
        self.send_if(|_| true)
    }

    /// Where what is complete begins, with the gradient ready from `offset` on: not within a part.
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
        // The last ones first, as the backward pass comes to them.
        complete.sort_by_key(|c| std::cmp::Reverse(c.range.start));
        self.outbox.mark(&self.compute)?;
        for cell in complete {
            let part = cell.begin()..cell.begin() + cell.range.len();
            let parcel = self.outbox.send_values(&cell.values, part)?;
            self.sent.push_back(SentPart { cell, parcel });
        }
        Ok(sent)
    }

    /// The next part of the gradient; waits for it. `None`: there is none, or, unless `all` are wanted, the device has the next layer's
    /// to compute first.
    pub fn come(&mut self, all: bool) -> Result<Option<ReceivedPart>> {
        let least = if all { 0 } else { PARCELS };
        if self.sent.len() <= least {
            return Ok(None);
        }
        let Some(SentPart { cell, parcel }) = self.sent.pop_front() else { return Ok(None) };
        let bytes = parcel.wait()?;
        Ok(Some(ReceivedPart { cell, bytes }))
    }

    /// It was written where it belongs.
    pub fn took(&mut self, come: ReceivedPart) {
        self.free_gradients.push(come.cell);
    }

    /// What a step that broke off has left is nobody's.
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
        // Memory is not given back under a copy.
        let _ = self.stream.synchronize();
        let _ = self.compute.synchronize();
    }
}

/// Each layer's ranges, cut where any layer's begins or ends: what layers share is in parts of its own.
fn parts(layers: &[Vec<Range<usize>>]) -> Vec<Vec<Range<usize>>> {
    let mut cuts: Vec<usize> = layers.iter().flatten().flat_map(|r| [r.start, r.end]).collect();
    cuts.sort_unstable();
    cuts.dedup();
    let cut = |range: &Range<usize>| -> Vec<Range<usize>> {
        let inner = cuts.iter().copied().filter(|c| range.contains(c) || *c == range.end);
        let places: Vec<usize> = inner.collect();
        places.windows(2).map(|w| w[0]..w[1]).collect()
    };
    layers.iter().map(|layer| layer.iter().flat_map(cut).collect()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_layers_share_is_in_parts_of_its_own() {
        let one = |r: Range<usize>| vec![r];
        let layers = [one(0..12), one(12..20), one(20..28), vec![0..10, 28..30]];
        let cut = parts(&layers);
        assert_eq!(cut, [vec![0..10, 10..12], one(12..20), one(20..28), vec![0..10, 28..30]]);
        assert_eq!(parts(&[one(0..4), Vec::new()]), [one(0..4), Vec::new()]);
    }
}
