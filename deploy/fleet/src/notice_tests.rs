//! Tests of `notice`.

use super::*;
use std::{io::BufRead, io::BufReader, net::TcpListener};

/// Replies to each request by its method and path.
fn page(answer: fn(&str) -> &'static str) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let at = listener.local_addr().expect("an address");
    thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let mut lines = BufReader::new(stream.try_clone().expect("a stream")).lines();
            let first = lines.next().and_then(Result::ok).unwrap_or_default();
            while lines.next().is_some_and(|l| l.is_ok_and(|l| !l.is_empty())) {}
            let _ = stream.write_all(answer(&first).as_bytes());
        }
    });
    format!("http://{at}/x")
}

#[test]
fn a_page_is_a_notice_when_it_is_there_and_says_something() {
    let is = |url: &str| is_there(&parse(url).expect("right"));
    assert!(!is(&page(|_| "HTTP/1.0 404 Not Found\r\n\r\nno")));
    assert!(!is(&page(|r| if r.starts_with("GET") { "HTTP/1.0 200 OK\r\n\r\nFALSE\n" } else { "" })));
    assert!(is(&page(|r| if r.starts_with("GET") { "HTTP/1.0 200 OK\r\n\r\nTRUE" } else { "" })));
    assert!(!is("http://127.0.0.1:1/x"));
    assert!(parse("https://h/x").is_err());
}

#[test]
fn a_file_is_a_notice_when_it_is_there() {
    let scratch = tempfile::tempdir().expect("scratch");
    let file = scratch.path().join("notice");
    let source = parse(&file.to_string_lossy()).expect("right");
    assert!(!is_there(&source));
    std::fs::write(&file, "").expect("a file");
    assert!(is_there(&source));
}
