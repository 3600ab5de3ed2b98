//! The start of a lane: the client names its purpose, and the server repeats it.

use crate::LaneError;
use std::io::ErrorKind;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// The purpose of a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// A worker's stream to a shard, as `Shards.Exchange`.
    Exchange,
    /// A leader's appends to a follower, as `Peers.Append`.
    Append,
}

impl Purpose {
    /// All purposes.
    pub const ALL: [Self; 2] = [Self::Exchange, Self::Append];

    /// The first bytes of a lane; as many as in HTTP/2's preface, so that a listener reads the same number of
    /// any connection.
    pub const fn preface(self) -> &'static [u8; 24] {
        match self {
            Self::Exchange => b"PARAFT-LANE/1 exchange\r\n",
            Self::Append => b"PARAFT-LANE/1 append  \r\n",
        }
    }

    /// The purpose of these first bytes; `None`: something else.
    pub fn of(preface: &[u8; 24]) -> Option<Self> {
        Self::ALL.into_iter().find(|p| p.preface() == preface)
    }
}

/// The answer if plain text is refused.
pub const ONLY_TLS: &[u8; 24] = b"PARAFT-LANE/1 only TLS\r\n";
/// The answer to a client whose certificate lacks the right.
pub const DENIED: &[u8; 24] = b"PARAFT-LANE/1 denied  \r\n";

/// Starts a lane on a new connection.
///
/// # Errors
/// [`LaneError::NoLanes`] if the server answers with anything else, or closes; [`LaneError::Refused`] if it
/// refuses us.
pub async fn dial(
    socket: &mut (impl AsyncRead + AsyncWrite + Unpin),
    purpose: Purpose,
) -> Result<(), LaneError> {
    socket.write_all(purpose.preface()).await?;
    let mut answer = [0; 24];
    match socket.read_exact(&mut answer).await {
        Ok(_) if answer == *purpose.preface() => Ok(()),
        Ok(_) if answer == *ONLY_TLS => Err(LaneError::Refused(paraft_tls::access::ONLY_TLS.into())),
        Ok(_) if answer == *DENIED => Err(LaneError::Refused(paraft_tls::access::DENIED.into())),
        Ok(_) => Err(LaneError::NoLanes),
        Err(e)
            if matches!(
                e.kind(),
                ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe
            ) =>
        {
            Err(LaneError::NoLanes)
        }
        Err(e) if e.kind() == ErrorKind::PermissionDenied => Err(LaneError::Refused(e.to_string())),
        Err(e) => Err(e.into()),
    }
}

/// Answers a client whose first bytes were read.
///
/// # Errors
/// The socket's.
pub async fn answer(socket: &mut (impl AsyncWrite + Unpin), purpose: Purpose) -> Result<(), LaneError> {
    Ok(socket.write_all(purpose.preface()).await?)
}
