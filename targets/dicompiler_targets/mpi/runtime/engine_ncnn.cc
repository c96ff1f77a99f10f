// Implements the engine interface with ncnn. The blobs (tensors) of a network are named in0, in1, … and out0, out1, …,
// in the order of the inputs and outputs of Rank::run. ncnn has no batch axis, so tensors of shape (1, …) are passed
// without their first axis.
#include <ncnn/cpu.h>
#include <ncnn/net.h>
#include <ncnn/platform.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <fstream>

#include "engine.hpp"

// The linker replaces posix_memalign by __wrap_posix_memalign (option --wrap in CMakeLists.txt). ncnn allocates weights
// with it. In huge pages, fewer accesses to large weights miss the processor's address cache (TLB).
extern "C" {
int __real_posix_memalign(void** memory, std::size_t alignment, std::size_t bytes);

int __wrap_posix_memalign(void** memory, std::size_t alignment, std::size_t bytes) {
    constexpr std::size_t HUGE_PAGE_BYTES = 2 << 20;
    if (bytes < 2 * HUGE_PAGE_BYTES) return __real_posix_memalign(memory, alignment, bytes);
    const auto code = __real_posix_memalign(memory, std::max(alignment, HUGE_PAGE_BYTES), bytes);
    if (code == 0) madvise(*memory, bytes, MADV_HUGEPAGE);  // Without huge pages, the memory is used as it is.
    return code;
}
}

namespace dicompiler {
namespace {

constexpr std::size_t MAT_ALIGNMENT_BYTES = 16;  // each channel of an ncnn::Mat begins at a multiple of it
constexpr std::size_t MAX_MAT_DIMS = 3;

struct BlobShape {
    int dims, width, height, channels;

    std::size_t plane() const { return static_cast<std::size_t>(width) * static_cast<std::size_t>(height); }
};

// Returns the shape of the blob for a tensor. Throws Error if ncnn has no such blob.
BlobShape shape_of_blob(const std::string& path, const Tensor& tensor) {
    const auto& shape = tensor.shape;
    const auto dims = shape.size() - 1;
    if (tensor.type != Type::float32 || shape.empty() || shape[0] != 1 || dims < 1 ||
        dims > MAX_MAT_DIMS) {
        throw Error(path + ": its tensor '" + tensor.name + "' of shape " + to_string(shape) + " cannot be in ncnn");
    }
    const auto size = [&](std::size_t from_last) {
        return from_last < dims ? static_cast<int>(shape[shape.size() - 1 - from_last]) : 1;
    };
    return {static_cast<int>(dims), size(0), size(1), size(2)};
}

// Returns a blob with memory of its own, or a view of `data`.
ncnn::Mat make_mat(const BlobShape& shape, void* data = nullptr) {
    const auto [dims, width, height, channels] = shape;
    if (dims == 1) return data == nullptr ? ncnn::Mat(width) : ncnn::Mat(width, data);
    if (dims == 2) return data == nullptr ? ncnn::Mat(width, height) : ncnn::Mat(width, height, data);
    return data == nullptr ? ncnn::Mat(width, height, channels) : ncnn::Mat(width, height, channels, data);
}

// Copies channels between a contiguous tensor and a blob, in which channels are aligned.
template <typename Copy>
void for_each_channel(const BlobShape& shape, std::size_t channel_stride, const Copy& copy) {
    for (std::size_t i = 0; i < static_cast<std::size_t>(shape.channels); ++i) {
        copy(i * shape.plane(), i * channel_stride, shape.plane() * sizeof(float));
    }
}

class NcnnBoundSegment : public BoundSegment {
public:
    NcnnBoundSegment(const ncnn::Net& net, std::string path, const std::vector<Tensor*>& inputs,
                     const std::vector<Tensor*>& outputs)
        : net_(net), path_(std::move(path)) {
        for (auto* tensor : inputs) inputs_.push_back({tensor, "in" + std::to_string(inputs_.size())});
        for (auto* tensor : outputs) outputs_.push_back({tensor, "out" + std::to_string(outputs_.size())});
    }

    void run() override {
        auto extractor = net_.create_extractor();
        for (const auto& input : inputs_) {
            if (extractor.input(input.name.c_str(), make_input(input)) != 0) fail(input);
        }
        for (const auto& output : outputs_) {
            ncnn::Mat mat;
            const auto shape = shape_of_blob(path_, *output.tensor);
            const auto code = extractor.extract(output.name.c_str(), mat);
            if (code != 0 || mat.dims != shape.dims || mat.w != shape.width || mat.h != shape.height ||
                mat.c != shape.channels || mat.elemsize != sizeof(float)) {
                fail(output);
            }
            const auto* const source = static_cast<const float*>(mat.data);
            auto* const target = static_cast<float*>(output.tensor->data);
            for_each_channel(shape, mat.cstep, [&](std::size_t ours, std::size_t theirs, std::size_t bytes) {
                std::memcpy(target + ours, source + theirs, bytes);
            });
        }
    }

private:
    struct Binding {
        Tensor* tensor;
        std::string name;
    };

