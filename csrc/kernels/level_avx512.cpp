#include "kernels/kernels.hpp"
#include "kernels/vec_avx512.hpp"

#define DYNAMICTP_LEVEL avx512
#define DYNAMICTP_LEVEL_NAME "avx512"
#include "kernels/level.inl"
