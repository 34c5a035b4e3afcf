//! Slices on a GPU, through ggml's Vulkan backend: blocks split between GPU and CPU give the text of the whole model with the
//! same blocks on the same devices, and the GPU's numbers are near the CPU's. `scripts/test-vulkan.sh` builds `shoal` for
//! it and runs it; where there is no GPU, on Mesa's lavapipe.
//!
//! GPU and CPU round differently, so like is compared with like, and the two with each other by angle only.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "helpers of tests are tests")]
#![forbid(unsafe_code)]

use std::process::Command;
use std::time::Duration;

use llama::{
    AddSpecial, ContextParams, Device, DeviceKind, MemoryPlace, Model, ModelParams, Output, RowInput, Rows,
    SliceContext, Special, devices,
};
use serde_json::{Value, json};
use tests::models::{SMOLLM2, model_path};
use tests::process::shoal_binary;
use tests::server::Server;

const N_LAYER: u32 = 30;

const PROMPT: &str = "The lighthouse keeper climbed the stairs every evening before dusk. He carried oil, a clean \
                      cloth, and a notebook in which he wrote down every ship that passed.";

/// The GPU that everything here runs on.
fn gpu() -> Device {
    let gpus = [DeviceKind::Gpu, DeviceKind::IntegratedGpu];
    let gpu = devices().into_iter().find(|device| gpus.contains(&device.kind));
    gpu.expect("no GPU: is the Vulkan backend compiled in, and for lavapipe GGML_VK_VISIBLE_DEVICES=0 set?")
}

/// Logits of every token of the prompt, with the model's last `gpu_layers` blocks on the GPU.
fn prefill(gpu_layers: u32) -> Vec<Vec<f32>> {
    let params = ModelParams { gpu_layers, ..ModelParams::default() };
    let model = Model::load(&model_path(SMOLLM2).unwrap(), params).unwrap();
    let tokens = model.vocab().tokenize(PROMPT, AddSpecial::AsModelSays, Special::Text).unwrap();
    let n = tokens.len() as u32;
    let params = ContextParams {
        threads: 1,
        threads_batch: 1,
        max_outputs: n,
        ..ContextParams::new(Output::Logits, 1, n)
    };
    let mut context = SliceContext::new(&model, &params).unwrap();
    let on_gpu = context.memory().unwrap().total_in(MemoryPlace::Device);
    assert_eq!(on_gpu > 0, gpu_layers > 0, "{on_gpu} bytes on the GPU with {gpu_layers} blocks there");
    let positions: Vec<u32> = (0..n).collect();
    let (slots, outputs) = (vec![0; tokens.len()], vec![true; tokens.len()]);
    let input = RowInput::Tokens(&tokens);
    context.run(&Rows { input, slots: &slots, positions: &positions, outputs: &outputs }).unwrap();
    (0..tokens.len()).map(|row| context.logits(row).unwrap().to_vec()).collect()
}

fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum::<f64>();
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

#[test]
#[ignore = "needs a build with Vulkan and a GPU or lavapipe: run scripts/test-vulkan.sh"]
fn prefill_logits_of_the_gpu_point_where_the_cpus_do() {
    let Device { name, description, memory_total, .. } = gpu();
    println!("{name}: {description}, {} MiB", memory_total >> 20);
    assert!(name.starts_with("Vulkan"), "{name} is no Vulkan device");
    let on_cpu = prefill(0);
    // With some blocks on the GPU, a prompt of 32 rows has it compute the CPU's blocks too.
    for gpu_layers in [10, N_LAYER] {
        let cosines = prefill(gpu_layers).iter().zip(&on_cpu).map(|(a, b)| cosine(a, b)).collect::<Vec<_>>();
        let worst = cosines.iter().copied().fold(1.0, f64::min);
        println!("{gpu_layers} blocks on the GPU, {} tokens: least cosine {worst:.5}", cosines.len());
        assert!(cosines.iter().all(|cosine| *cosine >= 0.99), "{cosines:?}");
    }
}

