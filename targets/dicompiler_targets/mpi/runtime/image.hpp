// Converts images to input tensors.
#pragma once

#include "npy.hpp"

namespace dicompiler {

// How images become inputs. The image is first scaled to the tensor's height and width (bilinear); then each channel is
// (pixel - mean) * scale, with pixels from 0 to 255. `order`: "RGB", "BGR" or "GRAY". `mean`, `scale`: one number, or
// one for each channel.
struct ImagePreprocessing {
    std::string order;
    std::vector<float> mean, scale;
};

// Returns true if the file name has the suffix of an image: .jpg, .jpeg, .png, .bmp, .ppm or .pgm.
bool is_image(const std::string& path);

// Reads the image as float32 of `shape` (1, channels, height, width). Throws Error that names the file.
Array read_image(const std::string& path, const Shape& shape, const ImagePreprocessing& preprocessing);

}  // namespace dicompiler
