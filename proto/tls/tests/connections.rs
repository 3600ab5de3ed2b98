//! Connections over real sockets: which peers are accepted, which are refused with a reason, and that data
//! arrives unchanged.

use paraft_tls::{
    Access, Credentials, Need, Role, Stream, TlsError, access::Expected, authority::Authority, blocking,
};
use std::{
    io::{IoSlice, Read, Write},
    net::{TcpListener as Blocking, TcpStream as BlockingStream},
    sync::Arc,
    time::Duration,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};
use tower::Service;

fn with(authority: &Authority, roles: &[&str], lasting: Duration) -> Arc<Credentials> {
    let roles: Vec<Role> = roles.iter().map(|r| r.parse().expect("a role")).collect();
    let issued = authority.issue("test", &roles, lasting).expect("issued");
    Credentials::of_issued(&issued).expect("good")
}

const DAY: Duration = Duration::from_secs(24 * 3600);

/// The outcomes at both ends.
async fn meet(
    server: Arc<Credentials>,
    client: Arc<Credentials>,
    to: Expected,
) -> (Result<paraft_tls::Rights, TlsError>, Result<Vec<u8>, String>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let at = listener.local_addr().expect("bound");
    let serves = tokio::spawn(async move {
        let (socket, _) = listener.accept().await.expect("accepted");
        match Stream::accept(socket, &server, &Expected::ANY_ROLE, false).await {
            Ok((mut stream, rights)) => {
                stream.write_all(b"welcome").await.expect("written");
                stream.shutdown().await.expect("shut down");
                let mut rest = Vec::new();
                let _ = stream.read_to_end(&mut rest).await;
                Ok(rights)
            }
            Err(failed) => {
                // Unread data would make the kernel discard the answer.
                let mut socket = failed.socket;
                socket.shutdown().await.expect("shut down");
                let _ = socket.read_to_end(&mut Vec::new()).await;
                Err(failed.why)
            }
        }
    });
    let socket = TcpStream::connect(at).await.expect("it listens");
    let said = async {
        let mut stream = Stream::dial(socket, &client, &to).await.map_err(|e| e.to_string())?;
        let mut said = Vec::new();
        stream.read_to_end(&mut said).await.map_err(|e| e.to_string())?;
        stream.shutdown().await.map_err(|e| e.to_string())?;
        Ok(said)
    }
    .await;
    (serves.await.expect("it ran"), said)
}

#[tokio::test]
async fn who_is_of_the_fleet_is_taken_and_nobody_else() {
    let (ours, theirs) = (Authority::new("ours").expect("made"), Authority::new("theirs").expect("made"));
    let peer = with(&ours, &["peer"], DAY);
    let (rights, said) = meet(peer.clone(), with(&ours, &["worker:a"], DAY), Expected::SERVER).await;
    let rights = rights.expect("taken");
    assert!(
        rights.are_enough_for(Need::Worker, Some("a")) && !rights.are_enough_for(Need::Worker, Some("b"))
    );
    assert_eq!(said.expect("said"), b"welcome");

    // Of another authority: each end says so.
    let (rights, said) = meet(peer.clone(), with(&theirs, &["admin"], DAY), Expected::SERVER).await;
    assert!(matches!(&rights, Err(TlsError::NotTaken(_) | TlsError::Refused(_))), "{rights:?}");
    assert!(said.is_err_and(|e| e.contains("certificate")));

    // A worker that acts as a server.
    let (_, said) =
        meet(with(&ours, &["worker:a"], DAY), with(&ours, &["worker:a"], DAY), Expected::SERVER).await;
    assert!(said.as_ref().is_err_and(|e| e.contains("not of role peer")), "{said:?}");
    // A rank of the same job is accepted, one of another job is not.
    for (job, taken) in [("a", true), ("b", false)] {
        let to = Expected::worker_of("a");
        let (_, said) =
            meet(with(&ours, &[&format!("worker:{job}")], DAY), with(&ours, &["worker:a"], DAY), to).await;
        assert_eq!(said.is_ok(), taken, "{job}: {said:?}");
    }

    // A certificate that has expired meanwhile.
    let short = with(&ours, &["admin"], Duration::from_secs(2));
    tokio::time::sleep(Duration::from_millis(3100)).await;
    let (rights, said) = meet(peer, short, Expected::SERVER).await;
    assert!(rights.is_err_and(|e| e.to_string().contains("expired")));
    assert!(said.as_ref().is_err_and(|e| e.contains("CertificateExpired")), "{said:?}");
}

#[tokio::test]
async fn refusal_reason_is_kept_until_bytes_arrive_there() {
    let ours = Authority::new("ours").expect("made");
    let (peer, good) = (with(&ours, &["peer"], DAY), with(&ours, &["admin"], DAY));
    let short = with(&ours, &["admin"], Duration::from_secs(2));
    tokio::time::sleep(Duration::from_millis(3100)).await;
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let at = listener.local_addr().expect("bound").to_string();
    let serves = tokio::spawn(async move {
        for _ in 0..2 {
            let (socket, _) = listener.accept().await.expect("accepted");
            match Stream::accept(socket, &peer, &Expected::ANY_ROLE, false).await {
                Ok((mut stream, _)) => stream.write_all(b"welcome").await.expect("written"),
                Err(mut failed) => failed.socket.shutdown().await.expect("shut down"),
            }
        }
    });
    for (shows, words) in [(short, Some("CertificateExpired")), (good, None)] {
        let uri = format!("http://{at}").parse().expect("an address");
        let dialled = Access::Certificates(shows).connector().call(uri).await;
        // No request yet: an HTTP client gets the refusal before it has sent anything.
        let mut dialled = dialled.expect("the server says later that it does not take us").into_inner();
        let read = dialled.read(&mut [0; 7]).await;
        assert_eq!(read.is_err(), words.is_some(), "{read:?}");
        let why = paraft_tls::refusal(&at);
        match words {
            Some(words) => assert!(why.as_ref().is_some_and(|w| w.contains(words)), "{why:?}"),
            None => assert_eq!(why, None),
        }
    }
    serves.await.expect("it ran");
}

