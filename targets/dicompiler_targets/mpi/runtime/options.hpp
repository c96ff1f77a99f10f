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
    // The functions of each rank that are played: the first one's place and how many; 0: those for no loss.
    std::size_t first_role = 0, roles = 0;
    bool pin = false, help = false, partial = false;
};

// Throws Error for arguments that cannot be.
Options parse_options(int argc, char** argv);

// What `--help` prints.
extern const char* const USAGE;

}  // namespace dicompiler
