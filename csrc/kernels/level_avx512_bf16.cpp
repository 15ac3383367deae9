#include "kernels/kernels.hpp"
#include "kernels/vec_avx512.hpp"

#define DYNAMICTP_LEVEL avx512_bf16
#define DYNAMICTP_LEVEL_NAME "avx512_bf16"
#include "kernels/level.inl"
