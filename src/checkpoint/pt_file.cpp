#include "checkpoint/weights_file.h"

#include <array>
#include <cstring>
#include <deque>
#include <initializer_list>
#include <optional>

#include "checkpoint/pickle.h"
#include "checkpoint/zip_view.h"
#include "core/error.h"
#include "core/files/mapped_file.h"
#include "core/text/some_of.h"

namespace kiln {
namespace {

struct StorageType {
  std::string_view name;
  Dtype dtype;
};
constexpr std::array<StorageType, 10> kStorageTypes = {{{"torch.FloatStorage", Dtype::kF32},
                                                        {"torch.HalfStorage", Dtype::kF16},
                                                        {"torch.BFloat16Storage", Dtype::kBF16},
                                                        {"torch.DoubleStorage", Dtype::kF64},
                                                        {"torch.LongStorage", Dtype::kI64},
                                                        {"torch.IntStorage", Dtype::kI32},
                                                        {"torch.ShortStorage", Dtype::kI16},
                                                        {"torch.CharStorage", Dtype::kI8},
                                                        {"torch.ByteStorage", Dtype::kU8},
                                                        {"torch.BoolStorage", Dtype::kBool}}};

// A tensor as torch describes it: a strided window into a storage.
struct Strided {
  Dtype dtype = Dtype::kF32;
  uint64_t offset = 0;  // elements
  std::vector<int64_t> shape, strides;
  uint64_t num_elements = 1;
};

class PtView : public TensorFile {
 public:
  PtView(std::span<const std::byte> bytes, const std::string& name, bool prefer_ema)
      : name_(name), zip_(open_zip(bytes, name)), max_copied_bytes_(2 * bytes.size()) {
    root_ = find_root();
    check_byte_order();
    check_pickle_size(zip_.member_size(root_ + "data.pkl"), name_);  // before it is unpacked
    const Pickle pickle(zip_.read(root_ + "data.pkl", /*verify=*/true), name_);
    const PickleValue& state_dict = find_state_dict(pickle.root(), prefer_ema);
    for (std::size_t i = 0; i < state_dict.items.size(); i += 2) {
      const PickleValue& key = *state_dict.items[i];
      if (key.kind != PickleValue::Kind::kString)
        fail("pt", "expected a string as key of the state dict, got another type ({})", name_);
      add(key.text, *state_dict.items[i + 1]);
    }
    if (tensors_.empty()) fail("pt", "no tensor found ({}): expected a state dict", name_);
    drop_common_prefix("module.");
    drop_common_prefix("_orig_mod.");
  }

 private:
  static ZipView open_zip(std::span<const std::byte> bytes, const std::string& name) {
    const auto starts_with = [&](std::string_view magic) {
      return bytes.size() >= magic.size() && std::memcmp(bytes.data(), magic.data(), magic.size()) == 0;
    };
    if (starts_with("\x80") || starts_with("ustar"))
      fail("pt",
           "the file is in the format that torch used before 1.6 ({}): load it and save it again in Python, "
           "with torch.load and torch.save",
           name);
    if (!starts_with("PK")) fail("pt", "expected a file of torch.save, got something else ({})", name);
    return ZipView(bytes, name);
  }

  // torch puts everything into one folder of the archive, named after the file.
  std::string find_root() const {
    std::optional<std::string> root;
    for (const std::string& member : zip_.member_names()) {
      if (member != "data.pkl" && !member.ends_with("/data.pkl")) continue;
      const std::string folder = member.substr(0, member.size() - std::strlen("data.pkl"));
      if (!root || folder.size() < root->size()) root = folder;
    }
    if (!root) fail("pt", "no data.pkl in the archive ({}): expected a file of torch.save", name_);
    if (zip_.contains(*root + "constants.pkl"))
      fail("pt", "the file is a TorchScript program ({}): expected a state dict", name_);
    return *root;
  }

  void check_byte_order() {
    if (!zip_.contains(root_ + "byteorder")) return;
    const auto order = zip_.read(root_ + "byteorder", /*verify=*/true);
    if (std::string_view(reinterpret_cast<const char*>(order.data()), order.size()) != "little")
      fail("pt", "the file was written on a big-endian machine ({}): expected little-endian data", name_);
  }

  static bool holds_tensors(const PickleValue& dict) {
    for (std::size_t i = 1; i < dict.items.size(); i += 2)
      if (dict.items[i]->kind == PickleValue::Kind::kCall &&
          dict.items[i]->items[0]->text.starts_with("torch."))
        return true;
    return false;
  }

