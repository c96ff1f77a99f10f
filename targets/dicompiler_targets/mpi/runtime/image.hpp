// Images become input tensors.
#pragma once

#include "npy.hpp"

namespace dicompiler {

// value = (pixel - mean) * scale for each channel, pixels from 0 to 255, after the image was stretched to the tensor's
// height and width (bilinear). order: "RGB", "BGR" or "GRAY"; mean, scale: one number, or one for each channel.
struct Preprocessing {
    std::string order;
    std::vector<float> mean, scale;
};

// Whether the name's ending is that of an image: .jpg, .jpeg, .png, .bmp, .ppm, .pgm.
bool is_image(const std::string& path);

// The image as float32 of `shape` (1, channels, height, width). Errors name the file.
Array read_image(const std::string& path, const Shape& shape, const Preprocessing& preprocessing);

}  // namespace dicompiler
