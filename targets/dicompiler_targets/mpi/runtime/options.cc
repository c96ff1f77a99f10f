#include "options.hpp"

#include <algorithm>
#include <cstdlib>

#include "tensor.hpp"

namespace dicompiler {

const char* const USAGE =
    "usage: mpirun -n RANKS PROGRAM [options]\n"
    "  --inputs PATH     an .npz, .npy or image file, or a directory of them: a frame each, in the order of names\n"
    "  --outputs DIR     write the outputs there as .npy, below the name of the device that has them\n"
    "  --frames N        how many; default: as many as there are input files\n"
    "  --in-flight N     frames on their way at once; default: three for each rank\n"
    "  --keep N          write the outputs of the first N frames only\n"
    "  --threads N       at most so many threads for a rank\n"
    "  --pin             each rank keeps to its share of this host's processors\n"
    "  --timeout S       seconds for all frames\n"
    "  --least S,S,…     seconds that a call of each segment takes at least: emulation\n"
    "  --roles FIRST,N   play these of each rank's functions: those for a loss\n"
    "  --partial         leave outputs in DIR/.NAME.part where the run fails\n"
    "  --data DIR        where the devices' directories are; default: the working directory\n"
    "Prints a JSON object: for each rank the seconds that it computed, waited and sent, its memory and its bytes.\n";

namespace {

double parse_number(const std::string& option, const std::string& text, double least, double most) {
    char* end = nullptr;
    const double found = std::strtod(text.c_str(), &end);
    if (text.empty() || *end != '\0' || !(found >= least && found <= most)) {
        throw Error("option " + option + " cannot be '" + text + "'");
    }
    return found;
}

std::vector<double> parse_numbers(const std::string& option, const std::string& text) {
    std::vector<double> found;
    for (std::size_t at = 0; at <= text.size();) {
        const auto end = std::min(text.find(',', at), text.size());
        found.push_back(parse_number(option, text.substr(at, end - at), 0, 1e9));
        at = end + 1;
    }
    return found;
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
        const std::string known[] = {"--inputs", "--outputs", "--frames",  "--in-flight", "--keep",
                                     "--threads", "--timeout", "--least", "--data", "--roles"};
        bool found = false;
        for (const auto& one : known) found = found || one == name;
        if (!found) throw Error("there is no option '" + name + "': see --help");
        if (i + 1 == argc) throw Error("option " + name + " needs a value");
        const std::string value = argv[++i];
        if (name == "--inputs") options.inputs = value;
        if (name == "--outputs") options.outputs = value;
        if (name == "--data") options.data = value;
        if (name == "--frames") options.frames = static_cast<std::size_t>(parse_number(name, value, 1, 1e7));
        if (name == "--in-flight") options.in_flight = static_cast<std::size_t>(parse_number(name, value, 1, 1024));
        if (name == "--keep") options.keep = static_cast<std::size_t>(parse_number(name, value, 0, 1e7));
        if (name == "--threads") options.threads = static_cast<int>(parse_number(name, value, 1, 4096));
        if (name == "--least") options.least = parse_numbers(name, value);
        if (name == "--roles") {
            const auto both = parse_numbers(name, value);
            if (both.size() != 2 || both[1] < 1) throw Error("option --roles cannot be '" + value + "'");
            options.first_role = static_cast<std::size_t>(both[0]);
            options.roles = static_cast<std::size_t>(both[1]);
        }
        if (name == "--timeout") options.timeout = parse_number(name, value, 0, 1e9);
    }
    return options;
}

}  // namespace dicompiler
