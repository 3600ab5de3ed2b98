//! The rows of a push, and how they are written: their ids, rising, then the values of each.
//!
//! ```text
//!  | id 1, u64 | ... | id n | values of row 1, f32 | ... | of row n |       little-endian
//! ```

use super::TableSpec;
use crate::payload::Payload;
use bytes::Bytes;

/// Bytes of an id.
pub const ID_BYTES: usize = 8;

/// Rows of one partition: ids, rising, and values. Shares the payload's memory.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rows {
    bytes: Bytes,
    count: usize,
    dim: usize,
}

/// Why a payload holds no rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RowsError {
    /// Its length is none of whole rows.
    #[error("{got} bytes are no whole number of rows of 8 bytes for the id and {dim} values of 4 bytes")]
    Length {
        /// Bytes that came.
        got: usize,
        /// Values of a row.
        dim: usize,
    },
    /// The ids do not rise.
    #[error(
        "row {at} has id {id}, which is not above the one before: a push names each id once, in rising order"
    )]
    Order {
        /// The row, from 0.
        at: usize,
        /// Its id.
        id: u64,
    },
    /// The id belongs to another partition.
    #[error("id {id} belongs to partition {of}, not to {partition}")]
    Partition {
        /// The id.
        id: u64,
        /// Its partition.
        of: u32,
        /// The partition that was pushed.
        partition: u32,
    },
}

impl Rows {
    /// Reads the rows of a partition, and checks everything but the values.
    ///
    /// # Errors
    /// See [`RowsError`].
    pub fn read(payload: &Payload, table: &TableSpec, partition: u32) -> Result<Self, RowsError> {
        let rows = Self::of(payload, table.dim)?;
        let mut before = None;
        for (at, id) in rows.ids().enumerate() {
            if before.is_some_and(|before| before >= id) {
                return Err(RowsError::Order { at, id });
            }
            let of = table.partition_of(id);
            if of != partition {
                return Err(RowsError::Partition { id, of, partition });
            }
            before = Some(id);
        }
        Ok(rows)
    }

    /// As [`Self::read`], of a payload that was checked before.
    pub fn of(payload: &Payload, dim: usize) -> Result<Self, RowsError> {
        let (got, row) = (payload.len(), ID_BYTES + 4 * dim);
        if got % row != 0 {
            return Err(RowsError::Length { got, dim });
        }
        Ok(Self { bytes: payload.to_bytes(), count: got / row, dim })
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.count
    }

    /// Bytes of ids and values.
    pub fn bytes(&self) -> usize {
        self.bytes.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    fn id_words(&self) -> &[[u8; ID_BYTES]] {
        self.bytes[..self.count * ID_BYTES].as_chunks().0
    }

    fn words(&self) -> &[[u8; 4]] {
        self.bytes[self.count * ID_BYTES..].as_chunks().0
    }

    /// The ids, rising.
    pub fn ids(&self) -> impl ExactSizeIterator<Item = u64> + '_ {
        self.id_words().iter().map(|word| u64::from_le_bytes(*word))
    }

    /// The values of each row, as they were written.
    pub fn values(&self) -> impl ExactSizeIterator<Item = &[[u8; 4]]> {
        self.words().chunks_exact(self.dim.max(1))
    }

    /// Whether all values are finite.
    pub fn all_finite(&self) -> bool {
        self.words().iter().all(|word| f32::from_le_bytes(*word).is_finite())
    }

    /// The sum of the squares of all values, added in their order.
    pub fn sum_of_squares(&self) -> f64 {
        self.words().iter().map(|word| f64::from(f32::from_le_bytes(*word)).powi(2)).sum()
    }

    /// The sum of several pushes, each row's values added in the order of the pushes.
    pub fn sum(pushes: &[Rows]) -> Payload {
        let dim = pushes.first().map_or(0, |p| p.dim);
        let (mut ids, mut values) = (Vec::new(), Vec::new());
        let mut rest: Vec<_> = pushes.iter().map(|p| p.ids().zip(p.values()).peekable()).collect();
        while let Some(id) = rest.iter_mut().filter_map(|r| r.peek().map(|(id, _)| *id)).min() {
            let at = values.len();
            ids.push(id);
            for push in &mut rest {
                let Some((_, row)) = push.next_if(|(other, _)| *other == id) else { continue };
                let row = row.iter().map(|word| f32::from_le_bytes(*word));
                if values.len() == at {
                    values.extend(row);
                } else {
                    values[at..].iter_mut().zip(row).for_each(|(sum, v)| *sum += v);
                }
            }
        }
        put_rows(&ids, &values, dim)
    }
}

/// Writes rows: ids, rising, and `dim` values for each.
///
/// # Panics
/// If there are not `dim` values for each id.
pub fn put_rows(ids: &[u64], values: &[f32], dim: usize) -> Payload {
    assert_eq!(ids.len() * dim, values.len());
    let mut bytes = Vec::with_capacity(ids.len() * (ID_BYTES + 4 * dim));
    bytes.extend(ids.iter().flat_map(|id| id.to_le_bytes()));
    bytes.extend(values.iter().flat_map(|v| v.to_le_bytes()));
    bytes.into()
}
