//! The rules of STYLE.md that can be read off the files. Each failure lists every place at once.
#![allow(clippy::panic, clippy::unwrap_used)] // how a test's helpers fail

use std::path::Path;

use xtask::repository::{RepositoryFile, files, root};

/// Crates that may hold `unsafe`, because they border on C.
const UNSAFE_CRATES: [&str; 2] = ["llama-sys/", "llama/"];
/// Lines of a file, its tests aside.
const MAX_LINES: usize = 499;
/// Bytes of any file.
const MAX_BYTES: usize = 1 << 20;

/// Fails with all places, if there are any.
fn assert_none(rule: &str, places: Vec<String>) {
    assert!(places.is_empty(), "{rule}:\n  {}", places.join("\n  "));
}

fn sources(extensions: &[&str]) -> Vec<RepositoryFile> {
    let mut files = files().unwrap();
    files.retain(|file| extensions.iter().any(|e| file.has_extension(e)));
    files
}

fn is_test_code(path: &str) -> bool {
    path.contains("/tests/") || path.ends_with("/tests.rs") || path.contains("/fuzz/")
}

/// The lines before the file's own unit tests.
fn lines_before_tests(text: &str) -> usize {
    let lines: Vec<&str> = text.lines().collect();
    let tests = lines
        .windows(2)
        .position(|pair| pair[0] == "#[cfg(test)]" && pair[1].starts_with("mod ") && pair[1].ends_with('{'));
    tests.unwrap_or(lines.len())
}

/// Places of `words` in `files`, as `path:line: word`.
fn places_of(words: &[&str], files: &[RepositoryFile]) -> Vec<String> {
    let mut places = Vec::new();
    for file in files {
        for (number, line) in file.text().unwrap_or_default().lines().enumerate() {
            for word in words.iter().filter(|word| line.contains(**word)) {
                places.push(format!("{}:{}: {word}", file.path, number + 1));
            }
        }
    }
    places
}

#[test]
fn every_rust_file_opens_by_saying_what_it_is_for() {
    let silent =
        sources(&["rs"]).into_iter().filter(|file| !file.bytes.starts_with(b"//! ")).map(|file| file.path);
    assert_none("a file opens with `//!`", silent.collect());
}

#[test]
fn files_are_under_500_lines_apart_from_tests() {
    let mut long = Vec::new();
    for file in
        sources(&["rs", "cpp", "h", "proto", "sh", "py"]).iter().filter(|file| !is_test_code(&file.path))
    {
        let lines = lines_before_tests(file.text().unwrap_or_default());
        if lines > MAX_LINES {
            long.push(format!("{}: {lines}", file.path));
        }
    }
    assert_none("look for the second idea in a file that has grown", long);
}

#[test]
fn unsafe_code_is_in_the_two_llama_crates_only() {
    let mut places = Vec::new();
    for file in sources(&["rs"]) {
        if UNSAFE_CRATES.iter().any(|path| file.path.starts_with(path)) || file.path == "xtask/tests/tidy.rs"
        {
            continue;
        }
        for (number, line) in file.text().unwrap_or_default().lines().enumerate() {
            let code = line.split("//").next().unwrap_or_default();
            if code.split(|c: char| !c.is_alphanumeric() && c != '_').any(|word| word == "unsafe") {
                places.push(format!("{}:{}", file.path, number + 1));
            }
        }
    }
    assert_none("`unsafe` belongs to llama-sys and llama", places);
}

#[test]
fn every_other_crate_forbids_unsafe_code() {
    let roots = sources(&["rs"]).into_iter().filter(|file| {
        let is_root = file.path.ends_with("/src/lib.rs") || file.path.ends_with("/src/main.rs");
        is_root && !UNSAFE_CRATES.iter().any(|path| file.path.starts_with(path))
    });
    let lax = roots.filter(|file| !file.text().unwrap_or_default().contains("\n#![forbid(unsafe_code)]\n"));
    assert_none("a crate's root has `#![forbid(unsafe_code)]`", lax.map(|file| file.path).collect());
}

#[test]
fn nothing_is_left_unfinished() {
    let words = [
        concat!("todo", "!("),
        concat!("unimplemented", "!("),
        concat!("FIX", "ME"),
        concat!("XX", "X:"),
        concat!("dbg", "!("),
    ];
    let files = sources(&["rs", "cpp", "h", "proto", "sh", "py", "toml", "md"]);
    assert_none("finish it, or file it", places_of(&words, &files));
}

#[test]
fn an_ignored_test_says_why() {
    assert_none(
        "write `#[ignore = \"the reason\"]`",
        places_of(&[concat!("#[ignore", "]")], &sources(&["rs"])),
    );
}

#[test]
fn no_file_belongs_to_one_machine() {
    let words = [
        concat!("/ro", "ot/"),
        concat!("/wo", "rk/"),
        concat!("/Us", "ers/"),
        concat!("/ho", "me/"),
        concat!("py", "pi.org"),
        concat!("python", "hosted"),
        concat!("static.crates", ".io"),
        concat!("deb.debian", ".org"),
    ];
    assert_none("write paths and hosts that hold everywhere", places_of(&words, &files().unwrap()));
}

#[test]
fn no_file_is_over_a_mebibyte() {
    let big = files().unwrap().into_iter().filter(|file| file.bytes.len() > MAX_BYTES);
    assert_none(
        "models and binaries stay outside the repository",
        big.map(|file| format!("{}: {} bytes", file.path, file.bytes.len())).collect(),
    );
}

#[test]
fn every_script_stops_at_its_first_error() {
    let lax = files().unwrap().into_iter().filter(|file| {
        let text = file.text().unwrap_or_default();
        text.starts_with("#!/usr/bin/env bash") && !text.contains("\nset -euo pipefail\n")
    });
    assert_none("a script has `set -euo pipefail`", lax.map(|file| file.path).collect());
}

#[test]
fn every_relative_link_in_a_document_leads_somewhere() {
    let mut dead = Vec::new();
    for file in sources(&["md"]) {
        let folder = root().join(&file.path).parent().map(Path::to_path_buf).unwrap_or_default();
        for piece in file.text().unwrap_or_default().split("](").skip(1) {
            let target = piece.split([')', '#']).next().unwrap_or_default();
            if !target.is_empty() && !target.contains("://") && !folder.join(target).exists() {
                dead.push(format!("{}: {target}", file.path));
            }
        }
    }
    assert_none("a link leads nowhere", dead);
}
