// What is measured while a run trains: phases of the step, the trace of some steps, the figures beside a
// plan.
#include <ATen/Parallel.h>
#include <malloc.h>
#include <sys/resource.h>

#include <csignal>
#include <numeric>
#include <set>
#include <thread>

#include "core/allocations.h"
#include "models/autoencoders/autoencoder_kl.h"
#include "page_data.h"
#include "parallel/busy_processor.h"
#include "parallel/nvml.h"
#include "run_log_lines.h"
#include "test_files.h"
#include "train/tiny_model.h"
#include "watch/monitor.h"
#include "watch/observer_group.h"
#include "watch/phase_timers.h"
#include "watch/profiler.h"
#include "watch/report_parts.h"
#include "watch/step_measurement.h"

namespace kiln {
namespace {

namespace fs = std::filesystem;

double at_phase(const PhaseSeconds& seconds, StepPhase phase) { return seconds[static_cast<size_t>(phase)]; }

void sleep_ms(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

// The shares of the progress line and the report's plot add up.
TEST(PhaseGroups, HoldEveryPhaseOnce) {
  std::multiset<std::string> grouped;
  for (const PhaseGroup& group : phase_groups()) grouped.insert(group.phases.begin(), group.phases.end());
  std::multiset<std::string> phases = {"data", "encoding", "caption encoding"};  // before the step
  for (int phase = 0; phase < kNumStepPhases; ++phase) phases.emplace(name_of(static_cast<StepPhase>(phase)));
  EXPECT_EQ(grouped, phases);
}

TEST(PhaseTimers, PhasesAddUpToTheStep) {
  using Clock = std::chrono::steady_clock;
  PhaseTimers timers(at::kCPU);
  const auto outer_begin = Clock::now();
  auto inner_begin = outer_begin;
  for (int64_t segment = 0; segment < 2; ++segment) {
    timers.begin(StepPhase::kForward, segment);
    if (segment == 0) inner_begin = Clock::now();
    sleep_ms(10);
    timers.end(StepPhase::kForward, segment);
  }
  sleep_ms(5);  // between two phases: still the earlier one's
  timers.begin(StepPhase::kBackward, 1);
  sleep_ms(20);
  timers.end(StepPhase::kBackward, 1);
  const double least = std::chrono::duration<double>(Clock::now() - inner_begin).count();
  timers.end_step();
  const double most = std::chrono::duration<double>(Clock::now() - outer_begin).count();
  sleep_ms(10);  // between two steps: nobody's
  const PhaseSeconds seconds = timers.take();
  EXPECT_GE(at_phase(seconds, StepPhase::kForward), 0.025);
  EXPECT_GE(at_phase(seconds, StepPhase::kBackward), 0.020);
  const double total = std::accumulate(seconds.begin(), seconds.end(), 0.0);
  EXPECT_GE(total, least - 1e-9);
  EXPECT_LE(total, most + 1e-9);
  for (double again : timers.take()) EXPECT_EQ(again, 0);
}

// Notes what it hears in a list that several share.
struct Listener : StepObserver {
  Listener(std::vector<std::string>& heard, std::string name) : heard(heard), name(std::move(name)) {}
  void begin(StepPhase phase, int64_t) override { heard.push_back(name + "+" + std::string(name_of(phase))); }
  void end(StepPhase phase, int64_t) override { heard.push_back(name + "-" + std::string(name_of(phase))); }
  std::vector<std::string>& heard;
  std::string name;
};

TEST(ObserverGroup, EndsInTheReverseOrder) {
  std::vector<std::string> heard;
  Listener a(heard, "a"), b(heard, "b");
  ObserverGroup group;
  group.add(&a);
  group.add(&b);
  group.begin(StepPhase::kLoss, -1);
  group.end(StepPhase::kLoss, -1);
  group.remove(&a);
  group.begin(StepPhase::kInput, -1);
  EXPECT_THAT(heard, ElementsAre("a+loss", "b+loss", "b-loss", "a-loss", "b+input"));
}

MonitorOptions monitor_options(const TempFolder& run, int64_t max_steps, int64_t log_every) {
  return {.run = run.path().string(),
          .global_batch = 1,
          .max_steps = max_steps,
          .log_every = log_every,
          .tensorboard = false};
}

// A step of one picture.
void take_step(Monitor& monitor, int64_t step, bool is_last = false) {
  const StepResult result{.loss = 0.25, .losses = {0.25}};
  monitor.step(
      {.step = step, .is_last = is_last, .images_seen = step, .result = &result, .positions = {0.5}});
}

// The share of what a product reaches here, and of the data sheet's peak: the second is MFU.
TEST(Monitor, TellsBothSharesOfThePeak) {
  for (const double sheet_flops : {0.0, 4e15}) {
    const TempFolder run;
    MonitorOptions options = monitor_options(run, 10, 1);
    options.global_batch = 8;
    options.peak_flops = 1e15;
    options.sheet_flops = sheet_flops;
    const StepResult result{.loss = 0.25, .losses = std::vector<double>(8, 0.25)};
    const std::string text = stdout_of([&] {
      Monitor(options, /*from_step=*/0)
          .step({.step = 1,
                 .images_seen = 8,
                 .flops = 8e5,
                 .result = &result,
                 .positions = std::vector<double>(8, 0.5)});
    });
    const nlohmann::json line = test::run_log_lines(run.path().string()).back();
    EXPECT_EQ(line.contains("mfu"), sheet_flops > 0);
    EXPECT_EQ(text.find("MFU") != std::string::npos, sheet_flops > 0) << text;
    if (sheet_flops > 0) {
      EXPECT_NEAR(line["mfu"].get<double>() * 4, line["peak_share"].get<double>(), 1e-9);
    }
  }
}

// Friction 6 of a new user: what makes a run slow is told while it runs, once.
TEST(Monitor, SaysThatOthersHaveTheProcessors) {
  if (!test::system_counts_waiting()) GTEST_SKIP() << "the system does not say";
  const TempFolder run;
  const int threads = at::get_num_threads();
  at::set_num_threads(1);
  const std::string text = stdout_of([&] {
    const test::BusyProcessor busy;
    Monitor monitor(monitor_options(run, 9, 1), 0);
    for (const int64_t step : {1, 2}) {
      const auto begin = std::chrono::steady_clock::now();
      while (std::chrono::steady_clock::now() - begin < std::chrono::milliseconds(1100)) {
      }
      take_step(monitor, step);
    }
  });
  at::set_num_threads(threads);
  const std::string note = "note: up to step 1 other programs had ";
  ASSERT_NE(text.find(note), std::string::npos) << text;
  EXPECT_EQ(text.find("note: ", text.find(note) + 1), std::string::npos) << text;
  EXPECT_GT(test::run_log_lines(run.path().string()).back().at("taken_share").get<double>(), 0.2);
}

TEST(Monitor, WritesALineOfTheLastStep) {
  const TempFolder run;
  {
    Monitor monitor(monitor_options(run, 100, 10), 0);
    for (const int64_t step : {1, 2, 3}) take_step(monitor, step, /*is_last=*/step == 3);
  }
  const std::vector<nlohmann::json> lines = test::run_log_lines(run.path().string());
  ASSERT_EQ(lines.size(), 1U);
  EXPECT_EQ(lines.front().at("step"), 3);
}

// Means of each term over the steps of a line, also where a checkpoint comes between. One term is the loss.
TEST(Monitor, LogsSeveralTermsByName) {
  const TempFolder run;
  const auto line_of = [&](const std::vector<std::string>& terms) {
    MonitorOptions options = monitor_options(run, 4, 4);
    options.terms = terms;
    nlohmann::json window;
    for (int64_t step = 1; step <= 4; ++step) {
      Monitor monitor(options, step - 1);  // a process for each step
      monitor.restore_window(window);
      const double mse = static_cast<double>(step), vb = step == 3 ? NAN : 0.5;  // a step that is skipped
      const StepResult result{.loss = mse + vb, .losses = {mse + vb}, .terms = {mse, vb}};
      monitor.step({.step = step, .images_seen = step, .result = &result, .positions = {0.5}});
      window = nlohmann::json::parse(monitor.window().dump());
    }
    return test::run_log_lines(run.path().string()).back();
  };
  const nlohmann::json line = line_of({"mse", "vb"});
  EXPECT_EQ(line.at("loss_by_term"), nlohmann::json({{"mse", 7.0 / 3}, {"vb", 0.5}}));
  EXPECT_DOUBLE_EQ(line.at("loss").get<double>(), 7.0 / 3 + 0.5);
  EXPECT_FALSE(line_of({"mse"}).contains("loss_by_term"));
}

// A limit of the file's size stands in for a full disk.
TEST(Monitor, Finding6AFullDiskIsOneWarningForEachFile) {
  const TempFolder run;
  MonitorOptions options = monitor_options(run, 9, 1);
  options.tensorboard = true;
  Monitor monitor(options, 0);
  ::testing::internal::CaptureStdout();
  take_step(monitor, 1);
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const uintmax_t log_bytes = fs::file_size(run / "log.jsonl");
  const rlimit full{.rlim_cur = log_bytes + 9, .rlim_max = before.rlim_max};  // the next line is cut
  setrlimit(RLIMIT_FSIZE, &full);
  const std::string warnings = stderr_of([&] {
    take_step(monitor, 2);
    monitor.validation(2, {.num_images = 1, .loss = 0.5}, "model");
    monitor.evaluation(2, {{"metrics", {{"fid", 3.0}}}});
    monitor.image("samples", std::vector<uint8_t>(100), 1, 1, 2);
  });
  setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  take_step(monitor, 3);
  ::testing::internal::GetCapturedStdout();
  EXPECT_EQ(std::ranges::count(warnings, '\n'), 2) << warnings;
  EXPECT_THAT(warnings, has_all("warning: training goes on without lines of log.jsonl: cannot write ",
                                "warning: training goes on without TensorBoard's events: cannot write "));
  std::ifstream file(run / "log.jsonl");
  std::vector<int64_t> steps;
  for (std::string line; std::getline(file, line);) steps.push_back(nlohmann::json::parse(line).at("step"));
  EXPECT_THAT(steps, ElementsAre(1, 3)) << "whole lines only";
}

TEST(Monitor, Finding6ALogThatCannotBeOpenedIsOneWarning) {
  const TempFolder run;
  fs::create_directory(run / "log.jsonl");
  MonitorOptions options = monitor_options(run, 9, 1);
  options.tensorboard = true;
  const auto run_it = [&] {
    Monitor monitor(options, 0);
    take_step(monitor, 1);
    fs::remove(run / "log.jsonl");
    take_step(monitor, 2);
  };
  const std::string warnings = stderr_of([&] { stdout_of(run_it); });
  EXPECT_EQ(std::ranges::count(warnings, '\n'), 1) << warnings;
  EXPECT_THAT(warnings, HasSubstr("warning: training goes on without lines of log.jsonl: cannot read "));
  const std::vector<nlohmann::json> lines = test::run_log_lines(run.path().string());
  ASSERT_EQ(lines.size(), 1U) << "from the line on that can be written";
  EXPECT_EQ(lines.front().at("step"), 2);
}

// A hundred slow steps may lie between two lines of the log.
TEST(Monitor, TellsThatTrainingGoesOnBetweenTwoLines) {
  const auto text_of = [](double quiet_seconds) {
    const TempFolder run;
    MonitorOptions options = monitor_options(run, 3000, 100);
    options.global_batch = 8;
    options.quiet_seconds = quiet_seconds;
    Monitor monitor(options, /*from_step=*/0);
    const StepResult result{.loss = 0.25, .losses = std::vector<double>(8, 0.25)};
    return stdout_of([&] {
      for (int64_t step = 1; step <= 3; ++step)
        monitor.step({.step = step,
                      .images_seen = 8 * step,
                      .train_seconds = 10.0 * static_cast<double>(step),
                      .result = &result,
                      .positions = std::vector<double>(8, 0.5)});
    });
  };
  const std::string text = text_of(0);
  EXPECT_THAT(text, HasSubstr("at step 1: loss 0.25000, "));
  // The first step begins before anything is timed: two steps took 20 s, 2997 are left.
  EXPECT_THAT(text, has_all("at step 3: loss 0.25000, ",
                            " images/s, 8h 19m left (a line of the log every 100 steps: --log-every)\n"));
  EXPECT_EQ(text_of(1e6), "");
}

TEST(Profile, RangeIsChecked) {
  EXPECT_EQ(StepRange::parse("3:5").first, 3);
  EXPECT_EQ(StepRange::parse("3:5").last, 5);
  EXPECT_EQ(StepRange::parse("7:7").last, 7);
  for (const char* bad : {"5", "5:", ":5", "5:3", "0:2", "-1:2", "a:b", "1:2:3", "1 :2"})
    EXPECT_ERROR(StepRange::parse(bad), "FROM:TO", fmt::format("'{}'", bad));
}

struct Slice {
  double begin = 0, end = 0;
};
std::map<std::string, std::vector<Slice>> slices_of(const nlohmann::json& trace) {
  std::map<std::string, std::vector<Slice>> slices;
  for (const auto& event : trace.at("traceEvents"))
    if (event.value("ph", "") == "X" && event.at("name").is_string()) {
      const double begin = event.at("ts");
      slices[event.at("name")].push_back({begin, begin + event.at("dur").get<double>()});
    }
  return slices;
}

TEST(Profile, TraceHoldsPhasesAndOperationsInsideTheSteps) {
  const TempFolder folder;
  const fs::path path = folder.path() / "profile.json";
  test::TinyTraining tiny({});
  StepProfiler::Options options{.steps = {2, 3}, .path = path.string(), .device = at::kCPU, .segments = {}};
  for (const auto& segment : tiny.denoiser->segments()) options.segments.push_back(segment->name());
  StepProfiler profiler(options);
  tiny.step->observe(&profiler);
  for (int64_t step = 1; step <= 4; ++step) {
    profiler.begin_step(step);
    tiny.step->run(tiny.batch(4), 1e-4);
    profiler.end_step(step);
    EXPECT_EQ(fs::exists(path), step >= 3);
  }
  EXPECT_TRUE(profiler.finished());
  std::ifstream file(path);
  const auto slices = slices_of(nlohmann::json::parse(file));
  EXPECT_FALSE(slices.contains("step 1"));
  EXPECT_FALSE(slices.contains("step 4"));
  ASSERT_EQ(slices.at("step 2").size(), 1u);
  ASSERT_EQ(slices.at("step 3").size(), 1u);
  const auto inside_a_step = [&](const Slice& slice) {
    constexpr double kMicrosecond = 1;  // of rounding
    for (const char* step : {"step 2", "step 3"})
      if (const Slice& whole = slices.at(step)[0];
          slice.begin >= whole.begin - kMicrosecond && slice.end <= whole.end + kMicrosecond)
        return true;
    return false;
  };
  for (const char* name : {"forward blocks.0", "backward blocks.1", "optimizer embed", "loss", "grad_norm"}) {
    ASSERT_TRUE(slices.contains(name)) << name;
    // A step measures the norm, makes the update's scale of it, and reads both.
    EXPECT_EQ(slices.at(name).size(), name == std::string("grad_norm") ? 6u : 2u) << name;
    EXPECT_TRUE(std::ranges::all_of(slices.at(name), inside_a_step)) << name;
  }
  size_t fused = 0;
  for (const auto& [name, of_name] : slices) {
    if (!name.starts_with("kiln::")) continue;
    ++fused;
    EXPECT_TRUE(std::ranges::all_of(of_name, inside_a_step)) << name;
  }
  EXPECT_GE(fused, 3u);
}

TEST(Profile, TrainingThatEndsInsideTheRangeLeavesWhatThereIs) {
  const TempFolder folder;
  const fs::path path = folder.path() / "profile.json";
  StepProfiler profiler({.steps = {1, 9}, .path = path.string(), .device = at::kCPU, .segments = {}});
  profiler.begin_step(1);
  profiler.end_step(1);
  EXPECT_FALSE(fs::exists(path));
  profiler.finish();
  std::ifstream file(path);
  EXPECT_TRUE(slices_of(nlohmann::json::parse(file)).contains("step 1"));
}

TEST(Nvml, AbsentIsSilent) { EXPECT_EQ(Nvml::open(12345), nullptr); }

TEST(MemoryCurve, FollowsTheEventsByKind) {
  RecordedStep step;
  step.memory.persistent = {{MemoryKind::kMaster, 100}};
  using enum StepPhase;
  step.spans = {{.phase = kForward,
                 .segment = 0,
                 .events = {{1, 10, MemoryKind::kActivations},
                            {2, 50, MemoryKind::kMatmul},
                            {2, -50, MemoryKind::kMatmul}}},
                {.phase = kForward,
                 .segment = 1,
                 .events = {{3, 20, MemoryKind::kActivations}, {3, -20, MemoryKind::kActivations}}},
                {.phase = kLoss},
                {.phase = kOptimizer, .segment = 0, .events = {{4, 5, MemoryKind::kTemporaries}}}};
  const MemoryCurve curve = memory_curve(step);
  ASSERT_EQ(curve.points.size(), 4u);
  const auto bytes = [&](size_t point, const char* kind) {
    const auto& by_kind = curve.points[point].by_kind;
    return by_kind.contains(kind) ? by_kind.at(kind) : 0;
  };
  EXPECT_EQ(bytes(0, "master"), 100);
  EXPECT_EQ(bytes(0, "matmul"), 50);
  EXPECT_EQ(bytes(0, "activations"), 10);
  EXPECT_EQ(bytes(1, "activations"), 30);
  EXPECT_EQ(bytes(1, "matmul"), 0);
  EXPECT_EQ(bytes(2, "activations"), 10);
  EXPECT_EQ(bytes(3, "temporaries"), 5);
  EXPECT_EQ(curve.points[3].phase, "optimizer");

  const MemoryCurve again = figures_from_json(to_json(StepFigures{.curve = curve})).curve;
  ASSERT_EQ(again.points.size(), 4u);
  EXPECT_EQ(again.points[1].by_kind.at("activations"), 30);
  EXPECT_EQ(again.points[3].phase, "optimizer");
}

TEST(MemoryCurve, OfAManyPartedStepKeepsItsPeak) {
  RecordedStep step;
  for (int i = 0; i < 5000; ++i) {
    const int64_t bytes = i == 3210 ? 999 : 1;
    step.spans.push_back({.phase = StepPhase::kForward, .segment = i, .events = {{1, bytes}, {1, -bytes}}});
  }
  const MemoryCurve curve = memory_curve(step);
  EXPECT_LE(curve.points.size(), 400u);
  int64_t highest = 0;
  for (const auto& point : curve.points)
    for (const auto& [kind, bytes] : point.by_kind) highest = std::max(highest, bytes);
  EXPECT_EQ(highest, 999);
}

TEST(Prediction, ToleratedAndFound) {
  const StepFigures predicted{.peak_bytes = 1000, .by_kind = {{"master", 800}}, .step_s = 1};
  StepFigures measured{.peak_bytes = 1049, .by_kind = {{"master", 800}}, .step_s = 1.19};
  EXPECT_THAT(findings(predicted, measured), ElementsAre());
  measured.peak_bytes = 1060;
  measured.step_s = 0.7;
  EXPECT_THAT(findings(predicted, measured),
              ElementsAre(HasSubstr("peak memory is 6 % higher"), HasSubstr("a step is 30 % shorter")));
  EXPECT_THAT(findings(predicted, measured).back(), Not(HasSubstr("other programs")));
  EXPECT_TRUE(comparison_json(nullptr, measured).at("predicted").is_null());
  EXPECT_THROW(figures_from_json({{"peak_bytes", "much"}}), Error);
  EXPECT_THROW(figures_from_json({{"curve", 3}}), Error);
}

// Friction 6 of a new user: 6131 % longer, and nothing said why.
TEST(Prediction, AFindingNamesThatOthersHadTheProcessors) {
  StepFigures predicted{.step_s = 1}, measured{.step_s = 62, .taken_share = 0.93};
  EXPECT_THAT(findings(predicted, measured),
              ElementsAre("a step is 6100 % longer than the plan said: 1 s predicted, 62 s measured; other "
                          "programs had 93 % of the processors' time during the run"));
  std::swap(predicted, measured);
  EXPECT_THAT(findings(predicted, measured), ElementsAre(::testing::EndsWith("when the plan was made")));
  EXPECT_EQ(figures_from_json(to_json(predicted)).taken_share, 0.93);
}

// The measured peak of the second step is what the allocator counted, and its kinds add up to it.
TEST(StepMeasurement, MeasuresASteadyStep) {
  install_tracking_cpu_allocator();
  test::TinyTraining tiny({});
  ObserverGroup observers;
  tiny.step->observe(&observers);
  const AutoencoderKl autoencoder({.block_out_channels = {32}, .layers_per_block = 1}, {});
  int64_t autoencoder_bytes = 0;
  for (const auto& weight : autoencoder.parameters())
    autoencoder_bytes += static_cast<int64_t>(weight->value.nbytes());
  StepMeasurement measurement(at::kCPU, 8, *tiny.state, &autoencoder, observers);
  int64_t counted_peak = 0;
  double steady_run_seconds = 0, steady_seconds = 0;
  for (int step = 1; step <= 5; ++step) {
    const StepBatch batch = tiny.batch(8, static_cast<uint64_t>(step));
    const auto step_begin = std::chrono::steady_clock::now();
    sleep_ms(2);  // the loader's
    const int64_t before = live_cpu_bytes().live;
    reset_peak_cpu_bytes();
    const auto run_begin = std::chrono::steady_clock::now();
    measurement.measure([&] { return tiny.step->run(batch, 1e-4); });
    const auto end = std::chrono::steady_clock::now();
    const double seconds = std::chrono::duration<double>(end - step_begin).count();
    if (step == 2) counted_peak = live_cpu_bytes().peak - before;
    if (step > 2) {
      steady_run_seconds += std::chrono::duration<double>(end - run_begin).count();
      steady_seconds += seconds;
    }
    measurement.add(seconds, 0.002);
  }
  const StepFigures figures = measurement.figures();
  EXPECT_EQ(figures.num_steps, 3);
  const std::set<std::string> lasting = {"master", "moments", "ema", "gradients", "constants", "autoencoder"};
  int64_t by_kind = 0, persistent = 0;
  for (const auto& [kind, bytes] : figures.by_kind) {
    by_kind += bytes;
    if (lasting.contains(kind)) persistent += bytes;
  }
  EXPECT_EQ(figures.by_kind.at("autoencoder"), autoencoder_bytes);
  EXPECT_EQ(by_kind, figures.peak_bytes);
  EXPECT_EQ(figures.peak_bytes - persistent, counted_peak);
  EXPECT_FALSE(figures.curve.points.empty());
  ASSERT_EQ(figures.step_s_quartiles.size(), 3u);
  EXPECT_LE(figures.step_s_quartiles[0], figures.step_s_quartiles[1]);
  EXPECT_EQ(figures.step_s, figures.step_s_quartiles[1]);
  double phases = -figures.phase_s.at("data");
  for (const auto& [phase, seconds] : figures.phase_s) phases += seconds;
  // Also where steps differ as the machine is loaded.
  EXPECT_LE(phases, figures.step_s * steady_run_seconds / steady_seconds + 1e-9);
  EXPECT_GE(phases, 0.5 * figures.step_s * steady_run_seconds / steady_seconds);
  EXPECT_GT(figures.phase_s.at("forward"), 0);
  EXPECT_NEAR(figures.phase_s.at("data"), 0.002, 1e-9);
  EXPECT_GT(figures.stall_share, 0);
  for (const char* phase : {"first step", "steady step"}) EXPECT_GT(figures.by_phase.at(phase), 0);
}

// A plan is of the largest batch: what a run measures of smaller ones is not held against it.
TEST(StepMeasurement, ARehearsalStandsForSmallerSteps) {
  install_tracking_cpu_allocator();
  test::TinyTraining tiny({});
  ObserverGroup observers;
  tiny.step->observe(&observers);
  StepMeasurement measurement(at::kCPU, 4, *tiny.state, nullptr, observers);
  measurement.measure_rehearsal([&] { tiny.step->run(tiny.batch(16, 1), 1e-4); });
  for (int step = 1; step <= 3; ++step) {
    measurement.measure([&] { return tiny.step->run(tiny.batch(4, static_cast<uint64_t>(step)), 1e-4); });
    measurement.add(0.01, 0);
  }
  const StepFigures figures = measurement.figures();
  EXPECT_EQ(figures.peak_bytes, figures.by_phase.at("rehearsal"));
  EXPECT_LT(figures.by_phase.at("steady step"), figures.peak_bytes);
  int64_t by_kind = 0;
  for (const auto& [kind, bytes] : figures.by_kind) by_kind += bytes;
  EXPECT_EQ(by_kind, figures.peak_bytes);
  StepFigures planned = figures;
  planned.by_phase = {{"steady step", figures.peak_bytes}, {"load", 1}};
  for (const ComparedFigure& figure : compare(planned, figures))
    if (!figure.is_time) {
      EXPECT_EQ(figure.relative_error(), 0) << figure.name;
    }
}

// Figures kept of every step were 32 bytes each, and the vectors' copies as they grew divided the heap: a run
// of 110,000 steps had 8 % more memory at its end.
TEST(StepMeasurement, ALongRunTakesNoMoreMemory) {
  test::TinyTraining tiny({});
  ObserverGroup observers;
  StepMeasurement measurement(at::kCPU, 4, *tiny.state, nullptr, observers);
  const auto add = [&](int times, double seconds) {
    for (int step = 0; step < times; ++step) measurement.add(seconds, seconds / 4, {seconds / 8, 0});
    const auto heap = ::mallinfo2();
    return static_cast<int64_t>(heap.uordblks + heap.hblkhd);
  };
  add(2, 100);  // not steady
  const int64_t early = add(10'000, 1), late = add(200'000, 1);
  EXPECT_LT(late - early, 4096);
  add(5'000, 2);
  const StepFigures figures = measurement.figures();
  EXPECT_EQ(measurement.num_steps(), 215'002);
  EXPECT_EQ(figures.num_steps, 215'000);
  EXPECT_EQ(figures.step_s_quartiles, std::vector<double>(3, 2.0));  // the newest
  EXPECT_DOUBLE_EQ(figures.stall_share, 0.25);
  EXPECT_NEAR(figures.phase_s.at(kEncodingPhases[0]), 220'000 / 8.0 / 215'000, 1e-12);
}

TEST(PhaseMemory, KeepsTheHighestPeakOfEachPhase) {
  install_tracking_cpu_allocator();
  constexpr int64_t kBytes = 4'000'000;
  const int64_t before = live_cpu_bytes().live;
  PhaseMemory memory(at::kCPU);
  for (const int64_t times : {1, 3, 2}) {
    const PhaseMemory::Phase phase(memory, "checkpoint");
    at::empty({times * kBytes}, at::kByte);
  }
  at::empty({9 * kBytes}, at::kByte);  // between phases
  { const PhaseMemory::Phase phase(memory, "load"); }
  EXPECT_EQ(memory.peak_bytes().at("checkpoint") - before, 3 * kBytes);
  EXPECT_LT(memory.peak_bytes().count("load") ? memory.peak_bytes().at("load") - before : 0, kBytes);
}

// Friction 7 of a new user: the plan counts a text encoder's weights, which are pages of their file.
TEST(PhaseMemory, CountsMappedWeightsInEveryPhase) {
  install_tracking_cpu_allocator();
  std::vector<float> pages(1000);
  const at::Tensor mapped = at::from_blob(pages.data(), {1000}), allocated = at::ones({500});
  PhaseMemory memory(at::kCPU);
  for (const char* name : {"load", "checkpoint"}) const PhaseMemory::Phase phase(memory, name);
  const std::map<std::string, int64_t> before = memory.peak_bytes();
  memory.count_mapped({mapped, allocated});
  for (const auto& [phase, bytes] : memory.peak_bytes()) EXPECT_EQ(bytes, before.at(phase) + 4000) << phase;
}

TEST(ReportParts, MemoryIsStackedByKindWithTheMeasuredLineOverIt) {
  MemoryCurve curve;
  for (const char* phase : {"forward", "forward", "backward", "optimizer"})
    curve.points.push_back({phase, {{"master", 1000000000}, {"activations", 500000000}, {"odd <kind>", 5}}});
  const auto plots_of = [](const MemoryCurve& by_kind, const MemoryCurve& measured) {
    Page page("p");
    add_memory_plot(page, by_kind, measured);
    return test::parts_of(page.json(), "plot");
  };
  const nlohmann::json plot = plots_of(curve, curve).at(0);
  EXPECT_EQ(plot.at("title"), "Memory over a step, GB");
  EXPECT_EQ(plot.at("x_ticks"),
            nlohmann::json::parse(R"([[0, "forward"], [2, "backward"], [3, "optimizer"]])"));
  std::vector<std::string> names;
  for (const nlohmann::json& one : plot.at("series")) {
    names.push_back(one.at("name"));
    EXPECT_EQ(one.at("stacked"), names.back() != "measured");
  }
  EXPECT_EQ(names, (std::vector<std::string>{"master", "activations", "odd <kind>", "measured"}));
  EXPECT_EQ(plot.at("series").at(3).at("y").at(0), 1.5);
  EXPECT_EQ(plots_of(curve, {}).at(0).at("series").at(3).at("x"), nlohmann::json::array());
  EXPECT_TRUE(plots_of({}, {}).empty());
}

}  // namespace
}  // namespace kiln
