// Sana as a row of the table of families.
#pragma once
#include "models/family.h"

namespace kiln {

Family sana_family();

}  // namespace kiln
