// See README.md in this folder.
#pragma once

namespace gloo::transport {
class Device;
}
