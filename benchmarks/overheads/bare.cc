// Runs a network in ONNX Runtime's C++ API with its defaults: bare MODEL THREADS FRAMES prints the seconds of each
// frame. The network has one float input, which is filled with 0.5. overhead.py compares the target `mpi` with this
// program.
#include <onnxruntime_cxx_api.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>

int main(int argc, char** argv) {
    if (argc != 4) return 2;
    const Ort::Env env;
    Ort::SessionOptions options;
    options.SetIntraOpNumThreads(std::atoi(argv[2]));
    Ort::Session session(env, argv[1], options);
    Ort::AllocatorWithDefaultOptions allocator;
    const auto in = session.GetInputNameAllocated(0, allocator), out = session.GetOutputNameAllocated(0, allocator);
    const auto shape = session.GetInputTypeInfo(0).GetTensorTypeAndShapeInfo().GetShape();
    auto input = Ort::Value::CreateTensor<float>(allocator, shape.data(), shape.size());
    const auto count = input.GetTensorTypeAndShapeInfo().GetElementCount();
    for (std::size_t i = 0; i < count; ++i) input.GetTensorMutableData<float>()[i] = 0.5f;
    const char *inputs[] = {in.get()}, *outputs[] = {out.get()};
    for (int frame = std::atoi(argv[3]); frame-- > 0;) {
        const auto start = std::chrono::steady_clock::now();
        session.Run(Ort::RunOptions{nullptr}, inputs, &input, 1, outputs, 1);
        std::printf("%.9f\n", std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
}
