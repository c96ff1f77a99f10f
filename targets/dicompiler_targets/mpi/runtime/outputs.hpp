// Writes the outputs of a run. The files stay in a hidden directory until all ranks have finished.
#pragma once

#include <string>

#include "tensor.hpp"

namespace dicompiler {

class OutputWriter {
public:
    // `directory`: empty to write nothing. `kept_frames`: the number of frames whose outputs are written. `partial`:
    // keep the written files if the run fails.
    OutputWriter(const std::string& directory, const std::string& device, std::size_t kept_frames, bool partial);
    ~OutputWriter();
    OutputWriter(const OutputWriter&) = delete;
    OutputWriter& operator=(const OutputWriter&) = delete;

    void write(std::size_t frame, const Tensor& tensor, const std::string& file);
    // Moves the files to <directory>/<device> and removes those of an earlier run there.
    void publish();
    // Removes the files, except for a writer with `partial`.
    void discard();

private:
    std::string directory_, hidden_directory_;
    std::size_t kept_frames_;
    bool partial_;
};

}  // namespace dicompiler
