// The kernels under sanitizers: buffers of exact size on the heap, every level, every tile height, and whole domains.
// Values are checked against the plain decoder from Python; here it is memory, races, and equal bits.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "kernels/kernels.hpp"
#include "kernels/memory.hpp"
#include "kernels/partition.hpp"
#include "kernels/step.hpp"
#include "kernels/team.hpp"
#include "shm/communicator.hpp"
#include "shm/control.hpp"

namespace {

using namespace dynamictp;
using namespace dynamictp::kernels;

int failures = 0;

void expect(bool condition, const std::string& what) {
    if (condition) return;
    ++failures;
    std::fprintf(stderr, "FAILED: %s\n", what.c_str());
}

// Random numbers of one dtype in a heap block of exactly their size.
struct Values {
    DType dtype;
    std::vector<std::byte> bytes;

    Values(DType kind, std::size_t count, unsigned seed, float scale = 1.0f) : dtype(kind), bytes(count * element_bytes(kind)) {
        std::mt19937 random(seed);
        std::normal_distribution<float> normal(0.0f, scale);
        for (std::size_t i = 0; i < count; ++i) {
            const float value = normal(random);
            if (dtype == DType::fp32) {
                std::memcpy(bytes.data() + 4 * i, &value, 4);
            } else {
                std::memcpy(bytes.data() + 2 * i, reinterpret_cast<const char*>(&value) + 2, 2);
            }
        }
    }
    const void* data() const { return bytes.data(); }
};

std::vector<Level> usable_levels() {
    std::vector<Level> levels;
    for (const Level level : {Level::portable, Level::avx2, Level::avx512, Level::avx512_bf16}) {
        if (level <= detect_level()) levels.push_back(level);
    }
    return levels;
}

void test_linear(Level level, DType dtype) {
    const Kernels& table = kernels::kernels(level, dtype);
    constexpr std::size_t panels = 7, columns = 34, most = 40;
    const Values weights(dtype, panels * panel_rows * columns, 1), x(dtype, most * columns, 2);
    const std::vector<float> bias(panels * panel_rows, 0.5f);
    std::vector<float> whole(most * panels * panel_rows);
    const Panels all{weights.data(), panels, columns, bias.data()};
    table.linear(all, {x.data(), columns, most}, whole.data(), panels * panel_rows);
    for (std::size_t rows = 1; rows <= most; ++rows) {
        std::vector<float> part(rows * panels * panel_rows);
        table.linear(all, {x.data(), columns, rows}, part.data(), panels * panel_rows);
        expect(std::equal(part.begin(), part.end(), whole.begin()), "linear bits over " + std::to_string(rows) + " rows");
        std::vector<std::byte> gated(rows * panels * panel_rows * element_bytes(dtype));
        table.gated(all, all, {x.data(), columns, rows}, gated.data(), panels * panel_rows);
    }
}

// Panels of random integers with scales of 2^-10 … 2^-7.
std::vector<std::byte> int8_panels(std::size_t panels, std::size_t columns, unsigned seed) {
    const std::size_t bytes = panel_bytes(columns, DType::bf16, WeightType::int8);
    std::vector<std::byte> result(panels * bytes);
    std::mt19937 random(seed);
    for (std::size_t i = 0; i < result.size(); ++i) {
        const std::size_t at = i % int8_block_bytes;
        // The second byte of a little-endian fp16 has its exponent.
        const std::uint32_t value = at >= int8_scale_bytes ? random() : at % 2 == 0 ? 0 : 20 + random() % 12;
        result[i] = static_cast<std::byte>(value);
    }
    return result;
}

void test_int8(Level level, DType dtype) {
    const Kernels& table = kernels::kernels(level, dtype);
    constexpr std::size_t panels = 4, columns = 80, padded = int8_columns(columns), groups = padded / int8_group, most = 40;
    const std::vector<std::byte> weights = int8_panels(panels, columns, 6);
    const Values x(dtype, most * columns, 7);
    std::vector<std::int16_t> values(most * padded);
    std::vector<float> factors(most * groups), whole(most * panels * panel_rows);
    const Panels all{weights.data(), panels, columns, nullptr};
    const auto digits = [&](std::size_t rows) { return Digits{values.data(), factors.data(), padded, groups, rows}; };
    table.quantise({x.data(), columns, most}, columns, digits(most));
    expect(std::all_of(values.end() - (padded - columns), values.end(), [](int value) { return value == 0; }), "padding");
    table.linear_int8(all, digits(most), whole.data(), panels * panel_rows);
    for (std::size_t rows = 1; rows <= most; ++rows) {
        std::vector<float> part(rows * panels * panel_rows);
        table.linear_int8(all, digits(rows), part.data(), panels * panel_rows);
        expect(std::equal(part.begin(), part.end(), whole.begin()), "int8 bits over " + std::to_string(rows) + " rows");
        std::vector<std::byte> gated(rows * panels * panel_rows * element_bytes(dtype));
        table.gated_int8(all, all, digits(rows), gated.data(), panels * panel_rows);
    }
}

void test_attention(Level level, DType dtype) {
    const Kernels& table = kernels::kernels(level, dtype);
    constexpr std::size_t page_tokens = 16, head_dim = 32, blocks = 5, heads = 3;
    const Values k(dtype, blocks * heads * page_tokens * head_dim, 3), v(dtype, blocks * heads * page_tokens * head_dim, 4);
    const Values query(dtype, max_attention_rows * head_dim, 5);
    const PagePlanes planes{k.data(), v.data(), page_tokens * head_dim, page_tokens, head_dim};
    std::vector<std::int32_t> pages(blocks * heads);
    for (std::size_t i = 0; i < pages.size(); ++i) pages[i] = static_cast<std::int32_t>(pages.size() - 1 - i);
    const std::size_t row_bytes = head_dim * element_bytes(dtype);
    for (std::size_t length = 1; length <= blocks * page_tokens; ++length) {
        std::vector<std::byte> together(max_attention_rows * row_bytes), alone(row_bytes);
        const Memory scratch = allocate(attention_scratch(length));
        AttentionTile tile{};
        tile.pages = pages.data() + 1;
        tile.page_step = heads;
        for (std::size_t row = 0; row < max_attention_rows; ++row) {
            tile.query[row] = query.bytes.data() + row * row_bytes;
            tile.out[row] = together.data() + row * row_bytes;
            tile.length[row] = std::max<std::size_t>(1, length * (row + 1) / max_attention_rows);
        }
        for (tile.rows = 1; tile.rows <= max_attention_rows; ++tile.rows) table.attention(planes, tile, scratch.get());
        for (std::size_t row = 0; row < max_attention_rows; ++row) {
            AttentionTile single = tile;
            single.rows = 1;
            single.query[0] = tile.query[row];
            single.length[0] = tile.length[row];
            single.out[0] = alone.data();
            table.attention(planes, single, scratch.get());
            expect(std::equal(alone.begin(), alone.end(), together.begin() + static_cast<std::ptrdiff_t>(row * row_bytes)),
                   "attention bits of row " + std::to_string(row) + " at length " + std::to_string(length));
        }
    }
}

// A small random model, one buffer per tensor.
class Model {
public:
    Model(DType dtype, WeightType weights)
        : shape{2, 144, 9, 3, 16, 288, 523, 1e-5f, dtype, weights},
          norm_(1024, 1.0f),
          embed_(dtype, 33 * panel_rows * shape.hidden, 10),
          qkv_(dtype, 15 * panel_rows * shape.hidden, 11, 0.08f),
          o_(dtype, 9 * panel_rows * 144, 12, 0.08f),
          gate_(dtype, 18 * panel_rows * shape.hidden, 13, 0.08f),
          up_(dtype, 18 * panel_rows * shape.hidden, 14, 0.08f),
          down_(dtype, 9 * panel_rows * shape.intermediate, 15, 0.06f),
          int8_(int8_panels(33, shape.hidden, 16)),
          int8_down_(int8_panels(9, shape.intermediate, 17)),
          cosine_(256 * 8, 0.8f),
          sine_(256 * 8, 0.6f) {}

