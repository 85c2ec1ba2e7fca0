// PixArt as rows of the table of families.
#pragma once
#include "models/family.h"

namespace kiln {

Family pixart_family();            // in the repository's keys
Family pixart_diffusers_family();  // in those of diffusers

}  // namespace kiln
