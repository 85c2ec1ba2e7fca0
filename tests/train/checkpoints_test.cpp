// Checkpoints of divided state over real ranks: any stage and number of ranks writes the same bytes, and
// resumes what any other wrote.
#include "train/checkpoints.h"

#include <map>

#include "checkpoint/tensor_files.h"
#include "parallel/rank_threads.h"
#include "test_files.h"
#include "train/checkpoint_saver.h"
#include "train/resume.h"
#include "train/tiny_model.h"

namespace kiln {
namespace {

namespace fs = std::filesystem;
using test::errors_of_ranks, test::on_ranks, test::rows_of, test::TinyOptions, test::TinyTraining;
using ::testing::Each;

constexpr int64_t kSavedBatch = 4;

struct Division {
  int64_t world_size = 1, stage = 0;
  bool on_disk = false;  // the optimizer's state
};

TinyOptions options_of(const Division& division, const std::shared_ptr<ProcessGroup>& group,
                       const fs::path& disk, at::ScalarType dtype = at::kFloat) {
  TinyOptions options{
      .compute_dtype = dtype, .ema_decays = {0.9, 0.5}, .group = group, .zero = {.stage = division.stage}};
  if (division.on_disk) {
    options.offload.optimizer = Placement::kNvme;
    options.offload.nvme = {.folder = disk.string()};
  }
  return options;
}

class Checkpoints : public ::testing::Test {
 protected:
  TinyOptions alone(at::ScalarType dtype = at::kFloat) const {
    return options_of({}, std::make_shared<ProcessGroup>(), run_, dtype);
  }

  TempFolder folder_;
  const fs::path run_ = folder_.path();
};

StepResult step(const TinyTraining& tiny, int64_t number) {
  return tiny.step->run(
      rows_of(tiny.batch(kSavedBatch, static_cast<uint64_t>(number)), tiny.state->zero->group()), 1e-3);
}

// Takes steps 2 to 4 and returns the last one's loss.
double loss_of_going_on(const TinyTraining& tiny) {
  for (const int64_t number : {2, 3}) step(tiny, number);
  return step(tiny, 4).loss;
}

// Every file but train_state.json, which says how many ranks there were.
std::map<std::string, std::string> tensors_of(const fs::path& folder) {
  std::map<std::string, std::string> files;
  for (const auto& entry : fs::directory_iterator(folder))
    if (entry.path().extension() == ".safetensors") files[entry.path().filename()] = read_bytes(entry.path());
  return files;
}

std::map<std::string, std::string> checksums_of(const fs::path& folder) {
  std::map<std::string, std::string> checksums;
  for (const CheckpointFile& file : read_file_list(folder)) checksums[file.name] = file.checksum;
  return checksums;
}

size_t num_entries(const fs::path& folder) {
  return static_cast<size_t>(std::distance(fs::directory_iterator(folder), {}));
}

// One checkpoint of trained state; every division loads it and saves it again: the same bytes. Each pair of
// (ranks, stage) that saves and (ranks, stage) that loads goes through them.
TEST_F(Checkpoints, EveryDivisionWritesTheSameBytesAndLoadsThem) {
  {
    TinyTraining tiny(alone());
    for (int64_t i = 0; i < 3; ++i) step(tiny, i);
    save_checkpoint(run_, *tiny.state, {.step = 3, .images_seen = 12});
  }
  const fs::path first = checkpoint_folder(run_, 3);
  const auto expected = tensors_of(first);
  ASSERT_EQ(expected.size(), 4u);
  const auto checksums = checksums_of(first);
  for (const auto& [name, checksum] : checksums) EXPECT_EQ(checksum.size(), 16u) << name;
  int64_t number = 3;
  for (const int64_t world_size : {4, 1, 3, 2})
    on_ranks(world_size, [&](const std::shared_ptr<ProcessGroup>& group) {
      for (const bool on_disk : {false, true})
        for (const int64_t stage :
             on_disk ? std::vector<int64_t>{world_size - 1} : std::vector<int64_t>{2, 0, 3, 1}) {
          TinyTraining tiny(options_of({world_size, stage, on_disk}, group, run_));
          const auto checkpoint = newest_checkpoint(run_, *group).checkpoint;
          ASSERT_TRUE(checkpoint);
          const TrainStateInfo info = load_checkpoint(checkpoint->folder, *tiny.state);
          EXPECT_EQ(info.images_seen, 12);
          EXPECT_EQ(tiny.state->updates, 3);
          const std::string saved =
              save_checkpoint(run_, *tiny.state, {.step = checkpoint->step + 1, .images_seen = 12});
          if (group->rank() == 0) {
            EXPECT_EQ(tensors_of(saved), expected) << world_size << " ranks, stage " << stage;
            EXPECT_EQ(checksums_of(saved), checksums);
            EXPECT_EQ(read_train_state(saved).world_size, world_size);
            ++number;
          }
          group->barrier("the comparison");
        }
    });
  EXPECT_EQ(number, 3 + 4 * (4 + 1));
  EXPECT_EQ(list_checkpoints(run_).back().step, number);
}

// Weights that other ranks compute with are those of the checkpoint, too: in each dtype, every division goes
// on as the one that was saved. KILN_FULL=1: in each dtype at every stage on any ranks, else each pair.
TEST_F(Checkpoints, TrainingGoesOnWhateverDivisionResumes) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    double expected = 0;
    {
      TinyTraining tiny(alone(dtype));
      for (int64_t i = 0; i < 2; ++i) step(tiny, i);
      save_checkpoint(run_, *tiny.state, {.step = 2});
      expected = loss_of_going_on(tiny);
    }
    for (const int64_t world_size : {1, 2, 4}) {
      on_ranks(world_size, [&](const std::shared_ptr<ProcessGroup>& group) {
        for (int64_t stage = 0; stage <= 3; ++stage) {
          const bool is_odd = (stage + world_size / 2 + (dtype == at::kFloat)) % 2 == 1;
          if (!std::getenv("KILN_FULL") && world_size > 1 && is_odd) continue;
          TinyTraining tiny(options_of({world_size, stage}, group, run_, dtype));
          step(tiny, 17);  // whatever it was before
          load_checkpoint(checkpoint_folder(run_, 2), *tiny.state);
          const double loss = loss_of_going_on(tiny);
          EXPECT_NEAR(loss / expected, 1, dtype == at::kFloat ? 5e-6 : 5e-3)
              << world_size << " ranks, stage " << stage;
          if (world_size == 1) {
            EXPECT_EQ(loss, expected);
          }
        }
      });
    }
  }
}

