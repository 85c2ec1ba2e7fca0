// What the configs of Sana's and PixArt's repositories share: the keys of training.
#pragma once
#include <set>
#include <string>
#include <vector>

#include "core/error.h"
#include "interop/foreign_recipe.h"

namespace kiln {

// Reads one config with its sections taken away: {"train_batch_size": 64, "optimizer": {...}, ...}. Keys that
// nobody asked for are named at the end.
class RecipeReader {
 public:
  // `config` has every key that is read; `given` are those that the file itself has.
  RecipeReader(nlohmann::json config, std::set<std::string> given, const std::string& name,
               const ForeignContext& context);

  // Sets what the repositories have in common: data, batch, length, optimizer, precision, files. `came`:
  // which CAME the repository has.
  void read_training(const std::string& came);
  // Sets vae_pretrained if it is a folder here. `advice`: how to come by one, for the note that it is not.
  void read_autoencoder(const std::string& advice);
  // Names what is left. Returns the whole.
  ForeignRecipe finish();

  template <class... Args>
  [[noreturn]] void refuse(fmt::format_string<Args...> format, Args&&... args) const {
    fail("recipe", "{}: {}", name_, fmt::format(format, std::forward<Args>(args)...));
  }
  void note(const std::string& text) { recipe_.notes.push_back(text); }
  void set(const std::string& option, const nlohmann::json& value, const std::string& key,
           bool is_of_pictures = false);

  // Returns the value and counts the key as read.
  const nlohmann::json& value(const std::string& key);
  // Throws Error: a value of another type.
  template <class T>
  T get(const std::string& key, const char* type) {
    try {
      return value(key).get<T>();
    } catch (const nlohmann::json::exception&) {
      refuse("{} expects {}, got {}", key, type, value(key).dump());
    }
  }
  std::string text(const std::string& key) { return get<std::string>(key, "a word"); }
  double number(const std::string& key) { return get<double>(key, "a number"); }
  int64_t integer(const std::string& key) { return get<int64_t>(key, "a whole number"); }
  bool flag(const std::string& key) { return get<bool>(key, "true or false"); }
  // Refuses every value but one of these.
  void only(const std::string& key, const std::vector<nlohmann::json>& values, const std::string& advice);
  // Keys, with spaces between, that are about something else than training, or that Kiln does anyway.
  void leave(const std::string& keys);

 private:
  void read_batch();
  void read_optimizer(const std::string& came);
  void read_schedule();
  void read_files();
  double rate_for_batch(double rate);

  nlohmann::json config_;
  std::set<std::string> given_, read_;
  std::string name_;
  ForeignContext context_;
  ForeignRecipe recipe_;
  int64_t global_batch_ = 0;
};

}  // namespace kiln
