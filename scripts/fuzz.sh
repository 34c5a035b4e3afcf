#!/usr/bin/env bash
# Fuzzes what reads files (GGUF, the planner's), KV blobs, and what strangers send, for some seconds each (120 unless told).
# Needs a nightly Rust toolchain.
#
#   scripts/fuzz.sh [SECONDS]
set -euo pipefail

seconds=${1:-120}
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/env.sh
. scripts/env.sh

if ! cargo +nightly --version >/dev/null 2>&1; then
    echo "fuzz: no nightly toolchain here (rustup toolchain install nightly)" >&2
    exit 1
fi
cargo_tool cargo-fuzz 0.13.2
# Sanitizer builds have flags of their own and would push the workspace's outputs aside.
export CARGO_TARGET_DIR=$shoal_cache/fuzz-target
for crate in gguf kv-blob protocol; do
    cd "$crate"
    for target in $(cargo +nightly fuzz list); do
        echo "== fuzz: $target, $seconds s"
        cargo +nightly fuzz run "$target" -- -max_total_time="$seconds"
    done
    cd ..
done