// Two machines of two ranks, each with all of the state: they resume what one rank saved, save it again in
// the same bytes, and go on like it.
TEST_F(Checkpoints, MachinesThatHoldCopiesSaveAndResume) {
  TinyTraining first(alone(at::kBFloat16));
  for (int64_t i = 0; i < 2; ++i) step(first, i);
  const std::string saved = save_checkpoint(run_, *first.state, {.step = 2});
  const double expected = loss_of_going_on(first);
  test::on_nodes({2, 2}, [&](const std::shared_ptr<ProcessGroup>& group) {
    for (int64_t stage = 1; stage <= 3; ++stage) {
      TinyOptions options = options_of({4, stage}, group, run_, at::kBFloat16);
      options.zero.shard_within_node = true;
      TinyTraining tiny(options);
      step(tiny, 17);  // whatever it was before
      load_checkpoint(saved, *tiny.state);
      const std::string again = save_checkpoint(run_, *tiny.state, {.step = 10 + stage});
      if (group->rank() == 0) {
        EXPECT_EQ(tensors_of(again), tensors_of(saved)) << stage;
      }
      EXPECT_NEAR(loss_of_going_on(tiny) / expected, 1, 5e-3) << stage;
    }
  });
}

TEST_F(Checkpoints, OtherDenoisersGetWholeWeights) {
  TinyTraining whole(alone());
  const auto expected = whole.denoiser->parameters();
  on_ranks(3, [&](const std::shared_ptr<ProcessGroup>& group) {
    for (int64_t stage = 0; stage <= 3; ++stage) {
      const TinyTraining tiny(options_of({3, stage}, group, run_));
      const TinyTraining other(TinyOptions{});
      const auto got = other.denoiser->parameters();
      {
        const at::NoGradGuard no_grad;
        for (const auto& parameter : got) parameter->value.zero_();
      }
      copy_weights(*tiny.state, WeightsKind::kEma, 1, *other.denoiser);
      for (size_t i = 0; i < expected.size(); ++i)
        EXPECT_TRUE(at::equal(got[i]->value, expected[i]->value)) << stage << " " << got[i]->key;
    }
  });
}

