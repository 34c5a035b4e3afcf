// See chat.h.
#include "shoal_shim.h"

#include "guard.hpp"

// This one includes llama.cpp's chat.h, which cannot be named here: "chat.h" is the shim's own.
#include "chat-peg-parser.h"
#include "log.h"

#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <variant>
#include <vector>

// The real things behind chat.h's opaque types. A type of their own, since common_chat_templates is a global name.
struct shoal_chat_templates {
    common_chat_templates_ptr templates;
};

struct shoal_chat_parser {
    common_chat_parser_params params;
    bool plain = false;
};

namespace {

using json = common_json;

std::string text_of(shoal_text text) {
    return text.size == 0 ? std::string() : std::string(text.data, text.size);
}

std::string string_at(const json & object, const char * key) {
    return object.at(key).get<std::string>();
}

// llama.cpp's common code has a log of its own, which writes prompts and answers to stderr. Faults are thrown as well.
void quiet_common_log() {
    static const bool once = [] {
        common_log_set_verbosity_thold(LOG_LEVEL_OUTPUT);
        return true;
    }();
    (void) once;
}

// common_chat_templates_init rethrows a template's fault as a bare std::exception, without its message.
void check_syntax(const llama_model * model, const std::string & override_source) {
    const char * own = llama_model_chat_template(model, nullptr);
    const std::string source = !override_source.empty() ? override_source : own != nullptr ? own : "";
    if (!source.empty() && source != "chatml") {
        const common_chat_template checked(source, "", "");
    }
}

// A template that refuses even the plainest chat is reported when it is used, not here.
bool supports_thinking(const common_chat_templates * templates) {
    try {
        return common_chat_templates_support_enable_thinking(templates);
    } catch (const std::exception &) {
        return false;
    }
}

common_chat_continuation continuation_of(const json & request) {
    return request.contains("continue_final_message")
        ? common_chat_continuation_parse(request.at("continue_final_message"))
        : COMMON_CHAT_CONTINUATION_NONE;
}

common_chat_templates_inputs inputs_of(const json & request) {
    common_chat_templates_inputs inputs;
    inputs.messages = common_chat_msgs_parse_oaicompat(request.at("messages"));
    if (request.contains("tools")) {
        inputs.tools = common_chat_tools_parse_oaicompat(request.at("tools"));
    }
    inputs.tool_choice            = common_chat_tool_choice_parse_oaicompat(string_at(request, "tool_choice"));
    inputs.parallel_tool_calls    = request.at("parallel_tool_calls").get<bool>();
    inputs.add_generation_prompt  = request.at("add_generation_prompt").get<bool>();
    inputs.continue_final_message = continuation_of(request);
    inputs.reasoning_format       = common_reasoning_format_from_name(string_at(request, "reasoning_format"));
    inputs.enable_thinking        = request.at("enable_thinking").get<bool>();
    inputs.use_jinja              = true;
    if (request.contains("json_schema")) {
        inputs.json_schema = request.at("json_schema").dump();
    }
    for (const auto & [name, value] : request.at("chat_template_kwargs").items()) {
        inputs.chat_template_kwargs[name] = value.dump();
    }
    return inputs;
}

const char * trigger_kind(common_grammar_trigger_type type) {
    switch (type) {
        case COMMON_GRAMMAR_TRIGGER_TYPE_TOKEN:        return "token";
        case COMMON_GRAMMAR_TRIGGER_TYPE_WORD:         return "word";
        case COMMON_GRAMMAR_TRIGGER_TYPE_PATTERN:      return "pattern";
        case COMMON_GRAMMAR_TRIGGER_TYPE_PATTERN_FULL: return "pattern_full";
    }
    throw std::runtime_error("a grammar trigger of an unknown type");
}

json result_of(const common_chat_params & params) {
    json triggers = json::array();
    for (const auto & trigger : params.grammar_triggers) {
        json item = json::object();
        item["kind"]  = std::string(trigger_kind(trigger.type));
        item["value"] = trigger.value;
        item["token"] = trigger.token;
        triggers.push_back(item);
    }
    json result = json::object();
    result["prompt"]            = params.prompt;
    result["grammar"]           = params.grammar;
    result["grammar_lazy"]      = params.grammar_lazy;
    result["triggers"]          = triggers;
    result["preserved_tokens"]  = params.preserved_tokens;
    result["additional_stops"]  = params.additional_stops;
    result["generation_prompt"] = params.generation_prompt;
    result["supports_thinking"] = params.supports_thinking;
    result["thinking_start"]    = params.thinking_start_tag;
    result["thinking_ends"]     = params.thinking_end_tags;
    result["format"]            = static_cast<int>(params.format);
    result["parser"]            = params.parser;
    return result;
}

json message_of(const common_chat_msg & message) {
    json calls = json::array();
    for (const auto & call : message.tool_calls) {
        json item = json::object();
        item["id"]        = call.id;
        item["name"]      = call.name;
        item["arguments"] = call.arguments;
        calls.push_back(item);
    }
    json result = json::object();
    result["content"]           = message.content;
    result["reasoning_content"] = message.reasoning_content;
    result["tool_calls"]        = calls;
    return result;
}

// What went wrong, without the stages of llama.cpp it came through and the template source around it.
std::string reason_of(const std::string & message) {
    static const std::string STAGE = "Automatic parser generation failed: ";
    static const std::string CAUSE = "\nError: ";
    static const std::string RAISED = "Jinja Exception: ";
    if (const size_t cause = message.rfind(CAUSE); cause != std::string::npos) {
        const std::string reason = message.substr(cause + CAUSE.size());
        return reason.compare(0, RAISED.size(), RAISED) == 0
            ? "the chat template refuses this: " + reason.substr(RAISED.size())
            : "the chat template cannot render this: " + reason;
    }
    const size_t stage = message.find(STAGE);
    return stage != std::string::npos ? message.substr(stage + STAGE.size()) : message;
}

common_chat_params apply(const common_chat_templates * templates, const json & request) {
    try {
        return common_chat_templates_apply(templates, inputs_of(request));
    } catch (const std::bad_alloc &) {
        throw;
    } catch (const std::exception & e) {
        throw std::runtime_error(reason_of(e.what()));
    }
}

// Appends the leaves of nested sequences in order.
void flatten(const common_peg_arena & arena, common_peg_parser_id id, std::vector<common_peg_parser_id> & leaves) {
    if (const auto * sequence = std::get_if<common_peg_sequence_parser>(&arena.get(id))) {
        for (const auto child : sequence->children) {
            flatten(arena, child, leaves);
        }
    } else {
        leaves.push_back(id);
    }
}

bool is_rest(const common_peg_arena & arena, common_peg_parser_id id) {
    const auto * until = std::get_if<common_peg_until_parser>(&arena.get(id));
    return until != nullptr && until->delimiters.empty();
}

// Whether a parser is: the generation prompt (of which the content may begin in a continued answer), then the rest as
// content, then the end. Anything that is not clearly that is not plain.
bool is_plain(const common_chat_parser_params & params) {
    if (params.parser.empty()) {
        return params.generation_prompt.empty();
    }
    std::vector<common_peg_parser_id> leaves;
    flatten(params.parser, params.parser.root(), leaves);
    std::string literal;
    bool content = false;
    for (const auto id : leaves) {
        const auto & leaf = params.parser.get(id);
        if (std::holds_alternative<common_peg_epsilon_parser>(leaf)) {
            continue;
        }
        if (const auto * piece = std::get_if<common_peg_literal_parser>(&leaf); piece != nullptr && !content) {
            literal += piece->literal;
        } else if (const auto * tag = std::get_if<common_peg_tag_parser>(&leaf); tag != nullptr && !content) {
            if (tag->tag != common_chat_peg_builder::CONTENT || !is_rest(params.parser, tag->child)) {
                return false;
            }
            content = true;
        } else if (!std::holds_alternative<common_peg_end_parser>(leaf)) {
            return false;
        }
    }
    return content && params.generation_prompt.compare(0, literal.size(), literal) == 0;
}

} // namespace

