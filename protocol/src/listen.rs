//! Accepting connections: TLS handshakes are done here rather than in tonic, because a listener that strangers can
//! reach must outlive whatever they send and whatever the operating system runs out of. A failed handshake costs a
//! log line at most once per second, a slow one a place in a bounded number until its deadline, and no error ends
//! the listener.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_stream::Stream;
use tokio_util::task::AbortOnDropHandle;
use tonic::transport::Server;
use tracing::warn;

use crate::certify::LiveIdentity;
use crate::throttle::Throttle;
pub use crate::tls::Clients;
use crate::tls::{KEEPALIVE_INTERVAL, TlsError, TlsIdentity, keepalive_timeout, server_config_for};

/// How long a handshake may take; a LAN member needs milliseconds.
const HANDSHAKE_DEADLINE: Duration = Duration::from_secs(5);

/// Handshakes at once. A cluster has tens of members; more is a flood, and new connections are closed at once.
const MAX_HANDSHAKES: usize = 64;

/// Log lines about bad connections: one per this long.
const LOG_PERIOD: Duration = Duration::from_secs(1);

/// Calls at once on one connection: every request that may wait in a queue, and more. HTTP/2's usual 200 would make
/// the rest of them wait unseen instead of being refused.
const MAX_CALLS: u32 = 1 << 17;

/// Pause after the operating system refused to accept, such as when descriptors have run out.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Message and window sizes that let one frame of hidden rows through without a pause.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FrameSizes {
    /// Largest encoded frame, in bytes.
    pub max_message: usize,
    /// HTTP/2 window, in bytes.
    pub window: u32,
}

impl FrameSizes {
    /// For frames of up to `n_batch` rows of `n_embd` f32 elements.
    pub fn for_rows(n_batch: u32, n_embd: u32) -> Self {
        // Runs and operations take some tens of bytes each; 256 runs and 4096 operations fit in this.
        const FIELDS: usize = 256 << 10;
        // Two frames, so that the next travels while one is taken out; never below what small calls need, never
        // above HTTP/2's limit.
        let rows = (n_batch as usize).saturating_mul(n_embd as usize).saturating_mul(4);
        let max_message = rows.saturating_add(FIELDS);
        let window = max_message.saturating_mul(2).clamp(1 << 20, (1 << 31) - 1);
        Self { max_message, window: u32::try_from(window).unwrap_or(u32::MAX >> 1) }
    }
}

/// A server for [`TlsIncoming`] connections that notices frozen clients and takes frames without a pause.
pub fn server(sizes: FrameSizes) -> Server {
    Server::builder()
        .initial_stream_window_size(sizes.window)
        .initial_connection_window_size(sizes.window)
        // Fewer, larger pieces of a 16 MiB frame than HTTP/2's default of 16 KiB each.
        .max_frame_size(1 << 20)
        .max_concurrent_streams(MAX_CALLS)
        .http2_keepalive_interval(Some(KEEPALIVE_INTERVAL))
        .http2_keepalive_timeout(Some(keepalive_timeout()))
}

/// Connections whose handshake went well: it proved membership of the cluster, unless others are admitted too. Dropping it
/// closes the listener.
#[derive(Debug)]
pub struct TlsIncoming {
    connections: mpsc::Receiver<TlsStream<TcpStream>>,
    address: SocketAddr,
    _accepting: AbortOnDropHandle<()>,
}

/// Why there is no listener.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// The identity cannot be used.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The port is in use, or not ours to take.
    #[error("cannot listen on {address}")]
    Bind {
        /// As asked for.
        address: SocketAddr,
        /// The operating system's reason.
        #[source]
        source: io::Error,
    },
}

impl TlsIncoming {
    /// Listens on `address`; port 0 takes a free one. Needs a tokio runtime.
    pub async fn bind(address: SocketAddr, identity: &TlsIdentity) -> Result<Self, ListenError> {
        Self::bind_live(address, &identity.clone().into(), Clients::Members).await
    }

