//! A stack of linear layers with ReLUs, shared by [`crate::Classifier`] and [`crate::Regressor`]. They add the loss.

use crate::init::Init;
use crate::net::{Flat, Layer as Piece, NetResult, Pass, Weights};
use crate::slice::{Run, Runs, Slice, SliceMember};
use paraft_common::layout::TensorSpec;
use paraft_compute::{
    Device,
    shape::{Activation, LinearAt, LinearShape},
};

/// A slice's part of a layer. Columns and rows alternate: a column layer's output stays split, and the next row
/// layer takes it split.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Whole,
    /// Some of its outputs.
    Columns,
    /// The contribution of some of its inputs to each output.
    Rows,
    /// Some of its outputs (this is the total number); all slices receive all outputs.
    Gathered(usize),
}

/// One layer's place in the flat vector.
#[derive(Clone, Copy, Debug)]
struct Layer {
    inputs: usize,
    outputs: usize,
    /// Offset of the weight; the bias follows.
    offset: usize,
    activation: Activation,
    part: Part,
}

impl Layer {
    fn weight_len(&self) -> usize {
        self.inputs * self.outputs
    }

    fn len(&self) -> usize {
        self.weight_len() + self.outputs
    }

    fn shape(&self, n: usize) -> LinearShape {
        LinearShape { n, inputs: self.inputs, outputs: self.outputs }
    }

    fn at(&self) -> LinearAt {
        LinearAt { weight: self.offset, bias: Some(self.offset + self.weight_len()) }
    }
}

/// The place of the output's gradient at the start of the backward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Gradient {
    /// In place of the output. The last layer then has no activation.
    InPlace,
    /// In the second value of [`Stack::output_and_delta`].
    Apart,
}

/// Layers and their workspaces.
pub(crate) struct Stack<D: Device> {
    layers: Vec<Layer>,
    /// For each slot, the outputs of each layer after its activation, `[n, outputs]`.
    outputs: Vec<Vec<D::Values>>,
    /// Gradients of a layer's output and input, alternating.
    deltas: [D::Values; 2],
    /// This slice, and the ranks with the others.
    among: Option<SliceMember>,
    /// A slice's part of values that all slices receive.
    scratch: D::Values,
}

impl<D: Device> Stack<D> {
    /// `widths`: input, each hidden layer, and output; at least two numbers.
    pub fn new(widths: &[usize], last: Activation) -> Self {
        Self::among(widths, last, None)
    }

    /// The stack, or a slice of it.
    pub fn among(widths: &[usize], last: Activation, among: Option<SliceMember>) -> Self {
        let mut offset = 0;
        let mut layers = Vec::with_capacity(widths.len());
        for (i, pair) in widths.windows(2).enumerate() {
            let is_last = i + 2 == widths.len();
            let activation = if is_last { last } else { Activation::Relu };
            let (mut inputs, mut outputs) = (pair[0], pair[1]);
            let part = match &among {
                None => Part::Whole,
                Some(_) if i % 2 == 1 => Part::Rows,
                Some(_) if is_last => Part::Gathered(outputs),
                Some(_) => Part::Columns,
            };
            if let Some(among) = &among {
                match part {
                    Part::Rows => inputs = among.slice.part(inputs).len(),
                    _ => outputs = among.slice.part(outputs).len(),
                }
            }
            let layer = Layer { inputs, outputs, offset, activation, part };
            offset += layer.len();
            layers.push(layer);
        }
        let deltas = Default::default();
        let mut stack = Self { layers, outputs: Vec::new(), deltas, among, scratch: Default::default() };
        stack.has_slot(0);
        stack
    }