    RankCut cut(std::size_t rank, std::size_t world) const {
        const auto part = [&](std::size_t units) {
            return Range{(rank * units + world - 1) / world, ((rank + 1) * units + world - 1) / world};
        };
        return {part(15), part(9), part(18), part(33)};
    }
    Weights weights(const RankCut& cut) const {
        const auto panels = [&](const Values& matrix, Range range, std::size_t columns) {
            const auto& int8 = columns == shape.intermediate ? int8_down_ : int8_;
            const auto& bytes = shape.weights == WeightType::int8 ? int8 : matrix.bytes;
            const std::size_t size = panel_bytes(columns, shape.dtype, shape.weights);
            return Panels{bytes.data() + range.start * size, range.size(), columns, nullptr};
        };
        Weights result{embed_.data(), {}, norm_.data(), panels(embed_, cut.vocab, shape.hidden)};
        for (std::size_t layer = 0; layer < shape.layers; ++layer) {
            result.layers.push_back({norm_.data(), nullptr, nullptr, norm_.data(), panels(qkv_, cut.qkv, shape.hidden),
                                     panels(o_, cut.hidden, 144), panels(gate_, cut.mlp, shape.hidden),
                                     panels(up_, cut.mlp, shape.hidden), panels(down_, cut.hidden, shape.intermediate)});
        }
        return result;
    }
    void rotate(Step& step) const { step.set_rotation(cosine_.data(), sine_.data(), 256); }

