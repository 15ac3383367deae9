// The kernels of one CPU-feature level, as a table of functions: the only thing that differs between levels.
//
// Every output element is one accumulation chain in one order that depends on its own inputs only: not on the batch,
// on the tile it was computed in, or on the range of rows a rank has. Bits may differ between levels.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dynamictp::kernels {

enum class DType : std::uint8_t { bf16 = 0, fp32 = 1 };
enum class Level : std::uint8_t { portable = 0, avx2 = 1, avx512 = 2, avx512_bf16 = 3 };

constexpr std::size_t element_bytes(DType dtype) noexcept { return dtype == DType::bf16 ? 2 : 4; }

inline constexpr std::size_t panel_rows = 16;
// Query rows that one attention tile holds at most, whatever the level.
inline constexpr std::size_t max_attention_rows = 6;

// How a matrix is stored: in the activations' dtype, or as int8 with a scale for every group of columns.
enum class WeightType : std::uint8_t { plain = 0, int8 = 1 };

// Columns that share a scale, and that int8 panels are padded to with zeros.
inline constexpr std::size_t int8_group = 32, int8_block = 64;
// A block of 64 columns and 16 rows: two groups' scales fp16 [2][16], then their weights int8 [2][16 pairs][16][2].
inline constexpr std::size_t int8_scale_bytes = int8_block / int8_group * panel_rows * 2;
inline constexpr std::size_t int8_block_bytes = int8_scale_bytes + int8_block * panel_rows;

constexpr std::size_t int8_columns(std::size_t columns) noexcept {
    return (columns + int8_block - 1) / int8_block * int8_block;
}
constexpr std::size_t panel_bytes(std::size_t columns, DType dtype, WeightType type) noexcept {
    if (type == WeightType::int8) return int8_columns(columns) / int8_block * int8_block_bytes;
    return panel_rows * columns * element_bytes(dtype);
}

// Consecutive panels of 16 output rows: bf16 [panel][K/2][16][2], fp32 [panel][K][16], int8 [panel][block].
struct Panels {
    const void* data;
    std::size_t count;
    std::size_t columns;  // K
    const float* bias;    // of the first panel's first row, or null
};

// Row-major activations of the table's dtype; strides in elements.
struct Rows {
    const void* data;
    std::size_t stride;
    std::size_t count;
};

// Activations as 15-bit integers, each group of 32 columns with its own factor: the products with int8 weights are sums
// of integers, exact in any order, and much closer to the activations than bf16 (a group's error is 2^-16 of its largest).
struct Digits {
    const std::int16_t* values;  // [count][stride], zeros beyond the columns
    const float* factors;        // [count][factor_stride], what the integers of a group are multiplied by
    std::size_t stride;
    std::size_t factor_stride;
    std::size_t count;
};

// KV pages of one layer and dtype. K in a page: [D/2][tokens][2], V: [tokens/2][D][2].
struct PagePlanes {
    const void* k;
    const void* v;
    std::size_t page_elements;
    std::size_t page_tokens;
    std::size_t head_dim;
};

// Query rows of one sequence that share a KV head. Lengths count the keys that a row sees, at least 1.
struct AttentionTile {
    const std::int32_t* pages;  // of this KV head, `page_step` apart
    std::size_t page_step;
    // The pages whose K the caller reads next, the same way apart, and how many: prefetched while this tile reads V.
    const std::int32_t* next_pages;
    std::size_t next_count;
    std::size_t rows;
    const void* query[max_attention_rows];
    void* out[max_attention_rows];
    std::size_t length[max_attention_rows];
};

struct Kernels {
    const char* name;
    // y[m][n] = Σ_k x[m][k]·W[n][k] + bias[n], fp32.
    void (*linear)(const Panels& weights, const Rows& x, float* y, std::size_t y_stride);
    // y[m][n] = silu(gate[m][n])·up[m][n] in the table's dtype.
    void (*gated)(const Panels& gate, const Panels& up, const Rows& x, void* y, std::size_t y_stride);
    // Activations of `columns` columns into `digits`, whose memory is [count][int8_columns(columns)] and a 32nd of that.
    void (*quantise)(const Rows& x, std::size_t columns, const Digits& digits);
    // The same products with int8 panels.
    void (*linear_int8)(const Panels& weights, const Digits& x, float* y, std::size_t y_stride);
    void (*gated_int8)(const Panels& gate, const Panels& up, const Digits& x, void* y, std::size_t y_stride);
    // residual += addend (may be null); out = residual / rms(residual) · weight in the table's dtype.
    void (*add_norm)(float* residual, const float* addend, const float* weight, float epsilon, std::size_t size,
                     void* out);
    // One head in place: x / rms(x) · weight.
    void (*head_norm)(float* x, const float* weight, float epsilon, std::size_t size);
    // Scratch: `attention_scratch(longest)` bytes, aligned to 64.
    void (*attention)(const PagePlanes& planes, const AttentionTile& tile, void* scratch);
    void (*round)(const float* from, std::size_t size, void* to);  // fp32 to the table's dtype
    // Turns dimension i with dimension i + half; cosine and sine of the token's position, [half].
    void (*rotate)(float* x, const float* cosine, const float* sine, std::size_t half);
    // Write one token's K or V of one head into slot `slot` of its page.
    void (*store_key)(const float* key, const PagePlanes& planes, std::size_t slot, void* page);
    void (*store_value)(const float* value, const PagePlanes& planes, std::size_t slot, void* page);
    // Row `row` of a packed matrix as fp32 [columns].
    void (*unpack_row)(const void* panels, std::size_t columns, std::size_t row, float* out);
    // Index of the largest of `size` values, the lowest of equals; size a multiple of 16.
    std::size_t (*arg_max)(const float* values, std::size_t size);
};

// Bytes that one attention tile needs whose longest row sees `length` keys.
std::size_t attention_scratch(std::size_t length) noexcept;

Level detect_level() noexcept;
const char* name_of(Level level) noexcept;
// Throws std::invalid_argument when this processor does not have the level.
const Kernels& kernels(Level level, DType dtype);

namespace level {
extern const Kernels portable[2], avx2[2], avx512[2], avx512_bf16[2];  // by DType
}

}  // namespace dynamictp::kernels
