//! Nodes that have no copy of the model: they get their parts of it from others, once, whole, and on from where a transfer broke.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime};

use serde_json::json;
use tests::chat::EventStream;
use tests::cluster::Cluster;
use tests::models::{SMOLLM2, model_path};
use tests::node::Node;
use tests::process::{eventually, shoal_binary, signal};
use tests::reference::Reference;
use tests::server::{READY_DEADLINE, Server, free_port};

const SOON: Duration = Duration::from_secs(40);

const PROMPT: &str = "The capital of France is";

/// A cluster whose nodes have caches of their own, with no model in them.
struct Bare {
    cluster: Cluster,
}

/// What a log tells of a part that came.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Received {
    file: String,
    source: String,
    from: u64,
    bytes: u64,
}

impl Bare {
    fn new() -> Self {
        Self { cluster: Cluster::new().unwrap() }
    }

    fn launch(&self, args: &[&str]) -> Server {
        let own = self.cluster.serve_args();
        let common = ["--cluster", "--slots", "1", "--ctx", "256", "--threads", "1"];
        let args = own.iter().map(String::as_str).chain(common).chain(args.iter().copied());
        Server::launch("SmolLM2", &args.collect::<Vec<_>>()).unwrap()
    }

    /// Launches, and waits for the API, behind which is the port at which nodes join.
    async fn serve(&self, args: &[&str]) -> Server {
        let server = self.launch(args);
        eventually("the API", SOON, async || server.ready().await.ok()).await.unwrap();
        server
    }

    fn cache(&self, name: &str) -> PathBuf {
        self.cluster.folder().join(format!("cache-{name}"))
    }

    /// A node without any model.
    async fn join(&self, name: &str, args: &[&str]) -> Node {
        let token = self.cluster.token().unwrap();
        self.run(name, &[&["--join", &token], args].concat()).await
    }

    async fn run(&self, name: &str, args: &[&str]) -> Node {
        let mut command = Command::new(shoal_binary().unwrap());
        command.arg("-v").arg("--state").arg(self.cluster.node_state(name));
        command.arg("--cache-dir").arg(self.cache(name)).args(["node", "--name", name]).args(args);
        command.env_remove("SHOAL_MODELS");
        if !args.contains(&"--bind") {
            command.args(["--bind", "127.0.0.1:0"]);
        }
        let mut node = Node::launch(command).unwrap();
        node.wait_listening().await.unwrap();
        node.event("reached").await.unwrap();
        node
    }

    /// Files of slices in a node's cache: whole ones, or those in the making.
    fn files(&self, name: &str, end: &str) -> Vec<(PathBuf, u64)> {
        let folders = std::fs::read_dir(self.cache(name).join("slices")).into_iter().flatten().flatten();
        let files = folders.flat_map(|folder| std::fs::read_dir(folder.path()).unwrap().flatten());
        let files = files.filter(|file| file.file_name().to_string_lossy().ends_with(end));
        let mut files: Vec<_> = files.map(|file| (file.path(), file.metadata().unwrap().len())).collect();
        files.sort();
        files
    }

    fn names(&self, name: &str) -> Vec<String> {
        let files = self.files(name, ".gguf").into_iter();
        files.map(|(path, _)| path.file_name().unwrap().to_string_lossy().into_owned()).collect()
    }
}

/// What a node tells of the parts that came.
fn received(node: &Node) -> Vec<Received> {
    let log = node.log();
    let lines = log.lines().filter(|line| line.contains("a part of a model was received"));
    lines
        .map(|line| Received {
            file: field(line, "file=").split(" source=").next().unwrap().to_owned(),
            source: word(line, "source="),
            from: word(line, "from=").parse().unwrap(),
            bytes: word(line, "bytes=").parse().unwrap(),
        })
        .collect()
}

fn field<'a>(line: &'a str, name: &str) -> &'a str {
    line.split_once(name).unwrap_or_else(|| panic!("no {name} in {line}")).1
}

fn word(line: &str, name: &str) -> String {
    field(line, name).split_whitespace().next().unwrap().to_owned()
}

fn whole_model() -> u64 {
    model_path(SMOLLM2).unwrap().metadata().unwrap().len()
}

