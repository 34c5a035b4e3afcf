// See grammar_mask.hpp. The same walk as src/llama-grammar.cpp's llama_grammar_reject_candidates_for_stack, which takes
// time exponential in the length of a token when a grammar can be read in several ways: with a rule such as
// s ::= " " s "b" | " " s "c" | " ", a token of 64 spaces is never done with. This one counts its steps.
#include "grammar_mask.hpp"

#include "grammar_check.hpp"

#include "llama-vocab.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <utility>
#include <vector>

namespace {

using shoal::refuse_grammar;

// Ways to read the text so far. OpenAI allows an enum of 1,000 values, each of which is one.
constexpr size_t MAX_STACKS = 1000;

// Candidates looked at for one mask, below a second. JSON needs some 500,000 with 50,000 tokens.
constexpr size_t MAX_STEPS = 50000000;

// A stack costs as much as this many candidates.
constexpr size_t STEPS_PER_STACK = 32;

// A token that is to be read: its code points from `next` on, of which the last is 0, then perhaps part of one more.
struct unread {
    size_t index;
    const uint32_t * next;
    llama_partial_utf8 partial;
    llama_token token;
};

using unread_list = std::vector<unread>;

// Appends the code points of `piece`, which continues `start`, and a 0. What cannot be UTF-8 has none, and n_remain -1.
llama_partial_utf8 decode(const std::string & piece, llama_partial_utf8 start, std::vector<uint32_t> & code_points) {
    const size_t begin = code_points.size();
    uint32_t value = start.value;
    int n_remain = start.n_remain;
    const auto invalid = [&] {
        code_points.resize(begin);
        code_points.push_back(0);
        return llama_partial_utf8 { 0, -1 };
    };
    for (const char character : piece) {
        const auto byte = static_cast<uint8_t>(character);
        if (byte == 0) {
            break;
        }
        if (n_remain > 0) {
            if (byte >> 6 != 2) {
                return invalid();
            }
            value = (value << 6) | (byte & 0x3f);
            --n_remain;
        } else {
            n_remain = byte < 0x80 ? 0 : byte >> 5 == 6 ? 1 : byte >> 4 == 14 ? 2 : byte >> 3 == 30 ? 3 : -1;
            if (n_remain < 0) {
                return invalid();
            }
            value = byte & (n_remain == 0 ? 0x7f : 0x3f >> n_remain);
        }
        if (n_remain == 0) {
            code_points.push_back(value);
        }
    }
    code_points.push_back(0);
    return { value, n_remain };
}

bool is_token_element(const llama_grammar_element & element) {
    return element.type == LLAMA_GRETYPE_TOKEN || element.type == LLAMA_GRETYPE_TOKEN_NOT;
}

bool matches_token(const llama_grammar_element & element, llama_token token) {
    return (element.value == static_cast<uint32_t>(token)) == (element.type == LLAMA_GRETYPE_TOKEN);
}

// Whether the characters that start at `at` include `code_point`.
bool matches_char(const llama_grammar_element * at, uint32_t code_point) {
    const bool negated = at->type == LLAMA_GRETYPE_CHAR_NOT;
    bool found = false;
    do {
        if (at[1].type == LLAMA_GRETYPE_CHAR_RNG_UPPER) {
            found = found || (at->value <= code_point && code_point <= at[1].value);
            at += 2;
        } else {
            found = found || at->type == LLAMA_GRETYPE_CHAR_ANY || at->value == code_point;
            at += 1;
        }
    } while (at->type == LLAMA_GRETYPE_CHAR_ALT);
    return found != negated;
}

class masker {
  public:
    explicit masker(llama_grammar & grammar) : grammar(grammar) {}

    // Those of `tokens` that cannot be read from any of `stacks`, with what is unread of them here.
    unread_list rejects(const llama_grammar_stacks & stacks, unread_list tokens) {
        for (const auto & stack : stacks) {
            if (tokens.empty()) {
                break;
            }
            tokens = rejects_of_stack(stack, tokens);
        }
        return tokens;
    }

  private:
    unread_list rejects_of_stack(const llama_grammar_stack & stack, const unread_list & tokens) {
        count(tokens.size() + STEPS_PER_STACK);
        if (stack.empty()) {
            return keep(tokens, [](const unread & token) { return *token.next != 0 || token.partial.n_remain != 0; });
        }
        const llama_grammar_element & top = *stack.back();
        if (is_token_element(top)) {
            return keep(tokens, [&](const unread & token) {
                return *token.next == 0 ? token.partial.n_remain != 0 : !matches_token(top, token.token);
            });
        }
        unread_list rejected;
        unread_list read;
        uint32_t first_read = 0;
        for (const auto & token : tokens) {
            if (*token.next == 0) {
                if (token.partial.n_remain != 0 && !matches_partial(stack, token)) {
                    rejected.push_back(token);
                }
            } else if (matches_char(&top, *token.next)) {
                first_read = *token.next;
                read.push_back({ token.index, token.next + 1, token.partial, token.token });
            } else {
                rejected.push_back(token);
            }
        }
        if (read.empty()) {
            return rejected;
        }
        for (const auto & token : rejects(after(stack, first_read), std::move(read))) {
            rejected.push_back({ token.index, token.next - 1, token.partial, token.token });
        }
        return rejected;
    }