  const PickleValue& find_state_dict(const PickleValue& top, bool prefer_ema) {
    if (top.kind == PickleValue::Kind::kCall)
      fail("pt", "the file holds an object of class {} ({}): expected a state dict, save model.state_dict()",
           top.items[0]->text, name_);
    if (top.kind != PickleValue::Kind::kDict)
      fail("pt", "expected a dict at the top of the file ({})", name_);
    const auto preference = prefer_ema ? std::array{"ema", "state_dict_ema", "model", "state_dict"}
                                       : std::array{"model", "state_dict", "ema", "state_dict_ema"};
    for (const char* group : preference) {
      const PickleValue* found = top.find(group);
      if (found == nullptr || found->kind != PickleValue::Kind::kDict || !holds_tensors(*found)) continue;
      metadata_["pt_group"] = group;
      return *found;
    }
    if (!holds_tensors(top)) {
      std::vector<std::string> keys;
      for (std::size_t i = 0; i < top.items.size(); i += 2)
        if (top.items[i]->kind == PickleValue::Kind::kString)
          keys.push_back(fmt::format("{:?}", top.items[i]->text));
      fail("pt",
           "no state dict found ({}): expected tensors, or a dict of them under \"ema\", \"model\" or "
           "\"state_dict\"; the file has {}",
           name_, keys.empty() ? "nothing" : some_of(keys));
    }
    metadata_["pt_group"] = "";
    return top;
  }

  void add(const std::string& key, const PickleValue& value) {
    const PickleValue* tensor = &value;
    if (tensor->is_call_of("torch._utils._rebuild_parameter")) {
      const auto& arguments = tensor->items[1]->items;
      if (arguments.empty()) fail("pt", "tensor {:?} is not described ({})", key, name_);
      tensor = arguments[0];
    }
    if (tensor->is_call_of("torch._utils._rebuild_tensor_v2") ||
        tensor->is_call_of("torch._utils._rebuild_tensor"))
      tensors_.insert_or_assign(key, read_tensor(key, tensor->items[1]->items));
    else if (tensor->kind == PickleValue::Kind::kCall && tensor->items[0]->text.starts_with("torch."))
      fail("pt", "tensor {:?} is made by {} ({}): only plain dense tensors are read", key,
           tensor->items[0]->text, name_);
    // Ignores numbers, strings and unknown objects beside the tensors: they are no weights.
  }

  [[noreturn]] void complain(const std::string& key, std::string_view what) const {
    fail("pt", "tensor {:?}: {} ({}): the file is damaged", key, what, name_);
  }

  std::vector<int64_t> read_sizes(const std::string& key, const PickleValue& value) const {
    const PickleValue* sizes = &value;
    if (sizes->is_call_of("torch.Size") && !sizes->items[1]->items.empty()) sizes = sizes->items[1]->items[0];
    if (sizes->kind != PickleValue::Kind::kTuple && sizes->kind != PickleValue::Kind::kList)
      complain(key, "its shape is not a tuple");
    std::vector<int64_t> result;
    for (const PickleValue* size : sizes->items) {
      if (size->kind != PickleValue::Kind::kInt || size->integer < 0)
        complain(key, "its shape or stride is not a number from 0 on");
      result.push_back(size->integer);
    }
    return result;
  }

  // arguments: (storage, offset, size, stride, requires_grad, hooks, ...), of
  // torch._utils._rebuild_tensor_v2.
  TensorView read_tensor(const std::string& key, const std::vector<const PickleValue*>& arguments) {
    if (arguments.size() < 4 || arguments[0]->kind != PickleValue::Kind::kPersistent ||
        arguments[1]->kind != PickleValue::Kind::kInt || arguments[1]->integer < 0)
      complain(key, "its description is incomplete");
    Strided tensor;
    const std::span<const std::byte> storage = read_storage(key, *arguments[0]->items[0], tensor.dtype);
    tensor.offset = static_cast<uint64_t>(arguments[1]->integer);
    tensor.shape = read_sizes(key, *arguments[2]);
    tensor.strides = read_sizes(key, *arguments[3]);
    if (tensor.shape.size() != tensor.strides.size()) complain(key, "its shape and strides differ in length");
    check_bounds(key, tensor, storage.size() / dtype_size(tensor.dtype));
    return {tensor.dtype, tensor.shape, dense_bytes(key, tensor, storage)};
  }

  // description: ("storage", type, member name, device, number of elements).
  std::span<const std::byte> read_storage(const std::string& key, const PickleValue& description,
                                          Dtype& dtype) {
    const auto& items = description.items;
    if (description.kind != PickleValue::Kind::kTuple || items.size() < 5 || items[0]->text != "storage" ||
        items[1]->kind != PickleValue::Kind::kGlobal || items[2]->kind != PickleValue::Kind::kString ||
        items[4]->kind != PickleValue::Kind::kInt)
      complain(key, "its storage is not described");
    const StorageType* type = nullptr;
    for (const StorageType& row : kStorageTypes)
      if (row.name == items[1]->text) type = &row;
    if (type == nullptr)
      fail("pt", "tensor {:?} is stored as {} ({}): expected a float, integer or bool type", key,
           items[1]->text, name_);
    dtype = type->dtype;
    const std::span<const std::byte> bytes = zip_.read(root_ + "data/" + items[2]->text);
    uint64_t num_bytes = 0;
    if (items[4]->integer < 0 ||
        __builtin_mul_overflow(static_cast<uint64_t>(items[4]->integer), dtype_size(dtype), &num_bytes) ||
        num_bytes > bytes.size())
      complain(key, fmt::format("its storage claims {} elements, the file has {} bytes", items[4]->integer,
                                bytes.size()));
    return bytes.first(num_bytes);
  }

