//! Fetches a stage's share of a sequence from the stages of another replica, which are cut differently, and puts it together.
//! Takes no more memory than the stage's own slot would take, whatever is announced.

use bytes::BytesMut;
use cluster::LayerRange;
use futures::future::try_join_all;
use llama::kv_blob::Blob;
use protocol::hand_off::{ChainStage, HeldSlot, KvHeader};
use protocol::patience::peer_timeout;
use protocol::tls::{TlsIdentity, connect, describe_status};
use protocol::v1;
use protocol::v1::kv_client::KvClient;
use tonic::Streaming;

use super::facts::{KvFacts, form_of};
use super::{TRANSFER, within};

/// What a stage fetches.
pub(super) struct Fetch<'a> {
    pub(super) facts: &'a KvFacts,
    pub(super) identity: &'a TlsIdentity,
    pub(super) from: &'a HeldSlot,
    /// Earlier positions are here.
    pub(super) first_position: u32,
}

/// A stage's share, and the bytes that travelled.
pub(super) struct Fetched {
    pub(super) blob: Blob,
    pub(super) bytes: u64,
}

impl Fetch<'_> {
    /// Fetches the share of all of the stage's blocks.
    pub(super) async fn run(&self) -> Result<Fetched, String> {
        let all = async {
            let parts = self.parts()?;
            try_join_all(parts.iter().map(|(stage, layers)| self.pull(stage, *layers))).await
        };
        let pulled = within(TRANSFER, "fetching keys and values", all).await?;
        let bytes = pulled.iter().map(|part| part.bytes).sum();
        let blob =
            Blob::merge(pulled.into_iter().map(|part| part.blob)).map_err(|error| error.to_string())?;
        Ok(Fetched { blob, bytes })
    }

    /// The stages that have some of this stage's blocks, and which.
    fn parts(&self) -> Result<Vec<(&ChainStage, LayerRange)>, String> {
        let own = self.facts.layers;
        let common = |stage: &ChainStage| {
            LayerRange::new(own.start().max(stage.layers.start()), own.end().min(stage.layers.end())).ok()
        };
        let parts: Vec<_> =
            self.from.chain.iter().filter_map(|stage| Some((stage, common(stage)?))).collect();
        let covered: u32 = parts.iter().map(|(_, layers)| layers.len()).sum();
        if covered == own.len() {
            return Ok(parts);
        }
        Err(format!("the other replica has {covered} of the {} blocks {own}", own.len()))
    }

    async fn pull(&self, stage: &ChainStage, layers: LayerRange) -> Result<Fetched, String> {
        let named = |reason: String| format!("blocks {layers} from {}: {reason}", stage.address);
        let channel =
            connect(&stage.address, self.identity).await.map_err(|error| named(error.to_string()))?;
        let request = v1::PullRequest {
            from: Some(self.from.clone().into()),
            first_block: layers.start(),
            end_block: layers.end(),
            first_position: self.first_position,
        };
        let mut client = KvClient::new(channel);
        // The other stage looks at it between two batches.
        let pieces = async { client.pull(request).await.map_err(|status| describe_status(&status)) };
        let pieces = within(super::BETWEEN_BATCHES, "asking", pieces).await.map_err(named)?;
        self.take(pieces.into_inner(), layers).await.map_err(named)
    }

    async fn take(&self, mut pieces: Streaming<v1::KvPiece>, layers: LayerRange) -> Result<Fetched, String> {
        use v1::kv_piece::Piece;
        let Some(Piece::Header(header)) = next(&mut pieces).await? else {
            return Err("no header came first".to_owned());
        };
        let header = KvHeader::check(header).map_err(|error| error.to_string())?;
        let own = self.facts.header(layers, self.from.tokens);
        header.agrees_with(&own).map_err(|error| error.to_string())?;
        // No more than the stage's own slot takes.
        let announced = usize::try_from(header.bytes).map_err(|error| error.to_string())?;
        let mut bytes = BytesMut::with_capacity(announced);
        while let Some(piece) = next(&mut pieces).await? {
            let Piece::Data(data) = piece else { return Err("a second header came".to_owned()) };
            if bytes.len() + data.len() > announced {
                return Err(format!("more than the {announced} bytes announced came"));
            }
            bytes.extend_from_slice(&data);
        }
        if bytes.len() < announced {
            return Err(format!("{} of {announced} bytes came", bytes.len()));
        }
        let blob = Blob::read(bytes.freeze(), &form_of(&header)).map_err(|error| error.to_string())?;
        if blob.tokens() != self.from.tokens {
            return Err(format!("{} tokens came, not {}", blob.tokens(), self.from.tokens));
        }
        Ok(Fetched { blob, bytes: announced as u64 })
    }
}

/// The next piece; none at the end.
async fn next(pieces: &mut Streaming<v1::KvPiece>) -> Result<Option<v1::kv_piece::Piece>, String> {
    let message = async { pieces.message().await.map_err(|status| describe_status(&status)) };
    match within(peer_timeout(), "waiting for a piece", message).await? {
        Some(v1::KvPiece { piece: Some(piece) }) => Ok(Some(piece)),
        Some(v1::KvPiece { piece: None }) => Err("an empty piece came".to_owned()),
        None => Ok(None),
    }
}
