# Sourced by the other scripts: where build outputs live, and how C++ is compiled. POSIX sh.

# A target folder outside the checkout survives a fresh clone, so llama.cpp is not compiled again.
: "${CARGO_TARGET_DIR:=${XDG_CACHE_HOME:-$HOME/.cache}/shoal/target}"
export CARGO_TARGET_DIR

if command -v ccache >/dev/null 2>&1; then
    export CMAKE_C_COMPILER_LAUNCHER=ccache CMAKE_CXX_COMPILER_LAUNCHER=ccache
fi
