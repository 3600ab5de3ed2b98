//! A snapshot in Raft's format: bytes.

use bytes::Bytes;
use paraft_common::Payload;
use std::{fmt, sync::Arc};
use xxhash_rust::xxh3::Xxh3;

/// A part of an image that is read from the live state when it is needed, as it was at the image's index.
pub trait LazyPart: fmt::Debug + Send + Sync {
    /// Its length in bytes.
    fn bytes(&self) -> usize;
    /// Its content.
    fn read(&self) -> Bytes;
}

/// A part of an image's bulk. Once it is dropped, later changes of the state need not keep it.
#[derive(Clone, Debug)]
pub enum ImagePart {
    /// It shares the state's memory, or owns its bytes.
    Ready(Payload),
    /// It is copied when it is read.
    Lazy(Arc<dyn LazyPart>),
}

impl ImagePart {
    /// Its length in bytes.
    pub fn len(&self) -> usize {
        match self {
            Self::Ready(payload) => payload.len(),
            Self::Lazy(part) => part.bytes(),
        }
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Its content.
    pub fn read(&self) -> Payload {
        match self {
            Self::Ready(payload) => payload.clone(),
            Self::Lazy(part) => part.read().into(),
        }
    }
}

impl From<Payload> for ImagePart {
    fn from(payload: Payload) -> Self {
        Self::Ready(payload)
    }
}

impl PartialEq for ImagePart {
    fn eq(&self, other: &Self) -> bool {
        self.len() == other.len() && self.read() == other.read()
    }
}

/// The whole state of a group at one log index. The parts share the live state's memory until it changes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RawImage {
    /// The small part, in its owner's format.
    pub head: Bytes,
    /// The bulk; each part is at most a bucket.
    pub parts: Vec<ImagePart>,
}

impl RawImage {
    /// XXH3 over the whole state: equal on replicas that applied the same log. Each part is released after it is
    /// hashed, so that later changes need not copy it.
    pub fn into_digest(self) -> u64 {
        let mut hash = Xxh3::new();
        let mut add = |part: Payload| {
            part.pieces().iter().for_each(|piece| hash.update(piece));
            hash.update(&(part.len() as u64).to_le_bytes());
        };
        add(self.head.into());
        self.parts.into_iter().for_each(|part| add(part.read()));
        hash.digest()
    }

    /// Bytes of the bulk.
    pub fn bytes(&self) -> u64 {
        self.parts.iter().map(|p| p.len() as u64).sum()
    }
}
