#!/usr/bin/env bash
# Builds Shoal with its Vulkan backend and tests it on a GPU, or where there is none on Mesa's lavapipe, which computes
# Vulkan shaders on the CPU: slices split between "GPU" and CPU, and the GPU's logits against the CPU's. Fails on any
# difference. Knows Debian and its kin. Apart from test.sh because compiling ggml's shaders takes minutes.
#
#   scripts/test-vulkan.sh
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/env.sh
. scripts/env.sh

# ggml-vulkan needs headers that are newer than Debian 12's (1.3.239, too old). These compile it.
headers_needed=1.4.309
# The first Debian release that has them.
headers_release=trixie

fail() {
    echo "test-vulkan: $*" >&2
    exit 1
}

section() { printf '\n== %s (after %s s)\n' "$*" "$SECONDS"; }

installed() { dpkg-query -W -f '${Status}' "$1" 2>/dev/null | grep -q 'install ok installed'; }

install_packages() {
    local package missing=
    for package in "$@"; do
        installed "$package" || missing="$missing $package"
    done
    [ -n "$missing" ] || return 0
    local sudo=
    [ "$(id -u)" = 0 ] || sudo=sudo
    $sudo apt-get update -qq
    # shellcheck disable=SC2086 # a list of words
    $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
}

# The mirror that this machine's apt takes Debian itself from.
debian_mirror() {
    local release
    # shellcheck source=/dev/null
    release=$(. /etc/os-release && echo "$VERSION_CODENAME")
    # shellcheck disable=SC2016 # apt's own placeholders
    apt-get indextargets --format '$(CODENAME) $(COMPONENT) $(REPO_URI)' 'Created-By: Packages' |
        awk -v release="$release" '$1 == release && $2 == "main" && !found { print $3; found = 1 }'
}

# Unpacks the newer headers into a folder. Nothing on the machine is changed: apt works on lists and caches of its own.
fetch_headers() {
    local folder=$1 work mirror
    mirror=$(debian_mirror)
    [ -n "$mirror" ] || fail "apt knows no mirror of this Debian release to take $headers_release's headers from"
    work=$(mktemp -d)
    # shellcheck disable=SC2064 # the folder's name now
    trap "rm -rf '$work'" RETURN
    mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$work/unpacked"
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $headers_release main" >"$work/sources.list"
    local options=(
        -o "Dir::Etc::SourceList=$work/sources.list" -o Dir::Etc::SourceParts=-
        -o "Dir::State::Lists=$work/lists" -o "Dir::Cache=$work/cache" -o APT::Sandbox::User=
    )
    apt-get "${options[@]}" update -qq
    (cd "$work" && apt-get "${options[@]}" download -qq libvulkan-dev spirv-headers)
    local package
    for package in "$work"/*.deb; do
        dpkg-deb -x "$package" "$work/unpacked"
    done
    [ -f "$work/unpacked/usr/include/vulkan/vulkan.hpp" ] || fail "$headers_release's libvulkan-dev has no vulkan.hpp"
    mkdir -p "$(dirname "$folder")"
    rm -rf "$folder"
    mv "$work/unpacked" "$folder"
}

command -v apt-get >/dev/null 2>&1 || fail "this script knows apt only: build with \`--features vulkan\` and run the ignored tests of tests/tests/vulkan yourself"

section "packages"
install_packages mesa-vulkan-drivers libvulkan-dev glslc spirv-headers
version=$(dpkg-query -W -f '${Version}' libvulkan-dev)
if dpkg --compare-versions "$version" lt "$headers_needed"; then
    headers=$shoal_cache/vulkan-headers-$headers_release
    if [ ! -f "$headers/usr/include/vulkan/vulkan.hpp" ]; then
        echo "libvulkan-dev $version is too old: fetching $headers_release's headers into $headers"
        fetch_headers "$headers"
    fi
    export CPLUS_INCLUDE_PATH=$headers/usr/include${CPLUS_INCLUDE_PATH:+:$CPLUS_INCLUDE_PATH}
    version=$headers_release
fi
echo "Vulkan headers: $version"

section "models"
scripts/fetch-models.sh

# With the features that the whole workspace asks of its dependencies, so that only what touches llama.cpp is built anew.
cargo_options=(--workspace --release --locked --features shoal/vulkan --test vulkan)
section "build"
cargo build "${cargo_options[@]}" --bin shoal

section "tests"
# ggml leaves out devices that call themselves a CPU, as lavapipe does, unless they are named.
if [ -z "${GGML_VK_VISIBLE_DEVICES:-}" ] && ! compgen -G '/dev/dri/renderD*' >/dev/null; then
    export GGML_VK_VISIBLE_DEVICES=0
fi
cargo test "${cargo_options[@]}" -- --ignored --nocapture --test-threads=1

section "all passed"
