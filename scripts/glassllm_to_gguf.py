#!/usr/bin/env python3
"""Converts the model inside the `glassllm` package (MIT, 0.85 M parameters) to GGUF, architecture `llama`.

usage: glassllm_to_gguf.py WHEEL OUT.gguf

Standard library only, and the same bytes on every machine, so that the result can be checked by hash.
GGUF's layout is that of llama.cpp's ggml/include/gguf.h, version 3.
"""

import json
import struct
import sys
import zipfile
from array import array
from io import BytesIO

ALIGNMENT = 32
# ggml's block-quantised types need rows of 32: the feed-forward width of 341 is padded with zeros, which is exact.
FFN_MULTIPLE = 32
U32, F32, BOOL, STRING, ARRAY, I32 = 4, 6, 7, 8, 9, 5
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6


def read_npy(data):
    """One `.npy` member as (shape, values): float16 arrays as `array('f')`, text as `str`."""
    header_len = struct.unpack_from("<H", data, 8)[0]
    header = data[10 : 10 + header_len].decode("latin1")
    body = data[10 + header_len :]
    if "'<U" in header:
        return (), body.decode("utf-32-le").rstrip("\0")
    if "'descr': '<f2'" not in header or "'fortran_order': False" not in header:
        raise SystemExit(f"an array is not little-endian float16 in C order: {header}")
    inner = header.split("'shape': (")[1].split(")")[0]
    shape = tuple(int(n) for n in inner.split(",") if n.strip())
    return shape, array("f", struct.unpack(f"<{len(body) // 2}e", body))


def read_wheel(path):
    """(config, tensors by name, tokenizer) of the English model."""
    with zipfile.ZipFile(path) as wheel:
        npz = zipfile.ZipFile(BytesIO(wheel.read("glassllm/weights/en.npz")))
        tokenizer = json.loads(wheel.read("glassllm/weights/en.tokenizer.json").decode("utf-8"))
    arrays = {name[: -len(".npy")]: read_npy(npz.read(name)) for name in npz.namelist()}
    return json.loads(arrays.pop("__config__")[1]), arrays, tokenizer


def transposed(tensor):
    """glassllm multiplies `x @ W`, ggml `W x`: rows become columns."""
    (rows, cols), values = tensor
    flat = array("f")
    for col in range(cols):
        flat.extend(values[col::cols])
    return (cols, rows), flat


def pad_rows(tensor, rows):
    """Zero rows appended up to `rows`."""
    (have, cols), values = tensor
    return (rows, cols), values + array("f", bytes(4 * (rows - have) * cols))


def pad_cols(tensor, cols):
    """Zeros appended to every row up to `cols`."""
    (rows, have), values = tensor
    flat = array("f")
    for row in range(rows):
        flat.extend(values[row * have : (row + 1) * have])
        flat.extend([0.0] * (cols - have))
    return (rows, cols), flat


def vocabulary(config, tokenizer):
    """(texts, types, scores). Scores make llama.cpp's SPM merge in glassllm's order. The 256 byte tokens at
    the end are not glassllm's: with them, text outside its alphabet is tokenized instead of refused."""
    alphabet, merges = tokenizer["alphabet"], tokenizer["merges"]
    texts = ["<pad>", "<unk>", "<bos>", "<eos>"] + alphabet + [a + b for a, b in merges]
    if len(texts) != config["vocab_size"]:
        raise SystemExit(f"the vocabulary has {len(texts)} tokens, the config says {config['vocab_size']}")
    types = [CONTROL, UNKNOWN, CONTROL, CONTROL] + [NORMAL] * (len(texts) - 4)
    scores = [0.0] * 4 + [-1e6] * len(alphabet) + [-float(rank) for rank in range(len(merges))]
    texts += [f"<0x{byte:02X}>" for byte in range(256)]
    return texts, types + [BYTE] * 256, scores + [-1e7] * 256


