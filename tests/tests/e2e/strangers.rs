//! Who is no member of the cluster, at every internal port of one that serves a model: the port at which nodes join, the one for
//! parts of the model, a node's, and its worker's.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use protocol::pin::{ShownCa, connect_as_stranger, pinned_ca, shown_ca};
use protocol::tls::{ClusterCa, TlsIdentity, connect};
use protocol::v1;
use tests::chat::chat_text;
use tests::cluster::Cluster;
use tests::process::{eventually, listening_ports};
use tests::server::{READY_DEADLINE, Server};
use tonic::transport::Channel;
use tonic::{Code, Status};

const SOON: Duration = Duration::from_secs(30);

/// Connections with nothing but noise, at each port.
const NOISE: usize = 60;

/// What no internal port answers to who is not let in: a call of every service.
async fn answers(channel: Channel) -> Vec<Status> {
    let mut node = v1::node_client::NodeClient::new(channel.clone());
    let mut slices = v1::slices_client::SlicesClient::new(channel.clone());
    let mut stage = v1::stage_client::StageClient::new(channel.clone());
    let mut engine = v1::engine_client::EngineClient::new(channel.clone());
    let mut kv = v1::kv_client::KvClient::new(channel.clone());
    let mut membership = v1::membership_client::MembershipClient::new(channel);
    let refused = [
        node.describe(v1::DescribeRequest {}).await.map(drop),
        slices.read(v1::ReadSliceRequest::default()).await.map(drop),
        stage.status(v1::StatusRequest {}).await.map(drop),
        engine.engine_status(v1::EngineStatusRequest {}).await.map(drop),
        kv.pull(v1::PullRequest::default()).await.map(drop),
        membership.leave(v1::LeaveRequest {}).await.map(drop),
        membership.renew(v1::RenewRequest::default()).await.map(drop),
    ];
    refused.into_iter().map(|answer| answer.expect_err("a stranger was answered")).collect()
}

fn make_noise(port: u16) {
    for n in 0..NOISE {
        let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        // The port may be closed before all of it was read.
        let _ =
            stream.write_all(if n % 2 == 0 { b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" } else { &[0x5A; 4096] });
        let _ = stream.read_to_end(&mut Vec::new());
    }
}

/// Lines about strangers, which are those of a port or of calls at the port at which nodes join.
fn refusals(log: &str) -> usize {
    log.lines().filter(|line| line.contains("refused a c")).count()
}

struct Strangers {
    ca: ShownCa,
    /// Of another cluster, whose member trusts this one.
    foreign: TlsIdentity,
}

impl Strangers {
    /// Whether a port lets nobody in; what it said to those who could talk.
    async fn try_in(&self, port: u16) -> Vec<Status> {
        let address = format!("127.0.0.1:{port}");
        let mut said = Vec::new();
        if let Ok(channel) = connect_as_stranger(&address, &self.ca).await {
            said.extend(answers(channel).await);
        }
        if let Ok(channel) = connect(&address, &self.foreign).await {
            said.extend(answers(channel).await);
        }
        said
    }
}

#[tokio::test]
async fn strangers_at_every_internal_port_are_refused_told_of_once_a_second_and_nothing_else_happens() {
    let cluster = Cluster::new().unwrap();
    let own = cluster.serve_args();
    let args = ["--cluster", "--slots", "1", "--ctx", "128", "--threads", "1"];
    let args: Vec<&str> = own.iter().map(String::as_str).chain(args).collect();
    let mut server = Server::launch("glassllm", &args).unwrap();
    eventually("the API", SOON, async || server.ready().await.ok()).await.unwrap();
    let node = cluster.join("desk").await.unwrap();
    server.wait_ready(READY_DEADLINE).await.unwrap();
    let (text, workers) = (chat_text(&server, "hello", 8).await.unwrap(), node.workers());

    let of_server: Vec<u16> =
        listening_ports(&[server.pid()]).unwrap().into_iter().filter(|&port| port != server.port()).collect();
    let of_worker = listening_ports(&workers).unwrap();
    assert_eq!(
        (of_server.len(), of_worker.len()),
        (2, 1),
        "to join at, for parts of the model, and the worker's"
    );
    let joining: u16 = cluster.address().rsplit(':').next().unwrap().parse().unwrap();
    let shown = shown_ca(&cluster.address()).await.unwrap();
    let ca = pinned_ca(&cluster.address(), shown.fingerprint).await.unwrap();
    let mut foreign = ClusterCa::new().unwrap().issue("x").unwrap();
    foreign.ca_pem = ca.pem.clone();
    let strangers = Strangers { ca, foreign };

    let begun = Instant::now();
    for port in of_server.iter().chain(&of_worker).copied().chain([node.port()]) {
        let said = strangers.try_in(port).await;
        let expected = if port == joining { &[Code::Unimplemented, Code::Unauthenticated][..] } else { &[] };
        // Where the handshake seems to go well, the connection ends with the first call.
        let unexpected = |status: &&Status| {
            let is_cut =
                matches!(status.code(), Code::Unavailable | Code::Unknown | Code::Cancelled | Code::Internal);
            !is_cut && !expected.contains(&status.code())
        };
        assert_eq!(said.iter().find(unexpected).map(ToString::to_string), None, "port {port}");
        tokio::task::spawn_blocking(move || make_noise(port)).await.unwrap();
    }
    let seconds = begun.elapsed().as_secs() as usize + 2;
    // Each port tells once a second at most, and the port at which nodes join once of calls besides.
    let (told, told_by_node) = (refusals(&server.log()), refusals(&node.log()));
    assert!((3..=3 * seconds).contains(&told), "{told} lines in {seconds} s: {}", server.log());
    assert!((2..=2 * seconds).contains(&told_by_node), "{told_by_node} lines in {seconds} s: {}", node.log());
    assert!(told + told_by_node < 5 * NOISE, "a line for each");

    assert_eq!(node.workers(), workers);
    assert_eq!(chat_text(&server, "hello", 8).await.unwrap(), text);
    assert_eq!(cluster.json(&["node", "list"]).unwrap().as_array().unwrap().len(), 1);
    let events = cluster.admin(&server, "/admin/v1/events").await.unwrap().to_string();
    assert!(!events.contains("node_left") && !events.contains("certificate_renewed"), "{events}");
}
