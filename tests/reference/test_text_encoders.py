"""T5, BERT, CLIP and Gemma 2 against transformers, live: features of random models, padded positions included."""

import json

import pytest
import torch
from closeness import FORWARD, FORWARD_BF16, assert_close, violation
from test_tokenizers import minilm_folder
from transformers import (AutoTokenizer, BertConfig, BertModel, CLIPTextConfig, CLIPTextModel, Gemma2Config, Gemma2Model,
                          T5Config, T5EncoderModel)

GEMMA_FORWARD = 2e-4
T5 = dict(d_model=48, d_kv=12, d_ff=80, num_layers=3, num_heads=5, vocab_size=90, feed_forward_proj="gated-gelu")
BERT = dict(hidden_size=48, num_hidden_layers=3, num_attention_heads=4, intermediate_size=72, vocab_size=90,
            max_position_embeddings=300, layer_norm_eps=1e-12)
CLIP = dict(hidden_size=48, num_hidden_layers=3, num_attention_heads=4, intermediate_size=72, vocab_size=90, eos_token_id=88,
            bos_token_id=87, pad_token_id=1)
GEMMA = dict(hidden_size=48, num_hidden_layers=4, num_attention_heads=6, num_key_value_heads=3, head_dim=16, intermediate_size=72,
             vocab_size=90, sliding_window=5, query_pre_attn_scalar=20, max_position_embeddings=64, attn_implementation="eager")
MODELS = {
    "t5": ("t5_encoder", T5EncoderModel, T5Config, T5),
    "t5, few buckets": ("t5_encoder", T5EncoderModel, T5Config,
                        T5 | dict(relative_attention_num_buckets=8, relative_attention_max_distance=9, layer_norm_epsilon=1e-3)),
    "t5, not gated": ("t5_encoder", T5EncoderModel, T5Config, T5 | dict(feed_forward_proj="relu")),
    "bert": ("bert", BertModel, BertConfig, BERT),
    "bert, three types, tanh gelu": ("bert", BertModel, BertConfig, BERT | dict(type_vocab_size=3, hidden_act="gelu_new")),
    "clip, quick gelu": ("clip_text", CLIPTextModel, CLIPTextConfig, CLIP | dict(hidden_act="quick_gelu")),
    "clip, gelu, old eos": ("clip_text", CLIPTextModel, CLIPTextConfig, CLIP | dict(hidden_act="gelu", eos_token_id=2)),
    "clip, one layer": ("clip_text", CLIPTextModel, CLIPTextConfig, CLIP | dict(num_hidden_layers=1)),
    "gemma2": ("gemma2", Gemma2Model, Gemma2Config, GEMMA),
    "gemma2, biases, all full": ("gemma2", Gemma2Model, Gemma2Config,
                                 GEMMA | dict(attention_bias=True, layer_types=["full_attention"] * 4, rope_theta=500.0)),
}


def model_of(name, seed=0):
    _, model_class, config_class, config = MODELS[name]
    model = model_class(config_class(**config)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * (0.6 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5))
            if "norm" in key.lower() and key.endswith("weight") and "gemma" not in name:
                parameter.add_(1)
            if "embed" in key or "shared" in key or "relative" in key:
                parameter.mul_(4)
    return model


def inputs_of(name, batch=3, length=13, lengths=(13, 6, 1), seed=1):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 86, (batch, length), generator=generator)
    mask = torch.zeros(batch, length, dtype=torch.int64)
    for row, count in enumerate(lengths):
        mask[row, :count] = 1
        ids[row, count - 1] = 88
    inputs = {"input_ids": ids, "attention_mask": mask}
    if name == "bert, three types, tanh gelu":
        inputs["token_type_ids"] = torch.randint(0, 3, (batch, length), generator=generator)
    return inputs


def sentence_vectors(hidden, mask):
    weights = mask[:, :, None].float()
    return torch.nn.functional.normalize((hidden * weights).sum(1) / weights.sum(1).clamp(min=1e-9), dim=1)


@torch.no_grad()
def wanted(name, model, inputs):
    output = model(**inputs, output_hidden_states=True)
    want = {"last_hidden_state": output.last_hidden_state}
    if name.startswith("bert"):
        want["sentence_embedding"] = sentence_vectors(output.last_hidden_state, inputs["attention_mask"])
    if name.startswith("clip"):
        want |= {"pooler_output": output.pooler_output, "penultimate_hidden_state": output.hidden_states[-2]}
    return want


