// What must be known of a context's cache before the bytes of llama_state_seq_get_data can be read. Plain C; implemented in
// kv.cpp.
#pragma once

#include "core.h"

#ifdef __cplusplus
extern "C" {
#endif

struct shoal_kv_form {
    bool windowed; // a second cache follows, of the layers with a sliding window (src/llama-kv-cache-iswa.h)
    bool extended; // cells carry more than a position (src/llama-kv-cache.cpp, has_cell_ext)
    bool values;   // values are cached beside the keys; not with multi-head latent attention
};

// Fills `form`, and `windows` with 1 for each of the model's `n_layer` layers that has a sliding window and 0 for the others.
// SHOAL_INVALID_ARGUMENT says why the cache is of a kind whose bytes cannot be told apart by layer.
enum shoal_status shoal_context_kv_form(
    struct llama_context * context,
    struct shoal_kv_form * form,
    uint8_t * windows,
    uint32_t n_layer,
    struct shoal_error * error);

#ifdef __cplusplus
}
#endif
