#include "options.hpp"

#include <algorithm>
#include <cstdlib>
#include <iterator>

#include "tensor.hpp"

namespace dicompiler {

const char* const USAGE =
    "usage: mpirun -n RANKS PROGRAM [options]\n"
    "  --inputs PATH       an .npz, .npy or image file, or a directory of such files: one frame each, sorted by name\n"
    "  --outputs DIR       write the outputs to DIR/DEVICE as .npy files\n"
    "  --frames N          number of frames; default: one for each input file\n"
    "  --in-flight N       maximum number of frames in flight; default: three times the number of ranks\n"
    "  --kept-frames N     write the outputs of the first N frames only\n"
    "  --threads N         maximum number of threads of a rank\n"
    "  --pin               pin each rank to its share of this host's cores\n"
    "  --timeout S         seconds that all frames together may take\n"
    "  --min-seconds S,S,… minimum duration of each segment in seconds, to emulate a slower device\n"
    "  --roles FIRST,N     use N roles, from number FIRST on. A role is the normal plan, a replica or a failure plan.\n"
    "                      Default: the normal plan and its replicas\n"
    "  --partial           if the run fails, leave the outputs in DIR/.DEVICE.part\n"
    "  --data DIR          directory that contains a directory for each device; default: the working directory\n"
    "Prints a JSON object with each rank's times (computing, waiting, sending), peak memory and sent bytes.\n";

namespace {

double parse_number(const std::string& option, const std::string& text, double min, double max) {
    char* end = nullptr;
    const double value = std::strtod(text.c_str(), &end);
    if (text.empty() || *end != '\0' || !(value >= min && value <= max)) {
        throw Error("option " + option + " cannot be '" + text + "'");
    }
    return value;
}

std::vector<double> parse_numbers(const std::string& option, const std::string& text) {
    std::vector<double> values;
    for (std::size_t start = 0; start <= text.size();) {
        const auto end = std::min(text.find(',', start), text.size());
        values.push_back(parse_number(option, text.substr(start, end - start), 0, 1e9));
        start = end + 1;
    }
    return values;
}

}  // namespace

Options parse_options(int argc, char** argv) {
    Options options;
    for (int i = 1; i < argc; ++i) {
        const std::string name = argv[i];
        if (name == "--help" || name == "-h") {
            options.help = true;
            continue;
        }
        if (name == "--pin" || name == "--partial") {
            (name == "--pin" ? options.pin : options.partial) = true;
            continue;
        }
        const std::string valued[] = {"--inputs", "--outputs", "--frames", "--in-flight", "--kept-frames",
                                      "--threads", "--timeout", "--min-seconds", "--data", "--roles"};
        if (std::find(std::begin(valued), std::end(valued), name) == std::end(valued)) {
            throw Error("there is no option '" + name + "': see --help");
        }
        if (i + 1 == argc) throw Error("option " + name + " needs a value");
        const std::string value = argv[++i];
        if (name == "--inputs") options.inputs = value;
        if (name == "--outputs") options.outputs = value;
        if (name == "--data") options.data = value;
        if (name == "--frames") options.frames = static_cast<std::size_t>(parse_number(name, value, 1, 1e7));
        if (name == "--in-flight") options.in_flight = static_cast<std::size_t>(parse_number(name, value, 1, 1024));
        if (name == "--kept-frames") options.kept_frames = static_cast<std::size_t>(parse_number(name, value, 0, 1e7));
        if (name == "--threads") options.threads = static_cast<int>(parse_number(name, value, 1, 4096));
        if (name == "--min-seconds") options.min_seconds = parse_numbers(name, value);
        if (name == "--roles") {
            const auto pair = parse_numbers(name, value);
            if (pair.size() != 2 || pair[1] < 1) throw Error("option --roles cannot be '" + value + "'");
            options.first_role = static_cast<std::size_t>(pair[0]);
            options.roles = static_cast<std::size_t>(pair[1]);
        }
        if (name == "--timeout") options.timeout_s = parse_number(name, value, 0, 1e9);
    }
    return options;
}

}  // namespace dicompiler