/// `shoal slice verify` with the model's last `gpu_layers` blocks on the GPU.
fn verify(cuts: &str, gpu_layers: u32) -> Value {
    let output = Command::new(shoal_binary().unwrap())
        .args(["slice", "verify", "-m", "SmolLM2", "--cuts", cuts, "--gpu-layers", &gpu_layers.to_string()])
        .args(["--tokens", "32", "--threads", "1", "--tolerance", "1e9", "--json"])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {said}"))
}

#[test]
#[ignore = "needs a build with Vulkan and a GPU or lavapipe: run scripts/test-vulkan.sh"]
fn slices_on_gpu_and_cpu_give_the_tokens_of_the_whole_model_on_the_same_devices() {
    gpu();
    // All on the GPU; a slice split between both; slices on either; the cut between them.
    for (cuts, gpu_layers) in [("10,20", N_LAYER), ("10,20", 15), ("15", 20), ("20", 10)] {
        let report = verify(cuts, gpu_layers);
        let difference = &report["max_abs_logit_diff"];
        println!("cut at {cuts}, {gpu_layers} blocks on the GPU: largest difference of logits {difference}");
        assert_eq!(report["tokens_equal"], true, "{report:#}");
        assert_eq!(report["single_slice"]["tokens_equal"], true, "{report:#}");
    }
}

#[test]
#[ignore = "needs a build with Vulkan and a GPU or lavapipe: run scripts/test-vulkan.sh"]
fn gpu_and_cpu_are_profiled_each_by_itself() {
    let gpu = gpu();
    let cache = tempfile::tempdir().unwrap();
    let output = Command::new(shoal_binary().unwrap())
        .arg("--cache-dir")
        .arg(cache.path())
        .args([
            "profile",
            "--device",
            &format!("{},cpu", gpu.name),
            "--ctx",
            "256",
            "--seconds",
            "10",
            "--json",
        ])
        .arg(model_path(SMOLLM2).unwrap())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    let profiles: Value =
        serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {said}"));
    let profile = &profiles["profiles"][0];
    // What a limit of memory leaves out is no failure of a device.
    let is_failure = |failure: &&Value| !failure["reason"].as_str().unwrap().starts_with("left out");
    let failed: Vec<&Value> =
        profile["measured"]["failures"].as_array().unwrap().iter().filter(is_failure).collect();
    assert!(failed.is_empty(), "{failed:?}");
    for (processor, name) in [("gpu", gpu.name.as_str()), ("cpu", "CPU")] {
        let decode = &profile[processor]["blocks"][0]["decode"]["ms"];
        println!("a step of one block on {name}: {} ms", decode[0]);
        assert!(decode[0].as_f64().is_some_and(|ms| ms > 0.0), "{processor}: {profile:#}");
        let measurements = profile["measured"]["measurements"].as_array().unwrap();
        assert!(
            measurements.iter().any(|measurement| measurement["processor"] == name),
            "{name}: {profile:#}"
        );
    }
}

/// A greedy completion by a server whose stages are as `args` say.
async fn completion(args: &[&str]) -> String {
    // Chunks of fewer than 32 rows, for the reason that `shoal slice verify` has them. A warm-up takes long on lavapipe.
    let common = ["--ctx", "512", "--slots", "1", "--prefill-chunk", "16"];
    let mut server = Server::launch("SmolLM2", &[args, &common].concat()).unwrap();
    server.wait_ready(Duration::from_secs(300)).await.unwrap();
    let body = json!({ "prompt": PROMPT, "temperature": 0, "max_tokens": 32 });
    let (status, answer) = server.post("/v1/completions", &body).await.unwrap();
    answer["choices"][0]["text"].as_str().unwrap_or_else(|| panic!("{status}: {answer}")).to_owned()
}

#[tokio::test]
#[ignore = "needs a build with Vulkan and a GPU or lavapipe: run scripts/test-vulkan.sh"]
async fn stages_split_between_gpu_and_cpu_serve_the_text_of_one_stage_with_the_same_blocks_on_the_gpu() {
    gpu();
    let whole = completion(&["--stages", "1", "--gpu-layers", "15"]).await;
    let staged = completion(&["--cuts", "10,20", "--gpu-layers", "0,5,10"]).await;
    println!("{staged:?}");
    assert!(!whole.trim().is_empty());
    assert_eq!(staged, whole);
}
