//! Files that are cut from a model and travel between hosts: how they are named and recognised, and the checks that messages
//! about them pass. Knows nothing of how they are cut or kept.

use std::fmt;

use cluster::{Bytes, LayerRange, ModelHash};

use crate::node::BadMessage;
use crate::v1;

/// Bytes of a piece, at most.
pub const PIECE: usize = 256 << 10;

const WHAT: &str = "a slice's request";

/// A file of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SliceFile {
    /// So many blocks, as a model of their own.
    Blocks(LayerRange),
    /// What the first stage looks tokens up in.
    Embedding,
}

impl fmt::Display for SliceFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Blocks(layers) => write!(f, "slice {}-{}", layers.start(), layers.end()),
            Self::Embedding => f.write_str("the embedding"),
        }
    }
}

/// What a file is, as far as it is known without reading tensor data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SliceForm {
    /// All of it.
    pub bytes: Bytes,
    /// Its tensors.
    pub tensor_bytes: Bytes,
    /// SHA-256 of all that comes before the tensors' data.
    pub header_sha256: [u8; 32],
}

/// Exactly which bytes are meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SliceId {
    /// Of the whole model.
    pub model: ModelHash,
    /// Version of the way in which tensor data are cut.
    pub cutter: u32,
    /// Which part.
    pub file: SliceFile,
    /// What it must be.
    pub form: SliceForm,
}

/// What is said of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SliceWord {
    /// It is being read to find out.
    Hashing {
        /// So far.
        done: Bytes,
        /// In all.
        total: Bytes,
    },
    /// SHA-256 of all of it.
    Sha256([u8; 32]),
}

fn digest(bytes: &[u8], field: &'static str) -> Result<[u8; 32], BadMessage> {
    let reason = || format!("{field} has {} bytes instead of 32", bytes.len());
    bytes.try_into().map_err(|_| BadMessage::Other { what: WHAT, reason: reason() })
}

impl SliceForm {
    /// Checks a received one.
    pub fn check(form: Option<v1::StageFile>) -> Result<Self, BadMessage> {
        let missing = BadMessage::Missing { what: WHAT, field: "its file" };
        let v1::StageFile { bytes, tensor_bytes, header_sha256 } = form.ok_or(missing)?;
        if bytes == 0 || tensor_bytes > bytes {
            let reason = format!("{tensor_bytes} bytes of tensors are no part of a file of {bytes} bytes");
            return Err(BadMessage::Other { what: WHAT, reason });
        }
        let header_sha256 = digest(&header_sha256, "its header's hash")?;
        Ok(Self { bytes: Bytes(bytes), tensor_bytes: Bytes(tensor_bytes), header_sha256 })
    }
}

impl From<SliceForm> for v1::StageFile {
    fn from(form: SliceForm) -> Self {
        let SliceForm { bytes, tensor_bytes, header_sha256 } = form;
        Self { bytes: bytes.0, tensor_bytes: tensor_bytes.0, header_sha256: header_sha256.to_vec().into() }
    }
}

impl SliceId {
    /// Checks a received request.
    pub fn check(request: v1::SliceRequest) -> Result<Self, BadMessage> {
        use v1::slice_request::File;
        let v1::SliceRequest { model_hash, cutter, file, form } = request;
        let file = match file.ok_or(BadMessage::Missing { what: WHAT, field: "which file" })? {
            File::Embedding(v1::EmbeddingFile {}) => SliceFile::Embedding,
            File::Blocks(v1::BlockRange { first_block, end_block }) => {
                let layers = LayerRange::new(first_block, end_block);
                let bad = |error: cluster::LayerRangeError| BadMessage::Other {
                    what: WHAT,
                    reason: error.to_string(),
                };
                SliceFile::Blocks(layers.map_err(bad)?)
            }
        };
        let model = ModelHash(digest(&model_hash, "its model's hash")?);
        Ok(Self { model, cutter, file, form: SliceForm::check(form)? })
    }

    /// Checks a received request for bytes; also where they begin.
    pub fn check_read(request: v1::ReadSliceRequest) -> Result<(Self, u64), BadMessage> {
        let v1::ReadSliceRequest { slice, offset } = request;
        let id = Self::check(slice.ok_or(BadMessage::Missing { what: WHAT, field: "which file" })?)?;
        if offset > id.form.bytes.0 {
            let reason = format!("a file of {} bytes has none from {offset} on", id.form.bytes.0);
            return Err(BadMessage::Other { what: WHAT, reason });
        }
        Ok((id, offset))
    }
}

impl From<SliceId> for v1::SliceRequest {
    fn from(id: SliceId) -> Self {
        use v1::slice_request::File;
        let file = match id.file {
            SliceFile::Embedding => File::Embedding(v1::EmbeddingFile {}),
            SliceFile::Blocks(layers) => {
                File::Blocks(v1::BlockRange { first_block: layers.start(), end_block: layers.end() })
            }
        };
        let model_hash = id.model.0.to_vec().into();
        Self { model_hash, cutter: id.cutter, file: Some(file), form: Some(id.form.into()) }
    }
}

impl SliceWord {
    /// Checks a received one.
    pub fn check(word: v1::SliceWord) -> Result<Self, BadMessage> {
        use v1::slice_word::Word;
        match word.word.ok_or(BadMessage::Missing { what: "a word about a slice", field: "content" })? {
            Word::Hashing(v1::SliceHashing { done, total }) => {
                Ok(Self::Hashing { done: Bytes(done), total: Bytes(total) })
            }
            Word::Sha256(bytes) => digest(&bytes, "its hash").map(Self::Sha256),
        }
    }
}

