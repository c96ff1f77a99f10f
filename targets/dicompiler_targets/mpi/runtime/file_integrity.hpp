// Checks a device's files against contents.txt.
#pragma once

#include <future>
#include <string>

namespace dicompiler {

// The files of a device, which are listed in its contents.txt: the digest of the artifact; bytes, digest and name of
// each file; and the SHA-256 of all lines before.
//
// A digest is "sha256:…", or "crc32:…" for a large file, because CRC-32 is several times faster. The check finds
// damaged files; it does not protect against attacks. A thread computes the digests while segments are loaded.
class DeviceFiles {
public:
    // Reads contents.txt, checks that all files exist with the listed sizes, and starts to compute their digests.
    // Throws Error with the name of a wrong file.
    explicit DeviceFiles(const std::string& directory);

    const std::string& artifact_digest() const { return artifact_digest_; }
    // Waits until all digests have been computed. Throws Error with the name of a file whose digest is wrong.
    void check() { checked_.get(); }

private:
    std::string artifact_digest_;
    std::future<void> checked_;
};

// Returns the SHA-256 of the bytes as hexadecimal digits.
std::string sha256(const std::string& bytes);

}  // namespace dicompiler
