// Digests of files, against the list that came with them.
#pragma once

#include <future>
#include <string>

namespace dicompiler {

// What holds a device's files: contents.txt with the artifact's digest, then a line for each file (bytes, digest,
// name), and in the end the SHA-256 of all this.
//
// Damage is all that is looked for here. Digests are those that artifact.json has of the same files, so that the two
// cannot disagree: `sha256:`, and for weights `lanes:` (docs/formats.md), which costs a third of it or less. They are taken in a
// thread beside the loading of the segments.
class Contents {
public:
    // Reads the list and looks whether all files are there with their sizes; from then on their digests are taken.
    // Throws Error that names the file.
    explicit Contents(const std::string& directory);

    const std::string& digest() const { return digest_; }
    // Waits until all files were read; throws Error for one that holds something else than what was compiled.
    void check() { checked_.get(); }

private:
    std::string digest_;
    std::future<void> checked_;
};

// Of some bytes, in hexadecimal digits.
std::string sha256(const std::string& bytes);

}  // namespace dicompiler