async fn gives_the_models_text(server: &Server) {
    let mut reference = Reference::load(&model_path(SMOLLM2).unwrap()).unwrap();
    let body = json!({ "prompt": PROMPT, "temperature": 0, "max_tokens": 16 });
    let stream = EventStream::open(server, "/v1/completions", body).await.unwrap();
    assert_eq!(stream.text().await.unwrap().0, reference.greedy_text(PROMPT, 16).unwrap());
}

async fn stop(mut server: Server) {
    assert!(server.interrupt(SOON).await.unwrap().success());
}

#[tokio::test]
async fn three_nodes_without_the_model_get_their_thirds_and_once_and_give_its_text() {
    let bare = Bare::new();
    let mut server = bare.serve(&["--cuts", "10,20"]).await;
    let mut nodes = Vec::new();
    for name in ["a", "b", "c"] {
        nodes.push(bare.join(name, &[]).await);
    }
    server.wait_ready(READY_DEADLINE).await.unwrap();
    gives_the_models_text(&server).await;
    let expected: [&[&str]; 3] = [&["0-10.gguf", "embedding.gguf"], &["10-20.gguf"], &["20-30.gguf"]];
    for ((node, name), expected) in nodes.iter().zip(["a", "b", "c"]).zip(expected) {
        assert_eq!(bare.names(name), expected);
        let (came, kept) = (received(node), bare.files(name, ".gguf"));
        let (came, kept): (u64, u64) =
            (came.iter().map(|part| part.bytes).sum(), kept.iter().map(|(_, bytes)| bytes).sum());
        eprintln!("node {name} received {came} bytes of a model of {}", whole_model());
        assert_eq!(came, kept, "{}", node.log());
    }
    let middle = received(&nodes[1]);
    assert!(middle[0].bytes <= whole_model() / 3 + (1 << 20), "{middle:?}");
    // Field case 15: what is there is not fetched again.
    stop(server).await;
    let mut server = bare.launch(&["--cuts", "10,20"]);
    server.wait_ready(READY_DEADLINE).await.unwrap();
    assert_eq!(nodes.iter().map(|node| received(node).len()).collect::<Vec<_>>(), [2, 1, 1]);
    // Another cut: the second node has none of the first one's new slice, and the orchestrator has all.
    stop(server).await;
    let mut server = bare.launch(&["--cuts", "12,20"]);
    server.wait_ready(READY_DEADLINE).await.unwrap();
    gives_the_models_text(&server).await;
    assert_eq!(nodes.iter().map(|node| received(node).len()).collect::<Vec<_>>(), [3, 2, 1]);
}

// Field case 15.
#[tokio::test]
async fn case_15_a_node_that_is_killed_in_mid_transfer_goes_on_where_it_was_and_progress_is_told() {
    let bare = Bare::new();
    let mut server = bare.serve(&["--stages", "1", "--slice-rate", "10MB/s"]).await;
    let address = format!("127.0.0.1:{}", free_port().unwrap());
    // At a port of its own, at which it will be again.
    let mut node = bare.join("a", &["--bind", &address]).await;
    let part = || bare.files("a", ".receiving").first().map_or(0, |(_, bytes)| *bytes);
    eventually("some of the slice", SOON, async || (part() > 4_000_000).then_some(())).await.unwrap();
    eventually("progress on /ready", SOON, async || {
        let (_, body) = server.ready().await.ok()?;
        let text = body.to_string();
        (text.contains("receiving slice 0-30: ") && text.contains("MiB of ")).then_some(())
    })
    .await
    .unwrap();
    signal(node.pid(), "KILL").unwrap();
    node.wait_exit(SOON).await.unwrap();
    let kept = part();
    assert!(kept > 4_000_000 && bare.files("a", ".gguf").is_empty());
    let node = bare.run("a", &["--bind", &address]).await;
    server.wait_ready(READY_DEADLINE).await.unwrap();
    gives_the_models_text(&server).await;
    let came = received(&node);
    assert_eq!((came[0].file.as_str(), came[0].from), ("slice 0-30", kept), "{came:?}");
    assert_eq!(came[0].bytes + kept, bare.files("a", "0-30.gguf")[0].1);
}

