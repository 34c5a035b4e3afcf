//! Parts of a model over real connections: from hosts that have it, and from hosts that break off, lie, or have nothing.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::{Arc, Mutex};

use cluster::{Bytes, LayerRange, ModelHash, NodeId};
use futures::Stream;
use gguf::cut::{CutOptions, OutputPlan, plan_embedding, plan_slice};
use protocol::listen::{FrameSizes, TlsIncoming, server};
use protocol::node::Peer;
use protocol::slices::{SliceFile, SliceId, SliceWord};
use protocol::tls::ClusterCa;
use protocol::v1;
use protocol::v1::slices_server::{Slices, SlicesServer};
use sha2::{Digest, Sha256};
use tempfile::TempDir;
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;
use tonic::{Request, Response, Status};

use super::*;
use crate::folders::Folders;
use crate::model_file::ModelFile;
use crate::model_hash::model_hash;
use crate::progress::{Observer, Progress, Work};
use crate::slices::{FetchRequest, SliceError, SliceStore, StoredFile, form_of};
use crate::test_model;

fn go_on(_: Progress) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// A model, and a cluster whose members have it or not.
struct World {
    ca: ClusterCa,
    hash: ModelHash,
    folder: TempDir,
    serving: Vec<AbortOnDropHandle<()>>,
}

impl World {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("models")).unwrap();
        let path = test_model::write(&folder.path().join("models"));
        let folders = Folders::new(Some(folder.path().join("boss")), None).unwrap();
        let hash = model_hash(&[path], &folders.model_hashes(), &mut go_on).unwrap();
        Self { ca: ClusterCa::new().unwrap(), hash, folder, serving: Vec::new() }
    }

    fn plan(&self, file: SliceFile) -> OutputPlan {
        let model = ModelFile::open(&self.folder.path().join("models/tiny.gguf")).unwrap();
        match file {
            SliceFile::Blocks(layers) => plan_slice(model.gguf(), layers, &CutOptions::default()).unwrap(),
            SliceFile::Embedding => plan_embedding(model.gguf(), &CutOptions::default()).unwrap(),
        }
    }

    /// A host with a cache folder of this name; that of "boss" knows the model.
    async fn host(&mut self, name: &str) -> Peer {
        let folders = Folders::new(Some(self.folder.path().join(name)), None).unwrap();
        let identity = self.ca.issue(name).unwrap();
        let limits = SliceLimits::default();
        let port =
            SlicePort::bind(([127, 0, 0, 1], 0).into(), &[], &identity, folders, limits).await.unwrap();
        let addresses = port.addresses().to_vec();
        self.serve(async { port.serve(CancellationToken::new()).await.unwrap() });
        peer(name, addresses)
    }

    /// A host that behaves as it is told to.
    async fn actor(&mut self, name: &str, act: Act) -> (Peer, Arc<Mutex<Vec<u64>>>) {
        let incoming =
            TlsIncoming::bind(([127, 0, 0, 1], 0).into(), &self.ca.issue(name).unwrap()).await.unwrap();
        let address = incoming.local_addr().into();
        let whole = self.plan(middle()).to_bytes().unwrap();
        let asked = Arc::new(Mutex::new(Vec::new()));
        let actor = Actor { act, whole, asked: Arc::clone(&asked) };
        let router = server(FrameSizes::for_rows(1, 1024)).add_service(SlicesServer::new(actor));
        self.serve(async { router.serve_with_incoming(incoming).await.unwrap() });
        (peer(name, vec![address]), asked)
    }

    fn serve(&mut self, serving: impl Future<Output = ()> + Send + 'static) {
        self.serving.push(AbortOnDropHandle::new(tokio::spawn(serving)));
    }

    fn store(&self, name: &str) -> SliceStore {
        SliceStore::new(self.slices(name))
    }

    fn slices(&self, name: &str) -> PathBuf {
        self.folder.path().join(name).join("slices")
    }

    /// Fetches as the node of this name.
    async fn fetch(&self, name: &str, file: SliceFile, sources: &[&Peer]) -> Result<StoredFile, SliceError> {
        self.fetch_told(name, file, sources, |_| ControlFlow::Continue(())).await
    }

    async fn fetch_told(
        &self,
        name: &str,
        file: SliceFile,
        sources: &[&Peer],
        mut told: impl FnMut(Progress) -> ControlFlow<()> + Send + 'static,
    ) -> Result<StoredFile, SliceError> {
        let (store, model, form) = (self.store(name), self.hash, form_of(&self.plan(file)));
        let identity = self.ca.issue(name).unwrap();
        let sources: Vec<Peer> = sources.iter().map(|&source| source.clone()).collect();
        let fetching = tokio::task::spawn_blocking(move || {
            let (pace, stop) = (Pace::new(None), CancellationToken::new());
            let mut fetcher = Fetcher {
                handle: Handle::current(),
                identity,
                pace: &pace,
                model,
                sources: &sources,
                stop: &stop,
            };
            let request = FetchRequest { model, files: &[(file, form)], deliver: &mut fetcher };
            store.fetch(request, &mut told as &mut Observer<'_>).map(|mut stored| stored.remove(0))
        });
        fetching.await.unwrap()
    }

    fn files(&self, name: &str) -> Vec<String> {
        let folder = self.slices(name).join(self.hash.to_string());
        let mut names: Vec<_> = names_in(&folder).into_iter().filter(|name| name != ".lock").collect();
        names.sort();
        names
    }
}

