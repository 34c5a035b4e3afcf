//! The Checkup service: what `shoal doctor` asks.

use std::path::PathBuf;
use std::time::SystemTime;

use protocol::certify::LiveIdentity;
use protocol::checkup::{ECHO_BYTES, Examination, PathFacts, echo};
use protocol::finding::reach::reach;
use protocol::node::Peer;
use protocol::v1;
use tonic::{Request, Response, Status};

use crate::host::disk_space;

/// One node's side of it.
pub(super) struct CheckupService {
    identity: LiveIdentity,
    /// Where slices are kept, or will be.
    slices: PathBuf,
}

impl CheckupService {
    pub(super) fn new(identity: LiveIdentity, slices: PathBuf) -> Self {
        Self { identity, slices }
    }
}

#[tonic::async_trait]
impl v1::checkup_server::Checkup for CheckupService {
    async fn examine(&self, _: Request<v1::ExamineRequest>) -> Result<Response<v1::Examination>, Status> {
        let examination = Examination { clock: SystemTime::now(), disk: disk_space(&self.slices) };
        Ok(Response::new(examination.into()))
    }

    async fn echo(&self, request: Request<v1::EchoMessage>) -> Result<Response<v1::EchoMessage>, Status> {
        let message = request.into_inner();
        if message.data.len() > ECHO_BYTES {
            return Err(Status::invalid_argument(format!("an echo has {ECHO_BYTES} bytes at most")));
        }
        Ok(Response::new(message))
    }

    async fn try_path(
        &self,
        request: Request<v1::TryPathRequest>,
    ) -> Result<Response<v1::TryPathReply>, Status> {
        let peer = Peer::check(request.into_inner().peer);
        let peer = peer.map_err(|error| Status::invalid_argument(error.to_string()))?;
        let reached = reach(&peer, &self.identity.now()).await;
        let (address, channel) = reached.map_err(|error| Status::unavailable(error.to_string()))?;
        Ok(Response::new(PathFacts { address, echo: echo(channel).await }.into()))
    }
}
