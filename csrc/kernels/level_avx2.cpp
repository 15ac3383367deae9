#include "kernels/kernels.hpp"
#include "kernels/vec_avx2.hpp"

#define DYNAMICTP_LEVEL avx2
#define DYNAMICTP_LEVEL_NAME "avx2"
#include "kernels/level.inl"
