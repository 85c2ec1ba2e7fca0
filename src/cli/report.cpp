#include "watch/report.h"
#include "cli/commands.h"
#include "watch/reported_run.h"

namespace kiln::cli {

void add_report_command(CLI::App& app) {
  struct Options {
    std::vector<std::string> runs;
    std::string out;
  };
  auto* command =
      app.add_subcommand("report", "Write a run's report.html again, or several runs on one page");
  auto options = std::make_shared<Options>();
  command->add_option("runs", options->runs, "Run folders")->required();
  command->add_option("--out", options->out,
                      "File to write (default: RUN/report.html for one run, report.html for several)");
  command->callback([options] {
    for (const std::string& run : options->runs) require_run_folder("report", run);
    if (options->runs.size() == 1) {
      write_report(options->runs[0], options->out);
      fmt::print("{}\n", options->out.empty() ? options->runs[0] + "/report.html" : options->out);
      return;
    }
    if (options->out.empty()) options->out = "report.html";
    write_runs_report(options->runs, options->out);
    fmt::print("{}\n", options->out);
  });
}

}  // namespace kiln::cli
