// See grammar.h. Uses llama.cpp's internal src/llama-grammar.h: its grammar sampler has no way to refuse a token.
#include "shoal_shim.h"

#include "grammar_check.hpp"
#include "grammar_mask.hpp"
#include "guard.hpp"

#include "json-schema-to-grammar.h"
#include "llama-grammar.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <optional>
#include <regex>
#include <string>
#include <vector>

namespace {

using shoal::refuse_grammar;

// Bytes of text that a trigger's regular expression looks at: the last, or for one that is anchored to the start, all
// of a text no longer than this. llama.cpp looks at the whole answer for each token. std::regex takes some 50 ns a byte
// where nothing matches, and [\s\S]* overflows a stack of 2 MiB on some 5,000 bytes.
constexpr size_t MAX_PATTERN_TEXT = 2048;

std::string text_of(shoal_text text) {
    return text.size == 0 ? std::string() : std::string(text.data, text.size);
}

// ---- triggers of a lazy grammar ----

// The text that `pattern` matches, if it is an escaped literal (as regex_escape makes them), which is found without a
// regular expression.
std::optional<std::string> literal_of(const std::string & pattern) {
    static constexpr const char * SPECIAL = ".^$|()*+?[]{}";
    std::string literal;
    for (size_t at = 0; at < pattern.size(); ++at) {
        if (pattern[at] == '\\') {
            // Only an escaped special character stands for itself: \s does not.
            ++at;
            if (at == pattern.size() || (std::strchr(SPECIAL, pattern[at]) == nullptr && pattern[at] != '\\')) {
                return std::nullopt;
            }
        } else if (std::strchr(SPECIAL, pattern[at]) != nullptr) {
            return std::nullopt;
        }
        literal += pattern[at];
    }
    return literal.empty() ? std::nullopt : std::optional(literal);
}

struct trigger {
    std::optional<std::string> literal;
    llama_grammar_trigger_pattern pattern;

    // Where the constrained text starts, or npos. `old_size`: how much of `text` was searched before.
    size_t find(const std::string & text, size_t old_size) const {
        return literal ? find_literal(text, old_size) : find_pattern(text);
    }

  private:
    size_t find_literal(const std::string & text, size_t old_size) const {
        const size_t overlap = literal->size() - 1;
        return text.find(*literal, old_size > overlap ? old_size - overlap : 0);
    }

    size_t find_pattern(const std::string & text) const {
        if (text.size() <= MAX_PATTERN_TEXT) {
            return pattern.find(text);
        }
        if (pattern.pattern.compare(0, 1, "^") == 0) {
            return std::string::npos;
        }
        const size_t skipped = text.size() - MAX_PATTERN_TEXT;
        const size_t found = pattern.find(text.substr(skipped));
        return found == std::string::npos ? found : skipped + found;
    }
};

trigger make_trigger(const std::string & pattern) {
    trigger result;
    result.literal = literal_of(pattern);
    result.pattern.pattern = pattern;
    if (!result.literal) {
        try {
            result.pattern.regex = std::regex(pattern);
        } catch (const std::regex_error & e) {
            refuse_grammar("trigger pattern " + pattern + ": " + e.what());
        }
    }
    return result;
}

struct grammar_deleter {
    void operator()(llama_grammar * grammar) const { llama_grammar_free_impl(grammar); }
};

// A token seen before the trigger, and the bytes of the text it is.
struct seen_token {
    llama_token token;
    size_t begin;
    size_t end;
};

} // namespace

struct shoal_grammar {
    const llama_vocab * vocab = nullptr;
    std::unique_ptr<llama_grammar, grammar_deleter> inner;
    bool waiting = false;
    bool broken = false; // an accept failed half-way: the state means nothing any more
    std::vector<trigger> triggers;
    std::vector<llama_token> trigger_tokens;
    std::string seen;
    std::vector<seen_token> seen_tokens;
};

