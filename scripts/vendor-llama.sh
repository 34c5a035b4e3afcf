#!/usr/bin/env bash
# Copies the sources of the pinned llama.cpp to vendor/llama.cpp/src, for reading and debugging; the build takes
# them from cargo's cache itself. Needs cargo and python3.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
source=$(cargo metadata --locked --format-version 1 | python3 -c '
import json, os, sys
packages = json.load(sys.stdin)["packages"]
manifest = next(p["manifest_path"] for p in packages if p["name"] == "llama-cpp-sys-2")
print(os.path.join(os.path.dirname(manifest), "llama.cpp"))')

target=vendor/llama.cpp/src
rm -rf "$target.new"
trap 'rm -rf "$target.new"' EXIT
cp -R "$source" "$target.new"
rm -rf "$target"
mv "$target.new" "$target"
echo "$target: llama.cpp of llama-cpp-sys-2 $(sed -n 's/^version = "\(.*\)"/\1/p' vendor/llama.cpp/pin.toml)"