    /// The places of a slice's values in the whole stack's flat vector.
    pub fn runs(&self, widths: &[usize], slice: Slice) -> Vec<Run> {
        let (whole, mut runs) = (Self::new(widths, Activation::None), Runs::default());
        for (from, to) in whole.layers.iter().zip(&self.layers) {
            let (of, bias) = (from.offset + from.weight_len(), to.offset + to.weight_len());
            match to.part {
                Part::Rows => {
                    let first = slice.part(from.inputs).start;
                    runs.rows((from.offset + first, from.inputs), to.offset, to.outputs, to.inputs);
                    if slice.is_first() {
                        runs.part(of, bias, to.outputs);
                    }
                }
                _ => {
                    let first = slice.part(from.outputs).start;
                    runs.part(from.offset + first * from.inputs, to.offset, to.weight_len());
                    runs.part(of + first, bias, to.outputs);
                }
            }
        }
        runs.0
    }

    /// Length of the flat vector.
    pub fn len(&self) -> usize {
        self.layers.iter().map(Layer::len).sum()
    }

    /// One a layer.
    pub fn layers(&self) -> Vec<Piece> {
        let last = self.layers.len() - 1;
        let piece = |(i, l): (usize, &Layer)| {
            let given = if i == last { 0 } else { l.outputs };
            let piece = Piece::of(l.offset..l.offset + l.len(), 2.0 * l.weight_len() as f64, given);
            let back = if i > 0 { l.inputs } else { 0 };
            let sums = match l.part {
                Part::Whole => 0,
                Part::Columns => back,
                Part::Rows => l.outputs,
                Part::Gathered(_) => l.outputs + back,
            };
            Piece { keeps: l.outputs, works: 2 * l.outputs.max(l.inputs), sums, ..piece }
        };
        self.layers.iter().enumerate().map(piece).collect()
    }

    /// Number of layers.
    pub fn depth(&self) -> usize {
        self.layers.len()
    }

    /// A pass through all layers, in the first slot.
    pub fn whole(&self, n: usize) -> Pass {
        Pass { layers: 0..self.layers.len(), slot: 0, n, evaluates: false }
    }

    /// Allocates a slot's buffers.
    pub fn has_slot(&mut self, slot: usize) {
        let layers = self.layers.len();
        let room = || (0..layers).map(|_| D::Values::default()).collect();
        self.outputs.extend((self.outputs.len()..=slot).map(|_| room()));
    }

    /// The tensors; `prefix` names a layer's module, given its index.
    pub fn tensors(&self, prefix: impl Fn(usize) -> String) -> Vec<TensorSpec> {
        let both = |(i, l): (usize, &Layer)| {
            let p = prefix(i);
            [
                TensorSpec::param(format!("{p}weight"), &[l.outputs, l.inputs]),
                TensorSpec::param(format!("{p}bias"), &[l.outputs]),
            ]
        };
        self.layers.iter().enumerate().flat_map(both).collect()
    }

    /// Draws the initial weights.
    pub fn init(&self, seed: u64, params: &mut [f32]) {
        let mut init = Init::new(seed);
        for l in &self.layers {
            let (weight, bias) = params[l.offset..l.offset + l.len()].split_at_mut(l.weight_len());
            init.uniform(l.inputs, weight);
            init.uniform(l.inputs, bias);
        }
    }

    /// Takes the output of the layer before a pass.
    pub fn take(&mut self, device: &mut D, pass: &Pass, input: Option<&[f32]>) -> NetResult {
        self.has_slot(pass.slot);
        match (input, pass.layers.start.checked_sub(1)) {
            (Some(input), Some(before)) => device.load_values(input, &mut self.outputs[pass.slot][before]),
            _ => Ok(()),
        }
    }

    /// A pass's output for the next layer; `None`: it was the last.
    pub fn give(&mut self, device: &mut D, pass: &Pass) -> NetResult<Option<Vec<f32>>> {
        let inner = pass.layers.end < self.layers.len();
        inner.then(|| device.read(&self.outputs[pass.slot][pass.layers.end - 1])).transpose()
    }