    // Returns a view of the tensor if its channels are as aligned as in a blob, or else a copy. Type and shape are
    // checked for each frame, because those of a network input are known only after the frame has been read.
    ncnn::Mat make_input(const Binding& input) {
        const auto shape = shape_of_blob(path_, *input.tensor);
        auto* const data = static_cast<float*>(input.tensor->data);
        const auto is_aligned = reinterpret_cast<std::uintptr_t>(data) % MAT_ALIGNMENT_BYTES == 0;
        if (is_aligned && (shape.dims < 3 || shape.plane() * sizeof(float) % MAT_ALIGNMENT_BYTES == 0)) {
            auto view = make_mat(shape, data);
            // With a reference count above 1, a layer that works in place copies the blob first instead of changing the
            // tensor.
            view.refcount = &view_count_;
            NCNN_XADD(&view_count_, 1);
            return view;
        }
        auto mat = make_mat(shape);
        auto* const target = static_cast<float*>(mat.data);
        for_each_channel(shape, mat.cstep, [&](std::size_t ours, std::size_t theirs, std::size_t bytes) {
            std::memcpy(target + theirs, data + ours, bytes);
        });
        return mat;
    }

    [[noreturn]] void fail(const Binding& binding) const {
        throw Error(path_ + ": ncnn cannot run it: tensor '" + binding.tensor->name + "' of shape " +
                    to_string(binding.tensor->shape) + " does not match " + binding.name);
    }

    const ncnn::Net& net_;
    std::string path_;
    std::vector<Binding> inputs_, outputs_;
    // The reference count of the views: one more than their number, so that ncnn never frees the memory of a tensor.
    int view_count_ = 1;
};

// Returns the precision that the last line of a segment's file states ("precision=bf16"); "fp32" if it states none.
std::string read_precision(const std::string& path) {
    const std::string key = "precision=";
    std::ifstream file(path);
    std::string line, last;
    while (std::getline(file, line)) last = line;
    return last.compare(0, key.size(), key) == 0 ? last.substr(key.size()) : "fp32";
}

// Without these features in the library or the processor, ncnn would ignore the options and compute in fp32.
#if NCNN_BF16
constexpr bool HAS_BF16 = true;
#else
constexpr bool HAS_BF16 = false;
#endif

bool has_fp16() {
#if defined(__x86_64__)
    return NCNN_F16C && ncnn::cpu_support_x86_f16c() != 0;
#else
    return NCNN_ARM82 && ncnn::cpu_support_arm_asimdhp() != 0;
#endif
}

// Throws Error if the library or the processor cannot compute with this precision.
void check_precision(const std::string& path, const std::string& precision) {
    if (precision == "bf16" && !HAS_BF16) {
        throw Error(path + ": this ncnn has no bf16: build it with -DNCNN_BF16=ON, or compile with --precision fp32");
    }
    if (precision == "fp16" && !has_fp16()) {
        throw Error(path + ": ncnn or the processor has no fp16: compile with --precision bf16 or fp32");
    }
    if (precision != "bf16" && precision != "fp16" && precision != "fp32") {
        throw Error(path + ": ncnn does not know the precision '" + precision + "': expected fp32, fp16 or bf16");
    }
}

class NcnnSegment : public Segment {
public:
    NcnnSegment(const std::string& path, const ncnn::Option& options) : path_(path) {
        const auto precision = read_precision(path);
        check_precision(path, precision);
        net_.opt = options;
        // By default, ncnn rounds values to 16 bits if the processor supports it, so these options are set explicitly.
        const auto is_fp16 = precision == "fp16";
        net_.opt.use_fp16_packed = net_.opt.use_fp16_storage = net_.opt.use_fp16_arithmetic = is_fp16;
        net_.opt.use_bf16_storage = precision == "bf16";
        const auto weights = path.substr(0, path.rfind('.')) + ".bin";
        if (net_.load_param(path.c_str()) != 0) throw Error(path + " cannot be loaded: ncnn does not know a layer");
        if (net_.load_model(weights.c_str()) != 0) throw Error(weights + " cannot be loaded");
    }

    std::unique_ptr<BoundSegment> bind(const std::vector<Tensor*>& inputs,
                                       const std::vector<Tensor*>& outputs) override {
        return std::make_unique<NcnnBoundSegment>(net_, path_, inputs, outputs);
    }

private:
    std::string path_;
    ncnn::Net net_;
};

class NcnnEngine : public Engine {
public:
    explicit NcnnEngine(const EngineOptions& options) {
        options_.num_threads = options.threads;
        if (options.yields) options_.openmp_blocktime = 0;
    }

    std::unique_ptr<Segment> load(const std::string& path) override {
        return std::make_unique<NcnnSegment>(path, options_);
    }

private:
    ncnn::Option options_;
};

}  // namespace

std::unique_ptr<Engine> make_ncnn(const EngineOptions& options) {
    if (options.ncnn_version != NCNN_VERSION_STRING) {
        throw Error("the files were made for ncnn " + options.ncnn_version + ", this program has " NCNN_VERSION_STRING
                    ": build it with ncnn " + options.ncnn_version + ", or compile the model again with 'pip install "
                    "ncnn==" NCNN_VERSION_STRING "'");
    }
    return std::make_unique<NcnnEngine>(options);
}

}  // namespace dicompiler