// --- in the background ---

TEST_F(Checkpoints, TrainingDuringTheWriteDoesNotChangeWhatIsWritten) {
  for (const int64_t world_size : {1, 2})
    on_ranks(world_size, [&](const std::shared_ptr<ProcessGroup>& group) {
      for (const CheckpointCopy copy : {CheckpointCopy::kMemory, CheckpointCopy::kPageCache}) {
        TinyTraining tiny(options_of({world_size, 2}, group, run_));
        step(tiny, 0);
        const std::string before = save_checkpoint(run_, *tiny.state, {.step = 1});
        CheckpointSaver saver(run_, *tiny.state, copy);
        EXPECT_FALSE(saver.poll());
        saver.begin({.step = 2});
        EXPECT_TRUE(saver.under_way());
        std::optional<std::string> folder;
        int64_t steps = 0;
        while (!folder) {
          step(tiny, ++steps);
          folder = saver.poll();
        }
        EXPECT_FALSE(saver.under_way());
        EXPECT_EQ(tensors_of(*folder), tensors_of(before));
        EXPECT_EQ(read_train_state(*folder).updates, 1);
        EXPECT_NE(tensors_of(save_checkpoint(run_, *tiny.state, {.step = 3})), tensors_of(before));
        group->barrier("the comparison");
      }
    });
}

TEST_F(Checkpoints, AnUnfinishedSaveIsNoCheckpointAndLeavesNothing) {
  on_ranks(2, [&](const std::shared_ptr<ProcessGroup>& group) {
    TinyTraining tiny(options_of({2, 1}, group, run_));
    {
      CheckpointSaver saver(run_, *tiny.state, CheckpointCopy::kMemory);
      saver.begin({.step = 1});
      EXPECT_FALSE(newest_checkpoint(run_, *group).checkpoint);
      group->barrier("the look");
    }
    group->barrier("the end");
    if (group->rank() == 0) {
      EXPECT_EQ(num_entries(run_ / "checkpoints"), 0u);
    }
  });
}

// --- what one rank cannot do ---

// Ranks of another machine, whose run folder is not the same one.
TEST_F(Checkpoints, AFolderThatRanksDoNotShareIsAnErrorOfAll) {
  const auto errors = errors_of_ranks(3, [&](const std::shared_ptr<ProcessGroup>& group) {
    TinyTraining tiny(options_of({3, 2}, group, run_));
    const fs::path run = group->rank() == 2 ? run_ / "elsewhere" : run_;
    save_checkpoint(run, *tiny.state, {.step = 1});
  });
  EXPECT_THAT(errors, Each(AllOf(has_all("rank 2 of 3: cannot write", "No such file or directory"),
                                 Not(HasSubstr("\n")))));
  EXPECT_EQ(num_entries(run_ / "checkpoints"), 0u);
}

// Rank 1 reaches the files by links, one of them to a device that is always full.
TEST_F(Checkpoints, ADiskThatIsFullForOneRankIsAnErrorOfAll) {
  for (const CheckpointCopy copy : {CheckpointCopy::kMemory, CheckpointCopy::kPageCache}) {
    const fs::path other = run_ / "other", links = partial_checkpoint_folder(other, 1);
    fs::remove_all(other);
    fs::create_directories(links);
    for (const char* name : {kModelFile, "ema.safetensors", "ema-0.5.safetensors"})
      fs::create_symlink(fs::path(partial_checkpoint_folder(run_, 1)) / name, links / name);
    fs::create_symlink("/dev/full", links / kOptimizerFile);
    const auto errors = errors_of_ranks(2, [&](const std::shared_ptr<ProcessGroup>& group) {
      TinyTraining tiny(options_of({2, 3}, group, run_));
      CheckpointSaver saver(group->rank() == 1 ? other : run_, *tiny.state, copy);
      saver.begin({.step = 1});
      EXPECT_EQ(copy, CheckpointCopy::kMemory);  // the other copy has met the error by now
      for (int64_t i = 0; saver.under_way(); ++i) {
        step(tiny, i);
        EXPECT_FALSE(saver.poll());
      }
    });
    EXPECT_THAT(errors,
                Each(has_all("rank 1 of 2: cannot write", "No space left on device: free some space")));
    EXPECT_EQ(num_entries(run_ / "checkpoints"), 0u);
  }
}

