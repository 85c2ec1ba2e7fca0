// Launchers' variables, and what ranks say to each other.
#include "parallel/ranks/ranks.h"
#include "core/aten.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>

#include <latch>
#include <map>
#include <thread>

#include "parallel/rank_threads.h"
#include "parallel/ranks/rendezvous_store.h"
#include "test_files.h"

namespace kiln {
namespace {

// With these variables: "RANK=0 WORLD_SIZE=2".
Ranks read(const std::string& line) {
  std::map<std::string, std::string> variables;
  std::istringstream words(line);
  for (std::string word; words >> word;)
    variables[word.substr(0, word.find('='))] = word.substr(word.find('=') + 1);
  return ranks_from_environment([&](const char* name) -> const char* {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  });
}

TEST(Ranks, NoLauncherIsOneRank) {
  EXPECT_EQ(read("").world_size, 1);
  // A batch script under Slurm that starts the program itself, without srun.
  EXPECT_EQ(read("SLURM_PROCID=0 SLURM_NTASKS=8").world_size, 1);
}

TEST(Ranks, Torchrun) {
  const Ranks ranks = read(
      "RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 MASTER_ADDR=node0 MASTER_PORT=1234 "
      "TORCHELASTIC_USE_AGENT_STORE=True TORCHELASTIC_RESTART_COUNT=2");
  EXPECT_EQ(ranks.rank, 5);
  EXPECT_EQ(ranks.world_size, 8);
  EXPECT_EQ(ranks.local_rank, 1);
  EXPECT_EQ(ranks.local_world_size, 4);
  EXPECT_EQ(ranks.master_addr, "node0");
  EXPECT_EQ(ranks.master_port, 1234);
  EXPECT_TRUE(ranks.launcher_hosts);
  EXPECT_EQ(ranks.attempt, "2");
}

TEST(Ranks, SlurmAndOpenMpi) {
  const Ranks slurm = read(
      "SLURM_PROCID=9 SLURM_STEP_NUM_TASKS=16 SLURM_LOCALID=1 SLURM_STEP_TASKS_PER_NODE=8(x2) "
      "SLURM_STEP_NODELIST=gpu[03-04] SLURM_JOB_ID=4100123");
  EXPECT_EQ(slurm.rank, 9);
  EXPECT_EQ(slurm.local_world_size, 8);
  EXPECT_EQ(slurm.master_addr, "gpu03");
  EXPECT_EQ(slurm.master_port, 29500 + 4100123 % 20000);
  EXPECT_FALSE(slurm.launcher_hosts);
  const Ranks mpi = read(
      "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1 "
      "OMPI_COMM_WORLD_LOCAL_SIZE=2");
  EXPECT_EQ(mpi.rank, 1);
  EXPECT_EQ(mpi.master_addr, "127.0.0.1");
  EXPECT_EQ(first_slurm_host("a"), "a");
  EXPECT_EQ(first_slurm_host("a,b"), "a");
  EXPECT_EQ(first_slurm_host("n[1,3-5]"), "n1");
  EXPECT_EQ(first_slurm_host("login,n[1-2]"), "login");
}

TEST(Ranks, NodesOfSlurmMayHaveDifferentNumbersOfTasks) {
  EXPECT_THAT(slurm_tasks_per_node("8"), ElementsAre(8));
  EXPECT_THAT(slurm_tasks_per_node("2(x3),1"), ElementsAre(2, 2, 2, 1));
  EXPECT_THAT(slurm_tasks_per_node("4,8(x2)"), ElementsAre(4, 8, 8));
  for (const char* impossible : {"", "x", "2(x", "2(3)", "2,", "2;", "0", "2(x99999999)"})
    EXPECT_ERROR(slurm_tasks_per_node(impossible), "tasks like 8(x2),4, got");
  const auto on_node = [](const char* tasks, const char* node, const char* rank, const char* local_rank) {
    return read(
        fmt::format("SLURM_PROCID={} SLURM_LOCALID={} SLURM_STEP_TASKS_PER_NODE={} SLURM_NODEID={} "
                    "SLURM_STEP_NUM_TASKS=12 SLURM_STEP_NODELIST=gpu[03-04]",
                    rank, local_rank, tasks, node));
  };
  EXPECT_EQ(on_node("4,8", "0", "3", "3").local_world_size, 4);
  EXPECT_EQ(on_node("4,8", "1", "11", "7").local_world_size, 8);
  EXPECT_EQ(on_node("8,4", "1", "11", "3").local_world_size, 4);
  EXPECT_ERROR(on_node("8,4", "2", "11", "3"), "SLURM_NODEID 2 is beyond");
}

// A shell, in which the user starts ranks.
TEST(Ranks, ASlurmStepOfOneTaskIsNoLauncher) {
  const Ranks ranks =
      read("SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1 SLURM_LOCALID=0 SLURM_STEP_TASKS_PER_NODE=1");
  EXPECT_FALSE(ranks.launched);
  EXPECT_EQ(ranks.world_size, 1);
}

TEST(Ranks, WhatIsMissingOrImpossibleIsNamed) {
  EXPECT_ERROR(read("WORLD_SIZE=2"), "RANK is not set");
  EXPECT_ERROR(read("RANK=2 WORLD_SIZE=2"), "RANK expects 0 to");
  EXPECT_ERROR(read("RANK=x WORLD_SIZE=2"), "RANK expects a number, got 'x'");
  EXPECT_ERROR(read("RANK=1 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1"), "MASTER_ADDR is not set");
}

// Whatever this machine is called.
TEST(Ranks, Finding3ThoseOfOneMachineMeetOnItsOwnAddress) {
  const auto address_of = [](const std::string& more) {
    return read("RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 MASTER_ADDR=node0 " + more).master_addr;
  };
  EXPECT_EQ(address_of("LOCAL_WORLD_SIZE=2"), "127.0.0.1");
  EXPECT_EQ(address_of("LOCAL_WORLD_SIZE=2 TORCHELASTIC_USE_AGENT_STORE=True"), "node0");
  EXPECT_EQ(address_of(""), "node0") << "rank 0 may be elsewhere";
}

TEST(Ranks, Finding3TheSecretOfAJob) {
  const test::TempFolder folder;
  const std::string secret = "0123456789abcdef";
  test::write_bytes(folder / "secret", secret + "\n");
  test::write_bytes(folder / "short", "\n");
  const auto with = [](const char* name, const std::string& value) {
    return read(fmt::format("RANK=0 WORLD_SIZE=1 {}={}", name, value)).secret;
  };
  EXPECT_EQ(with("KILN_JOB_SECRET", secret), secret);
  EXPECT_EQ(with("KILN_JOB_SECRET_FILE", folder / "secret"), secret);
  EXPECT_EQ(with("KILN_JOB_SECRET", ""), "");
  EXPECT_ERROR(with("KILN_JOB_SECRET", "short"), "KILN_JOB_SECRET expects 16 characters or more, got 5");
  EXPECT_ERROR(with("KILN_JOB_SECRET_FILE", folder / "short"),
               "KILN_JOB_SECRET_FILE expects 16 characters or more, got 0");
  EXPECT_ERROR(with("KILN_JOB_SECRET_FILE", folder / "absent"), "absent");
}

constexpr const char* kSecret = "0123456789abcdef";

// Returns whether something listens there.
bool is_open(const char* address, int64_t port) {
  const int probe = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port = htons(static_cast<uint16_t>(port));
  EXPECT_EQ(::inet_pton(AF_INET, address, &to.sin_addr), 1);
  const bool is_connected = ::connect(probe, reinterpret_cast<const sockaddr*>(&to), sizeof to) == 0;
  ::close(probe);
  return is_connected;
}

// What listens on all addresses listens on this one, too.
constexpr const char* kElsewhere = "127.0.0.2";

TEST(Rendezvous, Finding3OnlyThisMachineReachesIt) {
  const Rendezvous rendezvous;
  EXPECT_TRUE(is_open("127.0.0.1", rendezvous.port()));
  EXPECT_FALSE(is_open(kElsewhere, rendezvous.port()));
}

int64_t free_port() {
  const Rendezvous rendezvous;
  return rendezvous.port();
}

// One rank that is alone and yet connected.
std::shared_ptr<ProcessGroup> connect_alone(const Ranks& ranks) {
  const test::ScopedVariable no_record("TORCH_FR_BUFFER_SIZE", "0");
  return ProcessGroup::connect(ranks, {.timeout = std::chrono::seconds(60), .connects_alone = true});
}

// By hand or with srun: rank 0 hosts.
TEST(Rendezvous, Finding3NorThatOfRankZeroOnOneMachine) {
  for (const char* address : {"", kElsewhere}) {
    const int64_t port = free_port();
    const auto group = connect_alone(read(
        fmt::format("RANK=0 WORLD_SIZE=1 LOCAL_WORLD_SIZE=1 MASTER_ADDR={} MASTER_PORT={}", address, port)));
    EXPECT_TRUE(is_open("127.0.0.1", port)) << address;
    EXPECT_FALSE(is_open(kElsewhere, port)) << address;
  }
}

TEST(Rendezvous, Finding3WhoeverElseCanReachItIsToldWithoutASecret) {
  const auto warning_of = [](const Ranks& ranks) { return stderr_of([&] { connect_alone(ranks); }); };
  const Rendezvous of_launcher;
  const char* kWarning = "these ranks have no secret, so whoever reaches 127.0.0.";
  EXPECT_THAT(warning_of({.master_addr = kElsewhere, .master_port = free_port()}), HasSubstr(kWarning));
  EXPECT_THAT(warning_of({.master_port = of_launcher.port(), .launcher_hosts = true}), HasSubstr(kWarning))
      << "torchrun's listens on all addresses";
  EXPECT_THAT(warning_of({.master_addr = kElsewhere, .master_port = free_port(), .secret = kSecret}),
              IsEmpty());
  EXPECT_THAT(warning_of({.master_port = free_port()}), IsEmpty());
}

// A job of two ranks at a rendezvous of its own.
struct MetRanks {
  Rendezvous rendezvous;
  std::vector<c10::intrusive_ptr<c10d::Store>> stores{2};  // as a stranger reads and writes them
  std::vector<std::shared_ptr<NoticeBoard>> boards{2};

