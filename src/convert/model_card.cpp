#include "convert/model_card.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <vector>

#include "core/text/utf8.h"
#include "core/units.h"
#include "diffusion/sampler_noise.h"
#include "models/text/text_registry.h"

namespace kiln {
namespace {

using nlohmann::json;

constexpr const char* kPrompt = "a red apple on a wooden table";
constexpr const char *kNullRows = "null_rows", *kAllChannels = "all";

// Python: "text" with quotes and escapes.
std::string quoted(const std::string& text) { return dump_utf8(json(text)); }

std::string literal(const json& value) {
  if (value.is_boolean()) return value.get<bool>() ? "True" : "False";
  return value.is_null() ? "None" : value.dump();
}

bool takes_text(const ModelCard& card) { return card.shape.conditioning.takes_text(); }
bool takes_labels(const ModelCard& card) { return card.shape.conditioning.takes_labels(); }

bool guides(const ModelCard& card) {
  return card.record.drawing.cfg_scale != 1 && (takes_text(card) || takes_labels(card));
}

int64_t guided_channels(const ModelCard& card) {
  return card.record.drawing.guided_channels == kAllChannels ? card.shape.in_channels
                                                             : card.shape.guided_channels;
}

// Returns a piece's name without the place where it lies on this machine.
std::string name_or(const std::string& path, const char* otherwise) {
  const std::string name = piece_name(path);
  return name.empty() ? otherwise : name;
}

// --- Python ---

std::string scheduler_class(const ModelCard& card) {
  const DiffusersSchedule& schedule = card.schedule;
  return (schedule.outside_pipelines.is_null() ? schedule.config : schedule.outside_pipelines)
      .at("_class_name");
}

// The module of a scheduler that draws noise.
std::string scheduler_module(const std::string& class_name) {
  return class_name == "DDPMScheduler" ? "scheduling_ddpm" : "scheduling_euler_ancestral_discrete";
}

// Gives the scheduler Kiln's noise.
std::string step_noise(const ModelCard& card) {
  if (!card.has_step_noise) return "";
  return fmt::format(
      "step_noise = iter(load_file(f\"{{folder}}/{}\")[\"{}\"])\n"
      "schedulers.{}.randn_tensor = lambda *_, **__: next(step_noise)  # Kiln's, for the same picture\n",
      kNoiseFile, kStepNoiseTensor, scheduler_module(scheduler_class(card)));
}

std::string imports(const ModelCard& card, bool calls_pipeline) {
  std::vector<std::string> classes;
  if (calls_pipeline) {
    classes.push_back(card.pipeline);
  } else {
    const json& scheduler =
        card.schedule.outside_pipelines.is_null() ? card.schedule.config : card.schedule.outside_pipelines;
    classes = {card.format.class_name, scheduler.at("_class_name")};
  }
  if (!card.autoencoder.empty() && !(calls_pipeline && card.has_autoencoder))
    classes.push_back(card.autoencoder);
  if (card.has_step_noise) classes.emplace_back("schedulers");
  std::ranges::sort(classes);
  std::string text = fmt::format(
      "import torch\nfrom diffusers import {}\nfrom diffusers.image_processor import VaeImageProcessor\n"
      "from safetensors.torch import load_file\n",
      fmt::join(classes, ", "));
  if (!takes_text(card)) return text;
  const TransformersClasses& encoder = transformers_classes(card.record.text.encoder);
  return text + fmt::format("from transformers import {}, {}\n", encoder.model, encoder.tokenizer);
}

std::string settings(const ModelCard& card) {
  std::string text = "\nfolder = \".\"  # this one\n";
  if (!card.autoencoder.empty() && !card.has_autoencoder)
    text += fmt::format("autoencoder = {}  # the folder of the {}\n",
                        quoted(name_or(card.record.autoencoder.path, "autoencoder")), card.autoencoder);
  if (takes_text(card) && !card.has_text_encoder)
    text += fmt::format("text_encoder = {}  # the folder of the text encoder and its tokenizer\n",
                        quoted(name_or(card.record.text.encoder_path, "text_encoder")));
  if (takes_text(card)) text += fmt::format("prompt = {}\n", quoted(kPrompt));
  if (takes_labels(card)) text += "label = 0\n";
  text += fmt::format("height, width = {}, {}\n", card.height, card.width);
  if (guides(card)) text += fmt::format("guidance = {}\n", card.record.drawing.cfg_scale);
  return text + fmt::format(
                    "noise = load_file(f\"{{folder}}/{}\")[\"{}\"]  # of seed {}; torch.randn(noise.shape) "
                    "gives others\n",
                    kNoiseFile, kNoiseTensor, kCardSeed);
}

// Defines encode(text), the rows of a caption and their mask as training has them.
std::string encode_function(const ModelCard& card) {
  const ModelRecord::TextInfo& text = card.record.text;
  const TransformersClasses& encoder = transformers_classes(text.encoder);
  const auto from = [&](const char* subfolder) {
    return card.has_text_encoder ? fmt::format("f\"{{folder}}/{}\"", subfolder) : "text_encoder";
  };
  const bool shows_padding = text.encoder == "clip_text", has_instruction = !text.instruction.empty();
  const int64_t length = text.max_tokens > 0 ? text.max_tokens : card.shape.conditioning.max_text_tokens;
  std::string code =
      fmt::format("\ntokenizer = {}.from_pretrained({})\nencoder = {}.from_pretrained({}).float().eval()\n",
                  encoder.tokenizer, from("tokenizer"), encoder.model, from("text_encoder"));
  code += "tokenizer.padding_side = \"right\"\n";
  if (has_instruction) code += fmt::format("instruction = {}\n", quoted(text.instruction));
  code += fmt::format("\n\n@torch.no_grad()\ndef encode(text{}):\n", has_instruction ? ", before=\"\"" : "");
  if (has_instruction) code += "    hidden = max(len(tokenizer(before).input_ids) - 2, 0) if before else 0\n";
  code += fmt::format(
      "    tokens = tokenizer({}text, padding=\"max_length\", max_length={}{}, truncation=True, "
      "return_tensors=\"pt\")\n",
      has_instruction ? "before + " : "", length, has_instruction ? " + hidden" : "");
  code += fmt::format("    rows = encoder(tokens.input_ids{})[0]\n",
                      shows_padding ? "" : ", attention_mask=tokens.attention_mask");
  if (text.dtype != Dtype::kF32)
    code += fmt::format("    rows = rows.{}().float()  # as they were trained with\n",
                        text.dtype == Dtype::kBF16 ? "bfloat16" : "half");
  if (has_instruction) {
    code += "    kept = [0, *range(1 + hidden, rows.shape[1])]\n";
    return code + "    return rows[:, kept], tokens.attention_mask[:, kept]\n\n\n";
  }
  return code + fmt::format("    return rows, {}\n\n\n",
                            shows_padding ? "torch.ones_like(tokens.input_ids)" : "tokens.attention_mask");
}

std::string captions(const ModelCard& card) {
  const ModelRecord::TextInfo& text = card.record.text;
  std::string asked = "prompt";
  if (!text.prefix.empty()) asked = quoted(text.prefix) + " + " + asked;
  if (!text.suffix.empty()) asked += " + " + quoted(text.suffix);
  std::string code = encode_function(card) + fmt::format("rows, mask = encode({}{})\n", asked,
                                                         text.instruction.empty() ? "" : ", instruction");
  if (!guides(card)) return code;
  if (card.record.drawing.unconditional == kNullRows && card.has_null_rows)
    return code +
           fmt::format("null_rows, null_mask = load_file(f\"{{folder}}/{}\")[\"{}\"][None].float(), mask\n",
                       kNullRowsFile, kNullRowsTensor);
  return code + "null_rows, null_mask = encode(\"\")\n";
}

std::string decode(const ModelCard& card, const char* vae) {
  const char* const save = "VaeImageProcessor().postprocess(pixels)[0].save(\"picture.png\")\n";
  if (card.autoencoder.empty()) return fmt::format("pixels = x\n{}", save);
  const ModelRecord::AutoencoderInfo& trained = card.record.autoencoder;
  const bool may_shift = trained.shift_factor != 0 || trained.name.empty();
  return fmt::format(
      "with torch.no_grad():\n    pixels = {0}.decode(x / {0}.config.scaling_factor{1}).sample\n{2}", vae,
      may_shift ? fmt::format(" + ({}.config.get(\"shift_factor\") or 0)", vae) : "", save);
}

std::string load_autoencoder(const ModelCard& card) {
  if (card.autoencoder.empty()) return "";
  return fmt::format("vae = {}.from_pretrained({}).float().eval()\n", card.autoencoder,
                     card.has_autoencoder ? "folder, subfolder=\"vae\"" : "autoencoder");
}

// Calls the pipeline for latents, because not every pipeline knows an autoencoder's shift.
std::string pipeline_code(const ModelCard& card) {
  const bool loads_vae = !card.autoencoder.empty() && !card.has_autoencoder;
  const bool masks = card.format.card.passes_masks;
  const char* const next = ",\n         ";
  std::string call = fmt::format("prompt_embeds=rows{}", masks ? ", prompt_attention_mask=mask" : "");
  if (guides(card))
    call += fmt::format("{}negative_prompt=None, negative_prompt_embeds=null_rows{}", next,
                        masks ? ", negative_prompt_attention_mask=null_mask" : "");
  call +=
      fmt::format("{}guidance_scale={}, {},", next, guides(card) ? "guidance" : "1", card.schedule.arguments);
  const std::string further = card.format.card.call;
  call += fmt::format("\n         height=height, width=width, latents=noise, {}{}output_type=\"latent\"",
                      further, further.empty() ? "" : ", ");
  return load_autoencoder(card).substr(0, loads_vae ? std::string::npos : 0) + captions(card) +
         fmt::format("pipe = {}.from_pretrained(folder, torch_dtype=torch.float32{}{})\n", card.pipeline,
                     card.autoencoder.empty() ? ", vae=None"
                     : loads_vae              ? ", vae=vae"
                                              : "",
                     card.has_text_encoder ? "" : ", text_encoder=None, tokenizer=None") +
         step_noise(card) + fmt::format("x = pipe({}).images\n", call) + decode(card, "pipe.vae");
}

std::string load_scheduler(const ModelCard& card) {
  json given = card.schedule.outside_pipelines;
  const std::string of_class = scheduler_class(card);
  std::string from = ".from_pretrained(folder, subfolder=\"scheduler\")";
  if (!given.is_null()) {
    std::vector<std::string> arguments;
    given.erase("_class_name");
    for (const auto& [key, value] : given.items())
      arguments.push_back(fmt::format("{}={}", key, literal(value)));
    from = fmt::format("({})", fmt::join(arguments, ", "));
  }
  return fmt::format("scheduler = {}{}\nscheduler.set_timesteps({})\n", of_class, from,
                     card.schedule.arguments);
}

std::string indented(std::string text) {
  for (size_t at = text.find('\n'); at != std::string::npos; at = text.find('\n', at + 5))
    text.replace(at, 1, "\n    ");
  return text;
}

std::string loop_code(const ModelCard& card) {
  const bool scales = card.schedule.config.at("_class_name").get<std::string>().starts_with("Euler");
  const int64_t guided = guided_channels(card), channels = card.shape.in_channels;
  std::string code = fmt::format("model = {}.from_pretrained(folder, subfolder=\"{}\").float().eval()\n",
                                 card.format.class_name, card.format.component);
  code += card.format.card.setup + load_autoencoder(card) + load_scheduler(card) + step_noise(card);
  if (takes_text(card)) code += captions(card);
  if (takes_text(card) && guides(card))
    code += "rows, mask = torch.cat([rows, null_rows]), torch.cat([mask, null_mask])\n";
  if (takes_labels(card))
    code += guides(card)
                ? fmt::format("labels = torch.tensor([label, {}])\n", card.shape.conditioning.num_classes)
                : "labels = torch.tensor([label])\n";
  code += fmt::format("\nsample = noise{}\nwith torch.no_grad():\n    for step in scheduler.timesteps:\n",
                      scales ? " * scheduler.init_noise_sigma" : "");
  const std::string inputs = guides(card) ? "torch.cat([sample, sample])" : "sample";
  code += fmt::format("        x = {}\n",
                      scales ? fmt::format("scheduler.scale_model_input({}, step)", inputs) : inputs);
  code += "        t = step.expand(len(x))\n";
  const std::string forward = indented(indented(card.format.card.forward));
  code += fmt::format("        output = {}\n", forward);
  if (guides(card)) {
    code += "        output, null = output.chunk(2)\n";
    code += fmt::format(
        "        output[:, :{0}] = null[:, :{0}] + guidance * (output[:, :{0}] - null[:, :{0}])\n", guided);
  }
  // DDPM reads the learned variance behind the prediction.
  const json& outside = card.schedule.outside_pipelines;
  const bool keeps_variance = outside.is_object() && outside.contains("variance_type");
  code +=
      fmt::format("        sample = scheduler.step(output{}, step, sample).prev_sample\n",
                  card.shape.predicts_sigma() && !keeps_variance ? fmt::format("[:, :{}]", channels) : "");
  return code + "x = sample\n" + decode(card, "vae");
}

std::string python_code(const ModelCard& card) {
  const bool calls_pipeline = card.limit.empty();
  return imports(card, calls_pipeline) + settings(card) + "\n" +
         (calls_pipeline ? pipeline_code(card) : loop_code(card));
}

// --- the page ---

std::string objective_text(const json& objective) {
  std::string type = objective.is_object() ? objective.value("type", "") : "";
  if (type == "flow") return fmt::format("flow matching, shift {}", objective.value("shift", 1.0));
  if (type == "ddpm")
    return fmt::format("{}, {} betas", objective.value("prediction_type", "epsilon"),
                       objective.value("beta_schedule", "linear"));
  return type;
}

std::string guidance_text(const ModelCard& card) {
  if (!guides(card)) return "no guidance";
  const std::string from = takes_labels(card)                               ? "the null class"
                           : card.record.drawing.unconditional == kNullRows ? "the null rows"
                                                                            : "the empty caption";
  return fmt::format("guidance {} away from {}, on {} of {} channels", card.record.drawing.cfg_scale, from,
                     guided_channels(card), card.shape.in_channels);
}

std::string pieces_text(const std::string& kind, const std::string& path, const std::string& fingerprint,
                        const std::string& details) {
  std::string text = kind;
  if (!path.empty()) text += fmt::format(" `{}`", name_or(path, ""));
  if (!fingerprint.empty()) text += fmt::format(", fingerprint `{}`", fingerprint);
  return text + details;
}

std::string trained_on_text(const json& trained_on) {
  std::string text;
  const auto add = [&](const char* key, const char* words) {
    if (!trained_on.contains(key)) return;
    const json& value = trained_on.at(key);
    std::vector<std::string> named;
    for (const json& part : value.is_array() ? value : json::array({value}))
      named.push_back(part.is_string() ? part.get<std::string>() : part.dump());
    text += fmt::format("{}{}{}", text.empty() ? "" : ", ", fmt::join(named, ", "), words);
  };
  add("data", "");
  add("samples", " samples");
  add("steps", " steps");
  add("global_batch", " images a step");
  return text;
}

std::string facts(const ModelCard& card) {
  const ModelRecord& record = card.record;
  std::string table = "| | |\n|---|---|\n";
  const auto add = [&](const char* name, const std::string& value) {
    if (!value.empty()) table += fmt::format("| {} | {} |\n", name, value);
  };
  add("model",
      fmt::format("{}, {} weights", record.model, number_text(static_cast<double>(card.num_weights), 3)));
  add("weights", record.average);
  add("objective", objective_text(record.objective));
  add("trained on", trained_on_text(record.trained_on));
  std::string sizes = fmt::format("{} x {}", card.height, card.width);
  for (const auto& size : record.buckets)
    if (size.height != card.height || size.width != card.width)
      sizes += fmt::format(", {} x {}", size.height, size.width);
  add("sizes in pixels, height x width", sizes);
  add("drawn with", fmt::format("{} in {} steps, {}", record.drawing.sampler,
                                record.drawing.num_sampling_steps, guidance_text(card)));
  if (card.autoencoder.empty())
    add("autoencoder", "none: the model makes pixels");
  else
    add("autoencoder",
        pieces_text(card.autoencoder, record.autoencoder.path, record.autoencoder.fingerprint,
                    record.autoencoder.name.empty()
                        ? ""
                        : fmt::format(", scaling factor {}, shift {}", record.autoencoder.scaling_factor,
                                      record.autoencoder.shift_factor)));
  if (takes_text(card))
    add("text encoder",
        pieces_text(record.text.encoder, record.text.encoder_path, record.text.encoder_fingerprint,
                    record.text.max_tokens > 0
                        ? fmt::format(", captions of at most {} tokens", record.text.max_tokens)
                        : ""));
  if (!record.class_names.empty()) add("classes", "their names are in model_index.json");
  return table;
}

std::string kiln_command(const ModelCard& card) {
  std::string command = "kiln sample --weights .";
  if (!card.autoencoder.empty() && !card.has_autoencoder)
    command += fmt::format(" --autoencoder {}", name_or(card.record.autoencoder.path, "AUTOENCODER"));
  if (takes_text(card) && !card.has_text_encoder)
    command += fmt::format(" --text-encoder {}", name_or(card.record.text.encoder_path, "TEXT_ENCODER"));
  if (takes_text(card)) command += fmt::format(" --prompt {}", quoted(kPrompt));
  if (takes_labels(card)) command += " --classes 0";
  if (!card.other_pieces.empty()) command += " --anyway";
  return command + fmt::format(" --num-images 1 --seed {} --out pictures\n", kCardSeed);
}

std::string remarks(const ModelCard& card) {
  std::string text;
  if (!card.limit.empty())
    text += fmt::format(
        "\n`{}` loads from this folder but draws other pictures: {}. So the code above has its own loop.\n",
        card.pipeline, card.limit);
  else if (takes_text(card))
    text += fmt::format(
        "\n`{}` itself may prepare a `prompt` otherwise (lower case), so the code above encodes it.\n",
        card.pipeline);
  for (const std::string& other : card.other_pieces) text += fmt::format("\nAttention: {}.\n", other);
  if (!card.schedule.limit.empty()) text += fmt::format("\n{}.\n", card.schedule.limit);
  if (card.schedule.is_stochastic && !card.has_step_noise)
    text +=
        "\nThe sampler adds noise at every step. diffusers draws its own, so the two pictures differ as "
        "those "
        "of two seeds do.\n";
  if (card.has_null_rows)
    text += fmt::format(
        "\n`{}` holds the rows that stand for no caption. diffusers' class has no place for them; "
        "`kiln convert --in` this folder puts them back.\n",
        kNullRowsFile);
  if (!card.missing_pieces().empty())
    text +=
        "\nThe pieces that are not in this folder are named above with their fingerprints. `kiln download "
        "--list` names published ones; `kiln convert --components copy` puts them in.\n";
  return text;
}

}  // namespace

std::vector<const char*> ModelCard::missing_pieces() const {
  std::vector<const char*> missing;
  if (!autoencoder.empty() && !has_autoencoder) missing.push_back("the autoencoder");
  if (takes_text(*this) && !has_text_encoder) missing.push_back("the text encoder");
  return missing;
}

std::string model_card(const ModelCard& card) {
  return fmt::format(
             "---\nlibrary_name: diffusers\npipeline_tag: {}\ntags: [kiln]\n# license: that of the weights "
             "and "
             "their data, to be filled in\n---\n\n# {}\n\nDraws pictures of {} x {} pixels from {}. "
             "{} with Kiln.\n\n{}",
             takes_text(card) ? "text-to-image" : "unconditional-image-generation", card.record.model,
             card.height, card.width, subject_name(card.shape.conditioning),
             card.was_trained_here ? "Trained" : "Converted", facts(card)) +
         "\n## Draw with Kiln\n\n    " + kiln_command(card) +
         "\n## Draw the same with diffusers\n\n```python\n" + python_code(card) + "```\n" + remarks(card);
}

}  // namespace kiln