extern "C" shoal_status shoal_chat_templates_new(
    const llama_model * model,
    shoal_text override_source,
    shoal_chat_templates ** out,
    shoal_error * error) {
    return shoal::guard(error, [&] {
        if (model == nullptr || out == nullptr) {
            return shoal::fail(error, SHOAL_INVALID_ARGUMENT, "a null pointer");
        }
        quiet_common_log();
        auto result = std::make_unique<shoal_chat_templates>();
        const std::string source = text_of(override_source);
        check_syntax(model, source);
        result->templates = common_chat_templates_init(model, source);
        *out = result.release();
        return SHOAL_OK;
    });
}

extern "C" void shoal_chat_templates_free(shoal_chat_templates * templates) {
    delete templates;
}

extern "C" shoal_status shoal_chat_templates_describe(
    const shoal_chat_templates * templates,
    shoal_string * out,
    shoal_error * error) {
    return shoal::guard(error, [&] {
        const common_chat_templates * inner = templates->templates.get();
        json capabilities = json::object();
        for (const auto & [name, value] : common_chat_templates_get_caps(inner)) {
            capabilities[name] = value;
        }
        json result = json::object();
        result["source"]            = common_chat_templates_source(inner);
        result["explicit"]          = common_chat_templates_was_explicit(inner);
        result["supports_thinking"] = supports_thinking(inner);
        result["capabilities"]      = capabilities;
        *out = shoal::to_string(result.dump_safe());
        return SHOAL_OK;
    });
}

