// A rank from its start to its end: checks, sessions, frames, report.
#include <malloc.h>
#include <mpi.h>
#if __has_include(<mpi-ext.h>)
#include <mpi-ext.h>
#endif
#include <sched.h>
#include <sys/prctl.h>

#include <algorithm>
#include <csignal>
#include <cstdio>

#include "digest.hpp"
#include "exchange.hpp"
#include "options.hpp"
#include "outputs.hpp"
#include "report.hpp"

namespace dicompiler {
namespace {

std::atomic<bool> stopped{false};

extern "C" void stop_by_signal(int) { stopped = true; }

// What messages call a rank.
std::string title(const Program& program, int rank) {
    const auto& device = program.ranks[static_cast<std::size_t>(rank)];
    return "rank " + std::to_string(rank) + " (device '" + device.name + "' on host '" + device.host + "')";
}

// What a rank says that cannot go on. `after`: until it ends all others, which may tell as well.
[[noreturn]] void give_up(const std::string& who, const std::string& why, std::chrono::milliseconds after) {
    std::fprintf(stderr, "dicompiler: %s: %s\n", who.c_str(), why.c_str());
    std::this_thread::sleep_for(after);
    MPI_Abort(MPI_COMM_WORLD, 1);
    std::abort();
}

std::string suspicion(const Program& program, int rank) {
    return rank < 0 ? "" : "; the cause may be " + title(program, rank);
}

// Which rank Open MPI knows to be lost; -1 where it knows of none. It does with ULFM, where that is asked for.
int lost_rank() {
    int rank = -1;
#ifdef OMPI_HAVE_MPI_EXT_FTMPI
    MPI_Group gone, all;
    int count = 0;
    const int first = 0;
    if (MPIX_Comm_get_failed(MPI_COMM_WORLD, &gone) != MPI_SUCCESS) return rank;
    MPI_Group_size(gone, &count);
    MPI_Comm_group(MPI_COMM_WORLD, &all);
    if (count > 0) MPI_Group_translate_ranks(gone, 1, &first, all, &rank);
#endif
    return rank;
}

const Program* played = nullptr;  // of this process, for `fail`

// Called by MPI where a call of it fails.
void fail(MPI_Comm*, int* code, ...) {
    int self = 0, length = 0;
    char words[MPI_MAX_ERROR_STRING] = "";
    MPI_Comm_rank(MPI_COMM_WORLD, &self);
    MPI_Error_string(*code, words, &length);
    const auto lost = lost_rank();
    const auto why = lost < 0 ? words : "its connection to another rank was closed, which has ended";
    give_up(title(*played, self), why + suspicion(*played, lost), std::chrono::milliseconds{300});
}

void notice_failures(const Program& program) {
    MPI_Errhandler handler;
    played = &program;
    MPI_Comm_create_errhandler(fail, &handler);
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, handler);
}

// The program with those of its functions that are to be played.
Program chosen(Program program, const Options& options) {
    for (auto& rank : program.ranks) {
        const auto all = rank.roles.size();
        const auto count = options.roles != 0 ? options.roles : program.turns != 0 ? program.turns : all;
        if (options.first_role + count > all) {
            throw Error("option --roles: there are " + std::to_string(all) + " functions");
        }
        const auto first = rank.roles.begin() + static_cast<std::ptrdiff_t>(options.first_role);
        rank.roles = {first, first + static_cast<std::ptrdiff_t>(count)};
    }
    return program;
}

// All ranks must hold parts of the same artifact, but those that stand for a lost one and hold nothing.
void check_digests(const Program& program, const std::string& own) {
    constexpr std::size_t SIZE = 64;
    std::string all(SIZE * program.ranks.size(), ' ');
    std::string padded = own;
    padded.resize(SIZE, ' ');
    MPI_Allgather(padded.data(), SIZE, MPI_CHAR, &all[0], SIZE, MPI_CHAR, MPI_COMM_WORLD);
    std::size_t first = 0;
    for (std::size_t i = 1; i < program.ranks.size(); ++i) {
        if (all[i * SIZE] == ' ') continue;
        if (first == 0 && all[0] == ' ') first = i;
        if (all.compare(i * SIZE, SIZE, all, first * SIZE, SIZE) != 0) {
            throw Error("the files of " + title(program, static_cast<int>(i)) + " and of " +
                        title(program, static_cast<int>(first)) +
                        " are of different artifacts: copy the same one to both");
        }
    }
}

// Keeps to this rank's share of the processors that the ranks of this host may use.
void pin() {
    MPI_Comm here;
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &here);
    int place = 0, count = 1;
    MPI_Comm_rank(here, &place);
    MPI_Comm_size(here, &count);
    MPI_Comm_free(&here);
    cpu_set_t allowed, own;
    CPU_ZERO(&own);
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) throw Error("the system does not tell its processors");
    std::vector<int> cores;
    for (int core = 0; core < CPU_SETSIZE; ++core) {
        if (CPU_ISSET(core, &allowed)) cores.push_back(core);
    }
    const int total = static_cast<int>(cores.size()), share = std::max(1, total / count);
    for (int i = 0; i < share; ++i) CPU_SET(cores[static_cast<std::size_t>((place * share + i) % total)], &own);
    if (sched_setaffinity(0, sizeof own, &own) != 0) throw Error("the system does not let this process be pinned");
}

