#!/usr/bin/env bash
# Shows Shoal on this machine: builds it, cuts SmolLM2 into three stage processes, asks them a question and streams
# the answer, then stops everything. On a fresh Debian or macOS it first installs what is missing, and asks before
# that unless --yes is given or standard input is not a terminal.
#
#   scripts/demo.sh [--yes] [QUESTION]
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/env.sh
. scripts/env.sh

# How long loading may take; SmolLM2 needs a few seconds, a busy machine more.
ready_deadline_s=120
# How long the server may take to stop by itself before it is killed.
stop_deadline_s=10

yes=
question="Explain in three sentences why the sky is blue."
while [ $# -gt 0 ]; do
    case $1 in
    -h | --help)
        sed -n '2,6s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
        exit 0
        ;;
    -y | --yes) yes=--yes ;;
    -*)
        echo "demo: no option is called '$1' (see --help)" >&2
        exit 2
        ;;
    *) question=$1 ;;
    esac
    shift
done

scripts/setup.sh $yes
# Rust may be there only now.
# shellcheck source=scripts/env.sh
. scripts/env.sh
echo "== building shoal"
# All packages, also those of other platforms: a build script reads the metadata of the whole workspace offline.
cargo fetch --locked
cargo build --release --locked --package shoal
shoal=$CARGO_TARGET_DIR/release/shoal
echo "== fetching SmolLM2"
scripts/fetch-models.sh SmolLM2

temp=$(mktemp -d)
server=
cleanup() {
    status=$?
    trap - EXIT
    trap '' INT TERM HUP # a second Ctrl-C must not cut this short
    if [ -n "$server" ]; then
        kill -TERM "$server" 2>/dev/null || true
        for _ in $(seq $((stop_deadline_s * 10))); do
            kill -0 "$server" 2>/dev/null || break
            sleep 0.1
        done
        # Its stage workers end by themselves when it is gone: they read its end of a pipe.
        kill -KILL "$server" 2>/dev/null || true
        wait "$server" 2>/dev/null || true
    fi
    rm -rf "$temp"
    exit "$status"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'exit 129' HUP

port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
url=http://127.0.0.1:$port
echo "== starting a replica of three stage processes on $url"
"$shoal" serve --model SmolLM2 --stages 3 --listen "127.0.0.1:$port" </dev/null &
server=$!

fail() {
    echo "demo: $1" >&2
    exit 1
}
started=$SECONDS
until curl --silent --fail --max-time 2 --output /dev/null "$url/ready"; do
    kill -0 "$server" 2>/dev/null || fail "the server ended early"
    [ $((SECONDS - started)) -lt $ready_deadline_s ] || fail "not ready after $ready_deadline_s s"
    sleep 0.2
done

echo "== $question"
cat >"$temp/print.py" <<'PY'
"""Prints a streamed chat answer as it comes, then its speed. Reads server-sent events from standard input."""
import json, signal, sys, time

signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a traceback
first = last = usage = None
for line in sys.stdin:
    if not line.startswith("data: ") or line.startswith("data: [DONE]"):
        continue
    event = json.loads(line[len("data: "):])
    if "error" in event:
        sys.exit("\nthe server says: " + event["error"]["message"])
    usage = event.get("usage") or usage
    for choice in event.get("choices", []):
        text = choice["delta"].get("content") or ""
        if text:
            last = time.monotonic()
            first = first or last
            print(text, end="", flush=True)
print()
if usage is None or first is None:
    sys.exit("the stream ended without an answer")
tokens = usage["completion_tokens"]
# The first token's time is the prompt's.
rate = f", {(tokens - 1) / (last - first):.1f} tokens/s" if last > first else ""
print(f"== {tokens} tokens{rate}")
PY
MODEL=$(curl --silent --fail "$url/v1/models" | python3 -c 'import json, sys; print(json.load(sys.stdin)["data"][0]["id"])')
export MODEL
QUESTION=$question python3 -c 'import json, os; print(json.dumps({
    "model": os.environ["MODEL"], "messages": [{"role": "user", "content": os.environ["QUESTION"]}],
    "temperature": 0, "max_tokens": 160, "stream": True, "stream_options": {"include_usage": True}}))' >"$temp/body"
curl --silent --show-error --no-buffer --max-time 300 --header 'Content-Type: application/json' \
    --data-binary "@$temp/body" "$url/v1/chat/completions" | python3 "$temp/print.py" || fail "no answer"