def saved_weights(name, model):
    """As published: T5 once under shared.weight, CLIP with its prefix."""
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    if name.startswith("t5"):
        weights.pop("encoder.embed_tokens.weight", None)
    if name.startswith("clip"):
        weights = {key if key.startswith("text_model.") else "text_model." + key: value for key, value in weights.items()}
    if name.startswith("bert"):
        weights = {key: value for key, value in weights.items() if not key.startswith("pooler.")}
    return weights


def config_of(name):
    config = {key: value for key, value in MODELS[name][3].items() if key != "attn_implementation"}
    return config | {"_name": "ignored"}


def forward(conformance, name, model, inputs, change={}, **more):
    """What Kiln's gives for the weights of transformers' `model`."""
    return conformance("forward", model=MODELS[name][0], config=config_of(name) | change,
                       **dict(weights=saved_weights(name, model)) | more, inputs=inputs)


@pytest.mark.parametrize("name", MODELS)
def test_features_equal_transformers(conformance, name):
    model = model_of(name)
    for inputs in (inputs_of(name), inputs_of(name, 2, 37, (37, 20), seed=2)):
        for given in (inputs, {key: value for key, value in inputs.items() if key != "attention_mask"}):
            if "attention_mask" not in given and name.startswith("bert"):
                continue  # the sentence vector asks for one
            got = forward(conformance, name, model, given)
            want = wanted(name, model, given)
            assert set(want) <= set(got)
            for output, value in want.items():
                assert_close(got[output], value, GEMMA_FORWARD if name.startswith("gemma") else FORWARD)


@pytest.mark.parametrize("name", ["t5", "bert", "clip, gelu, old eos", "gemma2"])
def test_bf16_is_close_to_f32(conformance, name):
    model, inputs = model_of(name), inputs_of(name)
    got = forward(conformance, name, model, inputs, dtype="bf16")
    for output, value in wanted(name, model, inputs).items():
        assert_close(got[output], value, FORWARD_BF16)
        assert violation(got[output], value, FORWARD) > 1, "it ran in f32"


@pytest.mark.parametrize("shared", [2, 9])
@pytest.mark.parametrize("name", ["gemma2", "gemma2, biases, all full"])
def test_an_instruction_is_computed_once(conformance, name, shared):
    """Keys and values of the tokens that all texts begin with, fewer and more than the sliding window."""
    model, inputs = model_of(name), inputs_of(name, 4, 20, (20, 20, 13, 10))
    inputs["input_ids"][:, :shared] = inputs["input_ids"][0, :shared]
    run = lambda given={}, **more: forward(conformance, name, model, inputs | given, **more)["last_hidden_state"]
    again = dict(shared_tokens=torch.tensor([shared]))
    got = run(again)
    assert_close(got, wanted(name, model, inputs)["last_hidden_state"], GEMMA_FORWARD)
    assert_close(got, run(), 1e-5)
    assert_close(run(again, dtype="bf16"), got, FORWARD_BF16)


def test_texts_whose_tokens_see_all_others_share_nothing(conformance):
    model, inputs = model_of("t5"), inputs_of("t5")
    message = forward(conformance, "t5", model, inputs | dict(shared_tokens=torch.tensor([2])), expect_error=True)
    assert "t5_encoder keeps no prefix" in message


@pytest.mark.parametrize("name", ["t5", "bert", "gemma2"])
def test_norm_eps(conformance, name):
    """A wrong epsilon must show: the activations are as small as its root."""
    key = {"t5": "layer_norm_epsilon", "bert": "layer_norm_eps", "gemma2": "rms_norm_eps"}[name]
    model, inputs, config = model_of(name), inputs_of(name), config_of(name)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "embed" in parameter_name or "shared" in parameter_name:
                parameter.mul_(1e-3)
    want = wanted(name, model, inputs)["last_hidden_state"]
    default = config.get(key, 1e-6)
    for eps, is_right in ((default, True), (default * 10 if name != "bert" else 1e-5, False)):
        got = forward(conformance, name, model, inputs, {key: eps})
        assert (violation(got["last_hidden_state"], want, GEMMA_FORWARD) <= 1) == is_right


