// See core.h.
#include "guard.hpp"

#include "ggml-cpu.h"
#include "llama-context.h"
#include "llama-ext.h"

namespace {

void copy_name(char (&to)[64], const char * from) {
    std::snprintf(to, sizeof(to), "%s", from != nullptr ? from : "");
}

shoal_memory describe(ggml_backend_buffer_type_t type, const llama_memory_breakdown_data & data) {
    shoal_memory entry = {};
    // The CPU's plain buffer types have no device of their own (ggml-backend.cpp).
    ggml_backend_dev_t device = ggml_backend_buft_get_device(type);
    copy_name(entry.buffer_type, ggml_backend_buft_name(type));
    copy_name(entry.device, device != nullptr ? ggml_backend_dev_name(device) : "CPU");
    // Repacked weights lie in the host's memory, though in a form that only the CPU's kernels read.
    entry.host    = device == nullptr || ggml_backend_buft_is_host(type)
                 || ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_CPU;
    entry.model   = data.model;
    entry.context = data.context;
    entry.compute = data.compute;
    return entry;
}

} // namespace

extern "C" {

void shoal_string_free(shoal_string * string) {
    if (string != nullptr) {
        std::free(string->data);
        string->data = nullptr;
        string->size = 0;
    }
}

shoal_status shoal_decode(llama_context * context, llama_batch batch, int32_t * code, shoal_error * error) {
    return shoal::guard(error, [&] {
        *code = llama_decode(context, batch);
        return SHOAL_OK;
    });
}

shoal_status shoal_tokenize(
        const llama_vocab * vocab, const char * text, int32_t text_size, llama_token * tokens, int32_t capacity,
        bool add_special, bool parse_special, int32_t * count, shoal_error * error) {
    return shoal::guard(error, [&] {
        *count = llama_tokenize(vocab, text, text_size, tokens, capacity, add_special, parse_special);
        return SHOAL_OK;
    });
}

shoal_status shoal_token_to_piece(
        const llama_vocab * vocab, llama_token token, char * bytes, int32_t capacity, bool special, int32_t * size,
        shoal_error * error) {
    return shoal::guard(error, [&] {
        *size = llama_token_to_piece(vocab, token, bytes, capacity, 0, special);
        return SHOAL_OK;
    });
}

shoal_status shoal_use_reference_kernels(llama_context * context, shoal_error * error) {
    return shoal::guard(error, [&] {
        // The context has no public way to its backends but its scheduler (src/llama-context.h), which it may replace;
        // the backends stay.
        ggml_backend_sched_t sched = context->get_sched();
        for (int i = 0; i < ggml_backend_sched_get_n_backends(sched); i++) {
            ggml_backend_t backend = ggml_backend_sched_get_backend(sched, i);
            if (ggml_backend_is_cpu(backend)) {
                ggml_backend_cpu_set_use_ref(backend, true);
                return SHOAL_OK;
            }
        }
        return shoal::fail(error, SHOAL_FAILED, "the context has no CPU backend");
    });
}

shoal_status shoal_model_save(const llama_model * model, const char * path, shoal_error * error) {
    return shoal::guard(error, [&] {
        llama_model_save_to_file(model, path);
        return SHOAL_OK;
    });
}

shoal_status shoal_memory_breakdown(
        const llama_context * context, shoal_memory * entries, size_t capacity, size_t * count, shoal_error * error) {
    return shoal::guard(error, [&] {
        const llama_memory_breakdown breakdown = llama_get_memory_breakdown(context);
        size_t written = 0;
        for (const auto & [type, data] : breakdown) {
            if (written < capacity) {
                entries[written++] = describe(type, data);
            }
        }
        *count = breakdown.size();
        return SHOAL_OK;
    });
}

} // extern "C"
