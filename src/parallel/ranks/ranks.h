// Which of a run's processes this one is, as the launcher that started it says. Torch-free.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace kiln {

struct Ranks {
  bool launched = false;  // the environment of this process says the rest
  int64_t rank = 0, world_size = 1;
  int64_t local_rank = 0, local_world_size = 1;  // among the processes of this machine
  std::string master_addr = "127.0.0.1";         // where rank 0, or the launcher, hosts the rendezvous
  int64_t master_port = 29500;
  bool launcher_hosts = false;  // the launcher hosts the rendezvous; else rank 0 does
  std::string attempt = "0";    // torchrun restarts all ranks after a failure: their keys must not mix
  std::string secret{};         // of the job; without it notices of other ranks are not signed
};

using Environment = std::function<const char*(const char* name)>;  // std::getenv, or a test's table

// Reads RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT (torchrun, kiln train
// --nproc), SLURM_* (srun, of several tasks) or OMPI_COMM_WORLD_* (mpirun), and KILN_JOB_SECRET or
// KILN_JOB_SECRET_FILE. Without any of them there is one rank. Throws Error naming the variable that is
// missing or impossible.
Ranks ranks_from_environment(const Environment& environment);
Ranks ranks_from_environment();

// Returns the tasks of each node from Slurm's notation: 8, 8, 4 for "8(x2),4". Throws Error.
std::vector<int64_t> slurm_tasks_per_node(const std::string& list);

// Returns the first host of Slurm's list: "node03" for "node[03-07,12],big1".
std::string first_slurm_host(const std::string& nodelist);

}  // namespace kiln
