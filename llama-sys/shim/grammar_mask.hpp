// Which tokens a grammar allows next, in bounded time. C++ only.
#pragma once

#include "llama-grammar.h"

#include <string>

namespace shoal {

// Sets the logit of every candidate that `grammar` does not allow to -inf, as llama_grammar_apply_impl does. Throws
// std::invalid_argument if the grammar is too ambiguous to tell. `grammar` is used as scratch and left as it was.
void mask_candidates(llama_grammar & grammar, llama_token_data_array & candidates);

// Accepts a token of `piece` that is allowed, as llama_grammar_accept_token does. Throws std::invalid_argument, with
// `grammar` left as it was, if there would then be too many ways to read the text; and what llama.cpp throws.
void accept_piece(llama_grammar & grammar, llama_token token, const std::string & piece);

// Throws std::invalid_argument if there are too many ways to read the text so far.
void check_stacks(const llama_grammar & grammar);

} // namespace shoal
