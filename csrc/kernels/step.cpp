#include "kernels/step.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "shm/futex.hpp"

namespace dynamictp::kernels {

Step::Step(const ModelShape& shape, const RankCut& cut, const Weights& weights, const Arena& arena, std::byte* exchange,
           const Limits& limits, const Company& company, const Kernels& kernels)
    : common_{shape,
              arena,
              limits,
              Exchange::layout(shape, limits, company.peers == nullptr ? 1 : company.peers->world()),
              exchange,
              kernels},
      company_(company),
      rank_(company.peers == nullptr ? 0 : company.peers->rank()),
      world_(company.peers == nullptr ? 1 : company.peers->world()) {
    if (shape.hidden % 16 != 0 || shape.head_dim % 16 != 0 || shape.intermediate % 16 != 0) {
        throw std::invalid_argument("hidden, head_dim and intermediate must be multiples of 16");
    }
    if (arena.page_tokens == 0 || arena.page_tokens % 16 != 0) {
        throw std::invalid_argument("page_tokens must be a multiple of 16");
    }
    if (weights.layers.size() != shape.layers) throw std::invalid_argument("weights for every layer are needed");
    const std::size_t threads = company.team == nullptr ? 1 : company.team->size();
    lanes_.reserve(threads);
    Meeting& meeting = *this;
    for (std::size_t thread = 0; thread < threads; ++thread) {
        const RankCut part = cut.part(thread, threads);
        const Lane::Place place{thread, rank_ * threads + thread, world_ * threads};
        lanes_.emplace_back(common_, part, weights.part(shape, cut, part), place, meeting);
    }
}

std::vector<WeightSpan> Step::weight_spans() const {
    std::vector<WeightSpan> result;
    for (const Lane& lane : lanes_) {
        const std::vector<WeightSpan> spans = lane.weights().spans(common_.shape);
        result.insert(result.end(), spans.begin(), spans.end());
    }
    return result;
}

void Step::set_rotation(const float* cosine, const float* sine, std::size_t positions) noexcept {
    common_.cosine = cosine;
    common_.sine = sine;
    common_.positions = positions;
}

std::int64_t Step::take_wait_ns() noexcept { return std::exchange(wait_ns_, 0); }

void Step::check(const Batch& batch) const {
    if (batch.count > common_.limits.tokens) {
        throw std::invalid_argument("a step of " + std::to_string(batch.count) + " tokens; at most " +
                                    std::to_string(common_.limits.tokens) + " fit");
    }
    for (std::size_t t = 0; t < batch.count; ++t) {
        if (batch.tokens[t] < 0 || static_cast<std::size_t>(batch.tokens[t]) >= common_.shape.vocab) {
            throw std::invalid_argument("token " + std::to_string(batch.tokens[t]) + " is not in the vocabulary");
        }
    }
    for (std::size_t s = 0; s < batch.spans.size(); ++s) {
        const std::size_t end = batch.spans[s].start + batch.spans[s].count;
        if (end > common_.positions) throw std::invalid_argument("no rotation for position " + std::to_string(end - 1));
        const std::size_t entries = (end + common_.arena.page_tokens - 1) / common_.arena.page_tokens * common_.shape.kv_heads;
        for (std::size_t i = 0; i < entries; ++i) {
            const std::int32_t page = batch.tables[s][i];
            if (page < 0 || static_cast<std::size_t>(page) >= common_.arena.pages) {
                throw std::invalid_argument("page " + std::to_string(page) + " is not in the arena");
            }
        }
    }
}

void Step::run(const Batch& batch) {
    check(batch);
    std::size_t longest = 0;
    common_.token_positions.resize(batch.count);
    for (std::size_t s = 0; s < batch.spans.size(); ++s) {
        const Span& span = batch.spans[s];
        for (std::size_t i = 0; i < span.count; ++i) common_.token_positions[batch.offsets[s] + i] = span.start + i;
        longest = std::max(longest, span.start + span.count);
    }
    for (Lane& lane : lanes_) lane.prepare(batch, longest);
    batch_count_ = batch.count;
    on_all_lanes([&](std::size_t thread) { lanes_[thread].run(batch); });
}

void Step::logits(const std::int64_t* tokens, std::size_t count, std::int64_t* arg_max) {
    if (count > common_.limits.rows) {
        throw std::invalid_argument("logits of " + std::to_string(count) + " rows; at most " +
                                    std::to_string(common_.limits.rows) + " fit");
    }
    for (std::size_t r = 0; r < count; ++r) {
        if (tokens[r] < 0 || static_cast<std::size_t>(tokens[r]) >= batch_count_) {
            throw std::invalid_argument("logits of a token outside the batch");
        }
    }
    begin_layer(0, common_.shape.layers);
    best_count_ = count;
    on_all_lanes([&](std::size_t thread) {
        lanes_[thread].logits(tokens, count);
        meet(thread);
    });
    for (std::size_t r = 0; r < count; ++r) {
        Best found = best_of(0)[r];
        for (std::size_t rank = 1; rank < world_; ++rank) {
            const Best& other = best_of(rank)[r];
            if (other.value > found.value) found = other;
        }
        arg_max[r] = found.index;
    }
}

template <typename Call>
void Step::on_all_lanes(const Call& call) {
    if (company_.team == nullptr) return call(std::size_t{0});
    company_.team->run(call);
}

void Step::meet(std::size_t thread) {
    if (thread != 0) return company_.team->meet(thread, [] {});
    if (company_.team == nullptr && company_.peers == nullptr) return publish_best();
    const std::int64_t begin = shm::now_ns();
    if (company_.team == nullptr) {
        meet_peers();
    } else {
        company_.team->meet(0, [this] { meet_peers(); });
    }
    wait_ns_ += shm::now_ns() - begin;
}

void Step::begin_layer(std::size_t thread, std::size_t layer) {
    if (thread != 0 || company_.progress == nullptr) return;
    company_.progress->store_layer(static_cast<std::uint32_t>(layer));
}

// By thread 0, when every lane of this rank has arrived.
void Step::meet_peers() {
    publish_best();
    if (company_.peers != nullptr && !company_.peers->arrive()) company_.peers->wait();
}

// The best logits of this rank. Lanes hold growing ranges of the vocabulary, so of equal ones the first is the lowest token.
void Step::publish_best() {
    for (std::size_t r = 0; r < best_count_; ++r) {
        Best found = lanes_.front().best(r);
        for (const Lane& lane : lanes_) {
            if (lane.best(r).value > found.value) found = lane.best(r);
        }
        best_of(rank_)[r] = found;
    }
    best_count_ = 0;
}

}  // namespace dynamictp::kernels
