//! Sends datagrams and streams between hosts, and measures them. The sockets are opened inside the hosts.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tests::lan::Host;

/// The threads that measure go before others on the machine, as the delay line's does.
const PRIORITY: i32 = -15;

/// How long a datagram or a connection may take between hosts that can talk, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(5);

/// How long nothing must come from a host that cannot talk. Longer than anything that is under way.
const SILENCE: Duration = Duration::from_millis(200);

/// Left out at the beginning of a stream, while TCP finds out what the link can do.
const WARM_UP: Duration = Duration::from_millis(400);

/// Measured after that.
const MEASURED: Duration = Duration::from_millis(700);

/// Whether a datagram from one host is answered by an address of another.
pub(crate) fn talk(from: &Host, to: &Host, address: IpAddr) -> bool {
    exchange(from, to, address, PATIENCE)
}

/// Whether datagrams stay unanswered.
pub(crate) fn silent(from: &Host, to: &Host, address: IpAddr) -> bool {
    !exchange(from, to, address, SILENCE)
}

/// Sends datagrams again and again until one is answered or the time is over.
fn exchange(from: &Host, to: &Host, address: IpAddr, patience: Duration) -> bool {
    let server = to.inside(|| UdpSocket::bind((address, 0))).unwrap().unwrap();
    let unspecified = if address.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
    let client = from.inside(|| UdpSocket::bind(unspecified)).unwrap().unwrap();
    server.set_read_timeout(Some(SILENCE / 2)).unwrap();
    client.set_read_timeout(Some(SILENCE / 2)).unwrap();
    let target = server.local_addr().unwrap();
    let start = Instant::now();
    let mut buffer = [0; 16];
    while start.elapsed() < patience {
        // An address may be unreachable, which is an answer too.
        if client.send_to(b"?", target).is_err() {
            std::thread::sleep(Duration::from_millis(10));
            continue;
        }
        let Ok((_, peer)) = server.recv_from(&mut buffer) else { continue };
        let _ = server.send_to(b"!", peer);
        if client.recv_from(&mut buffer).is_ok() {
            return true;
        }
    }
    false
}

/// A TCP connection between two hosts: the caller's end and the other.
pub(crate) fn connect(from: &Host, to: &Host, address: IpAddr) -> (TcpStream, TcpStream) {
    let listener = to.inside(|| TcpListener::bind((address, 0))).unwrap().unwrap();
    let target: SocketAddr = listener.local_addr().unwrap();
    let near = from.inside(|| TcpStream::connect_timeout(&target, PATIENCE)).unwrap().unwrap();
    let (far, _) = listener.accept().unwrap();
    for end in [&near, &far] {
        end.set_nodelay(true).unwrap();
    }
    (near, far)
}

/// The median time in which a message of `bytes` bytes is answered with one byte.
pub(crate) fn round_trip(from: &Host, to: &Host, bytes: usize) -> Duration {
    let (mut near, mut far) = connect(from, to, to.address());
    hurry();
    let echo = std::thread::spawn(move || {
        let mut message = vec![0; bytes];
        while far.read_exact(&mut message).is_ok() {
            far.write_all(&[1]).unwrap();
        }
    });
    let message = vec![0; bytes];
    let mut times: Vec<Duration> = (0..25)
        .map(|_| {
            let start = Instant::now();
            near.write_all(&message).unwrap();
            near.read_exact(&mut [0]).unwrap();
            start.elapsed()
        })
        .collect();
    drop(near);
    echo.join().unwrap();
    times.sort_unstable();
    times[times.len() / 2]
}

/// A stream that is being measured.
pub(crate) struct Stream {
    sender: JoinHandle<()>,
    receiver: JoinHandle<f64>,
}

impl Stream {
    /// Begins to send.
    pub(crate) fn begin(from: &Host, to: &Host) -> Self {
        let (mut near, mut far) = connect(from, to, to.address());
        near.set_write_timeout(Some(PATIENCE)).unwrap();
        hurry();
        let sender = std::thread::spawn(move || {
            let block = vec![0; 1 << 17];
            loop {
                match near.write_all(&block) {
                    Ok(()) => {}
                    Err(e) if [ErrorKind::BrokenPipe, ErrorKind::ConnectionReset].contains(&e.kind()) => {
                        return;
                    }
                    Err(e) => panic!("sending: {e}"),
                }
            }
        });
        let receiver = std::thread::spawn(move || {
            let mut block = vec![0; 1 << 18];
            let begun = Instant::now();
            while begun.elapsed() < WARM_UP {
                assert_ne!(far.read(&mut block).unwrap(), 0, "the stream ended early");
            }
            let (start, mut received) = (Instant::now(), 0);
            while start.elapsed() < MEASURED {
                received += far.read(&mut block).unwrap();
            }
            received as f64 * 8e-6 / start.elapsed().as_secs_f64()
        });
        Self { sender, receiver }
    }

    /// The goodput in megabits per second.
    pub(crate) fn finish(self) -> f64 {
        let goodput = self.receiver.join().unwrap();
        self.sender.join().unwrap();
        goodput
    }
}

/// The goodput from one host to another in megabits per second.
pub(crate) fn goodput(from: &Host, to: &Host) -> f64 {
    Stream::begin(from, to).finish()
}

/// Gives this thread, and those that it starts, their priority.
fn hurry() {
    // Without it the measurement is only more easily disturbed.
    let _ = rustix::process::setpriority_process(None, PRIORITY);
}
