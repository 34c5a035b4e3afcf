#!/usr/bin/env bash
# Installs what is missing to build, test and demonstrate Shoal: a C++ toolchain, CMake, libclang, Python and Rust,
# through apt on Debian and its kin, through Homebrew on macOS. Asks first, unless --yes is given or standard input
# is not a terminal. Nothing is installed when nothing is missing.
#
#   scripts/setup.sh [--yes]
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/env.sh
. scripts/env.sh

ask=1
for argument in "$@"; do
    case $argument in
    -y | --yes) ask= ;;
    *)
        echo "usage: scripts/setup.sh [--yes]" >&2
        exit 2
        ;;
    esac
done
[ -t 0 ] || ask=

has() { command -v "$1" >/dev/null 2>&1; }

# bindgen loads libclang at build time; where it looks is written in the crate clang-sys.
has_libclang() {
    [ -n "${LIBCLANG_PATH:-}" ] ||
        compgen -G '/usr/lib/llvm-*/lib/libclang[.-][s0-9]*' >/dev/null ||
        compgen -G '/usr/lib/*/libclang[.-][s0-9]*' >/dev/null ||
        compgen -G '/usr/lib64/libclang[.-][s0-9]*' >/dev/null
}

# The packages of what is missing, one a line.
missing_debian() {
    has c++ || echo g++
    has make || echo make
    has cmake || echo cmake
    has clang || echo clang
    has_libclang || echo libclang-dev
    has ccache || echo ccache
    has git || echo git
    has curl || echo curl ca-certificates
    has pgrep || echo procps
    has python3 || echo python3
    python3 -m pip --version >/dev/null 2>&1 || echo python3-pip
    python3 -c 'import ensurepip, venv' 2>/dev/null || echo python3-venv
    # For the tests that make hosts of network namespaces; only root can, and without these tools they are skipped.
    if [ "$(id -u)" = 0 ]; then
        has ip || echo iproute2
        has nft || echo nftables
    fi
}

missing_macos() {
    has cmake || echo cmake
    has ccache || echo ccache
    python3 -m pip --version >/dev/null 2>&1 || echo python3
}

confirm() {
    [ -n "$ask" ] || return 0
    local answer
    read -r -p "Missing: $1. Install with \`$2\`? [Y/n] " answer
    case $answer in
    '' | [Yy]*) ;;
    *)
        echo "setup: nothing installed; without $1 the build cannot run" >&2
        exit 1
        ;;
    esac
}

install_debian() {
    local packages sudo=
    packages=$(missing_debian | tr '\n' ' ')
    packages=${packages% }
    [ -n "$packages" ] || return 0
    [ "$(id -u)" = 0 ] || sudo=sudo
    confirm "$packages" "${sudo:+sudo }apt-get install $packages"
    $sudo apt-get update -qq
    # shellcheck disable=SC2086 # a list of words
    $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $packages
}

install_macos() {
    if ! xcode-select -p >/dev/null 2>&1; then
        echo "setup: the C++ compiler is missing: run \`xcode-select --install\`, then this again" >&2
        exit 1
    fi
    local packages
    packages=$(missing_macos | tr '\n' ' ')
    packages=${packages% }
    [ -n "$packages" ] || return 0
    if ! has brew; then
        echo "setup: $packages missing, and no Homebrew to install them with (https://brew.sh)" >&2
        exit 1
    fi
    confirm "$packages" "brew install $packages"
    # shellcheck disable=SC2086 # a list of words
    brew install $packages
}

install_rust() {
    ! has cargo || return 0
    confirm "Rust" "rustup's installer"
    curl --proto '=https' --tlsv1.2 -sSf https://sh.rustup.rs | sh -s -- -y --profile default --no-modify-path
}

case $(uname -s) in
Darwin) install_macos ;;
Linux)
    if has apt-get; then
        install_debian
    else
        packages=$(missing_debian | tr '\n' ' ')
        if [ -n "$packages" ]; then
            echo "setup: please install what these Debian packages hold: $packages" >&2
            exit 1
        fi
    fi
    ;;
*)
    echo "setup: knows Debian and macOS only; see README.md for what is needed" >&2
    exit 1
    ;;
esac
install_rust
