//! The model part of a job file.

use crate::{
    Classifier, ConvNet, Layer, Layered, Model, ModelError, Net, OnCpu, OnCuda, Regressor, Sample,
    Transformer, TransformerShape,
};
use paraft_common::kind::NoOptions;
use paraft_compute::{
    Cpu, CpuDevice, Device, Threads,
    cuda::{CudaOptions, Keep},
};
use serde::{Deserialize, Serialize};

/// The model's type, and the part of its shape that the data does not determine.
///
/// ```
/// use paraft_models::{DataShape, ModelConfig, Sample};
/// let mlp = ModelConfig::Mlp { hidden: vec![256, 128] };
/// let model = mlp.build(DataShape { sample: Sample::Values(784), classes: Some(10) }).unwrap();
/// assert_eq!(model.tensors().len(), 6);
/// ```
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum ModelConfig {
    /// One linear layer and softmax cross-entropy.
    LogisticRegression,
    /// Linear layers with ReLUs between, softmax cross-entropy; for numbers to predict mean squared error.
    Mlp {
        /// Widths of the hidden layers, for example `[256, 128]`.
        hidden: Vec<usize>,
    },
    /// Linear layers, each with a ReLU, mean squared error against the input.
    Autoencoder {
        /// Widths of the layers between input and output, for example `[128, 128, 128]`.
        hidden: Vec<usize>,
    },
    /// Two convolutions with BatchNorm, ReLU and pooling, and a linear layer; for square grey images.
    Convnet,
    /// A decoder-only transformer; for text.
    Transformer {
        /// Blocks, 1 or more. Default 4.
        layers: usize,
        /// Heads of each attention, 1 or more. Default 4.
        heads: usize,
        /// Values of a token between blocks: 16, 32, 64 or 128 times `heads`. Default 128.
        width: usize,
        /// Keep only the inputs of blocks, and recompute each block in the backward pass. Default false.
        checkpoint_activations: bool,
    },
    /// A weight for each id of a sparse table, and a bias; two classes.
    Logistic,
    /// Matrix factorisation with biases; for ratings.
    Mf {
        /// The factor of the rows' squares in the loss, from 0. Default 0.
        l2: f32,
    },
    /// A factorisation machine of degree 2 over all ids.
    Fm {
        /// The factor of the squares of each used weight and factor in the loss, from 0. Default 0.
        l2: f32,
    },
    /// Products of user and item rows, softmax cross-entropy among the items of a minibatch; for ratings.
    TwoTower {
        /// The first factor of the products, above 0. It is learned. Default 1.
        scale: f32,
    },
    /// A weight for each id, and layers over the fields' rows; two classes.
    WideDeep {
        /// Widths of the hidden layers.
        hidden: Vec<usize>,
    },
    /// Layers over the plain values, products of the fields' rows, layers over these; two classes.
    Dlrm {
        /// Widths of the hidden layers over the plain values.
        bottom: Vec<usize>,
        /// Widths of the hidden layers over the products.
        top: Vec<usize>,
    },
}

/// Options of models with a penalty.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Penalty {
    #[serde(default)]
    l2: f32,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct OfTowers {
    #[serde(default = "one")]
    scale: f32,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct OfDlrm {
    bottom: Vec<usize>,
    top: Vec<usize>,
}

/// Options of models that are a list of widths.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Widths {
    hidden: Vec<usize>,
}

/// The options of a transformer.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct OfTransformer {
    #[serde(default = "four")]
    layers: usize,
    #[serde(default = "four")]
    heads: usize,
    #[serde(default = "width")]
    width: usize,
    #[serde(default)]
    checkpoint_activations: bool,
}

paraft_common::kinds!(ModelConfig {
    "logistic-regression" => |_: NoOptions| Self::LogisticRegression,
    "mlp" => |o: Widths| Self::Mlp { hidden: o.hidden },
    "autoencoder" => |o: Widths| Self::Autoencoder { hidden: o.hidden },
    "convnet" => |_: NoOptions| Self::Convnet,
    "transformer" => |o: OfTransformer| {
        let OfTransformer { layers, heads, width, checkpoint_activations } = o;
        Self::Transformer { layers, heads, width, checkpoint_activations }
    },
    "logistic" => |_: NoOptions| Self::Logistic,
    "mf" => |o: Penalty| Self::Mf { l2: o.l2 },
    "fm" => |o: Penalty| Self::Fm { l2: o.l2 },
    "two-tower" => |o: OfTowers| Self::TwoTower { scale: o.scale },
    "wide-deep" => |o: Widths| Self::WideDeep { hidden: o.hidden },
    "dlrm" => |o: OfDlrm| Self::Dlrm { bottom: o.bottom, top: o.top },
});

fn one() -> f32 {
    1.0
}