    ModelShape shape;

private:
    std::vector<float> norm_;
    Values embed_, qkv_, o_, gate_, up_, down_;
    std::vector<std::byte> int8_, int8_down_;  // one matrix for all of a width
    std::vector<float> cosine_, sine_;
};

template <typename T>
Memory zeros(std::size_t count) {
    Memory memory = allocate(count * sizeof(T));
    std::memset(memory.get(), 0, count * sizeof(T));
    return memory;
}

// Prefills 37 tokens in chunks, then decodes one; the last logits of every rank must be those of `tp` 1.
std::vector<float> run_domain(const Model& model, Level level, std::size_t tp, std::size_t threads = 1) {
    constexpr std::size_t page_tokens = 16, pages = 12;
    const Limits limits{40, 4};
    const std::size_t arena_bytes = model.shape.layers * 2 * pages * page_tokens * 16 * element_bytes(model.shape.dtype);
    const auto arena = zeros<std::byte>(arena_bytes);
    std::memset(arena.get(), 0xff, arena_bytes);  // stale NaN everywhere
    const auto exchange = zeros<std::byte>(Exchange::layout(model.shape, limits, tp).bytes);
    const auto words = zeros<std::byte>(shm::ControlBlock::bytes_needed(1, tp));
    const std::size_t region_bytes = shm::Communicator::bytes_needed(tp, 64);
    const auto region = zeros<std::byte>(region_bytes);
    const shm::ControlBlock control(words.get(), 1, tp);
    control.set_control(0, 1, shm::DomainState::live);

    std::vector<std::vector<float>> results(tp);
    const auto rank_main = [&](std::size_t rank) {
        std::unique_ptr<shm::Communicator> peers;
        if (tp > 1) {
            peers = std::make_unique<shm::Communicator>(
                region.get(), region_bytes, control,
                shm::Membership{static_cast<std::uint32_t>(rank), static_cast<std::uint32_t>(tp), 0, 1, rank},
                shm::WaitPolicy{30.0, 0, nullptr});
        }
        const std::unique_ptr<Team> team = threads > 1 ? std::make_unique<Team>(threads, std::vector<int>{}, 0) : nullptr;
        const RankCut cut = model.cut(rank, tp);
        Step step(model.shape, cut, model.weights(cut), {arena.get(), pages, page_tokens}, exchange.get(), limits,
                  {peers.get(), team.get(), &control.worker(rank)}, kernels::kernels(level, model.shape.dtype));
        model.rotate(step);
        std::vector<std::int64_t> tokens(38);
        for (std::size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<std::int64_t>(i * 37 % model.shape.vocab);
        const std::vector<std::int32_t> table{3, 1, 2, 11, 5, 0, 7, 8, 9};
        std::size_t start = 0;
        for (const std::size_t count : {std::size_t{30}, std::size_t{7}, std::size_t{1}}) {
            Batch batch{{{start, count}}, {table.data()}, {0}, tokens.data() + start, count};
            step.run(batch);
            const std::int64_t last = static_cast<std::int64_t>(count) - 1;
            std::int64_t best = -1;
            step.logits(&last, 1, &best);
            results[rank].assign(step.logits_data(), step.logits_data() + model.shape.vocab);
            const auto largest = std::max_element(results[rank].begin(), results[rank].end());
            expect(best == largest - results[rank].begin(), "the arg-max of rank " + std::to_string(rank));
            start += count;
            if (peers != nullptr && !peers->arrive()) peers->wait();
        }
    };
    std::vector<std::thread> ranks;
    for (std::size_t rank = 0; rank < tp; ++rank) ranks.emplace_back(rank_main, rank);
    for (std::thread& thread : ranks) thread.join();
    for (const auto& result : results) expect(result == results[0], "every rank reads the same logits");
    return results[0];
}

void test_domains(Level level, DType dtype, WeightType weights) {
    const Model model(dtype, weights);
    const std::vector<float> reference = run_domain(model, level, 1);
    expect(std::all_of(reference.begin(), reference.end(), [](float value) { return value == value; }), "logits are numbers");
    for (const std::size_t tp : {2, 3, 9}) {
        expect(run_domain(model, level, tp) == reference, "bits at tp" + std::to_string(tp) + ", level " + name_of(level));
    }
    for (const std::size_t threads : {2, 3}) {
        expect(run_domain(model, level, 1, threads) == reference, "bits of " + std::to_string(threads) + " threads");
        expect(run_domain(model, level, 2, threads) == reference, "bits of 2 ranks of " + std::to_string(threads));
    }
}

// Barriers in step, a job that fails at any of its barriers, and a team that goes on after it.
void test_team() {
    Team team(3, {}, 0);
    for (int failing = 0; failing < 20; ++failing) {
        std::vector<int> passed(3, 0);
        int between = 0;
        const auto job = [&](std::size_t thread) {
            for (int step = 0; step < 10; ++step) {
                passed[thread] = step + 1;
                team.meet(thread, [&] {
                    if (step == failing) throw shm::Broken("as asked");
                    between += passed[0] == passed[1] && passed[1] == passed[2] ? 1 : 100;
                });
            }
        };
        bool failed = false;
        try {
            team.run(job);
        } catch (const shm::Broken&) {
            failed = true;
        }
        expect(failed == (failing < 10), "a team fails when thread 0 does");
        expect(between == std::min(failing, 10), "a team's barriers hold every thread");
    }
}

}  // namespace

int main() {
    test_team();
    for (const Level level : usable_levels()) {
        for (const DType dtype : {DType::bf16, DType::fp32}) {
            test_linear(level, dtype);
            test_int8(level, dtype);
            test_attention(level, dtype);
            test_domains(level, dtype, WeightType::plain);
            test_domains(level, dtype, WeightType::int8);
        }
        std::printf("%s: %s\n", name_of(level), failures == 0 ? "ok" : "failed");
    }
    return failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
