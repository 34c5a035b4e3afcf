//! The table itself.

use super::{
    Architecture, EmbeddingScale, HiddenInput, PatternStart, Recurrence, SizeRule, SlidingWindow, Support,
    Window, WithoutSliding,
};

/// Every architecture of the pinned llama.cpp (`LLM_ARCH_NAMES` in `src/llama-arch.cpp`), certified ones first.
pub static TABLE: &[Architecture] = &[
    certified("llama"),
    certified("qwen2"),
    certified("qwen3"),
    certified("qwen3moe"),
    Architecture { sliding_window: uniform_pattern(Window::Required, 2), ..certified("gpt-oss") },
    Architecture {
        embedding_scale: EmbeddingScale::SqrtWidth,
        hidden_input: HiddenInput::OverNode("inp_scaled"),
        sliding_window: uniform_pattern(Window::Default(4096), 2),
        size_rule: SizeRule::Constant { blocks: 46 },
        note: "The graph scales hidden rows like embedding rows, so they are written over the scaled node. Gemma 2 27B (46 \
               blocks) has another attention scale, which llama.cpp picks by the number of blocks.",
        ..certified("gemma2")
    },
    Architecture {
        embedding_scale: EmbeddingScale::SqrtWidth,
        sliding_window: pattern(Window::Optional, 6, PatternStart::Sliding),
        size_rule: SizeRule::Constant { blocks: 62 },
        note: "Gemma 3 27B (62 blocks) has another attention scale, which llama.cpp picks by the number of blocks.",
        ..certified("gemma3")
    },
    Architecture { note: "llama.cpp ignores this architecture's sliding window.", ..certified("phi3") },
    Architecture {
        note: "Position embeddings are in the first slice, zeros in the others.",
        ..certified("gpt2")
    },
    Architecture {
        start_multiple: Some(4),
        note: "Every fourth block has no RoPE; llama.cpp counts from the first block of the file and no key says \
               otherwise.",
        ..certified("smollm3")
    },
    Architecture {
        embedding_scale: EmbeddingScale::Key { default: 1.0 },
        note: "The embedding scale is applied where rows are looked up, and is 0 (none) in slices.",
        ..certified("granite")
    },
    Architecture {
        sliding_window: pattern(Window::Optional, 4, PatternStart::Sliding),
        note: "OLMo 3 is this architecture with a sliding window.",
        ..certified("olmo2")
    },
    certified("mistral3"),
    Architecture {
        size_rule: SizeRule::Deepseek2,
        note: "Slices state the query compression and the expert gating that llama.cpp otherwise guesses from the \
               number of blocks; blocks that predict further tokens are left out.",
        ..certified("deepseek2")
    },
    Architecture {
        hidden_input: HiddenInput::MultiRope,
        note: "llama.cpp accepts hidden rows only with M-RoPE, so slices state sections that make it the same as plain \
               RoPE; blocks that predict further tokens are left out.",
        ..certified("glm4moe")
    },
    Architecture {
        recurrence: Recurrence::Interval(4),
        note: "Every slice needs an attention block and a recurrent block; blocks that predict further tokens are left \
               out.",
        ..certified("qwen35")
    },
    Architecture { recurrence: Recurrence::Interval(4), note: "As qwen35.", ..certified("qwen3next") },
    certified("arcee"),
    Architecture {
        sliding_window: pattern(Window::Required, 4, PatternStart::Sliding),
        ..certified("cohere2")
    },
    Architecture {
        size_rule: SizeRule::Constant { blocks: 64 },
        note: "llama.cpp expects norms of queries and keys in models of 64 blocks (Command R+) and more.",
        ..certified("command-r")
    },
    certified("ernie4_5"),
    Architecture {
        size_rule: SizeRule::Constant { blocks: 64 },
        note: "EXAONE 4 32B (64 blocks) has sliding windows, which llama.cpp tells by the number of blocks.",
        ..certified("exaone4")
    },
    certified("falcon"),
    Architecture {
        embedding_scale: EmbeddingScale::SqrtWidth,
        hidden_input: HiddenInput::OverNode("inp_scaled"),
        note: "The graph scales hidden rows like embedding rows, so they are written over the scaled node.",
        ..certified("gemma")
    },
    Architecture {
        embedding_scale: EmbeddingScale::Key { default: 1.0 },
        note: "As granite.",
        ..certified("granitemoe")
    },
    certified("hunyuan-dense"),
    certified("internlm2"),
    Architecture {
        // Its default in src/models/minicpm.cpp.
        embedding_scale: EmbeddingScale::Key { default: 12.0 },
        size_rule: SizeRule::MiniCpm,
        note: "As granite; slices state the residual scale that llama.cpp otherwise derives from the number of blocks.",
        ..certified("minicpm")
    },
    certified("mpt"),
    certified("nemotron"),
    certified("phi2"),
    certified("phimoe"),
    certified("qwen2moe"),
    certified("qwen2vl"),
    Architecture { recurrence: Recurrence::Interval(4), note: "As qwen35.", ..certified("qwen35moe") },
    certified("seed_oss"),
    certified("stablelm"),
    certified("starcoder2"),
    uncertified("apertus"),
    uncertified("arctic"),
    uncertified("bailingmoe"),
    uncertified("bailingmoe2"),
    uncertified("bitnet"),
    uncertified("chameleon"),
    uncertified("chatglm"),
    uncertified("codeshell"),
    uncertified("dbrx"),
    uncertified("deci"),
    uncertified("deepseek"),
    uncertified("deepseek32"),
    uncertified("dots1"),
    uncertified("exaone"),
    uncertified("gptneox"),
    uncertified("grovemoe"),
    uncertified("hunyuan-moe"),
    uncertified("hunyuan_vl"),
    uncertified("hy_v3"),
    uncertified("jais"),
    uncertified("jais2"),
    uncertified("maincoder"),
    uncertified("minimax-m2"),
    uncertified("mistral4"),
    uncertified("olmo"),
    uncertified("olmoe"),
    uncertified("openelm"),
    uncertified("orion"),
    uncertified("paddleocr"),
    uncertified("pangu-embedded"),
    uncertified("plamo"),
    uncertified("plm"),
    uncertified("qwen"),
    uncertified("refact"),
    uncertified("starcoder"),
    uncertified("xverse"),
    Architecture {
        sliding_window: pattern(Window::Required, 4, PatternStart::Dense),
        ..uncertified("cohere2moe")
    },
    Architecture {
        sliding_window: pattern(Window::Required, 4, PatternStart::Sliding),
        ..uncertified("exaone-moe")
    },
    Architecture {
        sliding_window: pattern(Window::Optional, 4, PatternStart::Dense),
        ..uncertified("laguna")
    },
    Architecture {
        sliding_window: pattern(Window::Optional, 4, PatternStart::Sliding),
        ..uncertified("mellum")
    },
    Architecture {
        sliding_window: pattern(Window::Optional, 8, PatternStart::Sliding),
        ..uncertified("plamo3")
    },
    Architecture {
        sliding_window: pattern(Window::Required, 1, PatternStart::Sliding),
        ..uncertified("maple")
    },
    Architecture {
        sliding_window: pattern(Window::Required, 1, PatternStart::Sliding),
        ..uncertified("mimo2")
    },
    Architecture {
        sliding_window: pattern(Window::Required, 1, PatternStart::Sliding),
        ..uncertified("spark2_5")
    },
    Architecture {
        sliding_window: pattern(Window::Required, 1, PatternStart::Sliding),
        ..uncertified("step35")
    },
    Architecture {
        embedding_scale: EmbeddingScale::Key { default: 1.0 },
        sliding_window: pattern(Window::Required, 1, PatternStart::Sliding),
        ..uncertified("granite_swa")
    },
    Architecture {
        // Its default in src/models/grok.cpp.
        embedding_scale: EmbeddingScale::Key { default: 78.383_67 },
        ..uncertified("grok")
    },
    refused("afmoe", COUNTED),
    refused("arwkv7", "every block mixes in a value of the first block (v_first)"),
    refused("baichuan", "llama.cpp picks RoPE or ALiBi by the number of blocks"),
    refused("bailingmoe3", HYBRID),
    refused("bert", ENCODER),
    refused("bloom", INPUT_NORM),
    refused("clef", NOT_TEXT),
    refused("clip", NOT_TEXT),
    refused("cogvlm", "llama.cpp computes hidden rows with the weights for images"),
    refused("deepseek2-ocr", "llama.cpp takes hidden rows for image features"),
    refused("deepseek4", STREAMS),
    refused("dflash", DRAFT),
    refused("dots3note", SHARED_INDEX),
    refused("dream", DIFFUSION),
    refused("eagle3", DRAFT),
    refused("ernie4_5-moe", COUNTED),
    refused("eurobert", ENCODER),
    refused("falcon-h1", HYBRID),
    refused("gemma-embedding", ENCODER),
    refused(
        "gemma3n",
        "later blocks read the keys and values of earlier ones, and every block an embedding of the token",
    ),
    refused(
        "gemma4",
        "later blocks read the keys and values of earlier ones, and every block an embedding of the token",
    ),
    refused("gemma4-assistant", DRAFT),
    refused("glm-dsa", SHARED_INDEX),
    refused("glm4", "llama.cpp accepts hidden rows only in multimodal models of it"),
    refused("glm5-next", SHARED_INDEX),
    refused("granitehybrid", HYBRID),
    refused("graniteswitch", "a router block decides for all others"),
    refused("hrm_text", LOOPED),
    refused("hy_v4", SHARED_INDEX),
    refused("jamba", HYBRID),
    refused("jina-bert-v2", ENCODER),
    refused("jina-bert-v3", ENCODER),
    refused("kimi-k3", "blocks attend to the outputs of earlier blocks"),
    refused("kimi-linear", HYBRID),
    refused("lfm2", HYBRID),
    refused("lfm2moe", HYBRID),
    refused("llada", DIFFUSION),
    refused("llada-moe", DIFFUSION),
    refused("llama-embed", ENCODER),
    refused("llama4", COUNTED),
    refused("mamba", RECURRENT),
    refused("mamba2", RECURRENT),
    refused("minicpm3", "its scale of embedding rows is fixed in llama.cpp and applied to hidden rows too"),
    refused("minimax-01", HYBRID),
    refused("minimax-m3", SHARED_INDEX),
    refused("modern-bert", ENCODER),
    refused("muse-glimmer", INPUT_NORM),
    refused("nanbeige", LOOPED),
    refused("nemotron_h", HYBRID),
    refused("nemotron_h_moe", HYBRID),
    refused("neo-bert", ENCODER),
    refused("nomic-bert", ENCODER),
    refused("nomic-bert-moe", ENCODER),
    refused("plamo2", HYBRID),
    refused("pockettts", NOT_TEXT),
    refused("qwen3tts", NOT_TEXT),
    refused("qwen3vl", DEEPSTACK),
    refused("qwen3vlmoe", DEEPSTACK),
    refused("qwen4exp", STREAMS),
    refused("rnd1", DIFFUSION),
    refused("rwkv6", RECURRENT),
    refused("rwkv6qwen2", RECURRENT),
    refused("rwkv7", "every block mixes in a value of the first block (v_first)"),
    refused("smallthinker", COUNTED),
    refused("t5", "it is an encoder-decoder: every block of the decoder attends to the encoder's output"),
    refused("t5encoder", ENCODER),
    refused("talkie", INPUT_NORM),
    refused("wavtokenizer-dec", NOT_TEXT),
];

