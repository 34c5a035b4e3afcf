// What the safe layer needs from llama.cpp and the bindings do not give, or give only with C++ exceptions that would
// run into Rust. Plain C; implemented in core.cpp, with guard.hpp around every call.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "llama.h"

#ifdef __cplusplus
extern "C" {
#endif

// How a call of the shim ended. Anything but SHOAL_OK has a message in its shoal_error.
enum shoal_status {
    SHOAL_OK               = 0,
    SHOAL_INVALID_ARGUMENT = 1, // the caller's fault: std::invalid_argument and its kin
    SHOAL_OUT_OF_MEMORY    = 2,
    SHOAL_EXCEPTION        = 3, // any other C++ exception
    SHOAL_FAILED           = 4, // llama.cpp returned a failure without an exception; its log has the reason
};

// Room for a message, given by the caller. Always NUL-terminated; longer messages are cut.
struct shoal_error {
    char message[1024];
};

// Bytes the shim allocated; give them back with shoal_string_free. Not NUL-terminated text: use size.
struct shoal_string {
    char * data;
    size_t size;
};

void shoal_string_free(struct shoal_string * string);

// llama_decode. `code` gets its return value; SHOAL_OK says only that no exception was thrown.
enum shoal_status shoal_decode(
    struct llama_context * context,
    struct llama_batch batch,
    int32_t * code,
    struct shoal_error * error);

// llama_tokenize. `count` gets its return value: the number of tokens, or minus the room they need.
enum shoal_status shoal_tokenize(
    const struct llama_vocab * vocab,
    const char * text,
    int32_t text_size,
    llama_token * tokens,
    int32_t capacity,
    bool add_special,
    bool parse_special,
    int32_t * count,
    struct shoal_error * error);

// llama_token_to_piece. `size` gets its return value: the bytes written, or minus the room they need.
enum shoal_status shoal_token_to_piece(
    const struct llama_vocab * vocab,
    llama_token token,
    char * bytes,
    int32_t capacity,
    bool special,
    int32_t * size,
    struct shoal_error * error);

// Makes the context's CPU backend compute with ggml's reference kernels (ggml_backend_cpu_set_use_ref), whose result
// for a row does not depend on the other rows of a batch, nor on the number of threads.
enum shoal_status shoal_use_reference_kernels(struct llama_context * context, struct shoal_error * error);

// llama_model_save_to_file.
enum shoal_status shoal_model_save(const struct llama_model * model, const char * path, struct shoal_error * error);

// Memory that a model and a context hold in buffers of one type.
struct shoal_memory {
    char buffer_type[64]; // such as "CPU", "CPU_REPACK", "CUDA0", "CUDA_Host"
    char device[64];      // such as "CPU", "CUDA0"
    bool host;            // in the host's memory
    uint64_t model;
    uint64_t context;
    uint64_t compute;
};

// llama_get_memory_breakdown (src/llama-ext.h). Writes at most `capacity` entries; `count` gets how many there are.
enum shoal_status shoal_memory_breakdown(
    const struct llama_context * context,
    struct shoal_memory * entries,
    size_t capacity,
    size_t * count,
    struct shoal_error * error);

#ifdef __cplusplus
}
#endif