#[tokio::test]
async fn a_node_with_a_copy_copies_nothing_and_others_get_their_parts_from_it_first() {
    let bare = Bare::new();
    let models = bare.cluster.folder().join("models-a");
    std::fs::create_dir(&models).unwrap();
    std::os::unix::fs::symlink(model_path(SMOLLM2).unwrap(), models.join(SMOLLM2)).unwrap();
    let mut server = bare.serve(&["--stages", "1"]).await;
    let a = bare.join("a", &["--models-dir", models.to_str().unwrap()]).await;
    server.wait_ready(READY_DEADLINE).await.unwrap();
    let b = bare.join("b", &[]).await;
    stop(server).await;
    let mut server = bare.serve(&["--stages", "2"]).await;
    server.wait_ready(READY_DEADLINE).await.unwrap();
    gives_the_models_text(&server).await;
    assert!(received(&a).is_empty(), "{:?}", received(&a));
    let came = received(&b);
    assert!(came.len() == 1 && came[0].source == "a" && came[0].from == 0, "{came:?}\n{}", b.log());
}

// Field case 15.
#[tokio::test]
async fn case_15_a_slice_that_rotted_on_another_node_is_refused_and_had_from_elsewhere() {
    let bare = Bare::new();
    let mut server = bare.serve(&["--stages", "1"]).await;
    let _z = bare.join("z", &[]).await;
    server.wait_ready(READY_DEADLINE).await.unwrap();
    stop(server).await;
    let (slice, bytes) = bare.files("z", "0-30.gguf").remove(0);
    let good = std::fs::read(&slice).unwrap();
    flip_unseen(&slice, bytes / 2);
    // A replica on each, so that both are used whichever comes first.
    let _server = bare.serve(&["--stages", "1", "--replicas", "2"]).await;
    let b = bare.join("b", &[]).await;
    eventually("the slice", READY_DEADLINE, async || {
        bare.names("b").contains(&"0-30.gguf".to_owned()).then_some(())
    })
    .await
    .unwrap();
    let of_slice = received(&b).into_iter().filter(|part| part.file == "slice 0-30");
    let sources: Vec<String> = of_slice.map(|part| part.source).collect();
    assert_eq!(sources, ["z", "orchestrator"], "{}", b.log());
    assert!(b.log().contains("what came has wrong bytes; it is fetched again"), "{}", b.log());
    assert!(std::fs::read(&bare.files("b", "0-30.gguf")[0].0).unwrap() == good);
}

/// Flips a bit so that the file looks untouched.
fn flip_unseen(path: &Path, at: u64) {
    use std::os::unix::fs::FileExt;
    let file = std::fs::File::options().read(true).write(true).open(path).unwrap();
    let modified: SystemTime = file.metadata().unwrap().modified().unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 1], at).unwrap();
    file.set_modified(modified).unwrap();
}

#[tokio::test]
async fn a_nodes_limit_is_kept_unused_slices_go_first_and_what_does_not_fit_says_the_numbers() {
    let bare = Bare::new();
    // The slice of all blocks, and no more than one of them.
    let limit = whole_model() * 4 / 3;
    let mut server = bare.serve(&["--cuts", "10,20"]).await;
    let mut nodes = Vec::new();
    for name in ["a", "b", "c"] {
        nodes.push(bare.join(name, &["--slice-cache", &format!("{limit}")]).await);
    }
    server.wait_ready(READY_DEADLINE).await.unwrap();
    stop(server).await;
    let mut server = bare.launch(&["--stages", "1"]);
    server.wait_ready(READY_DEADLINE).await.unwrap();
    gives_the_models_text(&server).await;
    // Whichever node came back first has the stage; the slice of 10 blocks that it had before had to go.
    let chosen = ["a", "b", "c"]
        .map(|name| bare.names(name))
        .into_iter()
        .find(|names| names.contains(&"0-30.gguf".to_owned()));
    assert_eq!(chosen.unwrap(), ["0-30.gguf", "embedding.gguf"]);
    stop(server).await;

    let small = Bare::new();
    let server = small.serve(&["--stages", "1"]).await;
    let _node = small.join("a", &["--slice-cache", "20MB"]).await;
    eventually("the numbers", SOON, async || {
        server.log().contains("--slice-cache allows 19.1 MiB").then_some(())
    })
    .await
    .unwrap_or_else(|error| panic!("{error}: {}", server.log()));
    assert!(small.names("a").is_empty());
}
