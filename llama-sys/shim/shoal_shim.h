// All headers of the shim: the one file that bindgen reads. Plain C.
#pragma once

#include "core.h"
#include "chat.h"
#include "grammar.h"
#include "kv.h"
