#!/usr/bin/env bash
# Builds what Shoal is measured against: llama.cpp's llama-server, ggml-rpc-server, llama-bench and
# llama-batched-bench, into ~/.cache/shoal/peers/bin ($SHOAL_CACHE moves it). Nothing of it is committed.
#
#   scripts/build-peers.sh [--as-released]
#
# The programs come from the source package of llama-cpp-python, which carries llama.cpp's whole tree. Its llama.cpp is
# another revision than the one that Shoal pins, so its ggml and llama libraries are replaced by the pinned ones:
# what is then compared is the programs, not two revisions of the same kernels. --as-released leaves them as they
# came, in peers/as-released/bin. Both are compiled with the flags of Shoal's own release build, read from that build.
# What was built from what is in peers/versions.txt. Needs cargo, cmake and python3 with pip.
set -euo pipefail

# The release whose llama.cpp is nearest to the pinned one; to be looked for again when the pin moves.
release=0.3.36
sha256=832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e
revision=0c1e57098 # of llama.cpp, from its change log
programs="llama-server ggml-rpc-server llama-bench llama-batched-bench"
# --rpc is part of what is measured; a web page, examples, TLS and downloads are not.
options="-DGGML_RPC=ON -DGGML_BUILD_TESTS=OFF -DGGML_BUILD_EXAMPLES=OFF
-DLLAMA_BUILD_TOOLS=ON -DLLAMA_BUILD_SERVER=ON -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_TESTS=OFF
-DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF"

cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/env.sh
. scripts/env.sh
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_REQUIRE_VIRTUALENV=0

usage() { sed -n '2,12s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; }
die() {
    printf 'build-peers: %s\n' "$*" >&2
    exit 1
}

peers=$shoal_cache/peers
libraries=pinned
case ${1:-} in
'') ;;
-h | --help)
    usage
    exit 0
    ;;
--as-released)
    libraries=released
    peers=$peers/as-released
    ;;
*)
    printf "build-peers: no option is called '%s' (see --help)\n" "$1" >&2
    exit 2
    ;;
esac

python3 -m pip --version >/dev/null 2>&1 || die "python3 with pip is needed (scripts/setup.sh)"
command -v cmake >/dev/null 2>&1 || die "cmake is needed (scripts/setup.sh)"

# Shoal's own build of llama.cpp: prints the folder of its sources and the folder of its CMake cache.
own_build() {
    cargo build --release --locked --quiet --package llama-sys --message-format json | python3 -c '
import json, os, sys
for line in sys.stdin:
    message = json.loads(line)
    if "llama-cpp-sys-2" not in message.get("package_id", ""):
        continue
    if message["reason"] == "build-script-executed":
        out = message["out_dir"]
    elif message["reason"] == "compiler-artifact":
        manifest = message["manifest_path"]
print(os.path.join(os.path.dirname(manifest), "llama.cpp"))
print(os.path.join(out, "build"))'
}

# A CMake initial cache with how Shoal compiles: kind of build, compiler flags, ggml's options.
flags_of() {
    python3 - "$1/CMakeCache.txt" <<'PY'
import re, sys
wanted = re.compile(r"(CMAKE_BUILD_TYPE|CMAKE_(?:C|CXX)_FLAGS\w*|GGML_\w+|BUILD_SHARED_LIBS):(BOOL|STRING)=(.*)")
for line in open(sys.argv[1]):
    found = wanted.fullmatch(line.rstrip("\n"))
    if found:
        name, kind, value = found.groups()
        print(f'set({name} [==[{value}]==] CACHE {kind} "")')
PY
}

# Downloads the release and checks its hash: fetch FOLDER.
fetch() {
    # pip reads hashes from a requirements file alone, and asks the package for its metadata, which compiles nothing.
    printf 'llama-cpp-python==%s --hash=sha256:%s\n' "$release" "$sha256" >"$1/requirements.txt"
    echo "fetching llama-cpp-python $release (MIT licence)"
    python3 -m pip download --no-deps --no-binary llama-cpp-python --require-hashes --dest "$1" --quiet \
        --requirement "$1/requirements.txt"
}