fn four() -> usize {
    4
}

fn width() -> usize {
    128
}

/// The shape of the data, as a model needs it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataShape {
    /// The kind of a sample.
    pub sample: Sample,
    /// All labels are below this number; `None`: no labels, or numbers to predict.
    pub classes: Option<usize>,
}

impl ModelConfig {
    /// The name in the job file.
    pub fn name(&self) -> &'static str {
        match self {
            Self::LogisticRegression => "logistic-regression",
            Self::Mlp { .. } => "mlp",
            Self::Autoencoder { .. } => "autoencoder",
            Self::Convnet => "convnet",
            Self::Transformer { .. } => "transformer",
            Self::Logistic => "logistic",
            Self::Mf { .. } => "mf",
            Self::Fm { .. } => "fm",
            Self::TwoTower { .. } => "two-tower",
            Self::WideDeep { .. } => "wide-deep",
            Self::Dlrm { .. } => "dlrm",
        }
    }

    /// The model for this data, on one CPU thread. An error says what does not fit.
    pub fn build(&self, data: DataShape) -> Result<Box<dyn Model>, ModelError> {
        self.build_with(1, data)
    }

    /// Likewise on several threads, which it starts. Fails also if they cannot start.
    pub fn build_with(&self, threads: usize, data: DataShape) -> Result<Box<dyn Model>, ModelError> {
        let device = CpuDevice::with(Threads::new(Cpu::detect(), threads)?);
        let net = self.net(&device, data)?;
        Ok(Box::new(OnCpu::on(net, device)))
    }

    /// Likewise on a GPU. Fails also if a requirement of the GPU is missing.
    pub fn build_on(&self, gpu: CudaOptions, data: DataShape) -> Result<Box<dyn Model>, ModelError> {
        Ok(Box::new(OnCuda::new(gpu, |device| self.net(device, data))?))
    }

    /// Likewise for a process with some layers at a time: `keep` says how many of their parameters stay on the GPU.
    pub fn build_layered(
        &self,
        gpu: CudaOptions,
        keep: impl FnOnce(&[Layer]) -> Keep,
        data: DataShape,
    ) -> Result<Box<dyn Model>, ModelError> {
        Ok(Box::new(Layered::new(gpu, keep, |device| self.net(device, data))?))
    }

    /// The model as a net for a device.
    pub fn net<D: Device + 'static>(&self, device: &D, data: DataShape) -> Result<Box<dyn Net<D>>, ModelError>
    where
        D::Values: Send,
        D::Floats: Send,
        D::Ids: Send,
        D::Images: Send,
        D::ConvBlock: Send,
    {
        let values = || match data.sample {
            Sample::Values(0) => Err(ModelError::new("the data's samples have no values")),
            Sample::Values(len) => Ok(len),
            Sample::Tokens { .. } => Err(ModelError::new(format!(
                "{} takes values, and the data is text; use [model] kind = \"transformer\"",
                self.name()
            ))),
        };
        let classes = || match data.classes {
            Some(c) if c >= 2 => Ok(c),
            Some(c) => {
                Err(ModelError::new(format!("{} needs two classes or more, the data has {c}", self.name())))
            }
            None => Err(ModelError::new(format!(
                "{} classifies, but the data has no labels that are classes; take data with classes, mlp for numbers \
                 to predict, or the autoencoder",
                self.name()
            ))),
        };
        Ok(match self {
            Self::LogisticRegression => Box::new(Classifier::linear(values()?, classes()?)?),
            Self::Mlp { hidden } if data.classes.is_none() => Box::new(Regressor::mlp(values()?, hidden)?),
            Self::Mlp { hidden } => Box::new(Classifier::mlp(values()?, hidden, classes()?)?),
            Self::Autoencoder { hidden } => Box::new(Regressor::autoencoder(values()?, hidden)?),
            Self::Convnet => Box::new(ConvNet::new(device, values()?, classes()?)?),
            Self::Transformer { layers, heads, width, checkpoint_activations } => {
                let Sample::Tokens { time, vocab } = data.sample else {
                    let why = "a transformer takes tokens; use [data] kind = \"text\"";
                    return Err(ModelError::new(why));
                };
                let (layers, heads, width) = (*layers, *heads, *width);
                let checkpoint_activations = *checkpoint_activations;
                let shape = TransformerShape { time, vocab, layers, heads, width, checkpoint_activations };
                Box::new(Transformer::new(shape)?)
            }
            Self::Logistic
            | Self::Mf { .. }
            | Self::Fm { .. }
            | Self::TwoTower { .. }
            | Self::WideDeep { .. }
            | Self::Dlrm { .. } => {
                return Err(ModelError::new("its rows are in sparse tables, on the servers of its job"));
            }
        })
    }
}
