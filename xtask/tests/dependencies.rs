//! Who may know whom: the dependency rules of ARCHITECTURE.md.
#![allow(clippy::panic, clippy::unwrap_used)] // how a test's helpers fail

use std::collections::BTreeSet;
use std::process::Command;

use cargo_metadata::{DependencyKind, Metadata, MetadataCommand};
use xtask::repository::{output_of, root};

/// Which of our own crates a crate may use outside its tests. A crate that is not listed here does not exist yet.
const MAY_KNOW: [(&str, &[&str]); 19] = [
    ("adapt", &["cluster", "planner"]),
    ("chart", &[]),
    ("cluster", &[]),
    ("deploy", &["cluster", "protocol", "registry"]),
    ("gguf", &["cluster"]),
    ("kv-blob", &[]),
    ("loadgen", &[]),
    ("planner", &["cluster"]),
    ("profiler", &["chart", "cluster", "gguf", "llama", "node", "protocol"]),
    ("protocol", &["cluster"]),
    ("llama-sys", &[]),
    ("llama", &["kv-blob", "llama-sys"]),
    ("stage", &["cluster", "llama", "protocol"]),
    ("node", &["cluster", "gguf", "protocol"]),
    ("registry", &["cluster", "protocol"]),
    ("orchestrator", &["cluster", "deploy", "llama", "protocol", "registry"]),
    (
        "shoal",
        &[
            "adapt",
            "chart",
            "cluster",
            "deploy",
            "gguf",
            "llama",
            "loadgen",
            "node",
            "orchestrator",
            "planner",
            "profiler",
            "protocol",
            "registry",
            "stage",
        ],
    ),
    ("tests", &["cluster", "gguf", "llama", "protocol"]),
    ("xtask", &["gguf", "protocol"]),
];

/// Packages that must not be found anywhere below a crate, and why.
const NEVER_BELOW: [(&str, &[&str], &str); 10] = [
    (
        "adapt",
        &["tokio", "tonic", "tracing", "cc", "cmake", "bindgen", "libc"],
        "it decides, and does nothing",
    ),
    ("cluster", &["tokio", "tonic", "tracing", "cc", "cmake", "bindgen", "libc"], "it is only nouns"),
    (
        "gguf",
        &["tokio", "tonic", "tracing", "cc", "cmake", "bindgen", "libc"],
        "it is pure, and builds with no C compiler",
    ),
    (
        "kv-blob",
        &["tokio", "tonic", "tracing", "cc", "cmake", "bindgen", "libc"],
        "it is pure, and builds with no C compiler",
    ),
    (
        "planner",
        &["tokio", "tonic", "tracing", "cc", "cmake", "bindgen", "libc"],
        "it is pure, and builds with no C compiler",
    ),
    ("llama", &["tokio", "tonic"], "it blocks; who calls it chooses the thread"),
    ("protocol", &["llama-cpp-sys-2"], "what is said on the wire does not depend on llama.cpp"),
    ("deploy", &["llama-cpp-sys-2"], "what is desired has nothing to do with who carries it out"),
    ("registry", &["llama-cpp-sys-2"], "who is a member has nothing to do with models"),
    ("node", &["llama-cpp-sys-2"], "native code can abort the process, and the agent must survive"),
];

/// Packages that only these crates may name.
const ONLY_IN: [(&str, &[&str]); 5] = [
    ("llama-cpp-sys-2", &["llama-sys"]),
    ("anyhow", &["shoal", "tests", "xtask"]),
    ("axum", &["orchestrator"]),
    ("mdns-sd", &["protocol"]),
    ("rusqlite", &["registry"]),
];

fn workspace() -> Metadata {
    MetadataCommand::new().manifest_path(root().join("Cargo.toml")).no_deps().exec().unwrap()
}

/// What a package names in its manifest outside of dev-dependencies.
fn dependencies_of(package: &cargo_metadata::Package) -> BTreeSet<&str> {
    let ours =
        package.dependencies.iter().filter(|dependency| dependency.kind != DependencyKind::Development);
    ours.map(|dependency| dependency.name.as_str()).collect()
}

/// Every package that is compiled for, or to build, a crate.
fn closure_of(name: &str) -> BTreeSet<String> {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args([
        "tree",
        "--offline",
        "--locked",
        "--edges",
        "normal,build",
        "--prefix",
        "none",
        "--format",
        "{p}",
        "-p",
        name,
    ]);
    let tree = output_of(&mut cargo).unwrap();
    tree.lines().filter_map(|line| line.split(' ').next()).map(str::to_owned).collect()
}

#[test]
fn our_crates_know_only_those_below_them() {
    let metadata = workspace();
    let names: BTreeSet<&str> = metadata.packages.iter().map(|package| package.name.as_str()).collect();
    assert_eq!(
        names,
        MAY_KNOW.iter().map(|(name, _)| *name).collect(),
        "MAY_KNOW lists every crate of the workspace"
    );
    for package in &metadata.packages {
        let (_, allowed) = MAY_KNOW.iter().find(|(name, _)| *name == package.name.as_str()).unwrap();
        let known: BTreeSet<&str> = dependencies_of(package).intersection(&names).copied().collect();
        let forbidden: Vec<&str> = known.into_iter().filter(|name| !allowed.contains(name)).collect();
        assert!(forbidden.is_empty(), "{} must not know {forbidden:?}", package.name);
    }
}

#[test]
fn some_packages_are_never_below_some_crates() {
    for (name, never, why) in NEVER_BELOW {
        let closure = closure_of(name);
        let found: Vec<&&str> = never.iter().filter(|package| closure.contains(**package)).collect();
        assert!(found.is_empty(), "{name} must not pull in {found:?}: {why}");
    }
}

#[test]
fn some_packages_are_named_by_few() {
    for package in &workspace().packages {
        for (dependency, only_in) in ONLY_IN {
            let named = dependencies_of(package).contains(dependency);
            assert!(
                !named || only_in.contains(&package.name.as_str()),
                "{} must not use {dependency}",
                package.name
            );
        }
    }
}
