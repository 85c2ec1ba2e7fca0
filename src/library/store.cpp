#include "kiln/store.h"

#include <array>

#include "data/store/store_source.h"
#include "library/guarded.h"

namespace kiln::v0 {

Store Store::open(const std::string& folder) {
  return guarded([&] {
    Store opened;
    const std::array<StoreSource, 1> source = {StoreSource{.store = folder}};
    opened.store_ = open_sources(source);
    return opened;
  });
}

void Store::check(int64_t index) const {
  if (index < 0 || index >= size())
    throw Error(fmt::format("the store has {} samples, there is no number {}", size(), index));
}

int64_t Store::size() const { return store_->size(); }

Store::Shape Store::shape(int64_t index) const {
  check(index);
  const Lane& lane = store_->info().lanes.at(static_cast<size_t>(store_->lane(index)));
  return {.channels = store_->info().channels, .height = lane.height, .width = lane.width};
}

std::vector<float> Store::mean(int64_t index, bool mirrored) const {
  const Shape of = shape(index);
  std::vector<float> values(static_cast<size_t>(of.channels * of.height * of.width));
  const uint8_t flip = mirrored;
  guarded([&] { store_->read_mean({&index, 1}, {&flip, 1}, values); });
  return values;
}

std::vector<float> Store::logvar(int64_t index, bool mirrored) const {
  const Shape of = shape(index);
  if (!store_->info().has_logvar) return {};
  std::vector<float> values(static_cast<size_t>(of.channels * of.height * of.width));
  const uint8_t flip = mirrored;
  guarded([&] { store_->read_logvar({&index, 1}, {&flip, 1}, values); });
  return values;
}

int64_t Store::label(int64_t index) const {
  check(index);
  return store_->label(index);
}

std::string Store::name(int64_t index) const {
  check(index);
  return store_->sample_name(index);
}

std::string Store::caption(int64_t index) const {
  check(index);
  return store_->caption(index);
}

double Store::scaling_factor() const {
  return store_->info().already_scaled ? 1 : store_->info().scaling_factor;
}
double Store::shift_factor() const { return store_->info().already_scaled ? 0 : store_->info().shift_factor; }
std::vector<std::string> Store::class_names() const { return store_->info().class_names; }

}  // namespace kiln::v0
