// One rank's forward pass: a whole step in one call, with its barriers.
//
// Every weight is cut on output rows only and nothing is summed over ranks; the residual is fp32 and whole on every
// rank. So the bits are the same at every degree, for any batch and any chunking (see kernels.hpp). A rank's threads
// divide its range in the same way, so their number changes no bit either.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/kernels.hpp"
#include "kernels/lane.hpp"
#include "kernels/team.hpp"
#include "shm/communicator.hpp"

namespace dynamictp::kernels {

// Whom a step works with; each may be null.
struct Company {
    shm::Communicator* peers;   // of a domain of several ranks
    Team* team;                 // the rank's threads, if more than the caller
    shm::WorkerSlot* progress;  // told which layer begins
};

// Not safe for use by several threads. Everything it points to must outlive it.
class Step final : private Meeting {
public:
    // `exchange` is `Exchange::layout(…).bytes` long, aligned to 64. Throws std::invalid_argument.
    Step(const ModelShape& shape, const RankCut& cut, const Weights& weights, const Arena& arena, std::byte* exchange,
         const Limits& limits, const Company& company, const Kernels& kernels);
    Step(const Step&) = delete;
    Step& operator=(const Step&) = delete;

    // cos and sin of positions 0 … positions-1, [positions][D/2]; read until the next call.
    void set_rotation(const float* cosine, const float* sine, std::size_t positions) noexcept;

    // Computes all layers and writes the pages of the batch's tokens. Five barriers a layer; after the last every rank is
    // done with the pages. Throws std::invalid_argument for a batch beyond the limits, and what barriers throw.
    void run(const Batch& batch);

    // Logits of the given tokens of the last batch: fp32 [count][logits_stride] in the exchange, padding -inf, and the
    // index of each row's maximum. One barrier, before the call returns; the caller puts another one between its
    // reads and the next call.
    void logits(const std::int64_t* tokens, std::size_t count, std::int64_t* arg_max);

    // The memory that its threads read weights from; what several of them read stands there several times.
    std::vector<WeightSpan> weight_spans() const;

    const float* logits_data() const noexcept { return common_.logits(); }
    // int64 [rows] that the step leaves alone: for the tokens that the ranks sample from the logits.
    const std::byte* tokens_data() const noexcept { return common_.shared + common_.exchange.tokens.offset; }
    std::size_t logits_stride() const noexcept { return common_.exchange.logits.stride; }
    // Time the calling thread spent since the last call of the same function: at barriers, in matrices, in attention. What
    // is left of a step is norms, rotary and page writes, and the embedding.
    std::int64_t take_wait_ns() noexcept;
    std::int64_t take_weights_ns() noexcept { return lanes_.front().take_weights_ns(); }
    std::int64_t take_attention_ns() noexcept { return lanes_.front().take_attention_ns(); }

private:
    void check(const Batch& batch) const;
    template <typename Call>
    void on_all_lanes(const Call& call);
    void meet(std::size_t thread) override;
    void begin_layer(std::size_t thread, std::size_t layer) override;
    void meet_peers();
    void publish_best();
    Best* best_of(std::size_t rank) const noexcept {
        return reinterpret_cast<Best*>(common_.shared + common_.exchange.best.offset) + rank * common_.limits.rows;
    }

    Common common_;
    Company company_;
    std::size_t rank_, world_;
    std::vector<Lane> lanes_;
    std::size_t batch_count_ = 0;
    std::size_t best_count_ = 0;  // rows of logits to publish at the next meeting
    std::int64_t wait_ns_ = 0;
};

}  // namespace dynamictp::kernels
