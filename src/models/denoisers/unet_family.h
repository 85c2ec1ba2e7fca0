// The U-Net's row of the registry.
#pragma once
#include "models/family.h"

namespace kiln {

Family unet_family();

}  // namespace kiln
