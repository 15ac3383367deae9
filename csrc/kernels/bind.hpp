// Adds the kernels to the Python module. Signatures and semantics are documented in dynamictp/_native.pyi.
#pragma once

#include <nanobind/nanobind.h>

namespace dynamictp::kernels {

void bind_kernels(nanobind::module_& module);

}  // namespace dynamictp::kernels
