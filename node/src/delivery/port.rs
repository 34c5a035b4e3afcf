//! The port at which a host that is no node gives out parts of its models: `shoal serve`, where it runs stages on nodes.

use std::net::SocketAddr;

use protocol::finding::addresses;
use protocol::listen::{Clients, FrameSizes, ListenError, TlsIncoming, server};
use protocol::node::Address;
use protocol::slices::PIECE;
use protocol::tls::TlsIdentity;
use protocol::v1::slices_server::SlicesServer;
use tokio_util::sync::CancellationToken;

use super::SliceLimits;
use super::pace::Pace;
use super::service::SlicesService;
use crate::folders::Folders;

/// Largest message to it: the name of a part.
const MAX_REQUEST: usize = 4 << 10;

/// A port that listens.
pub struct SlicePort {
    incoming: TlsIncoming,
    service: SlicesService,
    addresses: Vec<Address>,
}

impl SlicePort {
    /// Begins to listen. Others reach it at the hosts of `advertised`, or where the host's interfaces say.
    pub async fn bind(
        listen: SocketAddr,
        advertised: &[Address],
        identity: &TlsIdentity,
        folders: Folders,
        limits: SliceLimits,
    ) -> Result<Self, ListenError> {
        let incoming = TlsIncoming::bind_live(listen, &identity.clone().into(), Clients::Members).await?;
        let bound = incoming.local_addr();
        let advertised: Vec<Address> =
            advertised.iter().map(|address| address.with_port(bound.port())).collect();
        let addresses = addresses::offered(bound, &advertised);
        let service = SlicesService::new(folders, Pace::new(limits.rate));
        Ok(Self { incoming, service, addresses })
    }

    /// Where others may reach it.
    pub fn addresses(&self) -> &[Address] {
        &self.addresses
    }

    /// Serves until told to stop.
    pub async fn serve(self, stop: CancellationToken) -> Result<(), tonic::transport::Error> {
        let slices = SlicesServer::new(self.service).max_decoding_message_size(MAX_REQUEST);
        // Pieces go out; what comes in is small.
        let router = server(FrameSizes::for_rows(1, PIECE as u32)).add_service(slices);
        tokio::select! {
            served = router.serve_with_incoming(self.incoming) => served,
            () = stop.cancelled() => Ok(()),
        }
    }
}
