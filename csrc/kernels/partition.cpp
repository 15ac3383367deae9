#include "kernels/partition.hpp"

#include <algorithm>

namespace dynamictp::kernels {

namespace {

// What a row costs beyond its keys, in keys: softmax and bookkeeping.
constexpr std::uint64_t row_overhead = 16;

// Cost of the first `rows` rows of a span at one KV head.
std::uint64_t cost_of(const Span& span, std::size_t group, std::size_t rows) {
    const std::uint64_t tokens = rows / group, rest = rows % group;
    const std::uint64_t first = span.start + 1 + row_overhead;
    const std::uint64_t whole = tokens * first + (tokens == 0 ? 0 : tokens * (tokens - 1) / 2);
    return group * whole + rest * (first + tokens);
}

// The first row that begins at `cost` or later.
std::size_t row_at(const Span& span, std::size_t group, std::uint64_t cost) {
    std::size_t low = 0, high = span.count * group;
    while (low < high) {
        const std::size_t middle = (low + high) / 2;
        if (cost_of(span, group, middle) >= cost) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return low;
}

}  // namespace

std::vector<Segment> divide_attention(const Span* spans, std::size_t count, std::size_t kv_heads, std::size_t group,
                                      std::size_t rank, std::size_t world) {
    std::uint64_t total = 0;
    for (std::size_t s = 0; s < count; ++s) total += kv_heads * cost_of(spans[s], group, spans[s].count * group);
    const std::uint64_t begin = total * rank / world, end = total * (rank + 1) / world;
    std::vector<Segment> mine;
    std::uint64_t at = 0;
    for (std::size_t s = 0; s < count; ++s) {
        const std::uint64_t cost = cost_of(spans[s], group, spans[s].count * group);
        for (std::size_t head = 0; head < kv_heads; ++head, at += cost) {
            if (at + cost <= begin || at >= end) continue;
            const std::size_t first = begin <= at ? 0 : row_at(spans[s], group, begin - at);
            const std::size_t last = row_at(spans[s], group, std::min(end - at, cost));
            if (first < last) mine.push_back({s, head, first, last});
        }
    }
    return mine;
}

}  // namespace dynamictp::kernels