  // `before`: what comes between the first rank and the other one.
  explicit MetRanks(const std::function<void(c10d::Store&)>& before = [](c10d::Store&) {}) {
    std::vector<std::thread> threads;
    for (int64_t rank = 0; rank < 2; ++rank) {
      const auto r = static_cast<size_t>(rank);
      const Ranks ranks{.rank = rank,
                        .world_size = 2,
                        .master_port = rendezvous.port(),
                        .launcher_hosts = true,
                        .secret = kSecret};
      stores[r] = open_store(ranks, std::chrono::seconds(60));
      if (rank == 1) before(*open_store(ranks, std::chrono::seconds(60)));
      threads.emplace_back(
          [this, r, ranks] { boards[r] = meet(*stores[r], ranks, std::chrono::seconds(60)); });
    }
    for (std::thread& thread : threads) thread.join();
  }
};

// c10d's set() does not wait for the host of the rendezvous.
std::optional<std::string> found_soon(NoticeBoard& board, const std::string& key) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  std::optional<std::string> found;
  while (!(found = board.find(key)) && std::chrono::steady_clock::now() < end)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return found;
}

// Both have the secret of a file, and this is the first attempt of both.
TEST(Rendezvous, Finding3ANoticeOfAnEarlierJobDoesNotCount) {
  MetRanks earlier, job;
  earlier.boards[1]->set("failed/1", "the disk is full");
  EXPECT_EQ(found_soon(*earlier.boards[0], "failed/1"), "the disk is full");
  job.stores[0]->set("failed/1", earlier.stores[0]->get("failed/1"));
  EXPECT_EQ(job.stores[0]->get("failed/1"), earlier.stores[0]->get("failed/1")) << "it is there";
  EXPECT_EQ(job.boards[0]->find("failed/1"), std::nullopt);
  job.boards[1]->set("failed/1", "of this job");
  EXPECT_EQ(found_soon(*job.boards[0], "failed/1"), "of this job");
}

TEST(Rendezvous, Finding3AStrangerThatComesFirstIsIgnored) {
  const MetRanks job([](c10d::Store& store) {
    for (const char* key : {"here/1", "job"}) store.set(key, "yes");
    std::this_thread::sleep_for(std::chrono::milliseconds(200));  // rank 0 looks at them
  });
  job.boards[1]->set("failed/1", "the disk is full");
  EXPECT_EQ(found_soon(*job.boards[0], "failed/1"), "the disk is full");
}

TEST(Rendezvous, Finding3RanksWithAnotherSecretAreNamed) {
  const test::ScopedVariable no_record("TORCH_FR_BUFFER_SIZE", "0");
  const Rendezvous rendezvous;
  std::vector<std::string> messages(2);
  std::vector<std::thread> threads;
  for (int64_t rank = 0; rank < 2; ++rank)
    threads.emplace_back([&, rank] {
      const Ranks ranks{.rank = rank,
                        .world_size = 2,
                        .local_rank = rank,
                        .local_world_size = 2,
                        .master_port = rendezvous.port(),
                        .launcher_hosts = true,
                        .secret = rank == 0 ? "" : kSecret};
      messages[static_cast<size_t>(rank)] =
          message_of([&] { ProcessGroup::connect(ranks, {.timeout = std::chrono::seconds(1)}); });
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_THAT(messages[0], HasSubstr("rank 1 has another secret"));
  EXPECT_THAT(messages[1], HasSubstr("rank 0 has another secret"));
}

class Collectives : public ::testing::TestWithParam<at::ScalarType> {};

// Small integers: exact in every dtype.
TEST_P(Collectives, GiveWhatTheyPromise) {
  for (const int64_t world_size : {2, 3, 4}) {
    test::on_ranks(world_size, [&](const std::shared_ptr<ProcessGroup>& group) {
      const int64_t rank = group->rank();
      const auto options = at::TensorOptions().dtype(GetParam());
      const double rank_sum = static_cast<double>(world_size * (world_size - 1) / 2);
      const at::Tensor whole = at::arange(world_size * 32, options).remainder(7);

      const at::Tensor reduced = whole + static_cast<double>(rank);
      group->all_reduce(reduced, "a").wait();
      EXPECT_TRUE(at::equal(reduced, whole * static_cast<double>(world_size) + rank_sum));

      const at::Tensor input = whole + static_cast<double>(rank);
      const at::Tensor shard = input.narrow(0, rank * 32, 32);  // in place
      group->reduce_scatter(shard, input, "b").wait();
      EXPECT_TRUE(at::equal(shard, reduced.narrow(0, rank * 32, 32)));

      const at::Tensor all = at::zeros_like(whole);
      group->all_gather(all, whole.narrow(0, rank * 32, 32).clone(), "c").wait();
      EXPECT_TRUE(at::equal(all, whole));
      const at::Tensor in_place = at::zeros_like(whole);
      in_place.narrow(0, rank * 32, 32).copy_(whole.narrow(0, rank * 32, 32));
      group->all_gather(in_place, in_place.narrow(0, rank * 32, 32), "d").wait();
      EXPECT_TRUE(at::equal(in_place, whole));

      EXPECT_EQ(group->volume().all_reduced, world_size * 32);
      EXPECT_EQ(group->volume().reduce_scattered, world_size * 32);
      EXPECT_EQ(group->volume().all_gathered, 2 * world_size * 32);
      EXPECT_THAT(group->sum({1, static_cast<double>(rank)}, "e"),
                  ElementsAre(static_cast<double>(world_size), rank_sum));
      const auto texts = group->gather(std::string(static_cast<size_t>(rank), 'x'), "f");
      for (int64_t r = 0; r < world_size; ++r)
        EXPECT_EQ(texts[static_cast<size_t>(r)], std::string(static_cast<size_t>(r), 'x'));
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Dtypes, Collectives, ::testing::Values(at::kFloat, at::kBFloat16, at::kHalf));

TEST(ProcessGroup, OneRankCopies) {
  ProcessGroup group;
  const at::Tensor from = at::ones({8}), to = at::zeros({8});
  group.all_gather(to, from, "x").wait();
  EXPECT_TRUE(at::equal(to, from));
  EXPECT_THAT(group.sum({2}, "x"), ElementsAre(2));
  EXPECT_THAT(group.gather("one", "x"), ElementsAre("one"));
}

// A rank that is alive elsewhere and one that is gone are told apart; both messages name what was waited for.
TEST(ProcessGroup, AnErrorNamesRankOperationSegmentTimeAndWhoIsMissing) {
  std::string late, gone;
  std::latch seen(1);
  test::on_ranks(
      2,
      [&](const std::shared_ptr<ProcessGroup>& group) {
        if (group->rank() == 1) {
          seen.wait();
          return;
        }
        late = message_of([&] { group->all_reduce(at::ones({4}), "the gradients of blocks.3").wait(); });
        seen.count_down();
      },
      std::chrono::milliseconds(1500));
  EXPECT_THAT(late, has_all("rank 0 of 2: all_reduce of the gradients of blocks.3 failed after ",
                            "rank 1 has not come so far"));
  test::on_ranks(2, [&](const std::shared_ptr<ProcessGroup>& group) {
    if (group->rank() == 1) return;
    gone = message_of([&] { group->all_reduce(at::ones({4}), "the gradients of embed").wait(); });
  });
  EXPECT_THAT(gone, has_all("rank 0 of 2: all_reduce of the gradients of embed failed after",
                            "rank 1 no longer answers"));
}

// As a GPU that never comes to its end, while every rank lives.
TEST(ProcessGroup, AWaitForADeviceEndsAfterTheTimeout) {
  std::string waiting;
  std::latch seen(1);
  test::on_ranks(
      2,
      [&](const std::shared_ptr<ProcessGroup>& group) {
        if (group->rank() == 1) return seen.wait();
        waiting = message_of([&] { group->wait_until([] { return false; }, "a validation"); });
        seen.count_down();
      },
      std::chrono::milliseconds(1500));
  EXPECT_THAT(waiting, has_all("rank 0 of 2: the wait for a validation failed after", "it does not end"));
}

// Several machines look for an interface of their own elsewhere; what tests set is gone afterwards.
TEST(ProcessGroup, RanksOfATestLeaveTheEnvironmentAsItWas) {
  const test::ScopedVariable before("GLOO_SOCKET_IFNAME", "");
  test::on_nodes({1, 1}, [](const std::shared_ptr<ProcessGroup>& group) { group->barrier("the others"); });
  EXPECT_STREQ(std::getenv("GLOO_SOCKET_IFNAME"), "");
}

// Who watches hears of what is sent, by name, and when it is waited for; not of small values between hosts.
TEST(ProcessGroup, CollectivesAreObserved) {
  class Log : public CollectiveObserver {
   public:
    void started(const Start& start) override {
      lines.push_back(fmt::format("{} {} {} of {}", start.number, start.what, start.bytes, start.num_ranks));
    }
    void waited(int64_t number) override { lines.push_back(fmt::format("{} waited", number)); }
    std::vector<std::string> lines;
  };
  test::on_ranks(2, [](const std::shared_ptr<ProcessGroup>& group) {
    Log log;
    group->observe(&log);
    const at::Tensor a = at::ones({4}), b = at::ones({8});
    Collective first = group->all_reduce(a, "a"), second = group->all_gather(b, a.clone(), "b");
    group->sum({1}, "host values");
    first.wait();
    second.wait();
    group->observe(nullptr);
    group->all_reduce(a, "c").wait();
    EXPECT_THAT(log.lines, ElementsAre("1 a 16 of 2", "2 b 32 of 2", "1 waited", "2 waited"));
  });
}

// One that dies while another writes to it must not take that one along: rank 0, with the rendezvous, died
// so.
TEST(ProcessGroup, ABrokenPipeIsNoSignal) {
  test::on_ranks(2, [](const std::shared_ptr<ProcessGroup>& group) { group->barrier("the others"); });
  struct sigaction present {};
  ASSERT_EQ(sigaction(SIGPIPE, nullptr, &present), 0);
  EXPECT_EQ(present.sa_handler, SIG_IGN);
}

TEST(ProcessGroup, ARankThatFailsTellsTheOthersWhy) {
  std::string told, waiting;
  test::on_ranks(3, [&](const std::shared_ptr<ProcessGroup>& group) {
    if (group->rank() == 1) return group->report_failure("the disk is full");
    if (group->rank() == 2) told = message_of([&] { group->barrier("a checkpoint"); });
    if (group->rank() == 0)
      waiting = message_of([&] { group->wait_until([] { return false; }, "a step"); });  // as of a GPU
  });
  EXPECT_THAT(told, HasSubstr("rank 1 failed: the disk is full"));
  EXPECT_THAT(waiting,
              has_all("rank 0 of 3: the wait for a step failed after", "rank 1 failed: the disk is full"));
}

TEST(ProcessGroup, SubgroupsTalkAmongThemselves) {
  test::on_ranks(4, [&](const std::shared_ptr<ProcessGroup>& group) {
    const int64_t other = group->rank() ^ 1;
    const auto pair =
        group->subgroup("pair", {std::min(group->rank(), other), std::max(group->rank(), other)});
    EXPECT_EQ(pair->rank(), group->rank() % 2);
    EXPECT_EQ(pair->world_size(), 2);
    const auto sum = static_cast<double>(group->rank() + other);
    EXPECT_THAT(pair->sum({static_cast<double>(group->rank())}, "pairs"), ElementsAre(sum));
    EXPECT_THAT(group->sum({1}, "all"), ElementsAre(4));
    EXPECT_EQ(group->subgroup("alone", {group->rank()})->world_size(), 1);
  });
}

TEST(ProcessGroup, SaysWhereTheOthersWereExpected) {
  EXPECT_ERROR(ProcessGroup::connect({.rank = 1, .world_size = 2, .local_world_size = 2, .master_port = 1},
                                     {.timeout = std::chrono::milliseconds(500)}),
               "rank 1 of 2 did not meet the others at 127.0.0.1:1");
}

// One rank that connects sends all it says through c10d, as several do: with one GPU the only way to run
// NCCL.
TEST(ProcessGroup, OneRankMayConnectToItself) {
  test::alone_connected(at::kCPU, [](const std::shared_ptr<ProcessGroup>& group) {
    const at::Tensor values = at::arange(8, at::kFloat), out = at::zeros({8});
    group->all_reduce(values, "a").wait();
    EXPECT_TRUE(at::equal(values, at::arange(8, at::kFloat)));
    group->reduce_scatter(out, values, "b").wait();
    EXPECT_TRUE(at::equal(out, values));
    out.zero_();
    group->all_gather(out, values, "c").wait();
    EXPECT_TRUE(at::equal(out, values));
    EXPECT_EQ(group->volume().all_reduced, 8) << "it was sent";
    EXPECT_THAT(group->sum({2}, "d"), ElementsAre(2));
    EXPECT_EQ(group->subgroup("itself", {0})->volume().all_reduced, 8);
  });
}

}  // namespace
}  // namespace kiln