  void check_bounds(const std::string& key, Strided& tensor, uint64_t storage_elements) const {
    uint64_t last = tensor.offset;  // the highest element that is touched
    for (std::size_t i = 0; i < tensor.shape.size(); ++i) {
      const auto size = static_cast<uint64_t>(tensor.shape[i]),
                 stride = static_cast<uint64_t>(tensor.strides[i]);
      uint64_t extent = 0;
      if (__builtin_mul_overflow(tensor.num_elements, size, &tensor.num_elements) ||
          __builtin_mul_overflow(size == 0 ? 0 : size - 1, stride, &extent) ||
          __builtin_add_overflow(last, extent, &last))
        complain(key, "its shape is too large to count");
    }
    if (tensor.num_elements == 0) return;
    if (last >= storage_elements)
      complain(key, fmt::format("it reaches element {} of a storage of {}", last, storage_elements));
    if (tensor.num_elements > storage_elements)
      fail("pt", "tensor {:?} is expanded: {} elements from a storage of {} ({}): save it with .contiguous()",
           key, tensor.num_elements, storage_elements, name_);
  }

  static bool is_contiguous(const Strided& tensor) {
    int64_t expected = 1;
    for (std::size_t i = tensor.shape.size(); i-- > 0;) {
      if (tensor.shape[i] == 1) continue;
      if (tensor.strides[i] != expected) return false;
      expected *= tensor.shape[i];
    }
    return true;
  }

  std::span<const std::byte> dense_bytes(const std::string& key, const Strided& tensor,
                                         std::span<const std::byte> storage) {
    const std::size_t element_bytes = dtype_size(tensor.dtype);
    if (tensor.num_elements == 0) return {};
    const std::size_t num_bytes = tensor.num_elements * element_bytes;
    if (is_contiguous(tensor)) return storage.subspan(tensor.offset * element_bytes, num_bytes);

    // Transposed and sliced tensors are copied. Files that would grow too much this way are refused.
    copied_bytes_ += num_bytes;
    if (copied_bytes_ > max_copied_bytes_)
      fail("pt",
           "too many transposed views of the same data, at {:?} ({}): save the tensors with .contiguous()",
           key, name_);
    std::vector<std::byte>& copy = copies_.emplace_back(num_bytes);
    std::vector<int64_t> index(tensor.shape.size(), 0);
    uint64_t source = tensor.offset;
    for (std::size_t i = 0; i < num_bytes; i += element_bytes) {
      std::memcpy(copy.data() + i, storage.data() + source * element_bytes, element_bytes);
      for (std::size_t d = index.size(); d-- > 0;) {
        source += static_cast<uint64_t>(tensor.strides[d]);
        if (++index[d] < tensor.shape[d]) break;
        source -= static_cast<uint64_t>(index[d] * tensor.strides[d]);
        index[d] = 0;
      }
    }
    return copy;
  }

  // Wrappers (DistributedDataParallel, torch.compile) put their name before every key.
  void drop_common_prefix(std::string_view prefix) {
    for (const auto& [key, view] : tensors_)
      if (!key.starts_with(prefix)) return;
    std::map<std::string, TensorView> renamed;
    for (auto& [key, view] : tensors_) renamed.emplace(key.substr(prefix.size()), std::move(view));
    tensors_ = std::move(renamed);
  }

  const std::string name_;
  ZipView zip_;
  std::string root_;
  std::deque<std::vector<std::byte>> copies_;  // of tensors that are not contiguous
  std::size_t copied_bytes_ = 0;
  const std::size_t max_copied_bytes_;
};

class PtFile : public TensorFile {
 public:
  PtFile(const std::string& path, bool prefer_ema)
      : file_("pt", path), view_(file_.bytes(), path, prefer_ema) {
    tensors_ = view_.tensors();
    metadata_ = view_.metadata();
  }

 private:
  MappedFile file_;
  PtView view_;  // owns the copies
};

}  // namespace

std::unique_ptr<TensorFile> open_pt(const std::string& path, bool prefer_ema) {
  return std::make_unique<PtFile>(path, prefer_ema);
}

std::unique_ptr<TensorFile> parse_pt(std::span<const std::byte> bytes, const std::string& name,
                                     bool prefer_ema) {
  return std::make_unique<PtView>(bytes, name, prefer_ema);
}

}  // namespace kiln