def key_variants(name, weights):
    """The same weights as other files name them."""
    if name == "t5":
        table = weights["shared.weight"]
        rest = {key: value for key, value in weights.items() if key != "shared.weight"}
        decoder = {"decoder.block.0.layer.0.SelfAttention.q.weight": torch.zeros(2, 2), "lm_head.weight": torch.zeros(2, 2)}
        return [rest | {"encoder.embed_tokens.weight": table}, weights | {"encoder.embed_tokens.weight": table.clone()} | decoder]
    if name == "bert":
        ids = {"embeddings.position_ids": torch.arange(300)[None], "pooler.dense.weight": torch.zeros(2, 2)}
        prefixed = {"bert." + key: value for key, value in (weights | ids).items()} | {"cls.predictions.bias": torch.zeros(3)}
        old = {key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value for key, value in weights.items()}
        return [weights | ids, prefixed, old]
    if name.startswith("clip"):
        bare = {key.removeprefix("text_model."): value for key, value in weights.items()}
        other = {"text_model.embeddings.position_ids": torch.arange(77)[None], "vision_model.x": torch.zeros(2), "logit_scale": torch.zeros(()),
                 "text_projection.weight": torch.zeros(2, 2), "visual_projection.weight": torch.zeros(2, 2)}
        return [bare | {"embeddings.position_ids": torch.arange(77)[None]}, weights | other]
    return [{"model." + key: value for key, value in weights.items()} | {"lm_head.weight": torch.zeros(2, 2)}]


@pytest.mark.parametrize("name", ["t5", "bert", "clip, quick gelu", "gemma2"])
def test_keys_of_other_files(conformance, name):
    model, inputs = model_of(name), inputs_of(name)
    weights = saved_weights(name, model)
    run = lambda given: forward(conformance, name, model, inputs, weights=given)["last_hidden_state"]
    want = run(weights)
    for variant in key_variants(name, weights):
        assert torch.equal(run(variant), want)


def test_minilm_gives_the_sentence_vectors_of_transformers(conformance):
    """The published weights, on sentences of very different lengths."""
    folder = minilm_folder()
    tokenizer, model = AutoTokenizer.from_pretrained(folder), BertModel.from_pretrained(folder).eval()
    texts = ["A green circle.", "woman running: dark skin tone", "", "word " * 100, "Ein rotes Quadrat über einem Kreis."]
    tokens = dict(tokenizer(texts, padding=True, return_tensors="pt"))
    with torch.no_grad():
        want = sentence_vectors(model(**tokens).last_hidden_state, tokens["attention_mask"])
    got = conformance("forward", model="bert", config=folder / "config.json", weights=folder / "model.safetensors",
                      inputs={key: value for key, value in tokens.items()})
    assert_close(got["sentence_embedding"], want)


@pytest.mark.parametrize("model, change, inputs, expected", [
    ("t5", {"feed_forward_proj": "gated-mish"}, {}, "unknown activation \"mish\""),
    ("bert", {"position_embedding_type": "relative_key"}, {}, "position_embedding_type"),
    ("bert", {"num_attention_heads": 5}, {}, "divides"),
    ("gemma2", {"layer_types": ["chunked"] * 4}, {}, "layer_types"),
    ("gemma2", {"head_dim": 16, "num_key_value_heads": 4}, {}, "num_key_value_heads"),
    ("clip, quick gelu", {}, {"input_ids": torch.full((1, 78), 3)}, "78 tokens, clip_text takes 77"),
    ("t5", {}, {"input_ids": torch.tensor([[1, 90]])}, "0..89, got 1..90: another tokenizer"),
    ("bert", {}, {"token_type_ids": torch.tensor([[0, 2]]), "input_ids": torch.tensor([[1, 2]])}, "token types in 0..1"),
    ("t5", {}, {"input_ids": torch.zeros(0, 3, dtype=torch.int64)}, "at least one token"),
])
def test_errors_are_one_line(conformance, model, change, inputs, expected):
    given = inputs or {"input_ids": torch.tensor([[1, 2]])}
    assert expected in forward(conformance, model, model_of(model), given, change, expect_error=True)


def test_config_files_of_transformers_are_read(conformance, tmp_path):
    """What save_pretrained writes, shards of it included."""
    for name in ("t5", "bert", "clip, quick gelu", "gemma2"):
        model, inputs = model_of(name), inputs_of(name)
        folder = tmp_path / MODELS[name][0]
        model.save_pretrained(folder, max_shard_size="60KB")
        assert json.loads((folder / "config.json").read_text())["model_type"]
        got = conformance("forward", model=MODELS[name][0], config=folder / "config.json", inputs=inputs,
                          weights=folder / "model.safetensors.index.json")
        assert_close(got["last_hidden_state"], wanted(name, model, inputs)["last_hidden_state"], GEMMA_FORWARD)
