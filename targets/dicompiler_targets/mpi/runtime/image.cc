#include "image.hpp"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <limits>
#include <sstream>

#ifdef DICOMPILER_STB
#define STB_IMAGE_IMPLEMENTATION
#define STB_IMAGE_STATIC
#define STBI_NO_STDIO
#define STBI_ONLY_JPEG
#define STBI_ONLY_PNG
#define STBI_ONLY_BMP
#include <stb_image.h>
#endif

namespace dicompiler {
namespace {

// Rows of pixels from the top, three bytes (red, green, blue) each.
struct Pixels {
    std::size_t width = 0, height = 0;
    std::vector<unsigned char> bytes;
};

std::string ending(const std::string& path) {
    const auto dot = path.rfind('.');
    auto found = dot == std::string::npos ? "" : path.substr(dot + 1);
    std::transform(found.begin(), found.end(), found.begin(), [](unsigned char c) { return std::tolower(c); });
    return found;
}

// PPM and PGM with one byte per value (P6, P5).
Pixels read_pnm(const std::string& bytes, const std::string& path) {
    std::istringstream stream(bytes);
    std::string magic, word;
    std::vector<std::size_t> head;
    stream >> magic;
    while (head.size() < 3 && stream >> word) {
        if (word[0] == '#') {
            stream.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
        } else if (word.size() < 7 && word.find_first_not_of("0123456789") == std::string::npos) {
            head.push_back(std::stoul(word));
        } else {
            break;
        }
    }
    const std::size_t channels = magic == "P6" ? 3 : 1;
    if ((magic != "P6" && magic != "P5") || head.size() < 3 || head[2] != 255 || head[0] == 0 || head[1] == 0) {
        throw Error(path + ": the image cannot be read: not a binary PPM or PGM with 255 levels");
    }
    const auto start = static_cast<std::size_t>(stream.tellg()) + 1, size = head[0] * head[1];
    if (bytes.size() < start || bytes.size() - start < size * channels) {
        throw Error(path + ": the image cannot be read: it is cut short");
    }
    Pixels found{head[0], head[1], std::vector<unsigned char>(3 * size)};
    for (std::size_t i = 0; i < 3 * size; ++i) {
        found.bytes[i] = static_cast<unsigned char>(bytes[start + (channels == 3 ? i : i / 3)]);
    }
    return found;
}

Pixels decode(const std::string& path) {
    const auto bytes = read_file(path);
    const auto kind = ending(path);
    if (kind == "ppm" || kind == "pgm") return read_pnm(bytes, path);
#ifdef DICOMPILER_STB
    if (bytes.size() > static_cast<std::size_t>(std::numeric_limits<int>::max())) {
        throw Error(path + ": the image cannot be read: it is over 2 GiB");
    }
    int width = 0, height = 0, channels = 0;
    const std::unique_ptr<unsigned char, void (*)(void*)> data(
        stbi_load_from_memory(reinterpret_cast<const unsigned char*>(bytes.data()), static_cast<int>(bytes.size()),
                              &width, &height, &channels, 3),
        stbi_image_free);
    if (data == nullptr) throw Error(path + ": the image cannot be read: " + stbi_failure_reason());
    const auto wide = static_cast<std::size_t>(width), high = static_cast<std::size_t>(height);
    return {wide, high, std::vector<unsigned char>(data.get(), data.get() + 3 * wide * high)};
#else
    throw Error(path + ": this program was built without stb_image.h, which reads such images: install libstb-dev and "
                       "build it again, or convert the image to .ppm");
#endif
}

// Where a row (or column) of the tensor lies between two of the image: the first one and the share of the second.
struct Between {
    std::size_t low, high;
    float share;
};

std::vector<Between> between(std::size_t from, std::size_t to) {
    std::vector<Between> found(to);
    for (std::size_t i = 0; i < to; ++i) {
        // Centres of pixels lie on centres; beyond the outermost ones their values go on.
        const double at = (static_cast<double>(i) + 0.5) * static_cast<double>(from) / static_cast<double>(to) - 0.5;
        const double kept = std::min(std::max(at, 0.0), static_cast<double>(from - 1));
        const auto low = static_cast<std::size_t>(kept);
        found[i] = {low, std::min(low + 1, from - 1), static_cast<float>(kept - std::floor(kept))};
    }
    return found;
}

// The value of a channel of the tensor at a pixel of the image.
float channel(const unsigned char* pixel, const std::string& order, std::size_t index) {
    if (order == "GRAY") {
        return 0.299F * static_cast<float>(pixel[0]) + 0.587F * static_cast<float>(pixel[1]) +
               0.114F * static_cast<float>(pixel[2]);
    }
    return static_cast<float>(pixel[order == "BGR" ? 2 - index : index]);
}

}  // namespace

bool is_image(const std::string& path) {
    const auto kind = ending(path);
    return kind == "jpg" || kind == "jpeg" || kind == "png" || kind == "bmp" || kind == "ppm" || kind == "pgm";
}

Array read_image(const std::string& path, const Shape& shape, const Preprocessing& preprocessing) {
    const auto pixels = decode(path);
    const auto channels = static_cast<std::size_t>(shape[1]);
    const auto height = static_cast<std::size_t>(shape[2]), width = static_cast<std::size_t>(shape[3]);
    const auto rows = between(pixels.height, height), columns = between(pixels.width, width);
    Array array{"<f4", shape, allocate(4 * count(shape)), 4 * count(shape)};
    auto* out = static_cast<float*>(array.data.get());
    const auto value = [&](std::size_t c, std::size_t y, std::size_t x) {
        return channel(&pixels.bytes[3 * (y * pixels.width + x)], preprocessing.order, c);
    };
    for (std::size_t c = 0; c < channels; ++c) {
        const float mean = preprocessing.mean[preprocessing.mean.size() > 1 ? c : 0];
        const float scale = preprocessing.scale[preprocessing.scale.size() > 1 ? c : 0];
#ifdef _OPENMP
#pragma omp parallel for
#endif
        for (std::size_t y = 0; y < height; ++y) {
            for (std::size_t x = 0; x < width; ++x) {
                const auto& row = rows[y];
                const auto& column = columns[x];
                const auto across = [&](std::size_t at) {
                    return value(c, at, column.low) * (1 - column.share) + value(c, at, column.high) * column.share;
                };
                const float pixel = across(row.low) * (1 - row.share) + across(row.high) * row.share;
                out[(c * height + y) * width + x] = (pixel - mean) * scale;
            }
        }
    }
    return array;
}

}  // namespace dicompiler
