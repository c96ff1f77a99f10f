// Runs a rank: checks its files, loads its segments, executes the frames, and reports its measurements.
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

#include "exchange.hpp"
#include "file_integrity.hpp"
#include "options.hpp"
#include "outputs.hpp"
#include "report.hpp"

namespace dicompiler {
namespace {

std::atomic<bool> stop_requested{false};

extern "C" void request_stop(int) { stop_requested = true; }

std::string describe_rank(const Program& program, int rank) {
    const auto& device = program.ranks[static_cast<std::size_t>(rank)];
    return "rank " + std::to_string(rank) + " (device '" + device.name + "' on host '" + device.host + "')";
}

// Prints the reason of a failure and ends all ranks. Other ranks can print their reasons during the delay.
[[noreturn]] void abort_all(const std::string& rank, const std::string& reason, std::chrono::milliseconds delay) {
    std::fprintf(stderr, "dicompiler: %s: %s\n", rank.c_str(), reason.c_str());
    std::this_thread::sleep_for(delay);
    MPI_Abort(MPI_COMM_WORLD, 1);
    std::abort();
}

std::string describe_suspect(const Program& program, int rank) {
    return rank < 0 ? "" : "; the cause may be " + describe_rank(program, rank);
}

// Returns the rank that Open MPI reports as failed, or -1. Open MPI reports failures only if ULFM is enabled.
int find_failed_rank() {
    int rank = -1;
#ifdef OMPI_HAVE_MPI_EXT_FTMPI
    MPI_Group failed, all;
    int count = 0;
    const int first = 0;
    if (MPIX_Comm_get_failed(MPI_COMM_WORLD, &failed) != MPI_SUCCESS) return rank;
    MPI_Group_size(failed, &count);
    MPI_Comm_group(MPI_COMM_WORLD, &all);
    if (count > 0) MPI_Group_translate_ranks(failed, 1, &first, all, &rank);
#endif
    return rank;
}

const Program* running_program = nullptr;  // for `handle_mpi_error`, which MPI calls without it

// MPI calls this error handler when one of its functions fails.
void handle_mpi_error(MPI_Comm*, int* code, ...) {
    int self = 0, length = 0;
    char message[MPI_MAX_ERROR_STRING] = "";
    MPI_Comm_rank(MPI_COMM_WORLD, &self);
    MPI_Error_string(*code, message, &length);
    const auto failed = find_failed_rank();
    const auto reason = failed < 0 ? message : "another rank has ended and closed its connection to this rank";
    abort_all(describe_rank(*running_program, self), reason + describe_suspect(*running_program, failed),
              std::chrono::milliseconds{300});
}

void install_error_handler(const Program& program) {
    MPI_Errhandler handler;
    running_program = &program;
    MPI_Comm_create_errhandler(handle_mpi_error, &handler);
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, handler);
}

// Returns a copy of the program with only the roles (normal plan, replicas or failure plans) that the options select.
Program select_roles(Program program, const Options& options) {
    for (auto& rank : program.ranks) {
        const auto all = rank.roles.size();
        const auto regular = program.regular_roles != 0 ? program.regular_roles : all;
        const auto count = options.roles != 0 ? options.roles : regular;
        if (options.first_role + count > all) {
            throw Error("option --roles: the program has only " + std::to_string(all) + " roles");
        }
        const auto first = rank.roles.begin() + static_cast<std::ptrdiff_t>(options.first_role);
        rank.roles = {first, first + static_cast<std::ptrdiff_t>(count)};
    }
    return program;
}

// Checks that the files of all ranks have the same artifact digest, which is empty for ranks of failed devices.
void check_artifact_digests(const Program& program, const std::string& own) {
    constexpr std::size_t DIGEST_CHARS = 64;
    std::string all(DIGEST_CHARS * program.ranks.size(), ' ');
    std::string padded = own;
    padded.resize(DIGEST_CHARS, ' ');
    MPI_Allgather(padded.data(), DIGEST_CHARS, MPI_CHAR, &all[0], DIGEST_CHARS, MPI_CHAR, MPI_COMM_WORLD);
    std::size_t first = 0;
    for (std::size_t i = 1; i < program.ranks.size(); ++i) {
        if (all[i * DIGEST_CHARS] == ' ') continue;
        if (first == 0 && all[0] == ' ') first = i;
        if (all.compare(i * DIGEST_CHARS, DIGEST_CHARS, all, first * DIGEST_CHARS, DIGEST_CHARS) != 0) {
            throw Error("the files of " + describe_rank(program, static_cast<int>(i)) + " and of " +
                        describe_rank(program, static_cast<int>(first)) +
                        " are of different artifacts: copy the same one to both");
        }
    }
}

// Pins this rank to some of this host's cores. Each rank of a host gets the same number of cores.
void pin_to_cores() {
    MPI_Comm host;
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host);
    int index = 0, count = 1;
    MPI_Comm_rank(host, &index);
    MPI_Comm_size(host, &count);
    MPI_Comm_free(&host);
    cpu_set_t allowed, own;
    CPU_ZERO(&own);
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) throw Error("the system does not report its cores");
    std::vector<int> cores;
    for (int core = 0; core < CPU_SETSIZE; ++core) {
        if (CPU_ISSET(core, &allowed)) cores.push_back(core);
    }
    const int total = static_cast<int>(cores.size()), share = std::max(1, total / count);
    for (int i = 0; i < share; ++i) CPU_SET(cores[static_cast<std::size_t>((index * share + i) % total)], &own);
    if (sched_setaffinity(0, sizeof own, &own) != 0) throw Error("the system does not allow to pin this process");
}

