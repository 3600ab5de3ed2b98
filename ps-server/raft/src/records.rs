//! Conversion between entries and records of a log on disk: the payload is beside the header.

use super::{types::Entry, wire};
use openraft::EntryPayload;
use paraft_common::Payload;
use paraft_store::Record;

/// An entry as it is stored.
pub(super) fn record_of(entry: &Entry) -> Result<Record, wire::WireError> {
    let payload = match &entry.payload {
        EntryPayload::Normal(change) => change.payload().clone(),
        _ => Payload::EMPTY,
    };
    Ok(Record { index: entry.log_id.index, header: wire::encode(entry)?, payload })
}

/// Converts a record back to its entry.
pub(super) fn entry_of(record: Record) -> Result<Entry, wire::WireError> {
    let mut entry: Entry = wire::decode(&record.header)?;
    if entry.log_id.index != record.index {
        return Err(wire::WireError::new(format!(
            "entry {} is stored as {}",
            entry.log_id.index, record.index
        )));
    }
    if let EntryPayload::Normal(change) = &mut entry.payload {
        change.attach(record.payload);
    }
    Ok(entry)
}
