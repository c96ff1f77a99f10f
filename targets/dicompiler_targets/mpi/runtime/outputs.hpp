// Writes the outputs of a run to .npy files. They stay in a hidden directory until all ranks have finished, so that a
// failed run does not leave incomplete outputs.
#pragma once

#include <string>

#include "tensor.hpp"

namespace dicompiler {

class OutputWriter {
public:
    // Writes the outputs of the first `kept_frames` frames, or nothing if `directory` is empty. With `partial`, a
    // failed run keeps the hidden directory, so that finished frames need not be computed again.
    OutputWriter(const std::string& directory, const std::string& device, std::size_t kept_frames, bool partial);
    ~OutputWriter();
    OutputWriter(const OutputWriter&) = delete;
    OutputWriter& operator=(const OutputWriter&) = delete;

    void write(std::size_t frame, const Tensor& tensor, const std::string& file);
    // Moves the files to <directory>/<device>, and removes the files of an earlier run from that directory.
    void publish();
    // Removes the hidden directory, unless `partial` is true.
    void discard();

private:
    std::string directory_, hidden_directory_;
    std::size_t kept_frames_;
    bool partial_;
};

}  // namespace dicompiler
