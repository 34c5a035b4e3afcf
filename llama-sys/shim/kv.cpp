// See kv.h.
#include "kv.h"

#include "guard.hpp"

#include "llama-context.h"
#include "llama-kv-cache-iswa.h"
#include "llama-kv-cache.h"
#include "llama-model.h"

extern "C" {

shoal_status shoal_context_kv_form(
        llama_context * context, shoal_kv_form * form, uint8_t * windows, uint32_t n_layer, shoal_error * error) {
    return shoal::guard(error, [&] {
        // `llama_memory_t` is this class in llama.h's clothes.
        const llama_memory_i * memory = llama_get_memory(context);
        const bool windowed = dynamic_cast<const llama_kv_cache_iswa *>(memory) != nullptr;
        if (!windowed && dynamic_cast<const llama_kv_cache *>(memory) == nullptr) {
            return shoal::fail(
                error, SHOAL_INVALID_ARGUMENT,
                "its state is not one of keys and values by position (recurrent blocks, sparse attention)");
        }
        const llama_hparams & hparams = context->get_model().hparams;
        for (uint32_t layer = 0; layer < n_layer; layer++) {
            if (!hparams.has_kv(layer)) {
                return shoal::fail(error, SHOAL_INVALID_ARGUMENT, "some of its blocks share the keys of others");
            }
            windows[layer] = windowed && hparams.is_swa(layer) ? 1 : 0;
        }
        form->windowed = windowed;
        form->extended = hparams.n_pos_per_embd() > 1 || hparams.ple_n_heads > 0;
        form->values   = !hparams.is_mla();
        return SHOAL_OK;
    });
}

} // extern "C"