    /// Computes the outputs of a pass; `inputs` are the model's.
    pub fn forward<W: Weights<D> + ?Sized>(
        &mut self,
        device: &mut D,
        weights: &mut W,
        inputs: &D::Values,
        pass: &Pass,
    ) -> NetResult {
        for i in pass.layers.clone() {
            let l = &self.layers[i];
            let (done, rest) = self.outputs[pass.slot].split_at_mut(i);
            let x = done.last().unwrap_or(inputs);
            let params = weights.params(i)?;
            match (&self.among, l.part) {
                (Some(among), Part::Rows) => {
                    device.linear(
                        l.shape(pass.n),
                        x,
                        params,
                        l.at(),
                        Activation::None,
                        &mut rest[0],
                        None,
                    )?;
                    let mut sum = among.sum_of(&device.read(&rest[0])?)?;
                    if l.activation == Activation::Relu {
                        sum.iter_mut().for_each(|v| *v = v.max(0.0));
                    }
                    device.load_values(&sum, &mut rest[0])?;
                }
                (Some(among), Part::Gathered(cols)) => {
                    let (shape, scratch) = (l.shape(pass.n), &mut self.scratch);
                    device.linear(shape, x, params, l.at(), l.activation, scratch, None)?;
                    let all = among.columns(&device.read(scratch)?, cols)?;
                    device.load_values(&all, &mut rest[0])?;
                }
                _ => device.linear(l.shape(pass.n), x, params, l.at(), l.activation, &mut rest[0], None)?,
            }
        }
        Ok(())
    }

    /// The output of the last forward pass, `[n, outputs]`.
    pub fn output(&mut self, slot: usize) -> &mut D::Values {
        self.output_and_delta(slot).0
    }

    /// Likewise, with memory for its gradient.
    pub fn output_and_delta(&mut self, slot: usize) -> (&mut D::Values, &mut D::Values) {
        let last = self.layers.len() - 1;
        (&mut self.outputs[slot][last], &mut self.deltas[0])
    }

    /// Turns the gradient of a pass's output into that of its weights, last layer first, and of its input; returns
    /// the latter if a layer precedes. `inputs` are the model's; `given` is the gradient of an inner layer's
    /// output.
    pub fn backward(
        &mut self,
        device: &mut D,
        flat: &mut dyn Flat<D>,
        inputs: &D::Values,
        pass: &Pass,
        (of_output, given): (Gradient, Option<&[f32]>),
    ) -> NetResult<Option<Vec<f32>>> {
        let last = self.layers.len() - 1;
        if let Some(given) = given {
            device.load_values(given, &mut self.deltas[0])?;
        }
        for i in pass.layers.clone().rev() {
            let l = &self.layers[i];
            let (done, rest) = self.outputs[pass.slot].split_at_mut(i);
            let x = done.last().unwrap_or(inputs);
            let [delta, next] = &mut self.deltas;
            let delta = if i == last && of_output == Gradient::InPlace {
                &mut rest[0]
            } else {
                device.activation_backward(l.activation, &rest[0], delta)?;
                delta
            };
            let delta = match (&self.among, l.part) {
                (Some(among), Part::Gathered(cols)) => {
                    let own = among.own_columns(&device.read(delta)?, cols);
                    device.load_values(&own, &mut self.scratch)?;
                    &mut self.scratch
                }
                _ => delta,
            };
            device.linear_backward_weight(l.shape(pass.n), x, delta, l.at(), flat.layer(i)?.1)?;
            flat.ready(l.offset)?;
            // The data's gradient is not needed.
            if i > 0 {
                device.linear_backward_input(l.shape(pass.n), delta, flat.params(i)?, l.at(), next)?;
                if let Some(among) = self.among.as_ref().filter(|_| l.part != Part::Rows) {
                    among.sum(device, next)?;
                }
                self.deltas.swap(0, 1);
            }
        }
        (pass.layers.start > 0).then(|| device.read(&self.deltas[0])).transpose()
    }
}