// Loads the segments of all roles by file name. A low mmap threshold makes glibc return freed copies of large weights
// to the system at once, instead of keeping their memory.
std::map<std::string, std::unique_ptr<Segment>> load_segments(Engine& engine, const std::vector<Rank>& roles,
                                                              const std::string& directory) {
#ifdef __GLIBC__
    constexpr int LOADING_THRESHOLD = 128 << 10, RUNNING_THRESHOLD = 32 << 20;
    mallopt(M_MMAP_THRESHOLD, LOADING_THRESHOLD);
#endif
    std::map<std::string, std::unique_ptr<Segment>> segments;
    for (const auto& role : roles) {
        for (const auto& run : role.runs) {
            if (segments.count(run.file) != 0) continue;
            segments[run.file] = run.file.empty() ? nullptr : engine.load(directory + "/" + run.file);
        }
    }
#ifdef __GLIBC__
    mallopt(M_MMAP_THRESHOLD, RUNNING_THRESHOLD);
    mallopt(M_TRIM_THRESHOLD, 2 * RUNNING_THRESHOLD);
#endif
    return segments;
}

// Finds the sources (ranks that begin frames), the sinks (ranks that deliver outputs) and the number of frames, which
// ranks without inputs do not know.
FrameFlow make_flow(const Program& program, const Options& options, std::size_t input_files) {
    FrameFlow flow{{}, {}, options.frames, options.in_flight, options.timeout_s};
    for (std::size_t i = 0; i < program.ranks.size(); ++i) {
        bool is_source = false, is_sink = false;
        for (const auto& role : describe(program.ranks[i])) {
            is_source = is_source || !role.inputs.empty() || (!role.steps.empty() && role.receives.empty());
            is_sink = is_sink || !role.outputs.empty();
        }
        if (is_source) flow.sources.push_back(static_cast<int>(i));
        if (is_sink) flow.sinks.push_back(static_cast<int>(i));
    }
    if (flow.in_flight == 0) flow.in_flight = std::min<std::size_t>(3 * program.ranks.size(), 1024);
    unsigned long long own_count = input_files, max_count = 0;
    MPI_Allreduce(&own_count, &max_count, 1, MPI_UNSIGNED_LONG_LONG, MPI_MAX, MPI_COMM_WORLD);
    if (flow.frames == 0) flow.frames = std::max<std::size_t>(1, static_cast<std::size_t>(max_count));
    flow.in_flight = std::min(flow.in_flight, flow.frames);
    return flow;
}

// The work of this rank in a run.
struct RankTask {
    const Program& program;
    const Options& options;
    int self;
    const Device& device;
    std::vector<Rank> roles;
    int threads;
};

// Exchanges all frames with other ranks. After a failure, prints the reason and ends all ranks.
ExchangeTimes exchange_or_abort(const RankTask& task, const FrameFlow& flow,
                                std::vector<std::unique_ptr<FrameBuffers>>& buffers, StepExecutor& executor,
                                OutputWriter& outputs) {
    try {
        return exchange(task.roles, flow, buffers, executor, stop_requested);
    } catch (const Stopped&) {
        outputs.discard();
        std::signal(SIGTERM, SIG_DFL);
        std::raise(SIGTERM);
    } catch (const Error& error) {
        // The executor's thread is not joined, because it may still compute a long segment.
        outputs.discard();
        abort_all(describe_rank(task.program, task.self), error.what() + describe_suspect(task.program, error.peer),
                  std::chrono::milliseconds{1500});
    }
    return {};
}

