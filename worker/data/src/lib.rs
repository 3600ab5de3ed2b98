//! Training data: reading, sharing, prefetching.
//!
//! ```text
//!  file or embedded --load--> Split { train, test } --+
//!                                                     +--> Prefetcher (a thread) --> batches
//!  Sampler: (seed, epoch, rank, world) --> indices ---+
//! ```
//!
//! A host holds the data once: large data stays in a file, the user's or one of the [`Cache`], and is read batch by
//! batch; small data is in memory.
//!
//! It knows no model and no network. Files come from outside: a malformed one is an error that names the file, the
//! place and what to do, never a panic, and no header makes it allocate more than the file holds.

mod cache;
pub mod config;
mod csv_file;
mod dataset;
mod digest;
mod digits;
mod error;
mod idx;
mod input;
pub mod metrics;
mod prefetch;
mod sampler;
mod sparse;
mod text;
mod values;

pub use cache::Cache;
pub use config::DataConfig;
pub use csv_file::{Column, CsvOptions, LabelColumn, Task, read_csv};
pub use dataset::{Dataset, Samples, Split};
pub use digest::DataDigest;
pub use digits::digits;
pub use error::{DataError, Place};
pub use idx::{read_idx_folder, read_idx_pair};
pub use prefetch::{Minibatch, Prefetcher};
pub use sampler::{Batches, Sampler, chunk_of};
pub use sparse::config::SparseSplit;
pub use sparse::{Field, SparseBatch, SparseDataset};
pub use sparse::{clicks::Clicks, clicks::ClicksOptions, criteo::read_criteo, hashing::Hashing};
pub use sparse::{libsvm::read_libsvm, ratings::Ids, ratings::read_ratings};
pub use sparse::{vowpal::VowpalHash, vowpal::VowpalOptions, vowpal::read_vowpal};
pub use text::TextCorpus;
pub use values::FileValues;
