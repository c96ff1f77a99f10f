// Checks a device's files against contents.txt.
#pragma once

#include <future>
#include <string>

namespace dicompiler {

// The files of a device as contents.txt lists them: the artifact's digest, one line for each file (bytes, digest,
// name), and finally the SHA-256 of these lines.
//
// The check finds damage, not tampering. artifact.json has the same digests: "sha256:", and "crc32:" for large files,
// which is several times faster. A background thread computes them while the segments are loaded.
class DeviceFiles {
public:
    // Reads the list, checks that all files exist with the listed sizes, and starts to compute their digests.
    // Throws Error that names the file.
    explicit DeviceFiles(const std::string& directory);

    const std::string& artifact_digest() const { return artifact_digest_; }
    // Waits until all files have been read. Throws Error for a file whose content differs from the list.
    void check() { checked_.get(); }

private:
    std::string artifact_digest_;
    std::future<void> checked_;
};

// Returns the SHA-256 of the bytes as hexadecimal digits.
std::string sha256(const std::string& bytes);

}  // namespace dicompiler
