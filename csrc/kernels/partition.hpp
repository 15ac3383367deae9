// How the attention of one step is divided over the ranks of a domain. Pure: every rank computes the same.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace dynamictp::kernels {

// Tokens `start` … `start + count` of one sequence.
struct Span {
    std::size_t start;
    std::size_t count;
};

// Query rows [first, last) of one sequence and KV head. Row j is token j / group, query head j % group of the KV head.
struct Segment {
    std::size_t sequence;
    std::size_t kv_head;
    std::size_t first;
    std::size_t last;
    bool operator==(const Segment&) const = default;
};

// The part of `rank`. Rows stand in order (sequence, KV head, token, query head) and each costs the keys it sees and a
// constant; the line of costs is cut into `world` equal pieces, and a row belongs to the piece where it begins. So the
// cut falls between query heads, and of a prompt between tokens; pieces differ by one row at most.
std::vector<Segment> divide_attention(const Span* spans, std::size_t count, std::size_t kv_heads, std::size_t group,
                                      std::size_t rank, std::size_t world);

}  // namespace dynamictp::kernels
