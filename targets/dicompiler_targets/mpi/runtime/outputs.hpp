// Files of a run's outputs. They lie in a hidden directory until all ranks have done their part; else they go again.
#pragma once

#include <string>

#include "tensor.hpp"

namespace dicompiler {

class Outputs {
public:
    // `directory`: empty for none. `keep`: of how many frames. `partial`: what was written stays where frames fail.
    Outputs(const std::string& directory, const std::string& device, std::size_t keep, bool partial);
    ~Outputs();
    Outputs(const Outputs&) = delete;
    Outputs& operator=(const Outputs&) = delete;

    void write(std::size_t frame, const Tensor& tensor, const std::string& file);
    // Moves what was written to its place, <directory>/<device>, instead of what an earlier run has left there.
    void publish();
    // Removes what was written, unless that is to stay.
    void discard();

private:
    std::string place_, stage_;
    std::size_t keep_;
    bool partial_;
};

}  // namespace dicompiler