// Starting again from step 0 in their place would overwrite the log of the run.
TEST_F(Checkpoints, OnlyDamagedOnesAreAnErrorOfEveryRank) {
  {
    TinyTraining tiny(alone());
    for (const int64_t number : {1, 2}) save_checkpoint(run_, *tiny.state, {.step = number});
  }
  const auto look = [&] {
    return errors_of_ranks(2, [&](const std::shared_ptr<ProcessGroup>& group) {
      EXPECT_EQ(newest_checkpoint(run_, *group).checkpoint->step, 1);
    });
  };
  const fs::path first = checkpoint_folder(run_, 1), second = checkpoint_folder(run_, 2);
  fs::resize_file(second / kModelFile, 12);
  EXPECT_THAT(look(), Each(""));
  fs::remove(first / kModelFile);
  EXPECT_THAT(look(),
              Each(AllOf(has_all("none of the 2 checkpoints of " + run_.string() + " is whole",
                                 first.string() + " lacks model.safetensors",
                                 "model.safetensors of " + second.string() + " has 12 bytes, expected",
                                 "restore one, or remove"),
                         Not(HasSubstr("\n")))));
}

void change_bytes(const fs::path& path, const std::function<void(std::string&)>& change) {
  std::string bytes = read_bytes(path);
  change(bytes);
  std::ofstream(path, std::ios::binary) << bytes;
}

// Their sizes tell nothing: a bit that a disk turned over, and a tail that a loss of power left as zeros.
TEST_F(Checkpoints, BytesThatAreNotThoseWrittenAreDamage) {
  {
    TinyTraining tiny(alone());
    for (const int64_t number : {1, 2}) {
      step(tiny, number);
      save_checkpoint(run_, *tiny.state, {.step = number});
    }
  }
  const fs::path whole = checkpoint_folder(run_, 1), newest = checkpoint_folder(run_, 2),
                 copy = run_ / "copy";
  fs::copy(newest, copy, fs::copy_options::recursive);
  const auto flip = [](std::string& bytes) { bytes[bytes.size() / 2] ^= 4; };
  const auto flip_first = [](std::string& bytes) { bytes[0] ^= 1; };
  const auto flip_last = [](std::string& bytes) { bytes.back() ^= 1; };
  const auto zero_tail = [](std::string& bytes) {
    const size_t tail = bytes.size() / 3;
    bytes.replace(bytes.size() - tail, tail, tail, '\0');
  };
  int64_t ranks = 1;
  for (const char* name : {kModelFile, "ema.safetensors", "ema-0.5.safetensors", kOptimizerFile})
    for (const std::function<void(std::string&)>& change :
         {std::function<void(std::string&)>(flip), {flip_first}, {flip_last}, {zero_tail}}) {
      change_bytes(newest / name, change);
      ranks = ranks % 3 + 1;
      on_ranks(ranks, [&](const std::shared_ptr<ProcessGroup>& group) {
        const NewestCheckpoint found = newest_checkpoint(run_, *group);
        ASSERT_TRUE(found.checkpoint);
        EXPECT_EQ(found.checkpoint->step, 1);
        if (group->rank() > 0) return;
        const std::string aside = (run_ / "checkpoints" / "damaged-step-00000002").string();
        EXPECT_THAT(found.damaged,
                    ElementsAre(std::string(name) + " of " + newest.string() +
                                " has other bytes than were written: it is " + aside + " now"));
      });
      EXPECT_FALSE(fs::exists(newest));  // or it would be kept, and the ones that are good removed
      fs::remove_all(run_ / "checkpoints" / "damaged-step-00000002");
      fs::copy(copy, newest, fs::copy_options::recursive);
    }
  EXPECT_EQ(newest_checkpoint(run_, *std::make_shared<ProcessGroup>()).checkpoint->step, 2);
  for (const fs::path& folder : {whole, newest}) change_bytes(folder / kModelFile, flip);
  EXPECT_THAT(errors_of_ranks(2, [&](const auto& group) { newest_checkpoint(run_, *group); }),
              Each(AllOf(has_all("none of the 2 checkpoints of " + run_.string() + " is whole",
                                 "model.safetensors of " + whole.string() + " has other bytes"),
                         Not(HasSubstr("\n")))));
  EXPECT_TRUE(fs::exists(newest) && fs::exists(whole));
}

