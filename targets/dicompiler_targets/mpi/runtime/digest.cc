#include "digest.hpp"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <sstream>
#include <vector>

#include "tensor.hpp"

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#include <immintrin.h>
#define DICOMPILER_SHA_NI
#endif

namespace dicompiler {
namespace {

using State = std::array<std::uint32_t, 8>;
using Blocks = void (*)(State&, const unsigned char*, std::size_t);

constexpr std::size_t BLOCK = 64;

// The first 32 bits of the fractional parts of the cube roots of the first 64 primes (FIPS 180-4, 4.2.2).
alignas(16) constexpr std::uint32_t K[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

std::uint32_t turn(std::uint32_t x, int n) { return (x >> n) | (x << (32 - n)); }

void blocks_plain(State& state, const unsigned char* data, std::size_t count) {
    for (; count > 0; --count, data += BLOCK) {
        std::uint32_t w[64];
        for (int i = 0; i < 16; ++i) {
            w[i] = std::uint32_t{data[4 * i]} << 24 | std::uint32_t{data[4 * i + 1]} << 16 |
                   std::uint32_t{data[4 * i + 2]} << 8 | data[4 * i + 3];
        }
        for (int i = 16; i < 64; ++i) {
            const auto a = w[i - 15], b = w[i - 2];
            w[i] = w[i - 16] + (turn(a, 7) ^ turn(a, 18) ^ (a >> 3)) + w[i - 7] +
                   (turn(b, 17) ^ turn(b, 19) ^ (b >> 10));
        }
        auto [a, b, c, d, e, f, g, h] = state;
#pragma GCC unroll 8
        for (int i = 0; i < 64; ++i) {
            const auto up = h + (turn(e, 6) ^ turn(e, 11) ^ turn(e, 25)) + (g ^ (e & (f ^ g))) + K[i] + w[i];
            const auto down = (turn(a, 2) ^ turn(a, 13) ^ turn(a, 22)) + ((a & b) | (c & (a | b)));
            h = g, g = f, f = e, e = d + up;
            d = c, c = b, b = a, a = up + down;
        }
        const State made{a, b, c, d, e, f, g, h};
        for (std::size_t i = 0; i < 8; ++i) state[i] += made[i];
    }
}

#ifdef DICOMPILER_SHA_NI
// Four rounds at a time. The instructions hold the state as (A, B, E, F) and (C, D, G, H), highest first.
__attribute__((target("sha,sse4.1"))) void blocks_sha(State& state, const unsigned char* data, std::size_t count) {
    const auto order = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
    auto abef = _mm_set_epi32(static_cast<int>(state[0]), static_cast<int>(state[1]), static_cast<int>(state[4]),
                              static_cast<int>(state[5]));
    auto cdgh = _mm_set_epi32(static_cast<int>(state[2]), static_cast<int>(state[3]), static_cast<int>(state[6]),
                              static_cast<int>(state[7]));
    for (; count > 0; --count, data += BLOCK) {
        const auto before = abef, before2 = cdgh;
        __m128i w[4];
        for (int i = 0; i < 4; ++i) {
            w[i] = _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(data) + i), order);
        }
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) {
            if (i >= 4) {
                const auto last = w[(i + 3) % 4];
                const auto sum = _mm_add_epi32(_mm_sha256msg1_epu32(w[i % 4], w[(i + 1) % 4]),
                                               _mm_alignr_epi8(last, w[(i + 2) % 4], 4));
                w[i % 4] = _mm_sha256msg2_epu32(sum, last);
            }
            const auto with = _mm_add_epi32(w[i % 4], _mm_load_si128(reinterpret_cast<const __m128i*>(K) + i));
            cdgh = _mm_sha256rnds2_epu32(cdgh, abef, with);
            abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(with, 0x0e));
        }
        abef = _mm_add_epi32(abef, before);
        cdgh = _mm_add_epi32(cdgh, before2);
    }
    alignas(16) std::uint32_t high[4], low[4];
    _mm_store_si128(reinterpret_cast<__m128i*>(high), abef);
    _mm_store_si128(reinterpret_cast<__m128i*>(low), cdgh);
    state = {high[3], high[2], low[3], low[2], high[1], high[0], low[1], low[0]};
}

bool has_sha() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    const bool sse = __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_SSE4_1) != 0 && (c & bit_SSSE3) != 0;
    return sse && __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (b & (1U << 29)) != 0;
}
#endif

Blocks fastest() {
#ifdef DICOMPILER_SHA_NI
    if (has_sha()) return blocks_sha;
#endif
    return blocks_plain;
}

// Bytes come in pieces, all but the last of whole blocks.
class Sha256 {
public:
    void add(const unsigned char* data, std::size_t size) {
        bytes_ += size;
        blocks_(state_, data, size / BLOCK);
        rest_.assign(data + size / BLOCK * BLOCK, data + size);
    }