    /// The same with an identity that may be renewed, which changes nothing for connections that exist.
    pub async fn bind_live(
        address: SocketAddr,
        identity: &LiveIdentity,
        clients: Clients,
    ) -> Result<Self, ListenError> {
        let identity = Presented::new(identity, clients)?;
        let bound = |source| ListenError::Bind { address, source };
        let listener = TcpListener::bind(address).await.map_err(bound)?;
        let address = listener.local_addr().map_err(bound)?;
        // The server takes connections as fast as they come; when it does not, handshakes wait.
        let (sender, connections) = mpsc::channel(1);
        let accepting = tokio::spawn(accept(listener, identity, sender));
        Ok(Self { connections, address, _accepting: AbortOnDropHandle::new(accepting) })
    }

    /// Where it listens.
    pub const fn local_addr(&self) -> SocketAddr {
        self.address
    }
}

impl Stream for TlsIncoming {
    type Item = io::Result<TlsStream<TcpStream>>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.connections.poll_recv(cx).map(|next| next.map(Ok))
    }
}

/// What the listener presents now.
struct Presented {
    identity: watch::Receiver<TlsIdentity>,
    clients: Clients,
    acceptor: TlsAcceptor,
}

impl Presented {
    fn new(identity: &LiveIdentity, clients: Clients) -> Result<Self, TlsError> {
        let mut identity = identity.watch();
        let config = server_config_for(&identity.borrow_and_update(), clients)?;
        Ok(Self { identity, clients, acceptor: TlsAcceptor::from(config) })
    }

    /// For the next connection.
    fn acceptor(&mut self) -> TlsAcceptor {
        // An error says that nobody is left to renew it.
        if self.identity.has_changed().unwrap_or(false) {
            match server_config_for(&self.identity.borrow_and_update(), self.clients) {
                Ok(config) => self.acceptor = TlsAcceptor::from(config),
                Err(error) => warn!(%error, "a renewed identity cannot be used; the old one stays"),
            }
        }
        self.acceptor.clone()
    }
}

