//! Headers: the small things (log ids, votes, commands, who a folder belongs to) that go to disk and between servers
//! beside the bulk, which is never copied byte by byte.
//!
//! One byte of format, then bincode in its legacy layout. The only file that names bincode: what is kept in it can be
//! moved to another encoding here, by its format. Every decode has a limit, and takes all bytes or none.

use serde::{Serialize, de::DeserializeOwned};

/// The format that is written. What has another is refused.
pub const FORMAT: u8 = 1;

/// The longest header: the snapshot of a job with very many buckets or members.
const MAX_BYTES: usize = 64 << 20;

/// Bytes that are no header of this version.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum HeaderError {
    /// Not a byte.
    #[error("a header is empty")]
    Empty,
    /// Written by another version of Paraft.
    #[error("a header has format {0}, this version of paraft reads format {FORMAT}")]
    Format(u8),
    /// It names what a later version has, a kind of command, say.
    #[error("a later version of paraft wrote this, start the version that wrote it: {0}")]
    Newer(String),
    /// It ends early, says what cannot be, or goes on after its end.
    #[error("a header cannot be read: {0}")]
    Damaged(String),
    /// A value that has no such form.
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
            // serde's words for a variant that the enum has not. The bytes were checked before they came here.
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
