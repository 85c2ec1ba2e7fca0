// Which of this machine's addresses Gloo listens on. For parallel/ only.
#pragma once
#include <memory>

#include "parallel/ranks.h"

namespace gloo::transport {
class Device;
}

namespace kiln {

// Of the interface that GLOO_SOCKET_IFNAME names; else a loopback one where all ranks are on this machine,
// and the one that packets to the rendezvous leave from where they are not. Throws where there is none.
std::shared_ptr<gloo::transport::Device> network_device(const Ranks& ranks);

}  // namespace kiln