    template <typename Predicate>
    static unread_list keep(const unread_list & tokens, Predicate && predicate) {
        unread_list kept;
        std::copy_if(tokens.begin(), tokens.end(), std::back_inserter(kept), predicate);
        return kept;
    }

    // The stacks after a character that the top of `stack` matches; they are the same for each.
    llama_grammar_stacks after(const llama_grammar_stack & stack, uint32_t code_point) {
        std::swap(saved, grammar.stacks);
        grammar.stacks = { stack };
        llama_grammar_accept(&grammar, code_point);
        std::swap(saved, grammar.stacks);
        count(saved.size() * STEPS_PER_STACK);
        return std::move(saved);
    }

    // Whether a character that begins like this could be at the top of `stack`: few tokens end in one, so llama.cpp's
    // own function will do.
    bool matches_partial(const llama_grammar_stack & stack, const unread & token) const {
        const llama_grammar_candidate candidate = { token.index, token.next, token.partial, token.token };
        return llama_grammar_reject_candidates_for_stack(grammar.rules, stack, { candidate }).empty();
    }

    void count(size_t n) {
        steps += n;
        if (steps > MAX_STEPS) {
            refuse_grammar("it is too ambiguous to tell what is allowed next");
        }
    }

    llama_grammar & grammar;
    llama_grammar_stacks saved;
    size_t steps = 0;
};

bool can_end(const llama_grammar & grammar) {
    return std::any_of(grammar.stacks.begin(), grammar.stacks.end(), [](const auto & stack) { return stack.empty(); });
}

} // namespace

void shoal::check_stacks(const llama_grammar & grammar) {
    if (grammar.stacks.size() > MAX_STACKS) {
        refuse_grammar("the text can be read in more than " + std::to_string(MAX_STACKS) + " ways");
    }
}

void shoal::mask_candidates(llama_grammar & grammar, llama_token_data_array & candidates) {
    const bool end_allowed = can_end(grammar);
    std::vector<uint32_t> code_points;
    std::vector<std::pair<size_t, size_t>> starts; // index, and where its code points start
    unread_list tokens;
    tokens.reserve(candidates.size);
    for (size_t i = 0; i < candidates.size; ++i) {
        llama_token_data & candidate = candidates.data[i];
        const std::string & piece = grammar.vocab->token_to_piece(candidate.id);
        if (grammar.vocab->is_eog(candidate.id)) {
            candidate.logit = end_allowed ? candidate.logit : -INFINITY;
        } else if (piece.empty() || piece[0] == '\0') {
            candidate.logit = -INFINITY;
        } else {
            starts.emplace_back(i, code_points.size());
            tokens.push_back({ i, nullptr, decode(piece, grammar.partial_utf8, code_points), candidate.id });
        }
    }
    // Only now: the vector does not move any more.
    for (size_t i = 0; i < tokens.size(); ++i) {
        tokens[i].next = code_points.data() + starts[i].second;
    }
    const llama_grammar_stacks stacks = grammar.stacks;
    try {
        for (const auto & rejected : masker(grammar).rejects(stacks, std::move(tokens))) {
            candidates.data[rejected.index].logit = -INFINITY;
        }
    } catch (...) {
        grammar.stacks = stacks;
        throw;
    }
}

void shoal::accept_piece(llama_grammar & grammar, llama_token token, const std::string & piece) {
    const llama_grammar_stacks stacks = grammar.stacks;
    // Each character can multiply the stacks: stop before there are too many. Stacks that wait for a token do not.
    std::vector<uint32_t> code_points;
    decode(piece, grammar.partial_utf8, code_points);
    try {
        for (const uint32_t code_point : code_points) {
            if (code_point == 0 || grammar.stacks.empty()) {
                break;
            }
            llama_grammar_accept(&grammar, code_point);
            check_stacks(grammar);
        }
    } catch (...) {
        grammar.stacks = stacks;
        throw;
    }
    grammar.stacks = stacks;
    llama_grammar_accept_token(grammar, token, piece);
    check_stacks(grammar);
}
