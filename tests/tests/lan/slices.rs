//! Parts of a model on a Lan: what comes over each node's cable, and what a pulled cable does to it.

use std::path::{Path, PathBuf};
use std::time::Duration;

use gguf::write::{Data, Writer};
use gguf::{Gguf, Part};
use serde_json::json;
use tempfile::TempDir;
use tests::chat::EventStream;
use tests::lan::{Host, Lan, LinkShape};
use tests::models::{SMOLLM2, model_path};
use tests::node::{Node, Trust};
use tests::process::{eventually, shoal_binary};
use tests::reference::Reference;
use tests::server::{READY_DEADLINE, Server};

const SOON: Duration = Duration::from_secs(40);

/// Hosts without the model, one with it, and how the one directs the others.
struct Bare<'a> {
    lan: &'a Lan,
    folder: TempDir,
    trust: Trust,
}

impl<'a> Bare<'a> {
    fn new(lan: &'a Lan) -> Self {
        Self { lan, folder: TempDir::new().unwrap(), trust: Trust::found().unwrap() }
    }

    fn cache(&self, host: &str) -> PathBuf {
        self.folder.path().join(host)
    }

    async fn node(&self, host: &str) -> Node {
        let mut command = self.lan.host(host).command(shoal_binary().unwrap());
        command.args(["node", "-v", "--cache-dir"]).arg(self.cache(host)).env_remove("SHOAL_MODELS");
        Node::run(command, &self.trust.issue(host).unwrap(), &[]).await.unwrap()
    }

    fn serve(&self, model: &Path, nodes: &[&str], args: &[&str]) -> Server {
        let identity = self.trust.issue("me").unwrap();
        let nodes: Vec<String> = nodes.iter().map(|node| self.lan.host(node).address().to_string()).collect();
        let nodes = nodes.join(",");
        let common = ["--slots", "1", "--ctx", "256", "--threads", "1", "--node", &nodes, "--identity"];
        let args = [&common[..], &[identity.to_str().unwrap()], args].concat();
        let boss = self.lan.host("boss").command(shoal_binary().unwrap());
        Server::run(boss, model.to_str().unwrap(), &args).unwrap()
    }

    fn stored(&self, host: &str, end: &str) -> u64 {
        let folders = std::fs::read_dir(self.cache(host).join("slices")).into_iter().flatten().flatten();
        let files = folders.flat_map(|folder| std::fs::read_dir(folder.path()).unwrap().flatten());
        let files = files.filter(|file| file.file_name().to_string_lossy().ends_with(end));
        files.map(|file| file.metadata().unwrap().len()).sum()
    }
}

/// Bytes that came over a host's cable so far, frames and all.
fn received(host: &Host) -> u64 {
    let counters = host.inside(|| std::fs::read_to_string("/proc/thread-self/net/dev")).unwrap().unwrap();
    let line = counters.lines().find_map(|line| line.trim().strip_prefix("eth0:")).unwrap();
    line.split_whitespace().next().unwrap().parse().unwrap()
}

/// The test model with a head of its own in place of the one it shares with the embedding, so that three parts of it
/// can be nearly alike: 30 MB of embedding and 5 blocks, 19 blocks, 6 blocks and 30 MB of head.
fn write_untied(path: &Path) -> u64 {
    let file = std::fs::File::open(model_path(SMOLLM2).unwrap()).unwrap();
    let gguf = Gguf::read(vec![Part::new("model", file)]).unwrap();
    let mut writer = Writer::new();
    for (key, value) in gguf.metadata() {
        writer.set(key, value.clone());
    }
    let copy = |offset| Data::Copy { part: gguf.parts()[0].clone(), offset };
    for tensor in gguf.tensors() {
        writer.tensor(&*tensor.name, tensor.kind, &tensor.dims, copy(tensor.offset)).unwrap();
    }
    let shared = gguf.tensor("token_embd.weight").unwrap();
    writer.tensor("output.weight", shared.kind, &shared.dims, copy(shared.offset)).unwrap();
    let plan = writer.plan().unwrap();
    let mut file = std::fs::File::create(path).unwrap();
    plan.write_to(&mut file, &mut |_| {}).unwrap();
    plan.len()
}

