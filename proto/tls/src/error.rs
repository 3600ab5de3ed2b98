//! Why a connection under TLS failed.

use rustls::{AlertDescription, CertificateError, Error};
use std::io;

/// Why a TLS connection failed.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// The peer refuses us.
    #[error(
        "the other side refuses our certificate ({0}): it is of another authority, has ended, or is for something else; `paraft \
         certs show` says what it is"
    )]
    Refused(String),
    /// We refuse the peer.
    #[error("the certificate of the other side is not taken: {0}")]
    NotTaken(String),
    /// It uses plain text.
    #[error("the other side does not speak TLS: it was started with --insecure, or is nothing of Paraft's")]
    Plain,
    /// Something else.
    #[error("TLS: {0}")]
    Broken(String),
    /// The socket.
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl TlsError {
    /// The error of the peer's alert.
    pub(crate) fn of_alert(alert: AlertDescription) -> Self {
        use AlertDescription as A;
        match alert {
            A::BadCertificate
            | A::UnsupportedCertificate
            | A::CertificateRevoked
            | A::CertificateExpired
            | A::CertificateUnknown
            | A::UnknownCA
            | A::AccessDenied
            | A::CertificateRequired
            | A::DecryptError => Self::Refused(format!("{alert:?}")),
            other => Self::Broken(format!("the other side has ended it: {other:?}")),
        }
    }
}

impl From<Error> for TlsError {
    fn from(e: Error) -> Self {
        match e {
            Error::AlertReceived(alert) => Self::of_alert(alert),
            Error::InvalidCertificate(why) => Self::NotTaken(match why {
                CertificateError::UnknownIssuer => "it is of an authority that is not trusted here".into(),
                why => why.to_string(),
            }),
            Error::NoCertificatesPresented => Self::NotTaken("it shows none".into()),
            Error::InvalidMessage(_) => Self::Plain,
            other => Self::Broken(other.to_string()),
        }
    }
}

impl From<TlsError> for io::Error {
    fn from(e: TlsError) -> Self {
        match e {
            TlsError::Io(e) => e,
            // Another try would give the same error.
            refused @ (TlsError::Refused(_) | TlsError::NotTaken(_) | TlsError::Plain) => {
                io::Error::new(io::ErrorKind::PermissionDenied, refused)
            }
            broken @ TlsError::Broken(_) => io::Error::new(io::ErrorKind::InvalidData, broken),
        }
    }
}
