#include "kernels/kernels.hpp"
#include "kernels/vec_portable.hpp"

#define DYNAMICTP_LEVEL portable
#define DYNAMICTP_LEVEL_NAME "portable"
#include "kernels/level.inl"