// Loads the segments. Engines make and free copies of weights meanwhile: glibc would keep what is freed for good, once
// it has seen large blocks come and go; so they are given back at once while this lasts, and kept from then on.
// Roles share what they have in common.
std::map<std::string, std::unique_ptr<Segment>> load(Engine& engine, const std::vector<Rank>& roles,
                                                     const std::string& directory) {
#ifdef __GLIBC__
    constexpr int SMALL = 128 << 10, LARGE = 32 << 20;
    mallopt(M_MMAP_THRESHOLD, SMALL);
#endif
    std::map<std::string, std::unique_ptr<Segment>> segments;
    for (const auto& role : roles) {
        for (const auto& run : role.runs) {
            if (segments.count(run.file) != 0) continue;
            segments[run.file] = run.file.empty() ? nullptr : engine.load(directory + "/" + run.file);
        }
    }
#ifdef __GLIBC__
    mallopt(M_MMAP_THRESHOLD, LARGE);
    mallopt(M_TRIM_THRESHOLD, 2 * LARGE);
#endif
    return segments;
}

// Ranks that begin frames by themselves, and ranks that deliver outputs.
Flow make_flow(const Program& program, const Options& options, std::size_t samples) {
    Flow flow{{}, {}, options.frames, options.in_flight, options.timeout};
    for (std::size_t i = 0; i < program.ranks.size(); ++i) {
        bool starts = false, ends = false;
        for (const auto& role : describe(program.ranks[i])) {
            starts = starts || !role.inputs.empty() || (!role.steps.empty() && role.receives.empty());
            ends = ends || !role.outputs.empty();
        }
        if (starts) flow.starters.push_back(static_cast<int>(i));
        if (ends) flow.enders.push_back(static_cast<int>(i));
    }
    if (flow.in_flight == 0) flow.in_flight = std::min<std::size_t>(3 * program.ranks.size(), 1024);
    // Only ranks with inputs know how many there are.
    unsigned long long known = samples, most = 0;
    MPI_Allreduce(&known, &most, 1, MPI_UNSIGNED_LONG_LONG, MPI_MAX, MPI_COMM_WORLD);
    if (flow.frames == 0) flow.frames = std::max<std::size_t>(1, static_cast<std::size_t>(most));
    flow.in_flight = std::min(flow.in_flight, flow.frames);
    return flow;
}

// What one rank is and is asked for.
struct Task {
    const Program& program;
    const Options& options;
    int self;
    const Device& device;
    std::vector<Rank> roles;
    int threads;
};

// All frames; where that fails, says why and ends all ranks.
Measured exchange_or_end(const Task& task, const Flow& flow, std::vector<std::unique_ptr<Slot>>& slots, Player& player,
                         Outputs& outputs) {
    try {
        return exchange(task.roles, flow, slots, player, stopped);
    } catch (const Stopped&) {
        outputs.discard();
        std::signal(SIGTERM, SIG_DFL);
        std::raise(SIGTERM);
    } catch (const Error& error) {
        // The player's thread may be deep in a segment: nobody waits for it.
        outputs.discard();
        give_up(title(task.program, task.self), error.what() + suspicion(task.program, error.peer),
                std::chrono::milliseconds{1500});
    }
    return {};
}