def llama_tensors(config, arrays):
    """Tensors under llama.cpp's names, each (shape, values) with the longest-stride dimension first."""
    (n_vocab, width), embedding = arrays["E"]
    unknown_row = embedding[width : 2 * width]
    yield "token_embd.weight", ((n_vocab + 256, width), embedding + unknown_row * 256)
    yield "output_norm.weight", arrays["norm_f.gamma"]
    ffn = padded_ffn(arrays)
    for layer in range(config["n_layers"]):
        source, target = f"blocks.{layer}.", f"blk.{layer}."
        yield target + "attn_norm.weight", arrays[source + "norm1.gamma"]
        yield target + "ffn_norm.weight", arrays[source + "norm2.gamma"]
        for theirs, ours in (("W_Q", "attn_q"), ("W_K", "attn_k"), ("W_V", "attn_v"), ("W_O", "attn_output")):
            yield f"{target}{ours}.weight", transposed(arrays[f"{source}attn.{theirs}"])
        yield target + "ffn_gate.weight", pad_rows(transposed(arrays[source + "ffn.W1"]), ffn)
        yield target + "ffn_up.weight", pad_rows(transposed(arrays[source + "ffn.W3"]), ffn)
        yield target + "ffn_down.weight", pad_cols(transposed(arrays[source + "ffn.W2"]), ffn)


def padded_ffn(arrays):
    return -(-arrays["blocks.0.ffn.W1"][0][1] // FFN_MULTIPLE) * FFN_MULTIPLE


def metadata(config, arrays, tokenizer):
    """(key, type, value), arrays as (ARRAY, (element type, values))."""
    texts, types, scores = vocabulary(config, tokenizer)
    yield "general.architecture", STRING, "llama"
    yield "general.name", STRING, "glassllm en"
    yield "general.license", STRING, "mit"
    yield "general.file_type", U32, 0
    yield "llama.vocab_size", U32, len(texts)
    yield "llama.context_length", U32, config["max_len"]
    yield "llama.embedding_length", U32, config["d_model"]
    yield "llama.block_count", U32, config["n_layers"]
    yield "llama.feed_forward_length", U32, padded_ffn(arrays)
    yield "llama.attention.head_count", U32, config["n_heads"]
    yield "llama.attention.head_count_kv", U32, config["n_kv_heads"]
    yield "llama.rope.dimension_count", U32, config["d_model"] // config["n_heads"]
    yield "llama.rope.freq_base", F32, config["rope_base"]
    yield "llama.attention.layer_norm_rms_epsilon", F32, config["eps"]
    yield "tokenizer.ggml.model", STRING, "llama"
    yield "tokenizer.ggml.pre", STRING, "default"
    yield "tokenizer.ggml.tokens", ARRAY, (STRING, texts)
    yield "tokenizer.ggml.scores", ARRAY, (F32, scores)
    yield "tokenizer.ggml.token_type", ARRAY, (I32, types)
    for name, token in (("bos", 2), ("eos", 3), ("unknown", 1), ("padding", 0)):
        yield f"tokenizer.ggml.{name}_token_id", U32, token
    for name in ("add_bos_token", "add_eos_token", "add_space_prefix"):
        yield f"tokenizer.ggml.{name}", BOOL, False


def encode(kind, value):
    if kind == STRING:
        data = value.encode("utf-8")
        return struct.pack("<Q", len(data)) + data
    if kind == ARRAY:
        element, values = value
        return struct.pack("<IQ", element, len(values)) + b"".join(encode(element, v) for v in values)
    return struct.pack({U32: "<I", I32: "<i", F32: "<f", BOOL: "<?"}[kind], value)


def padding(length):
    return bytes(-length % ALIGNMENT)


def little_endian(values):
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def gguf(pairs, tensors):
    """The bytes of a GGUF file: header, key/value pairs, tensor table, data."""
    out = bytearray(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs)))
    for key, kind, value in pairs:
        out += encode(STRING, key) + struct.pack("<I", kind) + encode(kind, value)
    data = bytearray()
    for name, (shape, values) in tensors:
        dimensions = list(reversed(shape))
        out += encode(STRING, name) + struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
        out += struct.pack("<IQ", 0, len(data))  # type F32
        data += little_endian(values)
        data += padding(len(data))
    return bytes(out + padding(len(out)) + data)


def main():
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    config, arrays, tokenizer = read_wheel(sys.argv[1])
    pairs, tensors = list(metadata(config, arrays, tokenizer)), list(llama_tensors(config, arrays))
    with open(sys.argv[2], "wb") as out:
        out.write(gguf(pairs, tensors))


if __name__ == "__main__":
    main()
