// GBNF grammars: from a JSON schema, and as a constraint on sampling. Plain C; implemented in grammar.cpp.
//
// llama.cpp's own grammar sampler aborts the process when it is given an end-of-generation token it does not expect,
// asserts after a token it refused, and searches its triggers with std::regex over the whole answer for each token.
// This one refuses with a status, and leaves its state as it was.
#pragma once

#include "chat.h"

#ifdef __cplusplus
extern "C" {
#endif

// `schema`: JSON text. The caller has checked its size and nesting: the conversion recurses.
enum shoal_status shoal_json_schema_to_gbnf(
    struct shoal_text schema,
    struct shoal_string * out,
    struct shoal_error * error);

struct shoal_grammar;

struct shoal_grammar_config {
    struct shoal_text gbnf; // start symbol: root
    bool lazy;              // bind only after a trigger
    const struct shoal_text * trigger_patterns; // ECMAScript; `^…$` is tried against the whole text
    size_t n_trigger_patterns;
    const int32_t * trigger_tokens;
    size_t n_trigger_tokens;
};

// `vocab` must outlive the grammar.
enum shoal_status shoal_grammar_new(
    const struct llama_vocab * vocab,
    const struct shoal_grammar_config * config,
    struct shoal_grammar ** out,
    struct shoal_error * error);

void shoal_grammar_free(struct shoal_grammar * grammar);

// False while a lazy grammar waits for its trigger.
bool shoal_grammar_is_binding(const struct shoal_grammar * grammar);

// Sets the logit of every candidate that the grammar does not allow next to -inf.
enum shoal_status shoal_grammar_apply(
    const struct shoal_grammar * grammar,
    struct llama_token_data_array * candidates,
    struct shoal_error * error);

// Moves on by `token`. SHOAL_INVALID_ARGUMENT if the grammar does not allow it; the state is then unchanged.
enum shoal_status shoal_grammar_accept(struct shoal_grammar * grammar, int32_t token, struct shoal_error * error);

// llama_sampler_apply, which may throw std::bad_alloc.
enum shoal_status shoal_sampler_apply(
    struct llama_sampler * sampler,
    struct llama_token_data_array * candidates,
    struct shoal_error * error);

#ifdef __cplusplus
}
#endif
