//! Where a server is: `host:port`.

/// Whether this is an address, `host:port`.
///
/// # Errors
/// How one is written, for people.
pub fn check_address(address: &str) -> Result<(), String> {
    let shown: String = address.chars().take(100).collect();
    let parts = address.rsplit_once(':');
    let Some((host, port)) = parts.and_then(|(host, port)| Some((host, port.parse::<u16>().ok()?))) else {
        return Err(format!("`{}` is no address: write host:port", shown.escape_debug()));
    };
    let in_brackets = host.starts_with('[') && host.ends_with(']');
    match host {
        "" => Err(format!("`{}` is no address: write host:port", shown.escape_debug())),
        // The last colon may stand before a port, or be the address's own.
        _ if host.contains(':') && !in_brackets => Err(format!(
            "`{0}` is no address: write IPv6 in brackets, as [{1}]:{port}",
            shown.escape_debug(),
            host.escape_debug()
        )),
        _ if port == 0 => Err(format!("`{}` is no address: a port is 1 to 65535", shown.escape_debug())),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_without_brackets_gets_a_hint() {
        for address in ["h:1", "10.0.0.1:7071", "[::1]:7071", "[fe80::1%eth0]:1", "a.b.c:65535"] {
            assert_eq!(check_address(address), Ok(()), "{address}");
        }
        for (address, word) in [
            ("::1:7071", "[::1]:7071"),
            ("fe80::1:7071", "in brackets"),
            ("h", "host:port"),
            (":1", "host:port"),
            ("[::1]", "host:port"),
            ("h:x", "host:port"),
            ("h:65536", "host:port"),
            ("h:0", "1 to 65535"),
            ("", "host:port"),
        ] {
            let why = check_address(address).expect_err(address);
            assert!(why.contains(word), "{why}");
        }
    }
}
