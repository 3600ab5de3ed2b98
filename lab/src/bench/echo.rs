//! What the latency of a push is compared with: a bare tonic unary call that sends some bytes and gets them back.
//!
//! Default HTTP/2 settings, tonic's own codec for prost, one connection and one runtime thread for each caller, who waits
//! for each answer. The server is a process of its own, with as many runtime threads as `paraft server`.

use super::{
    far::{FarArgs, FarSide, broken},
    load::Via,
};
use bytes::Bytes;
use hyper_util::rt::TokioIo;
use paraft_fleet::failure::Failure;
use paraft_worker::exit;
use std::{convert::Infallible, future::ready, task};
use tokio::{net, runtime};
use tokio_stream::{
    StreamExt,
    wrappers::{TcpListenerStream, UnixListenerStream},
};
use tonic::{
    Request, Response, Status,
    body::Body,
    codegen::{BoxFuture, Service, http},
    server::{NamedService, UnaryService},
    transport::{Channel, Endpoint, Server, Uri},
};
use tonic_prost::ProstCodec;

/// The hidden command that is the far side.
pub const COMMAND: &str = "echo-peer";

const PATH: &str = "/paraft.bench.Echo/Echo";

/// What tonic's generated code would be for a service of one call.
#[derive(Clone)]
struct EchoServer;

impl NamedService for EchoServer {
    const NAME: &'static str = "paraft.bench.Echo";
}

struct Echoes;

impl UnaryService<Bytes> for Echoes {
    type Response = Bytes;
    type Future = std::future::Ready<Result<Response<Bytes>, Status>>;

    fn call(&mut self, request: Request<Bytes>) -> Self::Future {
        ready(Ok(Response::new(request.into_inner())))
    }
}

impl Service<http::Request<Body>> for EchoServer {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Self::Response, Infallible>;

    fn poll_ready(&mut self, _: &mut task::Context<'_>) -> task::Poll<Result<(), Infallible>> {
        task::Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        Box::pin(async move {
            let mut grpc = tonic::server::Grpc::new(ProstCodec::<Bytes, Bytes>::default());
            Ok(grpc.unary(Echoes, request).await)
        })
    }
}

/// The far side.
pub fn serve(args: &FarArgs) -> Result<i32, Failure> {
    let (tcp, unix) = args.listen()?;
    let failed =
        |e: &dyn std::fmt::Display| Failure::new(exit::IO, format!("the far side cannot serve: {e}"));
    let runtime = runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.map_err(|e| failed(&e))?.block_on(async {
        let listen = || {
            tcp.set_nonblocking(true)?;
            unix.set_nonblocking(true)?;
            Ok((net::TcpListener::from_std(tcp)?, net::UnixListener::from_std(unix)?))
        };
        let (tcp, unix) = listen().map_err(|e: std::io::Error| failed(&e))?;
        let tcp = TcpListenerStream::new(tcp).map(|s| {
            let s = s?;
            s.set_nodelay(true)?;
            Ok::<_, std::io::Error>(s)
        });
        let router = || Server::builder().add_service(EchoServer);
        tokio::spawn(router().serve_with_incoming(UnixListenerStream::new(unix)));
        router().serve_with_incoming(tcp).await.map_err(|e| failed(&e))
    })?;
    Ok(exit::OK)
}

/// A caller: blocking, as [`paraft_client::Client`] is.
pub struct Caller {
    via: Via,
    runtime: runtime::Runtime,
    channel: Channel,
    payload: Bytes,
}

impl Caller {
    /// Connects; every call will carry so many bytes, both ways.
    pub fn connect(to: &FarSide, via: Via, bytes: usize) -> Result<Self, Failure> {
        let runtime = runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|e| broken(via, e))?;
        let channel = runtime.block_on(async {
            let endpoint = Endpoint::from_shared(format!("http://{}", to.address))?.tcp_nodelay(true);
            let socket = to.socket.clone();
            match via {
                Via::Tcp => endpoint.connect().await,
                Via::Unix => {
                    let connector = tower::service_fn(move |_: Uri| {
                        let socket = socket.clone();
                        async move { net::UnixStream::connect(socket).await.map(TokioIo::new) }
                    });
                    endpoint.connect_with_connector(connector).await
                }
            }
        });
        let channel = channel.map_err(|e| broken(via, e))?;
        Ok(Self { via, runtime, channel, payload: vec![1; bytes].into() })
    }

    /// One call.
    pub fn call(&mut self) -> Result<(), Failure> {
        let (channel, payload) = (self.channel.clone(), self.payload.clone());
        let back = self.runtime.block_on(async {
            let mut grpc = tonic::client::Grpc::new(channel);
            grpc.ready().await.map_err(|e| Status::unavailable(e.to_string()))?;
            let codec = ProstCodec::<Bytes, Bytes>::default();
            grpc.unary(Request::new(payload), http::uri::PathAndQuery::from_static(PATH), codec).await
        });
        let back = back.map_err(|s| broken(self.via, s.message()))?.into_inner();
        match back == self.payload {
            true => Ok(()),
            false => Err(broken(self.via, "the answer is not what was sent")),
        }
    }
}
