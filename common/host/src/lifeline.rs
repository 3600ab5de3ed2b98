//! A launched process ends with its launcher, however that ends.
//!
//! The launcher holds the other end of the child's standard input and never writes after the first line. When
//! it exits, or is killed, the kernel closes the pipe, and the child reads the end of the file. Needs no
//! signal, no privilege and no unsafe code.

use std::{io::Read, thread};

/// Exit code of a process whose launcher is gone: as if it had got SIGTERM.
pub const ORPHANED: i32 = 143;

/// Ends this process when standard input does. Call it once, after the first line was read.
pub fn end_with_launcher() {
    end_with(std::io::stdin());
}

/// Ends this process when this does.
pub fn end_with(mut pipe: impl Read + Send + 'static) {
    let watch = move || {
        let mut sink = [0u8; 256];
        loop {
            match pipe.read(&mut sink) {
                Ok(0) => break,
                Ok(_) => {}
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                Err(_) => break,
            }
        }
        std::process::exit(ORPHANED);
    };
    if let Err(e) = thread::Builder::new().name("lifeline".into()).spawn(watch) {
        tracing::error!(error = %e, "no lifeline thread: this process would outlive its launcher");
        std::process::exit(ORPHANED);
    }
}

/// Resolves on SIGINT, SIGTERM or SIGUSR1, by which engines say that the time is nearly up, with the signal's number.
pub async fn terminated() -> i32 {
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        let [int, term, user] =
            [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::user_defined1()].map(signal);
        if let (Ok(mut int), Ok(mut term), Ok(mut user)) = (int, term, user) {
            let user_number = SignalKind::user_defined1().as_raw_value();
            return tokio::select! { _ = int.recv() => 2, _ = term.recv() => 15, _ = user.recv() => user_number };
        }
    }
    let _ = tokio::signal::ctrl_c().await;
    2
}