// On machines of different sizes, say: the parts that they read are of one division of the file.
TEST_F(Checkpoints, RanksOfUnevenThreadsReadEachByteOnce) {
  {
    TinyTraining tiny(alone());
    save_checkpoint(run_, *tiny.state, {.step = 1});
  }
  const int threads_before = at::get_num_threads();
  on_ranks(3, [&](const std::shared_ptr<ProcessGroup>& group) {
    at::get_num_threads();  // a thread's first call takes the number of another
    const int threads = static_cast<int>(1 + 2 * group->rank());
    at::set_num_threads(threads);
    group->barrier("every rank's number of threads");
    EXPECT_EQ(at::get_num_threads(), threads);
    const NewestCheckpoint found = newest_checkpoint(run_, *group);
    EXPECT_TRUE(found.checkpoint);
    EXPECT_TRUE(found.damaged.empty());
  });
  at::set_num_threads(threads_before);
}

// Written before there were checksums.
TEST_F(Checkpoints, OlderOnesLoadUnchecked) {
  TinyTraining tiny(alone());
  const fs::path folder = save_checkpoint(run_, *tiny.state, {.step = 1, .images_seen = 7});
  change_bytes(folder / "train_state.json", [](std::string& text) {
    auto state = nlohmann::json::parse(text);
    for (const char* newer : {"checksums", "xxh3"}) EXPECT_EQ(state.erase(newer), 1u);
    text = state.dump(2) + "\n";
  });
  for (const int64_t world_size : {1, 2})
    on_ranks(world_size, [&](const std::shared_ptr<ProcessGroup>& group) {
      TinyTraining other(options_of({world_size, 2}, group, run_));
      const NewestCheckpoint found = newest_checkpoint(run_, *group);
      ASSERT_TRUE(found.checkpoint);
      EXPECT_TRUE(found.damaged.empty());
      EXPECT_EQ(load_checkpoint(found.checkpoint->folder, *other.state).images_seen, 7);
    });
}

TEST_F(Checkpoints, DamagedFilesAreNamed) {
  TinyTraining tiny(alone());
  const fs::path folder = save_checkpoint(run_, *tiny.state, {.step = 1});
  const auto load = [&](int64_t world_size) {
    return errors_of_ranks(world_size, [&](const std::shared_ptr<ProcessGroup>& group) {
      TinyTraining other(options_of({world_size, 2}, group, run_));
      load_checkpoint(folder, *other.state);
    });
  };
  const auto replace = [&](const std::string& file, const std::string& key, const at::Tensor& value) {
    auto tensors = load_tensors((folder / file).string());
    for (auto& [name, tensor] : tensors) tensor = tensor.clone();
    if (value.defined())
      tensors[key] = value;
    else
      tensors.erase(key);
    save_tensors((folder / file).string(), tensors);
  };
  replace("ema-0.5.safetensors", "blocks.1.attn.qkv.bias", at::zeros({7}));
  EXPECT_THAT(load(2), Each(HasSubstr("ema-0.5.safetensors has blocks.1.attn.qkv.bias of shape "
                                      "[7], expected [144]")));
  replace("ema-0.5.safetensors", "blocks.1.attn.qkv.bias", {});
  EXPECT_THAT(load(3),
              Each(has_all("ema-0.5.safetensors lacks blocks.1.attn.qkv.bias: delete this checkpoint",
                           "rank 0 of 3")));
  fs::resize_file(folder / kModelFile, fs::file_size(folder / kModelFile) - 1);
  EXPECT_TRUE(list_checkpoints(run_).empty());
  EXPECT_THAT(load(1)[0], HasSubstr("model.safetensors"));
  fs::remove(folder / kModelFile);
  EXPECT_THAT(load(1)[0], HasSubstr("model.safetensors"));
}

}  // namespace
}  // namespace kiln
