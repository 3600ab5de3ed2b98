//! Which certificates are accepted: signed by an authority of ours, not expired, and with the expected role.
//! Host names are not checked.

use crate::role::{Need, Rights};
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, OtherError, RootCertStore,
    SignatureScheme,
    client::{
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
        verify_server_cert_signed_by_trust_anchor,
    },
    crypto::{CryptoProvider, verify_tls13_signature},
    pki_types::{CertificateDer, ServerName, UnixTime},
    server::{
        ParsedCertificate, WebPkiClientVerifier,
        danger::{ClientCertVerified, ClientCertVerifier},
    },
};
use std::sync::Arc;

/// Why a correctly signed certificate is refused.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct CertificateFault(String);

fn unfit(why: String) -> Error {
    Error::InvalidCertificate(CertificateError::Other(OtherError(Arc::new(CertificateFault(why)))))
}

fn rights(cert: &CertificateDer<'_>, expected: &Expected) -> Result<(), Error> {
    let rights = Rights::of_certificate(cert).map_err(unfit)?;
    let Expected { need, job } = expected;
    match rights.are_enough_for(*need, job.as_deref()) {
        true => Ok(()),
        false => Err(unfit(format!("it is of {rights}, and not of role {need}"))),
    }
}

/// The expected peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expected {
    /// The need that its certificate must cover.
    pub need: Need,
    /// The job.
    pub job: Option<String>,
}

impl Expected {
    /// A server of the fleet.
    pub const SERVER: Self = Self { need: Need::Peer, job: None };
    /// Any peer with a role.
    pub const ANY_ROLE: Self = Self { need: Need::Any, job: None };

    /// A process that trains this job.
    pub fn worker_of(job: &str) -> Self {
        Self { need: Need::Worker, job: Some(job.into()) }
    }
}

/// Verifies the server of an outgoing connection.
#[derive(Debug)]
pub(crate) struct ServerVerifier {
    pub roots: Arc<RootCertStore>,
    pub provider: Arc<CryptoProvider>,
    pub expected: Expected,
}

impl ServerCertVerifier for ServerVerifier {
    fn verify_server_cert(
        &self,
        cert: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let algorithms = self.provider.signature_verification_algorithms.all;
        let parsed = ParsedCertificate::try_from(cert)?;
        verify_server_cert_signed_by_trust_anchor(&parsed, &self.roots, intermediates, now, algorithms)?;
        rights(cert, &self.expected)?;
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(Error::General("TLS 1.2 is not spoken".into()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

/// Verifies the client of an incoming connection.
#[derive(Debug)]
pub(crate) struct ClientVerifier {
    pub chain: Arc<dyn ClientCertVerifier>,
    pub expected: Expected,
}

impl ClientVerifier {
    /// Signed by one of these authorities.
    pub fn new(
        roots: Arc<RootCertStore>,
        provider: Arc<CryptoProvider>,
        expected: Expected,
    ) -> Result<Self, String> {
        let chain = WebPkiClientVerifier::builder_with_provider(roots, provider);
        Ok(Self { chain: chain.build().map_err(|e| e.to_string())?, expected })
    }
}

impl ClientCertVerifier for ClientVerifier {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.chain.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        cert: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let verified = self.chain.verify_client_cert(cert, intermediates, now)?;
        rights(cert, &self.expected)?;
        Ok(verified)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.chain.verify_tls12_signature(message, cert, dss)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.chain.verify_tls13_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.chain.supported_verify_schemes()
    }
}