const ENCODER: &str = "it is an encoder: it has no causal attention, and no next token to sample";
const DIFFUSION: &str =
    "it denoises whole sequences: it has no causal attention, and no next token to sample";
const DRAFT: &str = "it only drafts for another model, whose hidden states it needs";
const NOT_TEXT: &str = "it does not generate text";
const INPUT_NORM: &str =
    "its graph normalises the rows that enter it, so hidden rows would be normalised again in every slice";
const RECURRENT: &str = "all its blocks are recurrent, which Shoal does not describe yet";
const HYBRID: &str = "which of its blocks are recurrent is not described in Shoal yet";
const DEEPSTACK: &str = "image features enter at several blocks (deepstack), not only at the first";
const SHARED_INDEX: &str = "blocks reuse the attention index of earlier ones";
const COUNTED: &str =
    "which blocks have RoPE or experts is counted from the first block of the file, and no key states it";
const STREAMS: &str = "what goes from block to block is not one hidden row per token";
const LOOPED: &str = "its blocks are run several times in a loop";

const fn certified(name: &'static str) -> Architecture {
    Architecture { support: Support::Certified, ..uncertified(name) }
}

const fn uncertified(name: &'static str) -> Architecture {
    Architecture {
        name,
        support: Support::Uncertified,
        embedding_scale: EmbeddingScale::One,
        hidden_input: HiddenInput::Batch,
        sliding_window: SlidingWindow::None,
        recurrence: Recurrence::None,
        size_rule: SizeRule::None,
        start_multiple: None,
        note: "",
    }
}

const fn refused(name: &'static str, reason: &'static str) -> Architecture {
    Architecture { support: Support::Refused(reason), ..uncertified(name) }
}

const fn pattern(window: Window, period: u32, start: PatternStart) -> SlidingWindow {
    let without = match window {
        Window::Optional => WithoutSliding::NoWindow,
        Window::Required | Window::Default(_) => WithoutSliding::Impossible,
    };
    SlidingWindow::Pattern { window, period, start, without }
}

/// A pattern whose sliding blocks differ from the others only in their window.
const fn uniform_pattern(window: Window, period: u32) -> SlidingWindow {
    let (start, without) = (PatternStart::Sliding, WithoutSliding::WidestWindow);
    SlidingWindow::Pattern { window, period, start, without }
}
