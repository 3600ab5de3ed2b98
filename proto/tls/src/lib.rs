//! Which peers may communicate: certificates that name a role, and connections under TLS 1.3.
//!
//! There is one mechanism. A fleet has an authority; a certificate that it signed says what its holder may do
//! ([`Role`]) and until when, and both ends of every connection show one. Host names are not checked: a
//! replaced node needs no new certificate. Over a Unix socket the kernel identifies the peer's user, and no
//! certificate is needed.
//!
//! - [`role`]: roles, what each permits, and how a certificate names them. Pure.
//! - [`authority`]: makes certificates, and writes them readable by their owner only.
//! - [`credentials`]: a folder with a certificate, its key and the trusted authorities; read again when it
//!   changes.
//! - [`access`]: how a process makes connections: under TLS, in plain text, or only within its host.
//! - `verify`: which certificates are accepted.
//! - `handshake`, by rustls, and `record`: the start of a connection and its records, without a socket;
//!   `incoming`: its received bytes.
//! - `refusals`: which servers refuse us, and why.
//! - [`stream`]: a connection for tokio; [`blocking`]: one for threads that wait. [`listen`]: a port of a
//!   process that is not a server.
//!
//! The services themselves decide which request needs which role (`paraft_server::rpc::rights`).

pub mod access;
pub mod authority;
pub mod blocking;
pub mod credentials;
mod error;
mod handshake;
mod incoming;
pub mod listen;
mod record;
mod refusals;
pub mod role;
pub mod stream;
mod verify;

pub use access::Access;
pub use credentials::{Credentials, CredentialsError};
pub use error::TlsError;
pub use refusals::{NotedConnection, refusal};
pub use role::{Need, Rights, Role};
pub use stream::{Stream, Wire};
