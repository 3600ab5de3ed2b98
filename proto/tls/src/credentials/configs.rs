//! rustls's configurations for a certificate.

use crate::{
    authority::{CERT, KEY},
    verify::{ClientVerifier, Expected, ServerVerifier},
};
use rustls::{
    ClientConfig, RootCertStore, ServerConfig,
    client::Resumption,
    crypto::{CryptoProvider, ring},
    pki_types::{CertificateDer, PrivateKeyDer},
    server::NoServerSessionStorage,
    version::TLS13,
};
use std::sync::{Arc, OnceLock};

/// AES-128 if the processor has it, which is fastest there and strong enough; else ChaCha20.
fn provider() -> Arc<CryptoProvider> {
    static PROVIDER: OnceLock<Arc<CryptoProvider>> = OnceLock::new();
    let make = || {
        use ring::cipher_suite::{
            TLS13_AES_128_GCM_SHA256, TLS13_AES_256_GCM_SHA384, TLS13_CHACHA20_POLY1305_SHA256,
        };
        let mut provider = ring::default_provider();
        provider.cipher_suites =
            vec![TLS13_AES_128_GCM_SHA256, TLS13_AES_256_GCM_SHA384, TLS13_CHACHA20_POLY1305_SHA256];
        #[cfg(target_arch = "x86_64")]
        if !std::arch::is_x86_feature_detected!("aes") {
            provider.cipher_suites.rotate_right(1);
        }
        Arc::new(provider)
    };
    PROVIDER.get_or_init(make).clone()
}

pub(super) fn server_config(
    chain: &[CertificateDer<'static>],
    key: &PrivateKeyDer<'static>,
    roots: &Arc<RootCertStore>,
    expected: Expected,
) -> Result<ServerConfig, String> {
    let dialling = ClientVerifier::new(roots.clone(), provider(), expected)?;
    let mut config = ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])
        .map_err(|e| e.to_string())?
        .with_client_cert_verifier(Arc::new(dialling))
        .with_single_cert(chain.to_vec(), key.clone_key())
        .map_err(|e| format!("{CERT} and {KEY}: {e}"))?;
    // A resumed session would not show its certificate.
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    config.enable_secret_extraction = true; // for our records (`record`)
    Ok(config)
}

pub(super) fn client_config(
    chain: &[CertificateDer<'static>],
    key: &PrivateKeyDer<'static>,
    roots: &Arc<RootCertStore>,
    expected: Expected,
) -> Result<ClientConfig, String> {
    let dialled = ServerVerifier { roots: roots.clone(), provider: provider(), expected };
    let mut config = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])
        .map_err(|e| e.to_string())?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(dialled))
        .with_client_auth_cert(chain.to_vec(), key.clone_key())
        .map_err(|e| format!("{CERT} and {KEY}: {e}"))?;
    config.resumption = Resumption::disabled();
    config.enable_sni = false;
    config.enable_secret_extraction = true;
    Ok(config)
}
