#include "checkpoint/background_write.h"

#include <algorithm>
#include <utility>

namespace kiln {

BackgroundWrite::BackgroundWrite(FileParts files, std::vector<FilePart> parts)
    : files_(std::move(files)), parts_(std::move(parts)), thread_([this] { run(); }) {}

BackgroundWrite::~BackgroundWrite() {
  given_up_ = true;
  wait();
}

const std::string& BackgroundWrite::wait() {
  if (thread_.joinable()) thread_.join();
  return error_;
}

void BackgroundWrite::run() {
  constexpr size_t kChunk = size_t{64} << 20;  // between two looks at given_up_
  try {
    for (const FilePart& part : parts_)
      for (size_t begin = 0; begin < part.bytes.size() && !given_up_; begin += kChunk)
        files_.write(part.file, part.offset + begin,
                     part.bytes.subspan(begin, std::min(kChunk, part.bytes.size() - begin)));
    if (!given_up_) files_.sync();
  } catch (const std::exception& error) {
    error_ = error.what();
  }
  done_ = true;
}

}  // namespace kiln