# Lays out the sources to build from: unpack FOLDER.
unpack() {
    python3 - "$1/llama_cpp_python-$release.tar.gz" "$1" <<'PY'
import sys, tarfile
with tarfile.open(sys.argv[1]) as archive:
    archive.extractall(sys.argv[2], filter="data") if hasattr(tarfile, "data_filter") else archive.extractall(sys.argv[2])
PY
    local tree=$1/llama_cpp_python-$release/vendor/llama.cpp folder
    if [ "$libraries" = pinned ]; then
        for folder in ggml src include; do
            rm -rf "${tree:?}/$folder"
            cp -R "$pinned/$folder" "$tree/$folder"
        done
    fi
    rm -rf "$peers/src"
    mv "$tree" "$peers/src"
}

own=$(own_build)
pinned=${own%%$'\n'*}
own=${own##*$'\n'}
pin=$(sed -n 's/^version = "\(.*\)"/\1/p' vendor/llama.cpp/pin.toml)
ggml_version() {
    sed -n 's/^set(GGML_VERSION_\(MAJOR\|MINOR\|PATCH\) \([0-9]*\)).*/\2/p' "$1/ggml/CMakeLists.txt" | paste -sd. -
}

mkdir -p "$peers"
temp=$(mktemp -d "$peers/.build-XXXXXX")
trap 'rm -rf "$temp"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

flags_of "$own" >"$temp/flags.cmake"
{
    echo "llama-cpp-python $release $sha256, $libraries libraries, llama-cpp-sys-2 $pin, $programs"
    echo "$options"
    cat "$temp/flags.cmake"
} >"$temp/recipe"
if cmp -s "$temp/recipe" "$peers/recipe"; then
    echo "$peers/bin: there already"
    cat "$peers/versions.txt"
    exit 0
fi
rm -f "$peers/recipe"

fetch "$temp"
unpack "$temp"
cp "$temp/flags.cmake" "$peers/flags.cmake"
commit=$revision
[ "$libraries" = released ] || commit=$revision-on-llama-cpp-sys-2-$pin
rm -rf "$peers/build"
# shellcheck disable=SC2086 # a list of options
cmake -S "$peers/src" -B "$peers/build" -C "$peers/flags.cmake" $options -DLLAMA_BUILD_COMMIT="$commit" >"$temp/configure.log" 2>&1 || {
    cat "$temp/configure.log" >&2
    die "cmake could not configure llama.cpp"
}
# shellcheck disable=SC2086 # a list of targets
nice cmake --build "$peers/build" --parallel "$(getconf _NPROCESSORS_ONLN)" --target $programs

mkdir -p "$peers/bin"
for program in $programs; do cp -f "$peers/build/bin/$program" "$peers/bin/$program"; done
{
    echo "programs: $programs"
    echo "their source: llama.cpp $revision (llama-cpp-python $release)"
    case $libraries in
    pinned) echo "libraries ggml and llama: those of llama-cpp-sys-2 $pin (ggml $(ggml_version "$peers/src")), as in Shoal" ;;
    released)
        echo "libraries ggml and llama: llama.cpp $revision (ggml $(ggml_version "$peers/src"))"
        echo "DIFFERENT REVISION: Shoal runs llama-cpp-sys-2 $pin (ggml $(ggml_version "$pinned"))"
        ;;
    esac
    echo "flags: $(sed -n 's/^set(CMAKE_BUILD_TYPE \[==\[\(.*\)\]==\].*/\1/p' "$peers/flags.cmake"), as in Shoal's own build"
} >"$peers/versions.txt"
mv "$temp/recipe" "$peers/recipe"
echo "$peers/bin: ready"
cat "$peers/versions.txt"
