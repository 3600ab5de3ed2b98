//! The start of a connection: rustls's handshake over our buffers, without a socket. Afterwards `record`
//! handles the records.

use crate::{
    credentials::Credentials,
    error::TlsError,
    record::{HANDSHAKE, Keys, Opener, Outbox, Sealer, Side},
    role::Rights,
    verify::Expected,
};
use rustls::{
    Error,
    client::UnbufferedClientConnection,
    pki_types::ServerName,
    server::UnbufferedServerConnection,
    unbuffered::{ConnectionState, EncodeError, UnbufferedStatus},
};
use std::io;

// Both exist only during the handshake.
#[allow(clippy::large_enum_variant)]
enum End {
    Dialled(UnbufferedClientConnection),
    Accepted(UnbufferedServerConnection),
}

/// A handshake in progress. See the module.
pub(crate) struct Handshake {
    end: End,
    /// Bytes for the peer.
    pub out: Outbox,
    /// Something has arrived.
    begun: bool,
}

enum Step {
    Again,
    /// `true`: the handshake is over.
    Stop(bool),
    /// The peer has closed the connection.
    Left,
}

/// One step; the number of consumed bytes, even after an error.
fn step<D>(
    status: UnbufferedStatus<'_, '_, D>,
    out: &mut Outbox,
    hear: &mut dyn FnMut(&[u8]),
) -> (usize, Result<Step, Error>) {
    let discard = status.discard;
    let work = || {
        Ok(match status.state? {
            // Bytes that the peer has sent after its part of the handshake.
            ConnectionState::ReadTraffic(mut traffic) => {
                while let Some(record) = traffic.next_record() {
                    hear(record?.payload);
                }
                Step::Again
            }
            ConnectionState::EncodeTlsData(mut data) => {
                let encoded = match data.encode(&mut []) {
                    Err(EncodeError::InsufficientSize(needs)) => data.encode(out.room(needs.required_size)),
                    other => other,
                };
                out.filled(encoded.map_err(|e| Error::General(e.to_string()))?);
                Step::Again
            }
            // They go out in the order of `out`.
            ConnectionState::TransmitTlsData(data) => {
                data.done();
                Step::Again
            }
            ConnectionState::WriteTraffic(_) => Step::Stop(true),
            ConnectionState::BlockedHandshake => Step::Stop(false),
            ConnectionState::PeerClosed => Step::Left,
            other => return Err(Error::General(format!("{other:?} during the handshake"))),
        })
    };
    let stepped = work();
    (discard, stepped)
}

impl Handshake {
    /// For an outgoing connection.
    pub fn dials(credentials: &Credentials, to: &Expected) -> Result<Self, TlsError> {
        let config = credentials.dials(to).map_err(TlsError::Broken)?;
        let name = ServerName::try_from(crate::authority::SERVER_NAME)
            .map_err(|e| TlsError::Broken(e.to_string()))?;
        let end = End::Dialled(UnbufferedClientConnection::new(config, name)?);
        Ok(Self { end, out: Outbox::default(), begun: false })
    }

    /// For an incoming connection.
    pub fn accepts(credentials: &Credentials, from: &Expected, http1: bool) -> Result<Self, TlsError> {
        let config = credentials.accepts(from, http1).map_err(TlsError::Broken)?;
        let end = End::Accepted(UnbufferedServerConnection::new(config)?);
        Ok(Self { end, out: Outbox::default(), begun: false })
    }

    /// Whether these first bytes are plain text: then no answer in records makes sense.
    pub fn begins_plain(&mut self, came: &[u8]) -> bool {
        let Some(kind) = came.first().filter(|_| !self.begun) else { return false };
        self.begun = true;
        matches!(self.end, End::Accepted(_)) && *kind != HANDSHAKE
    }

    /// The peer's rights, once the handshake is over.
    pub fn rights(&self) -> Result<Rights, TlsError> {
        let shown = match &self.end {
            End::Dialled(c) => c.peer_certificates(),
            End::Accepted(c) => c.peer_certificates(),
        };
        let cert = shown.and_then(|c| c.first()).ok_or_else(|| TlsError::NotTaken("it shows none".into()))?;
        Rights::of_certificate(cert).map_err(TlsError::NotTaken)
    }

    /// Reads all bytes that have arrived and are not consumed; `hear` receives the data after the handshake.
    /// Returns the number of consumed bytes, and whether the handshake is over once `out` is sent. After an
    /// error, `out` tells the peer why.
    pub fn read(&mut self, came: &mut [u8], hear: &mut dyn FnMut(&[u8])) -> Result<(usize, bool), TlsError> {
        let mut used = 0;
        loop {
            let (n, stepped) = self.step(&mut came[used..], hear);
            used += n;
            match stepped {
                Ok(Step::Again) => {}
                Ok(Step::Stop(over)) => return Ok((used, over)),
                Ok(Step::Left) => return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
                Err(e) => {
                    // The next call produces the alert for the peer; a further one returns the same error.
                    let _ = self.step(&mut came[used..], hear);
                    return Err(e.into());
                }
            }
        }
    }

    fn step(&mut self, came: &mut [u8], hear: &mut dyn FnMut(&[u8])) -> (usize, Result<Step, Error>) {
        match &mut self.end {
            End::Dialled(c) => step(c.process_tls_records(came), &mut self.out, hear),
            End::Accepted(c) => step(c.process_tls_records(came), &mut self.out, hear),
        }
    }

    /// The records from now on.
    pub fn over(self) -> Result<(Sealer, Opener), TlsError> {
        let (secrets, side) = match self.end {
            End::Dialled(c) => {
                let (secrets, side) = c.dangerous_into_kernel_connection()?;
                (secrets, Side::Dialled(side))
            }
            End::Accepted(c) => {
                let (secrets, side) = c.dangerous_into_kernel_connection()?;
                (secrets, Side::Accepted(side))
            }
        };
        let side = Keys::new(side);
        Ok((Sealer::new(secrets.tx, side.clone(), self.out)?, Opener::new(secrets.rx, side)?))
    }
}
