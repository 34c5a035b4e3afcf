// Chat templates and parsing of answers, as llama.cpp's common/chat.h does them for llama-server. Plain C; requests
// and results are JSON text, since they are trees of optional fields. Implemented in chat.cpp.
#pragma once

#include "core.h"

#ifdef __cplusplus
extern "C" {
#endif

// UTF-8 text that stays the caller's. Need not end in NUL.
struct shoal_text {
    const char * data;
    size_t size;
};

struct shoal_chat_templates;

// Templates of `model` (vocabulary-only is enough), or the one in `override_source` unless that is empty.
enum shoal_status shoal_chat_templates_new(
    const struct llama_model * model,
    struct shoal_text override_source,
    struct shoal_chat_templates ** out,
    struct shoal_error * error);

void shoal_chat_templates_free(struct shoal_chat_templates * templates);

// {"source", "explicit", "supports_thinking", "capabilities": {name: bool}}
enum shoal_status shoal_chat_templates_describe(
    const struct shoal_chat_templates * templates,
    struct shoal_string * out,
    struct shoal_error * error);

// Request: {"messages", "tools"?, "tool_choice", "parallel_tool_calls", "json_schema"?, "add_generation_prompt",
// "continue_final_message"?, "reasoning_format", "enable_thinking", "chat_template_kwargs"}.
// Result: {"prompt", "grammar", "grammar_lazy", "triggers": [{"kind", "value", "token"}], "preserved_tokens",
// "additional_stops", "generation_prompt", "supports_thinking", "thinking_start", "thinking_ends", "format",
// "parser"}. `kind` is "word", "pattern", "pattern_full" or "token".
// SHOAL_EXCEPTION and SHOAL_INVALID_ARGUMENT mean: this request does not go with this template.
enum shoal_status shoal_chat_templates_apply(
    const struct shoal_chat_templates * templates,
    struct shoal_text request,
    struct shoal_string * out,
    struct shoal_error * error);

struct shoal_chat_parser;

// Params: {"format", "parser", "generation_prompt"} of an apply's result, and "reasoning_format".
enum shoal_status shoal_chat_parser_new(
    struct shoal_text params,
    struct shoal_chat_parser ** out,
    struct shoal_error * error);

void shoal_chat_parser_free(struct shoal_chat_parser * parser);

// True when everything that is generated is content, unchanged.
bool shoal_chat_parser_is_plain(const struct shoal_chat_parser * parser);

enum shoal_completeness {
    SHOAL_PARTIAL  = 0, // more text may follow
    SHOAL_COMPLETE = 1,
};

// {"content", "reasoning_content", "tool_calls": [{"id", "name", "arguments"}]}. The parser is not changed.
enum shoal_status shoal_chat_parser_parse(
    const struct shoal_chat_parser * parser,
    struct shoal_text generated,
    enum shoal_completeness completeness,
    struct shoal_string * out,
    struct shoal_error * error);

#ifdef __cplusplus
}
#endif
