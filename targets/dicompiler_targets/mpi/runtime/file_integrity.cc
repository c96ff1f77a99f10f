#include "file_integrity.hpp"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <map>
#include <sstream>
#include <vector>

#include "tensor.hpp"

namespace dicompiler {
namespace {

constexpr std::size_t BLOCK_BYTES = 64;
constexpr std::size_t CHUNK_BYTES = 1 << 20;

// The first 32 bits of the fractional parts of the cube roots of the first 64 primes (FIPS 180-4, 4.2.2).
constexpr std::uint32_t ROUND_CONSTANTS[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

std::uint32_t rotate(std::uint32_t x, int n) { return (x >> n) | (x << (32 - n)); }

std::string to_hex(std::uint32_t word) {
    char digits[9];
    std::snprintf(digits, sizeof digits, "%08x", static_cast<unsigned>(word));
    return digits;
}

// SHA-256 of bytes that are added in chunks. The size of each chunk but the last must be a multiple of BLOCK_BYTES.
class Sha256 {
public:
    void add(const unsigned char* data, std::size_t size) {
        bytes_ += size;
        add_blocks(data, size / BLOCK_BYTES);
        rest_.assign(data + size / BLOCK_BYTES * BLOCK_BYTES, data + size);
    }

    std::string digits() {
        const std::uint64_t bits = 8 * bytes_;
        rest_.push_back(0x80);
        while (rest_.size() % BLOCK_BYTES != BLOCK_BYTES - 8) rest_.push_back(0);
        for (int shift = 56; shift >= 0; shift -= 8) rest_.push_back(static_cast<unsigned char>(bits >> shift));
        add_blocks(rest_.data(), rest_.size() / BLOCK_BYTES);
        std::string text;
        for (const auto word : state_) text += to_hex(word);
        return text;
    }

private:
    void add_blocks(const unsigned char* data, std::size_t count) {
        for (; count > 0; --count, data += BLOCK_BYTES) {
            std::uint32_t w[64];
            for (int i = 0; i < 16; ++i) {
                w[i] = std::uint32_t{data[4 * i]} << 24 | std::uint32_t{data[4 * i + 1]} << 16 |
                       std::uint32_t{data[4 * i + 2]} << 8 | data[4 * i + 3];
            }
            for (int i = 16; i < 64; ++i) {
                const auto a = w[i - 15], b = w[i - 2];
                w[i] = w[i - 16] + (rotate(a, 7) ^ rotate(a, 18) ^ (a >> 3)) + w[i - 7] +
                       (rotate(b, 17) ^ rotate(b, 19) ^ (b >> 10));
            }
            auto [a, b, c, d, e, f, g, h] = state_;
            for (int i = 0; i < 64; ++i) {
                const auto t1 = h + (rotate(e, 6) ^ rotate(e, 11) ^ rotate(e, 25)) + (g ^ (e & (f ^ g))) +
                                ROUND_CONSTANTS[i] + w[i];
                const auto t2 = (rotate(a, 2) ^ rotate(a, 13) ^ rotate(a, 22)) + ((a & b) | (c & (a | b)));
                h = g, g = f, f = e, e = d + t1;
                d = c, c = b, b = a, a = t1 + t2;
            }
            const std::array<std::uint32_t, 8> sum{a, b, c, d, e, f, g, h};
            for (std::size_t i = 0; i < 8; ++i) state_[i] += sum[i];
        }
    }

    std::array<std::uint32_t, 8> state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                        0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    std::uint64_t bytes_ = 0;
    std::vector<unsigned char> rest_;
};

using CrcTables = std::array<std::array<std::uint32_t, 256>, 8>;

// Entry b of table k is the CRC of byte b followed by k zero bytes.
CrcTables make_crc_tables() {
    CrcTables tables{};
    for (std::uint32_t byte = 0; byte < 256; ++byte) {
        auto crc = byte;
        for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (0xedb88320U & (0U - (crc & 1U)));
        tables[0][byte] = crc;
    }
    for (std::size_t k = 1; k < tables.size(); ++k) {
        for (std::size_t byte = 0; byte < 256; ++byte) {
            const auto crc = tables[k - 1][byte];
            tables[k][byte] = (crc >> 8) ^ tables[0][crc & 0xffU];
        }
    }
    return tables;
}

// CRC-32 as zlib computes it. Eight bytes are added at a time, with eight tables ("slicing by 8").
class Crc32 {
public:
    void add(const unsigned char* data, std::size_t size) {
        static const auto tables = make_crc_tables();
        for (; size >= 8; size -= 8, data += 8) {
            const auto low = crc_ ^ read_word(data), high = read_word(data + 4);
            crc_ = tables[7][low & 0xffU] ^ tables[6][(low >> 8) & 0xffU] ^ tables[5][(low >> 16) & 0xffU] ^
                   tables[4][low >> 24] ^ tables[3][high & 0xffU] ^ tables[2][(high >> 8) & 0xffU] ^
                   tables[1][(high >> 16) & 0xffU] ^ tables[0][high >> 24];
        }
        for (; size > 0; --size, ++data) crc_ = (crc_ >> 8) ^ tables[0][(crc_ ^ *data) & 0xffU];
    }

    std::string digits() const { return to_hex(~crc_); }

private:
    static std::uint32_t read_word(const unsigned char* data) {
        return std::uint32_t{data[0]} | std::uint32_t{data[1]} << 8 | std::uint32_t{data[2]} << 16 |
               std::uint32_t{data[3]} << 24;
    }

    std::uint32_t crc_ = 0xffffffffU;
};

template <class Digest>
std::string digest_file(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    std::vector<unsigned char> chunk(CHUNK_BYTES);
    Digest digest;
    do {
        file.read(reinterpret_cast<char*>(chunk.data()), CHUNK_BYTES);
        digest.add(chunk.data(), static_cast<std::size_t>(file.gcount()));
    } while (file);
    return digest.digits();
}

// Functions that compute the digest of a file, by the prefix of the digest in contents.txt.
const std::map<std::string, std::string (*)(const std::string&)> DIGEST_KINDS{{"sha256", digest_file<Sha256>},
                                                                              {"crc32", digest_file<Crc32>}};

struct ListedFile {
    std::string path, kind, digits;
};

// Returns the text of contents.txt without its last line, which must be the SHA-256 of the lines before it.
std::string read_list(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    std::ostringstream content;
    content << file.rdbuf();
    const std::string text = content.str();
    if (!file || text.empty()) throw Error(path + " is missing: copy the device's directory here");
    constexpr std::size_t LAST_LINE_CHARS = 65;
    const auto size = text.size() < LAST_LINE_CHARS ? 0 : text.size() - LAST_LINE_CHARS;
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

DeviceFiles::DeviceFiles(const std::string& directory) {
    std::istringstream list(read_list(directory + "/contents.txt"));
    std::getline(list, artifact_digest_);
    std::vector<ListedFile> files;
    std::string line;
    while (std::getline(list, line)) {
        std::istringstream fields(line);
        std::streamoff bytes = 0;
        std::string name, digest;
        fields >> bytes >> digest >> name;
        const auto path = directory + "/" + name;
        std::ifstream file(path, std::ios::binary | std::ios::ate);
        if (!file) throw Error(path + " is missing: copy the device's directory again");
        if (static_cast<std::streamoff>(file.tellg()) != bytes) {
            throw Error(path + " has " + std::to_string(static_cast<std::streamoff>(file.tellg())) +
                        " bytes instead of " + std::to_string(bytes) + ": copy the device's directory again");
        }
        const auto end = std::min(digest.find(':'), digest.size());
        const auto kind = digest.substr(0, end);
        if (DIGEST_KINDS.count(kind) == 0) {
            throw Error(path + ": unknown kind of digest '" + kind + "': compile the model again");
        }
        files.push_back({path, kind, digest.substr(end + 1)});
    }
    checked_ = std::async(std::launch::async, [files] {
        for (const auto& file : files) {
            if (DIGEST_KINDS.at(file.kind)(file.path) != file.digits) {
                throw Error(file.path + " is damaged: its content differs from the compiled one: copy the device's "
                            "directory again");
            }
        }
    });
}

}  // namespace dicompiler
