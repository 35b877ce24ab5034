#pragma once

#include <cstddef>
#include <functional>

namespace archipel {

// Calls its second argument with 0 to its first argument - 1, on several threads where there are.
using Parallel = std::function<void(size_t, const std::function<void(size_t)>&)>;

}  // namespace archipel
