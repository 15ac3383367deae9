// Norms, rotation, page writes, and the maximum over the vocabulary. Included by each level after linear.inl.

namespace {

// Σ x², four chains of sixteen lanes and a fixed tree; size a multiple of 16.
inline float sum_of_squares(const float* x, std::size_t size) {
    F16 sums[4] = {zero(), zero(), zero(), zero()};
    for (std::size_t i = 0; i < size; i += lanes) {
        const F16 value = load(x + i);
        sums[i / lanes % 4] = fma(value, value, sums[i / lanes % 4]);
    }
    return sum_lanes(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
}

inline float inverse_rms(float squares, std::size_t size, float epsilon) {
    return 1.0f / __builtin_sqrtf(squares / static_cast<float>(size) + epsilon);
}

template <class D>
void add_norm(float* residual, const float* addend, const float* weight, float epsilon, std::size_t size, void* out) {
    if (addend != nullptr) {
        for (std::size_t i = 0; i < size; i += lanes) store(residual + i, add(load(residual + i), load(addend + i)));
    }
    const F16 scale = set1(inverse_rms(sum_of_squares(residual, size), size, epsilon));
    auto* const to = static_cast<typename D::Element*>(out);
    for (std::size_t i = 0; i < size; i += lanes) {
        D::store_rounded(to + i, mul(mul(load(residual + i), scale), load(weight + i)));
    }
}

void head_norm(float* x, const float* weight, float epsilon, std::size_t size) {
    const F16 scale = set1(inverse_rms(sum_of_squares(x, size), size, epsilon));
    for (std::size_t i = 0; i < size; i += lanes) store(x + i, mul(mul(load(x + i), scale), load(weight + i)));
}

template <class D>
void round(const float* from, std::size_t size, void* to) {
    auto* const out = static_cast<typename D::Element*>(to);
    for (std::size_t i = 0; i < size; i += lanes) D::store_rounded(out + i, load(from + i));
}

// Half-split rotary order: dimension i turns with dimension i + half.
void rotate(float* x, const float* cosine, const float* sine, std::size_t half) {
    for (std::size_t i = 0; i < half; ++i) {
        const float first = x[i], second = x[i + half];
        x[i] = first * cosine[i] - second * sine[i];
        x[i + half] = second * cosine[i] + first * sine[i];
    }
}

// K of one token: pairs of dimensions stand together, a pair's tokens beside each other.
template <class D>
void store_key(const float* key, const PagePlanes& planes, std::size_t slot, void* page) {
    auto* const to = static_cast<typename D::Element*>(page) + 2 * slot;
    for (std::size_t d = 0; d < planes.head_dim; d += 2) {
        to[d * planes.page_tokens] = D::narrow(key[d]);
        to[d * planes.page_tokens + 1] = D::narrow(key[d + 1]);
    }
}

// V of one token: pairs of tokens stand together.
template <class D>
void store_value(const float* value, const PagePlanes& planes, std::size_t slot, void* page) {
    auto* const to = static_cast<typename D::Element*>(page) + slot / 2 * 2 * planes.head_dim + slot % 2;
    for (std::size_t d = 0; d < planes.head_dim; ++d) to[2 * d] = D::narrow(value[d]);
}

// One row of a packed matrix, widened.
template <class D>
void unpack_row(const void* panels, std::size_t columns, std::size_t row, float* out) {
    const auto* const from = static_cast<const typename D::Element*>(panels) + row / lanes * lanes * columns;
    for (std::size_t k = 0; k < columns; ++k) {
        out[k] = D::widen(from[k / D::step * D::step * lanes + row % lanes * D::step + k % D::step]);
    }
}

float largest(const float* values, std::size_t size) {
    F16 best = load(values);
    for (std::size_t i = lanes; i < size; i += lanes) best = max(best, load(values + i));
    return max_lanes(best);
}

std::size_t arg_max(const float* values, std::size_t size) {
    constexpr std::size_t block = 512;
    float best = -__builtin_huge_valf();
    std::size_t best_block = 0;
    for (std::size_t start = 0; start < size; start += block) {
        const float found = largest(values + start, size - start < block ? size - start : block);
        if (found > best) {
            best = found;
            best_block = start;
        }
    }
    for (std::size_t i = best_block; i < size && i < best_block + block; ++i) {
        if (values[i] == best) return i;
    }
    return 0;
}

}  // namespace
