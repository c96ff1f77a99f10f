// Converts images to input tensors.
#pragma once

#include "npy.hpp"

namespace dicompiler {

// How images become inputs. An image is first scaled to the height and width of the tensor with bilinear interpolation.
// Then each channel becomes (pixel - mean) * scale, with pixels from 0 to 255. `order` is "RGB", "BGR" or "GRAY".
// `mean` and `scale` have one number for all channels, or one for each channel.
struct ImagePreprocessing {
    std::string order;
    std::vector<float> mean, scale;
};

// Returns true if the file name has the suffix of an image: .jpg, .jpeg, .png, .bmp, .ppm or .pgm.
bool is_image(const std::string& path);

// Reads an image into a float32 array of shape (1, channels, height, width). Throws Error with the name of the file.
Array read_image(const std::string& path, const Shape& shape, const ImagePreprocessing& preprocessing);

}  // namespace dicompiler
