// Members of a struct in JSON under their own names, each named once. Torch-free.
#pragma once
#include "core/json.h"

// Does json["name"] = record.name for every name.
#define KILN_WRITE_FIELDS(json, record, ...)                                 \
  do {                                                                       \
    auto& kiln_json = json;                                                  \
    const auto& kiln_record = record;                                        \
    NLOHMANN_JSON_EXPAND(NLOHMANN_JSON_PASTE(KILN_WRITE_FIELD, __VA_ARGS__)) \
  } while (false)
#define KILN_WRITE_FIELD(name) kiln_json[#name] = kiln_record.name;

// Does record.name = json.at("name") for every name. Throws nlohmann::json::exception.
#define KILN_READ_FIELDS(json, record, ...)                                 \
  do {                                                                      \
    const auto& kiln_json = json;                                           \
    auto& kiln_record = record;                                             \
    NLOHMANN_JSON_EXPAND(NLOHMANN_JSON_PASTE(KILN_READ_FIELD, __VA_ARGS__)) \
  } while (false)
#define KILN_READ_FIELD(name) kiln_json.at(#name).get_to(kiln_record.name);

// Does record.name = config.get("name", record.name) of a JsonConfig for every name. Throws Error.
#define KILN_GET_FIELDS(config, record, ...)                               \
  do {                                                                     \
    const auto& kiln_config = config;                                      \
    auto& kiln_record = record;                                            \
    NLOHMANN_JSON_EXPAND(NLOHMANN_JSON_PASTE(KILN_GET_FIELD, __VA_ARGS__)) \
  } while (false)
#define KILN_GET_FIELD(name) kiln_record.name = kiln_config.get(#name, kiln_record.name);
