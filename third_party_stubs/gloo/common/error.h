// See README.md in this folder.
#pragma once