namespace {

std::string piece_of(const llama_vocab * vocab, llama_token token) {
    std::string piece(64, '\0');
    int32_t size = llama_token_to_piece(vocab, token, piece.data(), static_cast<int32_t>(piece.size()), 0, true);
    if (size < 0) {
        piece.resize(static_cast<size_t>(-size));
        size = llama_token_to_piece(vocab, token, piece.data(), static_cast<int32_t>(piece.size()), 0, true);
    }
    piece.resize(static_cast<size_t>(std::max(size, 0)));
    return piece;
}

bool allows(const shoal_grammar & grammar, llama_token token) {
    llama_token_data data = { token, 0.0f, 0.0f };
    llama_token_data_array one = { &data, 1, -1, false };
    shoal::mask_candidates(*grammar.inner, one);
    return std::isfinite(data.logit);
}

// The inner grammar's accept leaves no stack behind when it fails, and an apply on that asserts: so ask first.
void accept_piece(shoal_grammar & grammar, llama_token token, const std::string & piece) {
    grammar.broken = true;
    shoal::accept_piece(*grammar.inner, token, piece);
    grammar.broken = false;
}

void forget_seen(shoal_grammar & grammar) {
    grammar.seen.clear();
    grammar.seen_tokens.clear();
}

// The text from `start` on is the grammar's: feeds it the tokens that hold it, the first perhaps only in part. If they
// do not fit, the model went on in the same token with something else: no constraint then, and wait on.
void bind_from(shoal_grammar & grammar, size_t start) {
    const auto stacks = grammar.inner->stacks;
    const auto partial_utf8 = grammar.inner->partial_utf8;
    try {
        for (const auto & seen : grammar.seen_tokens) {
            if (seen.end > start) {
                const size_t begin = std::max(seen.begin, start);
                accept_piece(grammar, seen.token, grammar.seen.substr(begin, seen.end - begin));
            }
        }
        grammar.waiting = false;
    } catch (const std::runtime_error &) { // what the inner grammar throws; not refuse_grammar()
        grammar.inner->stacks = stacks;
        grammar.inner->partial_utf8 = partial_utf8;
        grammar.broken = false;
    }
    forget_seen(grammar);
}

void wait_for_trigger(shoal_grammar & grammar, llama_token token) {
    const size_t old_size = grammar.seen.size();
    const std::string piece = piece_of(grammar.vocab, token);
    const auto & tokens = grammar.trigger_tokens;
    grammar.seen += piece;
    grammar.seen_tokens.push_back({ token, old_size, grammar.seen.size() });
    if (std::find(tokens.begin(), tokens.end(), token) != tokens.end()) {
        bind_from(grammar, old_size);
        return;
    }
    for (const auto & trigger : grammar.triggers) {
        const size_t start = trigger.find(grammar.seen, old_size);
        if (start != std::string::npos) {
            bind_from(grammar, start);
            return;
        }
    }
}

shoal_status accept(shoal_grammar & grammar, llama_token token, shoal_error * error) {
    if (grammar.broken) {
        return shoal::fail(error, SHOAL_FAILED, "grammar: an earlier token broke it");
    }
    if (grammar.waiting) {
        wait_for_trigger(grammar, token);
        return SHOAL_OK;
    }
    if (!allows(grammar, token)) {
        const std::string message = "grammar: token " + std::to_string(token) + " is not allowed here";
        return shoal::fail(error, SHOAL_INVALID_ARGUMENT, message.c_str());
    }
    if (!llama_vocab_is_eog(grammar.vocab, token)) {
        accept_piece(grammar, token, piece_of(grammar.vocab, token));
    }
    return SHOAL_OK;
}

} // namespace

extern "C" shoal_status shoal_json_schema_to_gbnf(shoal_text schema, shoal_string * out, shoal_error * error) {
    return shoal::guard(error, [&] {
        *out = shoal::to_string(json_schema_to_grammar(common_json::parse(text_of(schema)), /* force_gbnf= */ true));
        return SHOAL_OK;
    });
}

extern "C" shoal_status shoal_grammar_new(
    const llama_vocab * vocab,
    const shoal_grammar_config * config,
    shoal_grammar ** out,
    shoal_error * error) {
    return shoal::guard(error, [&] {
        const auto parser = shoal::parse_gbnf(vocab, text_of(config->gbnf));
        auto rules = parser.c_rules();
        auto result = std::make_unique<shoal_grammar>();
        result->vocab = vocab;
        result->inner.reset(llama_grammar_init_impl(vocab, rules.data(), rules.size(), parser.symbol_ids.at("root")));
        if (result->inner == nullptr) {
            refuse_grammar("llama.cpp does not take it; its log has the reason");
        }
        shoal::check_stacks(*result->inner);
        result->waiting = config->lazy;
        for (size_t i = 0; i < config->n_trigger_patterns; ++i) {
            result->triggers.push_back(make_trigger(text_of(config->trigger_patterns[i])));
        }
        if (config->n_trigger_tokens > 0) {
            result->trigger_tokens.assign(config->trigger_tokens, config->trigger_tokens + config->n_trigger_tokens);
        }
        *out = result.release();
        return SHOAL_OK;
    });
}

extern "C" void shoal_grammar_free(shoal_grammar * grammar) {
    delete grammar;
}

extern "C" bool shoal_grammar_is_binding(const shoal_grammar * grammar) {
    return !grammar->waiting;
}

extern "C" shoal_status shoal_grammar_apply(
    const shoal_grammar * grammar,
    llama_token_data_array * candidates,
    shoal_error * error) {
    return shoal::guard(error, [&] {
        if (grammar->broken) {
            return shoal::fail(error, SHOAL_FAILED, "grammar: an earlier token broke it");
        }
        if (!grammar->waiting) {
            shoal::mask_candidates(*grammar->inner, *candidates);
        }
        return SHOAL_OK;
    });
}

extern "C" shoal_status shoal_grammar_accept(shoal_grammar * grammar, int32_t token, shoal_error * error) {
    return shoal::guard(error, [&] { return accept(*grammar, token, error); });
}

extern "C" shoal_status shoal_sampler_apply(
    llama_sampler * sampler,
    llama_token_data_array * candidates,
    shoal_error * error) {
    return shoal::guard(error, [&] {
        llama_sampler_apply(sampler, candidates);
        return SHOAL_OK;
    });
}
