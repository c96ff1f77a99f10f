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

// An image as rows of pixels from top to bottom. A pixel has three bytes: red, green and blue.
struct Pixels {
    std::size_t width = 0, height = 0;
    std::vector<unsigned char> bytes;
};

// Returns the file name's suffix in lower case, without the dot.
std::string get_suffix(const std::string& path) {
    const auto dot = path.rfind('.');
    auto suffix = dot == std::string::npos ? "" : path.substr(dot + 1);
    std::transform(suffix.begin(), suffix.end(), suffix.begin(), [](unsigned char c) { return std::tolower(c); });
    return suffix;
}

// Reads a binary PPM (P6) or PGM (P5) image with one byte per value. `path` is for error messages.
Pixels read_pnm(const std::string& bytes, const std::string& path) {
    std::istringstream stream(bytes);
    std::string magic, word;
    std::vector<std::size_t> header;
    stream >> magic;
    while (header.size() < 3 && stream >> word) {
        if (word[0] == '#') {
            stream.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
        } else if (word.size() < 7 && word.find_first_not_of("0123456789") == std::string::npos) {
            header.push_back(std::stoul(word));
        } else {
            break;
        }
    }
    const std::size_t channels = magic == "P6" ? 3 : 1;
    if ((magic != "P6" && magic != "P5") || header.size() < 3 || header[2] != 255 || header[0] == 0 || header[1] == 0) {
        throw Error(path + ": the image cannot be read: not a binary PPM or PGM with 255 levels");
    }
    const auto start = static_cast<std::size_t>(stream.tellg()) + 1, size = header[0] * header[1];
    if (bytes.size() < start || bytes.size() - start < size * channels) {
        throw Error(path + ": the image cannot be read: it is cut short");
    }
    Pixels pixels{header[0], header[1], std::vector<unsigned char>(3 * size)};
    for (std::size_t i = 0; i < 3 * size; ++i) {
        pixels.bytes[i] = static_cast<unsigned char>(bytes[start + (channels == 3 ? i : i / 3)]);
    }
    return pixels;
}

Pixels decode(const std::string& path) {
    const auto bytes = read_file(path);
    const auto suffix = get_suffix(path);
    if (suffix == "ppm" || suffix == "pgm") return read_pnm(bytes, path);
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
    const auto columns = static_cast<std::size_t>(width), rows = static_cast<std::size_t>(height);
    return {columns, rows, std::vector<unsigned char>(data.get(), data.get() + 3 * columns * rows)};
#else
    throw Error(path + ": this program was built without stb_image.h, which reads such images: install libstb-dev and "
                       "build it again, or convert the image to .ppm");
#endif
}

// A row (or column) of the tensor lies between rows `low` and `high` of the image, which have the weights 1 - `share`
// and `share` in the interpolation.
struct Interpolation {
    std::size_t low, high;
    float share;
};

std::vector<Interpolation> interpolate(std::size_t image_extent, std::size_t tensor_extent) {
    std::vector<Interpolation> positions(tensor_extent);
    for (std::size_t i = 0; i < tensor_extent; ++i) {
        // The centers of pixels are aligned. Positions outside the first and last center are moved to that center.
        const double position = (static_cast<double>(i) + 0.5) * static_cast<double>(image_extent) /
                                    static_cast<double>(tensor_extent) - 0.5;
        const double clamped = std::min(std::max(position, 0.0), static_cast<double>(image_extent - 1));
        const auto low = static_cast<std::size_t>(clamped);
        positions[i] = {low, std::min(low + 1, image_extent - 1), static_cast<float>(clamped - std::floor(clamped))};
    }
    return positions;
}

// Returns the value of channel `index` of the tensor for a pixel of the image.
float get_channel(const unsigned char* pixel, const std::string& order, std::size_t index) {
    if (order == "GRAY") {
        return 0.299F * static_cast<float>(pixel[0]) + 0.587F * static_cast<float>(pixel[1]) +
               0.114F * static_cast<float>(pixel[2]);
    }
    return static_cast<float>(pixel[order == "BGR" ? 2 - index : index]);
}

}  // namespace

bool is_image(const std::string& path) {
    const auto suffix = get_suffix(path);
    return suffix == "jpg" || suffix == "jpeg" || suffix == "png" || suffix == "bmp" || suffix == "ppm" ||
           suffix == "pgm";
}

Array read_image(const std::string& path, const Shape& shape, const ImagePreprocessing& preprocessing) {
    const auto pixels = decode(path);
    const auto channels = static_cast<std::size_t>(shape[1]);
    const auto height = static_cast<std::size_t>(shape[2]), width = static_cast<std::size_t>(shape[3]);
    const auto rows = interpolate(pixels.height, height), columns = interpolate(pixels.width, width);
    const auto bytes = 4 * count_elements(shape);
    Array array{"<f4", shape, allocate(bytes), bytes};
    auto* out = static_cast<float*>(array.data.get());
    const auto value = [&](std::size_t c, std::size_t y, std::size_t x) {
        return get_channel(&pixels.bytes[3 * (y * pixels.width + x)], preprocessing.order, c);
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
                const auto interpolate_row = [&](std::size_t image_row) {
                    return value(c, image_row, column.low) * (1 - column.share) +
                           value(c, image_row, column.high) * column.share;
                };
                const float pixel = interpolate_row(row.low) * (1 - row.share) + interpolate_row(row.high) * row.share;
                out[(c * height + y) * width + x] = (pixel - mean) * scale;
            }
        }
    }
    return array;
}

}  // namespace dicompiler
