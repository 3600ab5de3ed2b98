//! HTTP to trackers.

use std::sync::Arc;
use ureq::{
    Agent,
    tls::{Certificate, RootCerts, TlsConfig},
};

/// An HTTP client for this URL. Trusted authorities are those of the system, or of `SSL_CERT_FILE`.
pub(super) fn agent(url: &str) -> Agent {
    let mut config = Agent::config_builder()
        .http_status_as_error(false)
        .user_agent(concat!("paraft/", env!("CARGO_PKG_VERSION")));
    if url.starts_with("https") {
        config = config.tls_config(tls());
    }
    config.build().new_agent()
}

fn tls() -> TlsConfig {
    let roots: Vec<_> = rustls_native_certs::load_native_certs()
        .certs
        .iter()
        .map(|c| Certificate::from_der(c).to_owned())
        .collect();
    TlsConfig::builder()
        .unversioned_rustls_crypto_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .root_certs(RootCerts::new_with_certs(&roots))
        .build()
}