// Loads segments, makes buffers, waits until all ranks have done so, and executes the frames.
ExecutionTimes execute_frames(const RankTask& task, DeviceFiles& files, const FrameFlow& flow, FrameInputs& inputs,
                              OutputWriter& outputs, ExchangeTimes& exchange_times) {
    const auto directory = task.options.data + "/" + task.device.name;
    const auto has_transfers = [](const Rank& rank) { return !rank.receives.empty() || !rank.sends.empty(); };
    const auto engine =
        make_engine({task.threads, task.program.optimization, task.device.gpu ? task.program.provider : "",
                     std::any_of(task.roles.begin(), task.roles.end(), has_transfers), task.program.ncnn_version});
    std::map<std::string, std::unique_ptr<Segment>> loaded;
    try {
        loaded = load_segments(*engine, task.roles, directory);
    } catch (const Error&) {
        files.check();  // Throws an error that names the file, if a damaged file is the cause.
        throw;
    }
    files.check();
    std::vector<std::vector<Segment*>> segments(task.roles.size());
    for (std::size_t i = 0; i < task.roles.size(); ++i) {
        for (const auto& run : task.roles[i].runs) segments[i].push_back(loaded.at(run.file).get());
    }
    auto buffers = make_frame_buffers(task.roles, flow.in_flight, segments);
    const auto deliver = [&](std::size_t frame, const Tensor& tensor, const std::string& file) {
        outputs.write(frame, tensor, file);
    };
    StepExecutor executor(task.roles, buffers, inputs, deliver, flow.frames - 1, task.options.min_seconds);
    wait_at_barrier();
    // Ranks leave wait_at_barrier() at slightly different times, because it sleeps. MPI_Barrier does not.
    MPI_Barrier(MPI_COMM_WORLD);
    exchange_times = exchange_or_abort(task, flow, buffers, executor, outputs);
    return executor.stop();
}

void run_rank(const Program& program, const Options& options, int self) {
    const auto& device = program.ranks[static_cast<std::size_t>(self)];
    const int threads = options.threads > 0 ? std::min(options.threads, device.threads) : device.threads;
    const RankTask task{program, options, self, device, describe(device), threads};
    bool has_steps = false, has_inputs = false, has_outputs = false, has_states = false;
    for (const auto& role : task.roles) {
        has_steps = has_steps || !role.steps.empty();
        has_inputs = has_inputs || !role.inputs.empty();
        has_outputs = has_outputs || !role.outputs.empty();
        has_states = has_states || !role.states.empty();
    }
    const bool has_files = options.roles == 0 || has_steps || has_inputs || has_outputs;
    const auto files = has_files ? std::make_unique<DeviceFiles>(options.data + "/" + device.name) : nullptr;
    check_artifact_digests(program, has_files ? files->artifact_digest() : "");
    if (has_inputs && options.inputs.empty()) throw Error("there are no inputs: name a file or directory (--inputs)");
    FrameInputs inputs(program, has_inputs || has_states ? options.inputs : "");
    const auto flow = make_flow(program, options, inputs.file_count());
    if (options.pin) pin_to_cores();
    OutputWriter outputs(has_outputs ? options.outputs : "", device.name, options.kept_frames, options.partial);
    ExchangeTimes exchange_times;
    ExecutionTimes execution_times;
    if (has_steps) {
        execution_times = execute_frames(task, *files, flow, inputs, outputs, exchange_times);
    } else {
        if (has_files) files->check();
        wait_at_barrier();
        MPI_Barrier(MPI_COMM_WORLD);
    }
    wait_at_barrier();
    outputs.publish();
    const int lead = flow.sources.front();
    const auto lead_times = share_lead_times(lead, exchange_times);
    const auto queue_waits =
        reduce_queue_waits(self, exchange_times, execution_times, flow.frames, lead, lead_times.start);
    const auto report = make_report(self, device, threads, exchange_times, execution_times, lead_times.last_frame);
    print_reports(self, report, exchange_times, queue_waits, lead);
}

}  // namespace

int run_program(const Program& program, int argc, char** argv) {
    // The kernel kills this process when its parent ends. A small timer slack (in ns) makes short sleeps precise.
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    prctl(PR_SET_TIMERSLACK, 1000);
    int provided = 0, self = 0, count = 0;
    MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &provided);
    MPI_Comm_rank(MPI_COMM_WORLD, &self);
    MPI_Comm_size(MPI_COMM_WORLD, &count);
    std::signal(SIGTERM, request_stop);
    std::string rank = "rank " + std::to_string(self);
    try {
        const auto options = parse_options(argc, argv);
        if (options.help) {
            if (self == 0) std::fputs(USAGE, stdout);
            MPI_Finalize();
            return 0;
        }
        if (count != static_cast<int>(program.ranks.size())) {
            if (self == 0) {
                const auto needed = program.ranks.size();
                std::fprintf(stderr, "dicompiler: %d ranks were started, this program has %zu: use mpirun -n %zu\n",
                             count, needed, needed);
            }
            MPI_Finalize();
            return 2;
        }
        rank = describe_rank(program, self);
        install_error_handler(program);
        run_rank(select_roles(program, options), options, self);
    } catch (const std::exception& error) {
        // During the delay, mpirun forwards the message before it learns of the abort.
        abort_all(rank, error.what(), std::chrono::milliseconds{100});
    }
    MPI_Finalize();
    return 0;
}

}  // namespace dicompiler
