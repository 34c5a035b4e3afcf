# shellcheck shell=sh
# Sourced by the other scripts: where build outputs and tools live, and how C++ is compiled. POSIX sh.

# As `shoal` itself finds it.
shoal_cache=${SHOAL_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/shoal}

# A target folder outside the checkout survives a fresh clone, so llama.cpp is not compiled again.
: "${CARGO_TARGET_DIR:=$shoal_cache/target}"
export CARGO_TARGET_DIR

if command -v ccache >/dev/null 2>&1; then
    export CMAKE_C_COMPILER_LAUNCHER=ccache CMAKE_CXX_COMPILER_LAUNCHER=ccache
    # Each set of features builds llama.cpp in a folder of its own; the objects are the same.
    export CCACHE_BASEDIR="$CARGO_TARGET_DIR" CCACHE_NOHASHDIR=true
fi

# rustup's installer leaves cargo here and changes PATH for new shells only.
if ! command -v cargo >/dev/null 2>&1 && [ -x "$HOME/.cargo/bin/cargo" ]; then
    PATH=$HOME/.cargo/bin:$PATH
fi
PATH=$shoal_cache/tools/bin:$PATH
export PATH

# Installs a cargo tool into the cache unless it is there: cargo_tool NAME VERSION. Unoptimised: it compiles in a
# minute where an optimised build takes many, and the tools have little to compute.
cargo_tool() {
    command -v "$1" >/dev/null 2>&1 && return
    # A target folder of its own would be kept for nothing; without the variable cargo uses a temporary one.
    (
        unset CARGO_TARGET_DIR
        CARGO_PROFILE_DEV_DEBUG=0 cargo install "$1" --version "$2" --locked --debug --root "$shoal_cache/tools"
    )
}
