#!/usr/bin/env bash
# Checks and tests everything, in the order of what is quickest to fail. Fetches the test models (about 0.85 GB, once)
# and puts cargo's helpers into the cache; installs nothing else (scripts/setup.sh does).
#
#   scripts/test.sh
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/env.sh
. scripts/env.sh

step=start
section() {
    step=$*
    printf '\n== %s\n' "$step"
}
trap '[ $? -eq 0 ] || printf "\n== FAILED in: %s\n" "$step"' EXIT

section "format"
cargo fmt --all --check

section "scripts"
if command -v shellcheck >/dev/null 2>&1; then
    shellcheck scripts/*.sh .ci/run
else
    echo "shellcheck is not installed: skipped"
fi

section "models"
scripts/fetch-models.sh all

section "licences, sources and banned crates"
cargo_tool cargo-deny 0.20.2
cargo deny --all-features --locked check bans licenses sources

section "lints"
cargo clippy --workspace --all-targets --release --locked -- -D warnings

section "documentation"
RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --release --locked

section "build"
# The end-to-end tests start the binary. Together with the tests, since apart the two would enable other features
# of dependencies, and those would be compiled twice.
cargo build --workspace --all-targets --release --locked

section "documentation tests"
cargo test --workspace --doc --release --locked

section "tests"
if cargo_tool cargo-nextest 0.9.143; then
    cargo nextest run --workspace --release --locked --no-fail-fast
else
    # Each end-to-end test wants the machine for itself, which is what .config/nextest.toml says.
    cargo test --workspace --lib --bins --tests --release --locked --no-fail-fast -- --test-threads=1
fi

section "all passed"
