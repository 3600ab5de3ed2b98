//! The token of the page.

use std::{
    fmt,
    fs::File,
    io::{self, Read},
};

/// The environment variable with the token. All servers of a fleet share it, so a page that loses one
/// server continues with another.
pub const TOKEN: &str = "PARAFT_DASHBOARD_TOKEN";

/// Characters of a generated token.
const TOKEN_LENGTH: usize = 32;

/// A client with this token may view and control the fleet.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(String);

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

impl Token {
    /// A token with this text.
    ///
    /// # Errors
    ///
    /// The text is easy to guess, or is not valid in a URL.
    pub fn new(text: &str) -> Result<Self, String> {
        match text.len() >= 16 && text.chars().all(|c| c.is_ascii_alphanumeric()) {
            true => Ok(Self(text.into())),
            false => Err(format!("{TOKEN}: write at least 16 letters and digits")),
        }
    }

    /// The token from the environment, if there is one.
    pub fn given() -> Option<Result<Self, String>> {
        std::env::var(TOKEN).ok().filter(|t| !t.is_empty()).map(|given| Self::new(&given))
    }

    /// A random token.
    ///
    /// # Errors
    ///
    /// The system has no random numbers.
    pub fn draw() -> io::Result<Self> {
        let mut bytes = [0u8; TOKEN_LENGTH / 2];
        File::open("/dev/urandom")?.read_exact(&mut bytes)?;
        Ok(Self(bytes.iter().map(|b| format!("{b:02x}")).collect()))
    }

    /// The link to the page at host:port. Browsers do not send the part after `#`, so no server or
    /// proxy sees the token.
    pub fn link(&self, address: &str) -> String {
        format!("http://{address}/#token={}", self.0)
    }

    /// The token as it is in the link.
    pub fn text(&self) -> &str {
        &self.0
    }

    /// Compares in constant time.
    pub(super) fn is(&self, shown: &str) -> bool {
        let differ = self.0.bytes().zip(shown.bytes()).fold(0, |all, (a, b)| all | (a ^ b));
        self.0.len() == shown.len() && differ == 0
    }
}