// Makes sessions and buffers, waits until all ranks have, and plays the frames.
Times compute(const Task& task, Contents& contents, const Flow& flow, Samples& samples, Outputs& outputs,
              Measured& measured) {
    const auto directory = task.options.data + "/" + task.device.name;
    const auto exchanges = [](const Rank& role) { return !role.receives.empty() || !role.sends.empty(); };
    const auto engine =
        make_engine({task.threads, task.program.optimization, task.device.gpu ? task.program.provider : "",
                     std::any_of(task.roles.begin(), task.roles.end(), exchanges)});
    std::map<std::string, std::unique_ptr<Segment>> loaded;
    try {
        loaded = load(*engine, task.roles, directory);
    } catch (const Error&) {
        contents.check();  // a damaged file is the cause
        throw;
    }
    contents.check();
    std::vector<std::vector<Segment*>> segments(task.roles.size());
    for (std::size_t i = 0; i < task.roles.size(); ++i) {
        for (const auto& run : task.roles[i].runs) segments[i].push_back(loaded.at(run.file).get());
    }
    auto slots = make_slots(task.roles, flow.in_flight, segments);
    const auto deliver = [&](std::size_t frame, const Tensor& tensor, const std::string& file) {
        outputs.write(frame, tensor, file);
    };
    Player player(task.roles, slots, samples, deliver, flow.frames - 1, task.options.least);
    barrier();
    MPI_Barrier(MPI_COMM_WORLD);  // all are there: it is short, and all begin at the same time
    measured = exchange_or_end(task, flow, slots, player, outputs);
    return player.stop();
}

void play(const Program& program, const Options& options, int self) {
    const auto& device = program.ranks[static_cast<std::size_t>(self)];
    const int threads = options.threads > 0 ? std::min(options.threads, device.threads) : device.threads;
    const Task task{program, options, self, device, describe(device), threads};
    bool works = false, given = false, delivers = false, keeps = false;
    for (const auto& role : task.roles) {
        works = works || !role.steps.empty();
        given = given || !role.inputs.empty();
        delivers = delivers || !role.outputs.empty();
        keeps = keeps || !role.states.empty();
    }
    const bool here = options.roles == 0 || works || given || delivers;
    const auto contents = here ? std::make_unique<Contents>(options.data + "/" + device.name) : nullptr;
    check_digests(program, here ? contents->digest() : "");
    if (given && options.inputs.empty()) throw Error("there are no inputs: give a file or directory (--inputs)");
    Samples samples(program, given || keeps ? options.inputs : "");
    const auto flow = make_flow(program, options, samples.size());
    if (options.pin) pin();
    Outputs outputs(delivers ? options.outputs : "", device.name, options.keep, options.partial);
    Measured measured;
    Times times;
    if (works) {
        times = compute(task, *contents, flow, samples, outputs, measured);
    } else {
        if (here) contents->check();
        barrier();
        MPI_Barrier(MPI_COMM_WORLD);
    }
    barrier();
    outputs.publish();
    const int lead = flow.starters.front();
    const auto begun = begun_at(lead, measured);
    const auto waited = waits(self, measured, times, flow.frames, lead, begun.first);
    print_reports(self, report(self, device, threads, measured, times, begun.last), measured, waited, lead);
}

}  // namespace

int run(const Program& program, int argc, char** argv) {
    // Neither this process may outlive who started it, nor may its sleeps be rounded up.
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    prctl(PR_SET_TIMERSLACK, 1000);
    int provided = 0, self = 0, count = 0;
    MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &provided);
    MPI_Comm_rank(MPI_COMM_WORLD, &self);
    MPI_Comm_size(MPI_COMM_WORLD, &count);
    std::signal(SIGTERM, stop_by_signal);
    std::string who = "rank " + std::to_string(self);
    try {
        const auto options = parse_options(argc, argv);
        if (options.help) {
            if (self == 0) std::fputs(USAGE, stdout);
            MPI_Finalize();
            return 0;
        }
        if (count != static_cast<int>(program.ranks.size())) {
            if (self == 0) {
                const auto wanted = program.ranks.size();
                std::fprintf(stderr, "dicompiler: %d ranks were started, this program has %zu: use mpirun -n %zu\n",
                             count, wanted, wanted);
            }
            MPI_Finalize();
            return 2;
        }
        who = title(program, self);
        notice_failures(program);
        play(chosen(program, options), options, self);
    } catch (const std::exception& error) {
        // mpirun must have taken the line before it hears of the end.
        give_up(who, error.what(), std::chrono::milliseconds{100});
    }
    MPI_Finalize();
    return 0;
}

}  // namespace dicompiler
