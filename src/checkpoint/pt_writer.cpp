#include <fmt/format.h>

#include <algorithm>

#include "checkpoint/weights_file.h"
#include "checkpoint/zip_writer.h"
#include "core/files/byte_writer.h"

namespace kiln {
namespace {

// By Dtype.
constexpr const char* kStorageNames[] = {"BoolStorage",  "ByteStorage",  "CharStorage", "ShortStorage",
                                         "IntStorage",   "LongStorage",  "HalfStorage", "BFloat16Storage",
                                         "FloatStorage", "DoubleStorage"};

// Protocol 2, as torch.save writes it: an OrderedDict of _rebuild_tensor_v2 calls on storages 0, 1, 2...
class PickleWriter {
 public:
  PickleWriter() { out_.text("\x80\x02"); }

  void string(std::string_view value) { out_.text("X").u32(value.size()).text(value); }
  void empty_dict() { out_.text("}"); }
  void begin_items() { out_.text("("); }
  void end_items() { out_.text("u"); }

  void state_dict(const std::vector<NamedTensor>& tensors) {
    out_.text("ccollections\nOrderedDict\n)R");
    begin_items();
    for (const NamedTensor& tensor : tensors) {
      string(tensor.name);
      this->tensor(tensor.view);
    }
    end_items();
  }

  std::string finish() { return out_.text(".").bytes(); }

 private:
  void integer(int64_t value) { out_.text("\x8a\x08").u64(static_cast<uint64_t>(value)); }
  void tensor(const TensorView& view) {
    out_.text("ctorch._utils\n_rebuild_tensor_v2\n((");
    string("storage");
    out_.text(fmt::format("ctorch\n{}\n", kStorageNames[static_cast<size_t>(view.dtype)]));
    string(std::to_string(num_storages_++));
    string("cpu");
    integer(static_cast<int64_t>(view.bytes.size() / dtype_size(view.dtype)));
    out_.text("tQ");
    integer(0);
    out_.text("(");
    for (const int64_t size : view.shape) integer(size);
    out_.text("t(");
    std::vector<int64_t> strides(view.shape.size(), 1);
    for (std::size_t i = strides.size(); i-- > 1;)
      strides[i - 1] = strides[i] * std::max<int64_t>(view.shape[i], 1);
    for (const int64_t stride : strides) integer(stride);
    out_.text(
        "t\x89"
        "ccollections\nOrderedDict\n)RtR");
  }

  ByteWriter out_;
  std::size_t num_storages_ = 0;
};

std::string make_pickle(const std::vector<PtGroup>& groups) {
  PickleWriter pickle;
  if (groups.size() == 1 && groups[0].name.empty()) {
    pickle.state_dict(groups[0].tensors);
    return pickle.finish();
  }
  pickle.empty_dict();
  pickle.begin_items();
  for (const PtGroup& group : groups) {
    pickle.string(group.name);
    pickle.state_dict(group.tensors);
  }
  pickle.end_items();
  return pickle.finish();
}

}  // namespace

void write_pt(const std::string& path, const std::vector<PtGroup>& groups) {
  ZipWriter zip("pt", path);
  zip.add("archive/data.pkl", make_pickle(groups));
  zip.add("archive/byteorder", "little");
  std::size_t num_storages = 0;
  for (const PtGroup& group : groups)
    for (const NamedTensor& tensor : group.tensors)
      zip.add(fmt::format("archive/data/{}", num_storages++), tensor.view.bytes);
  zip.add("archive/version", "3\n");
  zip.commit();
}

}  // namespace kiln