extern "C" shoal_status shoal_chat_templates_apply(
    const shoal_chat_templates * templates,
    shoal_text request,
    shoal_string * out,
    shoal_error * error) {
    return shoal::guard(error, [&] {
        const json parsed = json::parse(text_of(request));
        const auto params = apply(templates->templates.get(), parsed);
        *out = shoal::to_string(result_of(params).dump_safe());
        return SHOAL_OK;
    });
}

extern "C" shoal_status shoal_chat_parser_new(shoal_text params, shoal_chat_parser ** out, shoal_error * error) {
    return shoal::guard(error, [&] {
        const json parsed = json::parse(text_of(params));
        auto result = std::make_unique<shoal_chat_parser>();
        const int format = parsed.at("format").get<int>();
        if (format < 0 || format >= COMMON_CHAT_FORMAT_COUNT) {
            return shoal::fail(error, SHOAL_INVALID_ARGUMENT, "unknown chat format");
        }
        result->params.format            = static_cast<common_chat_format>(format);
        result->params.reasoning_format  = common_reasoning_format_from_name(string_at(parsed, "reasoning_format"));
        result->params.generation_prompt = string_at(parsed, "generation_prompt");
        const auto parser = string_at(parsed, "parser");
        if (!parser.empty()) {
            result->params.parser.load(parser);
        }
        result->plain = is_plain(result->params);
        *out = result.release();
        return SHOAL_OK;
    });
}

extern "C" void shoal_chat_parser_free(shoal_chat_parser * parser) {
    delete parser;
}

extern "C" bool shoal_chat_parser_is_plain(const shoal_chat_parser * parser) {
    return parser->plain;
}

extern "C" shoal_status shoal_chat_parser_parse(
    const shoal_chat_parser * parser,
    shoal_text generated,
    shoal_completeness completeness,
    shoal_string * out,
    shoal_error * error) {
    return shoal::guard(error, [&] {
        const auto message = common_chat_parse(text_of(generated), completeness == SHOAL_PARTIAL, parser->params);
        *out = shoal::to_string(message_of(message).dump_safe());
        return SHOAL_OK;
    });
}
