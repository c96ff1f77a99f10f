// The command line of a generated program.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace dicompiler {

struct Options {
    std::string data = ".", inputs, outputs;
    std::size_t frames = 0, in_flight = 0, kept_frames = static_cast<std::size_t>(-1);
    int threads = 0;
    double timeout_s = 1e9;
    // The minimum duration of each segment in seconds, to emulate a slower device. Empty: segments are not delayed.
    std::vector<double> min_seconds;
    // The index of the first role that the ranks use, and the number of these roles. A role is the normal plan, a
    // replica or a failure plan. If the number is 0, the ranks use the roles for a run without failed devices.
    std::size_t first_role = 0, roles = 0;
    bool pin = false, help = false, partial = false;
};

// Throws Error for invalid arguments.
Options parse_options(int argc, char** argv);

// The text that `--help` prints.
extern const char* const USAGE;

}  // namespace dicompiler
