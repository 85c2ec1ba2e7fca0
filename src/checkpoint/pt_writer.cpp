#include <algorithm>
#include <limits>

#include "checkpoint/weights_file.h"
#include "checkpoint/zip_view.h"
#include "core/error.h"
#include "core/files/atomic_file.h"

namespace kiln {
namespace {

constexpr uint64_t kStorageAlignment = 64;  // as torch.save aligns storages, so that they can be mapped
constexpr uint64_t kMax32 = std::numeric_limits<uint32_t>::max();

// Little-endian bytes of numbers and texts.
class Bytes {
 public:
  template <class T>
  void number(T value) {
    for (std::size_t i = 0; i < sizeof(T); ++i) text_.push_back(static_cast<char>(value >> (8 * i)));
  }
  void text(std::string_view value) { text_ += value; }
  const std::string& str() const { return text_; }

 private:
  std::string text_;
};

// Writes a zip archive of stored members, each with its size and checksum in front. Uses zip64 where a size
// or an offset needs it.
class ZipWriter {
 public:
  explicit ZipWriter(const std::string& path) : file_("pt", path) {}

  void add(const std::string& name, std::span<const std::byte> content) {
    Member member{name, zip_crc(content), content.size(), file_.size()};
    const bool is_large = member.size > kMax32;
    Bytes header;
    header.number<uint32_t>(0x04034b50);
    common_fields(header, member, is_large, is_large);
    header.number<uint16_t>(static_cast<uint16_t>(name.size()));
    Bytes extra;
    if (is_large) {
      extra.number<uint16_t>(1);
      extra.number<uint16_t>(16);
      extra.number<uint64_t>(member.size);
      extra.number<uint64_t>(member.size);
    }
    // A padding field ("FB", as torch uses) moves the content to the next boundary.
    const uint64_t content_at = file_.size() + 30 + name.size() + extra.str().size() + 4;
    const uint64_t padding = (kStorageAlignment - content_at % kStorageAlignment) % kStorageAlignment;
    extra.text("FB");
    extra.number<uint16_t>(static_cast<uint16_t>(padding));
    extra.text(std::string(padding, 'Z'));
    header.number<uint16_t>(static_cast<uint16_t>(extra.str().size()));
    header.text(name);
    header.text(extra.str());
    file_.write(header.str());
    file_.write(content);
    members_.push_back(std::move(member));
  }
  void add(const std::string& name, std::string_view content) {
    add(name, std::as_bytes(std::span(content.data(), content.size())));
  }

  void commit() {
    const uint64_t directory_at = file_.size();
    for (const Member& member : members_) write_directory_entry(member);
    write_end(directory_at, file_.size() - directory_at);
    file_.commit();
  }

 private:
  struct Member {
    std::string name;
    uint32_t crc;
    uint64_t size, offset;
  };

  // Writes the fields that the local header and the directory entry share, from the version on.
  static void common_fields(Bytes& out, const Member& member, bool needs_zip64, bool size_in_extra) {
    out.number<uint16_t>(needs_zip64 ? 45 : 20);
    out.number<uint16_t>(0x0800);  // names are UTF-8
    out.number<uint16_t>(0);       // stored
    out.number<uint16_t>(0);       // no time: the same input gives the same bytes
    out.number<uint16_t>(0x21);    // 1980-01-01, the earliest date
    out.number<uint32_t>(member.crc);
    const auto size = static_cast<uint32_t>(size_in_extra ? kMax32 : member.size);
    out.number<uint32_t>(size);
    out.number<uint32_t>(size);
  }

