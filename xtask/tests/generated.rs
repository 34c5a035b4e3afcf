//! What is written down twice says the same in both places.
#![allow(clippy::panic, clippy::unwrap_used)] // how a test's helpers fail

use std::fs;

use xtask::documents;
use xtask::repository::root;

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// The text between the quotes of the first `key = "value"` line.
fn value_of<'a>(text: &'a str, key: &str) -> &'a str {
    let line = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(" = \""));
    line.and_then(|rest| rest.split('"').next()).unwrap_or_else(|| panic!("no {key} in:\n{text}"))
}

#[test]
fn generated_documents_are_what_the_code_says() {
    for document in documents::all() {
        let same = read(&document.path) == document.text;
        assert!(same, "{} is not what the code says: run `cargo xtask docs`", document.path);
    }
}

#[test]
fn the_llama_cpp_pin_is_what_cargo_builds() {
    let pin = read("vendor/llama.cpp/pin.toml");
    let (name, version, checksum) =
        (value_of(&pin, "crate"), value_of(&pin, "version"), value_of(&pin, "checksum"));
    let lock = read("Cargo.lock");
    let locked = lock.split("[[package]]").find(|package| package.contains(&format!("name = \"{name}\"\n")));
    let locked = locked.expect("Cargo.lock has the pinned crate");
    assert_eq!(value_of(locked, "version"), version, "Cargo.lock and vendor/llama.cpp/pin.toml differ");
    assert_eq!(value_of(locked, "checksum"), checksum, "Cargo.lock and vendor/llama.cpp/pin.toml differ");
    let exact = format!("{name} = {{ version = \"={version}\"");
    assert!(read("Cargo.toml").contains(&exact), "Cargo.toml does not pin `{exact}`");
}