#[tokio::test]
async fn what_is_said_arrives_whatever_the_pieces() {
    let ours = Authority::new("ours").expect("made");
    let (peer, worker) = (with(&ours, &["peer"], DAY), with(&ours, &["worker:a"], DAY));
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let at = listener.local_addr().expect("bound");
    let all: Vec<u8> = (0..9_000_001u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    let echoed = all.clone();
    // Reads and echoes, both at the same time, on both ends.
    let serves = tokio::spawn(async move {
        let (socket, _) = listener.accept().await.expect("accepted");
        let (stream, _) =
            Stream::accept(socket, &peer, &Expected::ANY_ROLE, false).await.map_err(|f| f.why)?;
        let (mut read, mut write) = stream.into_split();
        tokio::io::copy(&mut read, &mut write).await?;
        write.shutdown().await?;
        Ok::<_, TlsError>(())
    });
    let socket = TcpStream::connect(at).await.expect("it listens");
    let stream = Stream::dial(socket, &worker, &Expected::SERVER).await.expect("taken");
    let (mut read, mut write) = stream.into_split();
    let writes = tokio::spawn(async move {
        let (mut at, mut size) = (0, 1);
        while at < all.len() {
            // Pieces of all sizes, several at once.
            let cut = |from: usize, n: usize| &all[from.min(all.len())..(from + n).min(all.len())];
            let pieces = [cut(at, size), cut(at + size, 3), cut(at + size + 3, size / 2)];
            at += write.write_vectored(&pieces.map(IoSlice::new)).await.expect("written");
            size = (size * 7 + 1) % 300_000;
        }
        write.shutdown().await.expect("shut down");
    });
    let mut came = Vec::new();
    let mut piece = vec![0; 1];
    loop {
        match read.read(&mut piece).await.expect("read") {
            0 => break,
            n => came.extend_from_slice(&piece[..n]),
        }
        let size = (piece.len() * 5 + 1) % 400_000;
        piece.resize(size.max(1), 0);
    }
    writes.await.expect("it ran");
    serves.await.expect("it ran").expect("it served");
    assert!(came == echoed, "{} of {} bytes, or others", came.len(), echoed.len());
}

#[test]
fn threads_speak_it_too() {
    let ours = Authority::new("ours").expect("made");
    let of = |role| Access::Certificates(with(&ours, &[role], DAY));
    let listener = Blocking::bind("127.0.0.1:0").expect("a port");
    let at = listener.local_addr().expect("bound");
    let (one, other) = (of("worker:a"), of("worker:b"));
    let a = Expected::worker_of("a");
    let all: Vec<u8> = (0..1_000_000u32).map(|i| (i >> 3) as u8).collect();
    std::thread::scope(|scope| {
        let (one, a) = (&one, &a);
        let serves = scope.spawn(move || {
            let (socket, _) = listener.accept().expect("accepted");
            let mut wire = blocking::Wire::accept(socket, one, a).expect("taken");
            let mut came = vec![0; 1_000_000];
            wire.read_exact(&mut came).expect("read");
            let (socket, _) = listener.accept().expect("accepted");
            (came, blocking::Wire::accept(socket, one, a).map(drop))
        });
        let mut wire =
            blocking::Wire::dial(BlockingStream::connect(at).expect("it listens"), one, a).expect("taken");
        wire.write_all(&all).expect("written");
        wire.flush().expect("flushed");
        let stranger = blocking::Wire::dial(BlockingStream::connect(at).expect("it listens"), &other, a);
        let refused = stranger
            .map_err(|e| e.to_string())
            .and_then(|mut w| w.read(&mut [0]).map(drop).map_err(|e| e.to_string()));
        assert!(refused.is_err_and(|e| e.contains("certificate")));
        let (came, second) = serves.join().expect("it ran");
        assert!(came == all);
        assert!(second.is_err_and(|e| e.to_string().contains("not of role worker")));
    });
}

#[tokio::test]
async fn plain_text_is_recognised_by_both() {
    let ours = Authority::new("ours").expect("made");
    let peer = with(&ours, &["peer"], DAY);
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let at = listener.local_addr().expect("bound");
    let mut socket = TcpStream::connect(at).await.expect("it listens");
    let (came, _) = listener.accept().await.expect("accepted");
    socket.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.expect("written");
    let Err(failed) = Stream::accept(came, &peer, &Expected::ANY_ROLE, false).await else {
        panic!("it is not TLS")
    };
    assert!(matches!(failed.why, TlsError::Plain), "{}", failed.why);
    assert_eq!(failed.said, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n");

    let socket = TcpStream::connect(at).await.expect("it listens");
    let (mut came, _) = listener.accept().await.expect("accepted");
    came.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await.expect("written");
    let Err(why) = Stream::dial(socket, &peer, &Expected::SERVER).await else { panic!("it is not TLS") };
    assert!(matches!(why, TlsError::Plain), "{why}");
}
