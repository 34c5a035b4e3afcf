// Keeps C++ exceptions inside the shim. Include in every shim/*.cpp; C++ only.
#pragma once

#include "core.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <new>
#include <stdexcept>
#include <string>

namespace shoal {

inline shoal_status fail(shoal_error * error, shoal_status status, const char * message) noexcept {
    if (error != nullptr) {
        std::snprintf(error->message, sizeof(error->message), "%s", message != nullptr ? message : "");
    }
    return status;
}

// Runs `body`, which returns a shoal_status, and turns whatever it throws into a status and a message.
template <typename Body>
shoal_status guard(shoal_error * error, Body && body) noexcept {
    try {
        return body();
    } catch (const std::bad_alloc &) {
        return fail(error, SHOAL_OUT_OF_MEMORY, "out of memory");
    } catch (const std::invalid_argument & e) {
        return fail(error, SHOAL_INVALID_ARGUMENT, e.what());
    } catch (const std::exception & e) {
        return fail(error, SHOAL_EXCEPTION, e.what());
    } catch (...) {
        return fail(error, SHOAL_EXCEPTION, "an exception that is no std::exception");
    }
}

// Copies `text` into malloc'ed memory for the caller. Throws std::bad_alloc.
inline shoal_string to_string(const std::string & text) {
    char * data = static_cast<char *>(std::malloc(text.size() + 1));
    if (data == nullptr) {
        throw std::bad_alloc();
    }
    std::memcpy(data, text.data(), text.size());
    data[text.size()] = '\0';
    return { data, text.size() };
}

} // namespace shoal
