// One CPU-feature level: its .cpp is compiled for that level, includes its vector type and then this file.
// Everything but the table has internal linkage and uses no library template: code compiled for one level must never be
// what the linker picks for another.
#include "kernels/linear.inl"

#include "kernels/linear_int8.inl"

#include "kernels/attention.inl"
#include "kernels/elementwise.inl"

namespace {

template <class D, class Kv>
constexpr dynamictp::kernels::Kernels table() {
    return {DYNAMICTP_LEVEL_NAME, linear<D>,     gated<D>,  quantise<D>, linear_int8,  gated_int8<D>,  add_norm<D>,
            head_norm,            attention<Kv>, round<D>,  rotate,      store_key<D>, store_value<D>, unpack_row<D>,
            arg_max};
}

}  // namespace

namespace dynamictp::kernels::level {

// By DType.
constinit const Kernels DYNAMICTP_LEVEL[2] = {table<Bf16, Bf16Kv>(), table<Fp32, Fp32Kv>()};

}  // namespace dynamictp::kernels::level
