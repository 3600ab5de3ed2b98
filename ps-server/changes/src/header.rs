//! Headers: the small values (log ids, votes, commands, folder metadata) that go to disk and between servers
//! beside the bulk, which is never copied byte by byte.
//!
//! One byte of format, then bincode in its legacy layout. Only this file names bincode: another encoding
//! would be a new format here. Every decode has a limit, and consumes all bytes or none.

use serde::{Serialize, de::DeserializeOwned};

/// The written format. Any other is refused.
pub const FORMAT: u8 = 1;

/// The longest header: the snapshot of a job with very many buckets or members.
const MAX_BYTES: usize = 64 << 20;

/// Why bytes are not a header of this version.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum HeaderError {
    /// There are no bytes.
    #[error("a header is empty")]
    Empty,
    /// Written by another version of Paraft.
    #[error("a header has format {0}, this version of paraft reads format {FORMAT}")]
    Format(u8),
    /// It names something of a later version, for example a kind of command.
    #[error("a later version of paraft wrote this, start the version that wrote it: {0}")]
    Newer(String),
    /// It ends early, has an impossible value, or has trailing bytes.
    #[error("a header cannot be read: {0}")]
    Damaged(String),
    /// The value has no such form.
    #[error("a header cannot be written: {0}")]
    Unwritable(String),
}

/// Encodes a header.
pub fn encode<T: Serialize>(value: &T) -> Result<Vec<u8>, HeaderError> {
    let mut bytes = vec![FORMAT];
    bincode::serde::encode_into_std_write(value, &mut bytes, bincode::config::legacy())
        .map_err(|e| HeaderError::Unwritable(e.to_string()))?;
    Ok(bytes)
}

/// Decodes a header; trailing bytes are an error.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, HeaderError> {
    let (format, rest) = bytes.split_first().ok_or(HeaderError::Empty)?;
    if *format != FORMAT {
        return Err(HeaderError::Format(*format));
    }
    let config = bincode::config::legacy().with_limit::<MAX_BYTES>();
    match bincode::serde::decode_from_slice(rest, config) {
        Ok((value, used)) if used == rest.len() => Ok(value),
        Ok((_, used)) => Err(HeaderError::Damaged(format!("{} bytes too many", rest.len() - used))),
        Err(e) => {
            let why = e.to_string();
            // serde's text for an unknown variant of an enum. The bytes were checked before they arrive here.
            Err(if why.contains("variant index") {
                HeaderError::Newer(why)
            } else {
                HeaderError::Damaged(why)
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_whole_or_of_another_format_is_refused() {
        let bytes = encode(&(7u64, "a")).expect("encodes");
        assert_eq!(decode(&bytes), Ok((7u64, "a".to_string())));
        for cut in 0..bytes.len() {
            assert!(decode::<(u64, String)>(&bytes[..cut]).is_err(), "cut at {cut}");
        }
        let long = [&bytes[..], &[0]].concat();
        assert!(matches!(decode::<(u64, String)>(&long), Err(HeaderError::Damaged(_))));
        let other = [&[FORMAT + 1], &bytes[1..]].concat();
        assert_eq!(decode::<(u64, String)>(&other), Err(HeaderError::Format(FORMAT + 1)));
        // A length that would take all memory.
        let huge = [&[FORMAT], &u64::MAX.to_le_bytes()[..]].concat();
        assert!(matches!(decode::<Vec<u8>>(&huge), Err(HeaderError::Damaged(_))));
    }
}
