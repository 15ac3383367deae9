// Which kernels this processor can run.
#include <stdexcept>
#include <string>

#include "kernels/kernels.hpp"

namespace dynamictp::kernels {

Level detect_level() noexcept {
#if defined(__x86_64__)
    // These also ask the operating system whether it saves the wide registers.
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl")) {
        const bool products = __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
        return products ? Level::avx512_bf16 : Level::avx512;
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return Level::avx2;
#endif
    return Level::portable;
}

const char* name_of(Level level) noexcept {
    switch (level) {
        case Level::portable: return "portable";
        case Level::avx2: return "avx2";
        case Level::avx512: return "avx512";
        case Level::avx512_bf16: return "avx512_bf16";
    }
    return "unknown";
}

const Kernels& kernels(Level level, DType dtype) {
    if (level > detect_level()) {
        throw std::invalid_argument(std::string("this processor does not have the kernel level ") + name_of(level) +
                                    "; its best is " + name_of(detect_level()));
    }
    const auto index = static_cast<std::size_t>(dtype);
    switch (level) {
#if defined(__x86_64__)
        case Level::avx512_bf16: return level::avx512_bf16[index];
        case Level::avx512: return level::avx512[index];
        case Level::avx2: return level::avx2[index];
#endif
        default: return level::portable[index];
    }
}

std::size_t attention_scratch(std::size_t length) noexcept {
    const std::size_t padded = (length + 15) / 16 * 16;
    return max_attention_rows * padded * 2 * sizeof(float);
}

}  // namespace dynamictp::kernels