/// Runs a test in the host whose loopback address the server listens at.
fn on_boss(lan: &Lan, test: impl AsyncFnOnce(Bare<'_>) + Send) {
    let done = lan.host("boss").inside(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(test(Bare::new(lan)));
    });
    done.unwrap();
}

#[test]
fn over_each_nodes_cable_comes_no_more_than_its_third_of_the_model_and_a_mebibyte() {
    let Some(lan) = Lan::with_hosts(&["boss", "a", "b", "c"]).build_or_skip().unwrap() else { return };
    on_boss(&lan, async |bare| {
        let model = bare.folder.path().join("untied.gguf");
        let whole = write_untied(&model);
        let mut reference = Reference::load(&model).unwrap();
        let (_a, _b, _c) = (bare.node("a").await, bare.node("b").await, bare.node("c").await);
        let before = ["a", "b", "c"].map(|name| received(bare.lan.host(name)));
        // A list of links, so that none are measured meanwhile, which takes more bytes than the model.
        let links = bare.folder.path().join("links.json");
        let link = |from, to| json!({ "from": from, "to": to, "mbit_per_s": 900.0, "one_way_ms": 0.2 });
        let measured = [link("a", "b"), link("b", "c"), link("c", "a")];
        std::fs::write(&links, json!({ "nodes": [], "links": { "measured": measured } }).to_string())
            .unwrap();
        let args = ["--cuts", "5,24", "--links", links.to_str().unwrap()];
        let mut server = bare.serve(&model, &["a", "b", "c"], &args);
        server.wait_ready(READY_DEADLINE).await.unwrap();
        for (name, before) in ["a", "b", "c"].into_iter().zip(before) {
            let came = received(bare.lan.host(name)) - before;
            let kept = bare.stored(name, ".gguf");
            eprintln!(
                "{name}: {came} bytes came over its cable, for files of {kept} bytes of a model of {whole}"
            );
            // With the headers of all packets. The last one needs somewhat more than a third, and its zeros do not travel.
            let needs = if name == "c" { kept } else { whole / 3 };
            assert!(came <= needs + (1 << 20) && came > whole / 4, "{name}: {came} bytes of {whole}");
        }
        let prompt = "The capital of France is";
        let body = json!({ "prompt": prompt, "temperature": 0, "max_tokens": 16 });
        let stream = EventStream::open(&server, "/v1/completions", body).await.unwrap();
        assert_eq!(stream.text().await.unwrap().0, reference.greedy_text(prompt, 16).unwrap());
    });
}

// Field cases 5 and 15.
#[test]
fn case_15_a_cable_that_is_pulled_in_mid_transfer_and_put_back_costs_no_byte_twice() {
    let Some(lan) = Lan::with_hosts(&["boss", "a"]).build_or_skip().unwrap() else { return };
    lan.shape("boss", "a", LinkShape::new(100.0, Duration::from_millis(1))).unwrap();
    on_boss(&lan, async |bare| {
        let _a = bare.node("a").await;
        let before = received(bare.lan.host("a"));
        let mut server = bare.serve(&model_path(SMOLLM2).unwrap(), &["a"], &[]);
        let part = || bare.stored("a", ".receiving");
        eventually("a part of the slice", SOON, async || (part() > 20_000_000).then_some(())).await.unwrap();
        bare.lan.cut("a").unwrap();
        eventually("the loss to be told", SOON, async || {
            server.ready().await.ok()?.1.to_string().contains("was lost").then_some(())
        })
        .await
        .unwrap();
        let kept = part();
        bare.lan.heal().unwrap();
        server.wait_ready(READY_DEADLINE).await.unwrap();
        let (came, files) = (received(bare.lan.host("a")) - before, bare.stored("a", ".gguf"));
        eprintln!("the cable was pulled after {kept} bytes; {came} came in all, for files of {files} bytes");
        assert!(kept > 20_000_000 && came < files + files / 50 + (1 << 20), "{came} bytes for {files}");
    });
}