  void write_directory_entry(const Member& member) {
    const bool large_size = member.size > kMax32, large_offset = member.offset > kMax32;
    Bytes extra;
    if (large_size || large_offset) {
      extra.number<uint16_t>(1);
      extra.number<uint16_t>(static_cast<uint16_t>((large_size ? 16 : 0) + (large_offset ? 8 : 0)));
      if (large_size) extra.number<uint64_t>(member.size);
      if (large_size) extra.number<uint64_t>(member.size);
      if (large_offset) extra.number<uint64_t>(member.offset);
    }
    Bytes entry;
    entry.number<uint32_t>(0x02014b50);
    entry.number<uint16_t>(45);  // made by
    common_fields(entry, member, large_size || large_offset, large_size);
    entry.number<uint16_t>(static_cast<uint16_t>(member.name.size()));
    entry.number<uint16_t>(static_cast<uint16_t>(extra.str().size()));
    entry.number<uint16_t>(0);  // comment
    entry.number<uint16_t>(0);  // disk
    entry.number<uint16_t>(0);  // attributes
    entry.number<uint32_t>(0);
    entry.number<uint32_t>(static_cast<uint32_t>(std::min(member.offset, kMax32)));
    entry.text(member.name);
    entry.text(extra.str());
    file_.write(entry.str());
  }

  void write_end(uint64_t directory_at, uint64_t directory_bytes) {
    const uint64_t end_at = file_.size(), num_members = members_.size();
    Bytes end;
    if (directory_at > kMax32 || num_members >= 0xffff) {
      end.number<uint32_t>(0x06064b50);
      end.number<uint64_t>(44);  // bytes that follow
      end.number<uint16_t>(45);
      end.number<uint16_t>(45);
      end.number<uint32_t>(0);
      end.number<uint32_t>(0);
      end.number<uint64_t>(num_members);
      end.number<uint64_t>(num_members);
      end.number<uint64_t>(directory_bytes);
      end.number<uint64_t>(directory_at);
      end.number<uint32_t>(0x07064b50);
      end.number<uint32_t>(0);
      end.number<uint64_t>(end_at);
      end.number<uint32_t>(1);
    }
    end.number<uint32_t>(0x06054b50);
    end.number<uint32_t>(0);
    end.number<uint16_t>(static_cast<uint16_t>(std::min<uint64_t>(num_members, 0xffff)));
    end.number<uint16_t>(static_cast<uint16_t>(std::min<uint64_t>(num_members, 0xffff)));
    end.number<uint32_t>(static_cast<uint32_t>(std::min(directory_bytes, kMax32)));
    end.number<uint32_t>(static_cast<uint32_t>(std::min(directory_at, kMax32)));
    end.number<uint16_t>(0);
    file_.write(end.str());
  }

  AtomicFile file_;
  std::vector<Member> members_;
};

std::string_view storage_type(Dtype dtype) {
  switch (dtype) {
    case Dtype::kBool:
      return "BoolStorage";
    case Dtype::kU8:
      return "ByteStorage";
    case Dtype::kI8:
      return "CharStorage";
    case Dtype::kI16:
      return "ShortStorage";
    case Dtype::kI32:
      return "IntStorage";
    case Dtype::kI64:
      return "LongStorage";
    case Dtype::kF16:
      return "HalfStorage";
    case Dtype::kBF16:
      return "BFloat16Storage";
    case Dtype::kF32:
      return "FloatStorage";
    case Dtype::kF64:
      return "DoubleStorage";
  }
  throw std::logic_error("storage_type: not a Dtype");
}

// Protocol 2, as torch.save writes it: an OrderedDict of _rebuild_tensor_v2 calls on storages 0, 1, 2...
class PickleWriter {
 public:
  PickleWriter() { out_.text("\x80\x02"); }

  void string(std::string_view value) {
    out_.text("X");
    out_.number<uint32_t>(static_cast<uint32_t>(value.size()));
    out_.text(value);
  }
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

  std::string finish() {
    out_.text(".");
    return out_.str();
  }

 private:
  void integer(int64_t value) {
    out_.text("\x8a\x08");
    out_.number<int64_t>(value);
  }
  void tensor(const TensorView& view) {
    out_.text("ctorch._utils\n_rebuild_tensor_v2\n((");
    string("storage");
    out_.text(fmt::format("ctorch\n{}\n", storage_type(view.dtype)));
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

  Bytes out_;
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
  ZipWriter zip(path);
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
