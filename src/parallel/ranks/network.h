// Which of this machine's addresses Gloo listens on. For parallel/ only.
#pragma once
#include <memory>

#include "parallel/ranks/ranks.h"

namespace gloo::transport {
class Device;
}

namespace kiln {

// Chooses the interface that GLOO_SOCKET_IFNAME names. Without it, chooses a loopback interface if all ranks
// are on this machine, else the one that packets to the rendezvous leave from. Throws if there is none.
std::shared_ptr<gloo::transport::Device> network_device(const Ranks& ranks);

}  // namespace kiln
