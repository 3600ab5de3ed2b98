//! The model part of a job file.

use crate::{Autoencoder, Classifier, ConvNet, Model, ModelError, Net, OnCpu};
use paraft_compute::{CpuDevice, Device};
use serde::{Deserialize, Serialize};

/// Which model, and what of its shape the data does not decide.
///
/// ```
/// use paraft_models::ModelConfig;
/// let mlp = ModelConfig::Mlp { hidden: vec![256, 128] };
/// let model = mlp.build(784, Some(10)).unwrap();
/// assert_eq!(model.tensors().len(), 6);
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case", deny_unknown_fields)]
pub enum ModelConfig {
    /// One linear layer and softmax cross-entropy.
    LogisticRegression,
    /// Linear layers with ReLUs between, softmax cross-entropy.
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
}

impl ModelConfig {
    /// The name in the job file.
    pub fn name(&self) -> &'static str {
        match self {
            Self::LogisticRegression => "logistic-regression",
            Self::Mlp { .. } => "mlp",
            Self::Autoencoder { .. } => "autoencoder",
            Self::Convnet => "convnet",
        }
    }

    /// The model for samples of `input_len` values and, where the data has labels, this many classes, on the CPU.
    ///
    /// An error says what of the data or of the configuration does not fit.
    pub fn build(&self, input_len: usize, classes: Option<usize>) -> Result<Box<dyn Model>, ModelError> {
        let device = CpuDevice::default();
        let net = self.net(&device, input_len, classes)?;
        Ok(Box::new(OnCpu::on(net, device)))
    }

    /// The same as a net for a device.
    pub fn net<D: Device + 'static>(
        &self,
        device: &D,
        input_len: usize,
        classes: Option<usize>,
    ) -> Result<Box<dyn Net<D>>, ModelError>
    where
        D::Values: Send,
        D::Floats: Send,
        D::Ids: Send,
        D::Images: Send,
        D::ConvBlock: Send,
    {
        if input_len == 0 {
            return Err(ModelError::new("the data's samples have no values"));
        }
        let classes = || match classes {
            Some(c) if c >= 2 => Ok(c),
            Some(c) => {
                Err(ModelError(format!("{} needs two classes or more, the data has {c}", self.name())))
            }
            None => Err(ModelError(format!(
                "{} classifies, but the data has no labels; take labelled data or the autoencoder",
                self.name()
            ))),
        };
        Ok(match self {
            Self::LogisticRegression => Box::new(Classifier::linear(input_len, classes()?)?),
            Self::Mlp { hidden } => Box::new(Classifier::mlp(input_len, hidden, classes()?)?),
            Self::Autoencoder { hidden } => Box::new(Autoencoder::new(input_len, hidden)?),
            Self::Convnet => Box::new(ConvNet::new(device, input_len, classes()?)?),
        })
    }
}