async fn accept(
    listener: TcpListener,
    mut identity: Presented,
    connections: mpsc::Sender<TlsStream<TcpStream>>,
) {
    let log = Arc::new(Throttle::new(LOG_PERIOD));
    let mut handshakes = JoinSet::new();
    loop {
        while handshakes.try_join_next().is_some() {}
        match listener.accept().await {
            Ok((stream, peer)) if handshakes.len() < MAX_HANDSHAKES => {
                let (acceptor, connections) = (identity.acceptor(), connections.clone());
                let log = Arc::clone(&log);
                handshakes.spawn(async move {
                    match shake_hands(&acceptor, stream).await {
                        // The server has gone; so will this task's owner.
                        Ok(stream) => drop(connections.send(stream).await),
                        Err(error) => refuse(&log, peer, &error),
                    }
                });
            }
            Ok((_, peer)) => refuse(&log, peer, &"too many handshakes at once"),
            Err(error) => {
                if let Some(held) = log.pass(Instant::now()) {
                    warn!(%error, held, "cannot accept a connection");
                }
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

async fn shake_hands(acceptor: &TlsAcceptor, stream: TcpStream) -> io::Result<TlsStream<TcpStream>> {
    stream.set_nodelay(true)?;
    tokio::time::timeout(HANDSHAKE_DEADLINE, acceptor.accept(stream))
        .await
        .map_err(|_| io::Error::new(io::ErrorKind::TimedOut, "no handshake in time"))?
}

fn refuse(log: &Throttle, peer: SocketAddr, error: &dyn std::fmt::Display) {
    if let Some(held) = log.pass(Instant::now()) {
        warn!(%peer, %error, held, "refused a connection that is not from this cluster");
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio_stream::StreamExt;

    use super::*;
    use crate::tls::{ClusterCa, connect};
    use crate::v1;

    struct Idle;

    #[tonic::async_trait]
    impl v1::engine_server::Engine for Idle {
        type GenerateStream = tokio_stream::Empty<Result<v1::GenerateEvent, tonic::Status>>;

        async fn generate(
            &self,
            _: tonic::Request<v1::GenerateRequest>,
        ) -> Result<tonic::Response<Self::GenerateStream>, tonic::Status> {
            Ok(tonic::Response::new(tokio_stream::empty()))
        }

        async fn engine_status(
            &self,
            _: tonic::Request<v1::EngineStatusRequest>,
        ) -> Result<tonic::Response<v1::EngineStatusReply>, tonic::Status> {
            Ok(tonic::Response::new(v1::EngineStatusReply { slots: 3, ..Default::default() }))
        }
    }

    /// Counts the bytes of the frames it gets.
    #[derive(Default)]
    struct Sink(Arc<std::sync::atomic::AtomicUsize>);

    #[tonic::async_trait]
    impl v1::stage_server::Stage for Sink {
        type ForwardStream = tokio_stream::Empty<Result<v1::ForwardReply, tonic::Status>>;

        async fn status(
            &self,
            _: tonic::Request<v1::StatusRequest>,
        ) -> Result<tonic::Response<v1::StatusReply>, tonic::Status> {
            Ok(tonic::Response::new(Default::default()))
        }

        async fn link(
            &self,
            _: tonic::Request<v1::LinkRequest>,
        ) -> Result<tonic::Response<v1::LinkReply>, tonic::Status> {
            Ok(tonic::Response::new(Default::default()))
        }

        async fn forward(
            &self,
            request: tonic::Request<tonic::Streaming<v1::Frame>>,
        ) -> Result<tonic::Response<Self::ForwardStream>, tonic::Status> {
            let mut frames = request.into_inner();
            while let Some(frame) = frames.message().await? {
                if let Some(v1::frame::Payload::Hidden(hidden)) = frame.payload {
                    self.0.fetch_add(hidden.data.len(), std::sync::atomic::Ordering::Relaxed);
                }
            }
            Ok(tonic::Response::new(tokio_stream::empty()))
        }
    }

    #[tokio::test]
    async fn the_largest_frames_pass_and_larger_ones_do_not() {
        let ca = ClusterCa::new().unwrap();
        let incoming =
            TlsIncoming::bind(([127, 0, 0, 1], 0).into(), &ca.issue("server").unwrap()).await.unwrap();
        let address = incoming.local_addr();
        let (sink, sizes) = (Sink::default(), FrameSizes::for_rows(512, 2048));
        let received = Arc::clone(&sink.0);
        let stage = v1::stage_server::StageServer::new(sink).max_decoding_message_size(sizes.max_message);
        let _serving = AbortOnDropHandle::new(tokio::spawn(
            server(sizes).add_service(stage).serve_with_incoming(incoming),
        ));
        let channel = connect(address, &ca.issue("client").unwrap()).await.unwrap();
        let mut client = v1::stage_client::StageClient::new(channel);
        let frame = |bytes: usize| v1::Frame {
            payload: Some(v1::frame::Payload::Hidden(v1::HiddenRows {
                encoding: 1,
                data: vec![1; bytes].into(),
            })),
            ..Default::default()
        };
        let full = 512 * 2048 * 4;
        client.forward(tokio_stream::iter(vec![frame(full); 3])).await.unwrap();
        assert_eq!(received.load(std::sync::atomic::Ordering::Relaxed), 3 * full);
        let refused = client.forward(tokio_stream::iter([frame(full + (1 << 20))])).await.unwrap_err();
        assert_eq!(refused.code(), tonic::Code::OutOfRange, "{refused}");
    }

    async fn start(identity: &TlsIdentity) -> (SocketAddr, AbortOnDropHandle<()>) {
        let incoming = TlsIncoming::bind(([127, 0, 0, 1], 0).into(), identity).await.unwrap();
        let address = incoming.local_addr();
        let serving = tokio::spawn(async move {
            server(FrameSizes::for_rows(512, 64))
                .add_service(v1::engine_server::EngineServer::new(Idle))
                .serve_with_incoming(incoming)
                .await
                .unwrap();
        });
        (address, AbortOnDropHandle::new(serving))
    }

    async fn slots(address: SocketAddr, identity: &TlsIdentity) -> Result<u32, String> {
        let channel = connect(address, identity).await.map_err(|e| e.to_string())?;
        v1::engine_client::EngineClient::new(channel)
            .engine_status(v1::EngineStatusRequest {})
            .await
            .map(|reply| reply.into_inner().slots)
            .map_err(|status| status.to_string())
    }

    #[tokio::test]
    async fn members_of_one_cluster_talk_and_strangers_do_not() {
        let ca = ClusterCa::new().unwrap();
        let (address, _serving) = start(&ca.issue("server").unwrap()).await;
        assert_eq!(slots(address, &ca.issue("client").unwrap()).await, Ok(3));
        let stranger = ClusterCa::new().unwrap().issue("client").unwrap();
        assert!(slots(address, &stranger).await.is_err());
        // Trusts the server, but has no certificate of its cluster.
        let mut impostor = stranger;
        impostor.ca_pem = ca.issue("x").unwrap().ca_pem;
        assert!(slots(address, &impostor).await.is_err());
    }

    #[tokio::test]
    async fn a_renewed_identity_serves_new_connections_and_leaves_the_old_ones_alone() {
        let (old, new) = (ClusterCa::new().unwrap(), ClusterCa::new().unwrap());
        let live = LiveIdentity::new(old.issue("server").unwrap());
        let local = ([127, 0, 0, 1], 0).into();
        let incoming = TlsIncoming::bind_live(local, &live, Clients::Members).await.unwrap();
        let address = incoming.local_addr();
        let service = v1::engine_server::EngineServer::new(Idle);
        let serving = server(FrameSizes::for_rows(8, 64)).add_service(service).serve_with_incoming(incoming);
        let _serving = AbortOnDropHandle::new(tokio::spawn(serving));
        let member = old.issue("client").unwrap();
        let channel = connect(address, &member).await.unwrap();
        // A certificate of another CA stands for a renewed one: who presents it can be told from outside.
        live.renew(new.issue("server").unwrap());
        assert_eq!(slots(address, &new.issue("client").unwrap()).await, Ok(3));
        assert!(slots(address, &member).await.is_err(), "the old identity is still presented");
        let mut open = v1::engine_client::EngineClient::new(channel);
        assert!(open.engine_status(v1::EngineStatusRequest {}).await.is_ok(), "an open connection was ended");
    }

    /// Field case 8.
    #[tokio::test]
    async fn garbage_on_the_port_disturbs_nobody() {
        let ca = ClusterCa::new().unwrap();
        let (address, _serving) = start(&ca.issue("server").unwrap()).await;
        let mut megabyte = vec![0_u8; 1 << 20];
        let mut state = 1_u32;
        for byte in &mut megabyte {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            *byte = (state >> 24) as u8;
        }
        let hello = [&[22, 3, 1, 2, 0, 1, 0, 1, 252, 3, 3][..], &megabyte[..200]].concat();
        for garbage in [
            &b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"[..],
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            &hello,
            &megabyte,
            b"",
        ] {
            let mut stream = TcpStream::connect(address).await.unwrap();
            // The server may close before it has read everything.
            let _ = stream.write_all(garbage).await;
            let _ = stream.shutdown().await;
            let _ = stream.read_to_end(&mut Vec::new()).await;
        }
        assert_eq!(slots(address, &ca.issue("client").unwrap()).await, Ok(3));
    }

    #[tokio::test]
    async fn silent_connections_beyond_the_limit_do_not_lock_members_out_for_good() {
        let ca = ClusterCa::new().unwrap();
        let identity = ca.issue("server").unwrap();
        let mut incoming = TlsIncoming::bind(([127, 0, 0, 1], 0).into(), &identity).await.unwrap();
        let address = incoming.local_addr();
        let mut silent = Vec::new();
        for _ in 0..MAX_HANDSHAKES + 10 {
            silent.push(TcpStream::connect(address).await.unwrap());
        }
        drop(silent);
        let client = ca.issue("client").unwrap();
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            let accepted = tokio::time::timeout(Duration::from_millis(500), incoming.next());
            let (_, accepted) = tokio::join!(connect(address, &client), accepted);
            if accepted.is_ok() {
                break;
            }
            assert!(Instant::now() < deadline, "the listener never recovered");
        }
    }

    #[tokio::test]
    async fn a_port_in_use_is_named() {
        let taken = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = taken.local_addr().unwrap();
        let identity = ClusterCa::new().unwrap().issue("server").unwrap();
        let error = TlsIncoming::bind(address, &identity).await.unwrap_err();
        assert_eq!(error.to_string(), format!("cannot listen on {address}"));
    }

    #[test]
    fn sizes_let_the_largest_frame_through() {
        let sizes = FrameSizes::for_rows(512, 8192);
        assert!(sizes.max_message > 512 * 8192 * 4);
        assert!(sizes.window as usize >= 2 * 512 * 8192 * 4);
        let absurd = FrameSizes::for_rows(u32::MAX, u32::MAX);
        assert!(absurd.window < 1 << 31);
    }
}
