// Parses a GBNF text that may come from anyone, and refuses what llama.cpp would crash or hang on. C++ only.
#pragma once

#include "llama-grammar.h"

#include <string>

namespace shoal {

// Throws std::invalid_argument: the caller's grammar is wrong.
[[noreturn]] void refuse_grammar(const std::string & why);

// The rules of `gbnf`, all defined, with one named root. `vocab`: for the tokens it names.
llama_grammar_parser parse_gbnf(const llama_vocab * vocab, const std::string & gbnf);

} // namespace shoal