    std::string digits() {
        const std::uint64_t bits = 8 * bytes_;
        rest_.push_back(0x80);
        while (rest_.size() % BLOCK != BLOCK - 8) rest_.push_back(0);
        for (int shift = 56; shift >= 0; shift -= 8) rest_.push_back(static_cast<unsigned char>(bits >> shift));
        blocks_(state_, rest_.data(), rest_.size() / BLOCK);
        std::string text;
        for (const auto word : state_) {
            char digits[9];
            std::snprintf(digits, sizeof digits, "%08x", static_cast<unsigned>(word));
            text += digits;
        }
        return text;
    }

private:
    State state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    std::uint64_t bytes_ = 0;
    std::vector<unsigned char> rest_;
    Blocks blocks_ = fastest();
};

constexpr std::size_t PIECE = 1 << 20;

// Bytes come in pieces of PIECE, the last may be shorter: zeros are added.
class Lanes {
public:
    void add(const unsigned char* data, std::size_t size) {
        bytes_ += size;
        for (std::size_t done = 0; size > 0 && done < PIECE; done += sizeof row_) {
            const auto here = std::min(sizeof row_, size - std::min(size, done));
            if (here < sizeof row_) std::memset(row_, 0, sizeof row_);
            if (here > 0) std::memcpy(row_, data + done, here);
            for (std::size_t i = 0; i < COUNT; ++i) lanes_[i] = lanes_[i] * 0x9e3779b1U + row_[i];
        }
    }

    std::string digits() {
        Sha256 digest;
        digest.add(reinterpret_cast<const unsigned char*>(lanes_), sizeof lanes_);
        digest.add(reinterpret_cast<const unsigned char*>(&bytes_), sizeof bytes_);
        return digest.digits();
    }

private:
    static constexpr std::size_t COUNT = 1 << 12;
    std::uint32_t lanes_[COUNT] = {}, row_[COUNT];
    std::uint64_t bytes_ = 0;
};

template <class Digest>
std::string digits_of(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    std::vector<unsigned char> piece(PIECE);
    const auto digest = std::make_unique<Digest>();
    do {
        file.read(reinterpret_cast<char*>(piece.data()), PIECE);
        digest->add(piece.data(), static_cast<std::size_t>(file.gcount()));
    } while (file);
    return digest->digits();
}

// How digests begin, and what takes those that do.
const std::map<std::string, std::string (*)(const std::string&)> KINDS{{"sha256", digits_of<Sha256>},
                                                                       {"lanes", digits_of<Lanes>}};

struct File {
    std::string path, kind, digits;
};

// The list without its last line, which is the SHA-256 of all before it.
std::string read_list(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    std::ostringstream all;
    all << file.rdbuf();
    const std::string text = all.str();
    if (!file || text.empty()) throw Error(path + " is missing: copy the device's directory here");
    constexpr std::size_t LAST = 65;
    const auto size = text.size() < LAST ? 0 : text.size() - LAST;
    if (text.substr(size) != sha256(text.substr(0, size)) + "\n") {
        throw Error(path + " is damaged: copy the device's directory again");
    }
    return text.substr(0, size);
}

}  // namespace

std::string sha256(const std::string& bytes) {
    Sha256 digest;
    digest.add(reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size());
    return digest.digits();
}

Contents::Contents(const std::string& directory) {
    std::istringstream list(read_list(directory + "/contents.txt"));
    std::getline(list, digest_);
    std::vector<File> files;
    std::string line;
    while (std::getline(list, line)) {
        std::istringstream words(line);
        std::streamoff bytes = 0;
        std::string name, digest;
        words >> bytes >> digest >> name;
        const auto path = directory + "/" + name;
        std::ifstream file(path, std::ios::binary | std::ios::ate);
        if (!file) throw Error(path + " is missing: copy the device's directory again");
        if (static_cast<std::streamoff>(file.tellg()) != bytes) {
            throw Error(path + " has " + std::to_string(static_cast<std::streamoff>(file.tellg())) +
                        " bytes instead of " + std::to_string(bytes) + ": copy the device's directory again");
        }
        const auto end = std::min(digest.find(':'), digest.size());
        const auto kind = digest.substr(0, end);
        if (KINDS.count(kind) == 0) {
            throw Error(path + ": this program knows no digest of the kind '" + kind + "': compile the network again");
        }
        files.push_back({path, kind, digest.substr(end + 1)});
    }
    checked_ = std::async(std::launch::async, [files] {
        for (const auto& file : files) {
            if (KINDS.at(file.kind)(file.path) != file.digits) {
                throw Error(file.path + " is damaged, its content is not what was compiled: copy the device's "
                            "directory again");
            }
        }
    });
}

}  // namespace dicompiler