fn names_in(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

fn peer(name: &str, addresses: Vec<protocol::node::Address>) -> Peer {
    Peer { name: NodeId(name.to_owned()), instance: String::new(), addresses }
}

fn middle() -> SliceFile {
    SliceFile::Blocks(LayerRange::new(1, 3).unwrap())
}

/// What is wrong with a host.
#[derive(Clone, Copy)]
enum Act {
    /// Nothing, and it sends small pieces.
    Well,
    /// It breaks off after so many bytes, of those asked for.
    BreaksOff(usize),
    /// It flips a bit of the byte at this offset.
    Lies(usize),
    /// It sends more than there is.
    AddsSome,
}

struct Actor {
    act: Act,
    whole: Vec<u8>,
    /// From which offsets it was asked.
    asked: Arc<Mutex<Vec<u64>>>,
}

type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl Slices for Actor {
    type DescribeStream = Answers<v1::SliceWord>;
    type ReadStream = Answers<v1::SlicePiece>;

    async fn describe(&self, _: Request<v1::SliceRequest>) -> Result<Response<Self::DescribeStream>, Status> {
        let word = SliceWord::Sha256(Sha256::digest(&self.whole).into()).into();
        Ok(Response::new(Box::pin(futures::stream::iter([Ok(word)]))))
    }

    async fn read(
        &self,
        request: Request<v1::ReadSliceRequest>,
    ) -> Result<Response<Self::ReadStream>, Status> {
        let (_, offset) = SliceId::check_read(request.into_inner()).unwrap();
        self.asked.lock().unwrap().push(offset);
        let mut bytes = self.whole.clone();
        match self.act {
            Act::Lies(at) => bytes[at] ^= 4,
            Act::AddsSome => bytes.push(0),
            Act::Well | Act::BreaksOff(_) => {}
        }
        let mut rest = bytes.split_off(offset as usize);
        let mut end = Vec::new();
        if let Act::BreaksOff(after) = self.act {
            rest.truncate(after);
            end.push(Err(Status::unavailable("the cable was pulled")));
        }
        let pieces: Vec<_> = rest
            .chunks(100)
            .map(|piece| Ok(v1::SlicePiece { data: piece.to_vec().into(), zeros: 0 }))
            .collect();
        Ok(Response::new(Box::pin(futures::stream::iter(pieces.into_iter().chain(end)))))
    }
}

#[tokio::test]
async fn what_travelled_is_what_cutting_gives_and_travels_once_and_on_from_there() {
    let mut world = World::new();
    let boss = world.host("boss").await;
    for file in [middle(), SliceFile::Embedding] {
        let stored = world.fetch("a", file, &[&boss]).await.unwrap();
        assert_eq!(std::fs::read(&stored.path).unwrap(), world.plan(file).to_bytes().unwrap());
    }
    assert_eq!(world.files("a"), ["1-3.gguf", "1-3.json", "embedding.gguf", "embedding.json"]);
    // Nobody need be there for what is here.
    let gone = peer("gone", vec![protocol::node::Address::parse("127.0.0.1:1").unwrap()]);
    world.fetch("a", middle(), &[&gone]).await.unwrap();
    // Who has the part, and not the model, gives it; also its word counts if the boss is away.
    let a = world.host("a").await;
    let stored = world.fetch("b", middle(), &[&a, &gone]).await.unwrap();
    assert_eq!(std::fs::read(&stored.path).unwrap(), world.plan(middle()).to_bytes().unwrap());
    // It does not have that one, nor does anybody else.
    let other = SliceFile::Blocks(LayerRange::new(0, 1).unwrap());
    let error = world.fetch("b", other, &[&a, &gone]).await.unwrap_err().to_string();
    for part in
        ["slice 0-1 cannot be had", "a: 127.0.0.1:", "neither slice 0-1 nor a copy of the model", "gone: "]
    {
        assert!(error.contains(part), "{error}");
    }
}

// Field case 15.
#[tokio::test]
async fn case_15_where_one_host_breaks_off_the_next_goes_on_from_the_same_byte() {
    let mut world = World::new();
    let boss = world.host("boss").await;
    let (bad, asked) = world.actor("bad", Act::BreaksOff(300)).await;
    let (worse, asked_too) = world.actor("worse", Act::BreaksOff(200)).await;
    let stored = world.fetch("a", middle(), &[&bad, &worse, &boss]).await.unwrap();
    assert_eq!(std::fs::read(&stored.path).unwrap(), world.plan(middle()).to_bytes().unwrap());
    assert_eq!((asked.lock().unwrap().clone(), asked_too.lock().unwrap().clone()), (vec![0], vec![300]));
    // One that breaks off again and again is asked again, and is enough.
    let (bad, asked) = world.actor("bad", Act::BreaksOff(1500)).await;
    world.fetch("b", middle(), &[&bad]).await.unwrap();
    assert!(asked.lock().unwrap().iter().is_sorted() && asked.lock().unwrap()[..2] == [0, 1500]);
}

// Field case 15.
#[tokio::test]
async fn case_15_a_transfer_that_was_stopped_goes_on_with_what_has_come() {
    let mut world = World::new();
    let (good, asked) = world.actor("good", Act::Well).await;
    let sources = [&good];
    let stopped = world.fetch_told("a", middle(), &sources, |progress| {
        assert_eq!(
            (progress.work, progress.work.to_string().as_str()),
            (Work::Receiving(middle()), "receiving slice 1-3")
        );
        if progress.done >= Bytes(700) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    assert!(matches!(stopped.await, Err(SliceError::Stopped)));
    let left = world.files("a");
    assert!(
        left.len() == 1 && left[0].starts_with(".1-3.gguf.") && left[0].ends_with(".receiving"),
        "{left:?}"
    );
    world.fetch("a", middle(), &[&good]).await.unwrap();
    assert_eq!(asked.lock().unwrap().clone(), [0, 700]);
    assert_eq!(world.files("a"), ["1-3.gguf", "1-3.json"]);
}

// Field case 15.
#[tokio::test]
async fn case_15_wrong_bytes_are_refused_and_fetched_again_from_others_first() {
    let mut world = World::new();
    let boss = world.host("boss").await;
    let (liar, asked) = world.actor("liar", Act::Lies(1000)).await;
    let stored = world.fetch("a", middle(), &[&liar, &boss]).await.unwrap();
    assert_eq!(std::fs::read(&stored.path).unwrap(), world.plan(middle()).to_bytes().unwrap());
    assert_eq!(asked.lock().unwrap().clone(), [0]);
    // Where there is nobody else, it is tried twice, and nothing of it stays.
    let error = world.fetch("b", middle(), &[&liar]).await.unwrap_err();
    assert!(error.to_string().contains("slice 1-3 came with wrong bytes twice: sha256"), "{error}");
    assert_eq!((asked.lock().unwrap().clone(), world.files("b")), (vec![0, 0, 0], vec![]));
    let (generous, _) = world.actor("generous", Act::AddsSome).await;
    let stored = world.fetch("c", middle(), &[&generous, &boss]).await.unwrap();
    assert_eq!(std::fs::read(&stored.path).unwrap(), world.plan(middle()).to_bytes().unwrap());
}

#[tokio::test]
async fn a_node_of_another_cluster_gets_nothing() {
    let mut world = World::new();
    let boss = world.host("boss").await;
    world.ca = ClusterCa::new().unwrap();
    assert!(matches!(world.fetch("a", middle(), &[&boss]).await, Err(SliceError::NoSource { .. })));
    assert!(world.files("a").is_empty());
}

#[tokio::test]
async fn what_the_disk_has_no_room_for_is_refused_before_anything_travels() {
    let mut world = World::new();
    let (good, asked) = world.actor("good", Act::Well).await;
    let (store, model, mut form) = (world.store("a"), world.hash, form_of(&world.plan(middle())));
    form.bytes = Bytes::from_mib(1 << 40);
    let identity = world.ca.issue("a").unwrap();
    let refused = tokio::task::spawn_blocking(move || {
        let (pace, stop) = (Pace::new(None), CancellationToken::new());
        let sources = [good];
        let handle = Handle::current();
        let mut fetcher = Fetcher { handle, identity, pace: &pace, model, sources: &sources, stop: &stop };
        let files = [(middle(), form)];
        store.fetch(FetchRequest { model, files: &files, deliver: &mut fetcher }, &mut go_on).unwrap_err()
    });
    let error = refused.await.unwrap().to_string();
    assert!(error.contains("1048576.0 TiB in ") && error.contains("are free there"), "{error}");
    assert!(asked.lock().unwrap().is_empty());
}
