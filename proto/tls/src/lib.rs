//! Who may speak to whom: certificates that name a role, and connections under TLS 1.3.
//!
//! There is one mechanism. A fleet has an authority; a certificate that it signed says what its holder may do ([`Role`]) and until
//! when, and both ends of every connection show one. Names of hosts are not looked at: a node that is replaced needs no new
//! certificate. Over a Unix socket the kernel says whose process the other one is, and no certificate is asked for.
//!
//! - [`role`]: roles, what each may do, and how a certificate names them. Pure.
//! - [`authority`]: makes certificates, and writes them where only their owner reads them.
//! - [`credentials`]: a folder with a certificate, its key and the authorities that are trusted; read again when it changes.
//! - [`access`]: how a process comes by connections: under TLS, in plain text, or only within its host.
//! - `verify`: whose certificate is taken.
//! - `handshake`, by rustls, and `record`: how a connection begins and goes on, without a socket; `incoming`: what has come over one.
//! - `refusals`: who does not take us, and why.
//! - [`stream`]: a connection for tokio; [`blocking`]: one for threads that wait. [`listen`]: a port of a process that is no server.
//!
//! Which request needs which role is not decided here, but by who serves it (`paraft_server::rpc::rights`).

pub mod access;
pub mod authority;
pub mod blocking;
pub mod credentials;
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
pub use handshake::TlsError;
pub use refusals::{Noted, refusal};
pub use role::{Need, Rights, Role};
pub use stream::{Stream, Wire};
