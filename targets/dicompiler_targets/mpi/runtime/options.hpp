// The arguments of a program.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace dicompiler {

struct Options {
    std::string data = ".", inputs, outputs;
    std::size_t frames = 0, in_flight = 0, keep = static_cast<std::size_t>(-1);
    int threads = 0;
    double timeout = 1e9;
    // Seconds that a call of each segment takes at least; empty where nothing is held back.
    std::vector<double> least;
    bool pin = false, help = false;
};

// Throws Error for arguments that cannot be.
Options parse_options(int argc, char** argv);

// What `--help` prints.
extern const char* const USAGE;

}  // namespace dicompiler