/// Takes a piece apart: its bytes, of which there may be none.
pub fn piece_bytes(piece: v1::SlicePiece) -> Result<bytes::Bytes, BadMessage> {
    let v1::SlicePiece { data, zeros } = piece;
    let (got, zeros) = (data.len(), zeros as usize);
    if got > PIECE || zeros > PIECE || (got > 0 && zeros > 0) {
        let reason = format!("it has {got} bytes and {zeros} zeros, and may have {PIECE} of either");
        return Err(BadMessage::Other { what: "a piece of a slice", reason });
    }
    Ok(if zeros > 0 { vec![0; zeros].into() } else { data })
}

/// Makes a piece of bytes, at most [`PIECE`] of them.
pub fn piece_of(bytes: Vec<u8>) -> v1::SlicePiece {
    if bytes.iter().all(|&byte| byte == 0) {
        return v1::SlicePiece { data: bytes::Bytes::new(), zeros: bytes.len() as u32 };
    }
    v1::SlicePiece { data: bytes.into(), zeros: 0 }
}

impl From<SliceWord> for v1::SliceWord {
    fn from(word: SliceWord) -> Self {
        use v1::slice_word::Word;
        Self {
            word: Some(match word {
                SliceWord::Hashing { done, total } => {
                    Word::Hashing(v1::SliceHashing { done: done.0, total: total.0 })
                }
                SliceWord::Sha256(bytes) => Word::Sha256(bytes.to_vec().into()),
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use prost::Message;

    use super::*;

    fn id(file: SliceFile) -> SliceId {
        let form = SliceForm { bytes: Bytes(100), tensor_bytes: Bytes(80), header_sha256: [3; 32] };
        SliceId { model: ModelHash([7; 32]), cutter: 1, file, form }
    }

    fn blocks() -> SliceFile {
        SliceFile::Blocks(LayerRange::new(10, 20).unwrap())
    }

    #[test]
    fn what_is_asked_and_said_survives_the_wire() {
        for file in [blocks(), SliceFile::Embedding] {
            assert_eq!(SliceId::check(id(file).into()), Ok(id(file)));
            let read = v1::ReadSliceRequest { slice: Some(id(file).into()), offset: 100 };
            assert_eq!(SliceId::check_read(read), Ok((id(file), 100)));
        }
        for word in [SliceWord::Sha256([9; 32]), SliceWord::Hashing { done: Bytes(1), total: Bytes(2) }] {
            assert_eq!(SliceWord::check(word.into()), Ok(word));
        }
        assert_eq!(blocks().to_string(), "slice 10-20");
    }

    #[test]
    fn zeros_travel_as_their_number_and_too_many_do_not() {
        let zeros = piece_of(vec![0; PIECE]);
        assert!(zeros.encoded_len() < 8 && piece_bytes(zeros).unwrap() == vec![0; PIECE]);
        for bytes in [vec![1, 0, 0], vec![], vec![7; PIECE]] {
            assert_eq!(piece_bytes(piece_of(bytes.clone())).unwrap(), bytes);
        }
        let flood = v1::SlicePiece { zeros: u32::MAX, ..Default::default() };
        assert!(piece_bytes(flood).unwrap_err().to_string().contains("4294967295 zeros"));
        assert!(piece_bytes(v1::SlicePiece { data: vec![1].into(), zeros: 1 }).is_err());
    }

    #[test]
    fn a_request_that_makes_no_sense_is_refused() {
        let broken = |change: fn(&mut v1::SliceRequest)| {
            let mut request = id(blocks()).into();
            change(&mut request);
            SliceId::check(request).unwrap_err().to_string()
        };
        assert!(broken(|r| r.model_hash = vec![1; 31].into()).contains("31 bytes"));
        assert!(broken(|r| r.file = None).contains("which file"));
        assert!(broken(|r| r.form = None).contains("its file"));
        assert!(broken(|r| r.form.as_mut().unwrap().bytes = 79).contains("79 bytes"));
        let backwards = v1::BlockRange { first_block: 3, end_block: 3 };
        let mut request = v1::SliceRequest::from(id(blocks()));
        request.file = Some(v1::slice_request::File::Blocks(backwards));
        assert!(SliceId::check(request).is_err());
        let beyond = v1::ReadSliceRequest { slice: Some(id(blocks()).into()), offset: 101 };
        assert!(SliceId::check_read(beyond).unwrap_err().to_string().contains("from 101 on"));
        assert!(SliceId::check_read(v1::ReadSliceRequest::default()).is_err());
        assert!(SliceWord::check(v1::SliceWord::default()).is_err());
    }

    proptest! {
        #[test]
        fn garbled_requests_never_panic(
            garble in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
        ) {
            let read = v1::ReadSliceRequest { slice: Some(id(blocks()).into()), offset: 7 };
            let mut bytes = read.encode_to_vec();
            for (at, byte) in garble {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            }
            if let Ok(Ok((id, offset))) = v1::ReadSliceRequest::decode(&bytes[..]).map(SliceId::check_read) {
                prop_assert!(offset <= id.form.bytes.0 && id.form.tensor_bytes <= id.form.bytes);
            }
        }
    }
}
