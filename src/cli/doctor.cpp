#include "doctor/doctor.h"

#include "cli/build_identity.h"
#include "cli/commands.h"

namespace kiln::cli {

void add_doctor_command(CLI::App& app) {
  auto* command = app.add_subcommand(
      "doctor", "Say what this machine has for Kiln, what it lacks and what would make it faster");
  auto options = std::make_shared<DoctorOptions>();
  auto json = std::make_shared<bool>(false);
  command->add_option("--folder", options->folder, "Folder where runs will be written")
      ->capture_default_str();
  command->add_flag("!--no-peak", options->measures_peak, "Leave out the measurement of five seconds");
  command->add_flag("--json", *json, "Print one JSON object, and nothing else, on standard output");
  command->callback([=] {
    const std::vector<MachineFinding> findings = examine(*options);
    nlohmann::json result = to_json(findings);
    result["program"] = build_identity();
    fmt::print("{}", *json ? result.dump(1) + "\n" : findings_text(findings));
    check_nothing_lacks(findings);
  });
}

}  // namespace kiln::cli
