"""kiln extract --text-encoder: the stored features are those of transformers, from captions of every layout."""

import json
import tarfile

import numpy as np
import pytest
import torch
from closeness import assert_close
from conftest import assert_fails, assert_refused, succeed
from PIL import Image, PngImagePlugin
from safetensors.torch import load_file
from test_tokenizers import MAKERS
from transformers import (BertConfig, BertModel, BertTokenizer, CLIPTextConfig, CLIPTextModel, CLIPTokenizer, Gemma2Config, Gemma2Model,
                          GemmaTokenizer, T5Config, T5EncoderModel, T5Tokenizer)

SIZE = 16
FAMILIES = {
    "bert": ("wordpiece", BertTokenizer, BertModel, BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48,
                                                               vocab_size=30524, max_position_embeddings=64)),
    "t5_encoder": ("t5", T5Tokenizer, T5EncoderModel, T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=4120,
                                                               feed_forward_proj="gated-gelu")),
    "clip_text": ("clip", CLIPTokenizer, CLIPTextModel, CLIPTextConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48,
                                                                       vocab_size=5000, eos_token_id=2, max_position_embeddings=24)),
}


def encoder_folder(family, folder, seed=0):
    """A random model of a family with its tokenizer."""
    kind, _, model_class, config = FAMILIES[family]
    torch.manual_seed(seed)
    folder.mkdir(parents=True, exist_ok=True)
    MAKERS[kind](folder)
    model_class(config).eval().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def encoders(tmp_path_factory):
    return {family: encoder_folder(family, tmp_path_factory.mktemp(family)) for family in FAMILIES}


def picture(index):
    return Image.fromarray(np.full((SIZE, SIZE, 3), index * 10 % 256, dtype=np.uint8))


def write_metadata(folder, captions):
    """Pictures with their captions, or what else stands in their lines."""
    folder.mkdir(exist_ok=True)
    with open(folder / "metadata.jsonl", "w") as file:
        for index, caption in enumerate(captions):
            picture(index).save(folder / f"{index}.png")
            file.write(json.dumps({"file_name": f"{index}.png"} | ({"text": caption} if isinstance(caption, str) else caption)) + "\n")
    return folder


def read_text_store(folder):
    info = json.loads((folder / "text.json").read_text())
    captions = load_file(folder / "captions.safetensors")
    text = bytes(captions["text_bytes"].tolist())
    bounds = captions["text_offsets"].tolist()
    texts = [text[a:b].decode() for a, b in zip(bounds, bounds[1:])]
    rows = []
    for path in sorted(folder.glob("features-*.safetensors")):
        shard = load_file(path)
        bounds = shard["row_offsets"].tolist()
        rows += [shard["features"][a:b] for a, b in zip(bounds, bounds[1:])]
    bounds = captions["offsets"].tolist()
    samples = [[texts[entry] for entry in captions["entry_of_caption"][a:b].tolist()] for a, b in zip(bounds, bounds[1:])]
    return info, texts, rows, samples, captions


def command(data, out, *more):
    return ["extract", "--data", data, "--autoencoder", "pixels", "--image-size", SIZE, "--out", out, *more]


def extract(data, out, encoder, *more):
    return succeed(*command(data, out, "--text-encoder", encoder, *more))


@pytest.mark.parametrize("family", FAMILIES)
def test_features_are_those_of_transformers(encoders, tmp_path, family):
    _, tokenizer_class, model_class, _ = FAMILIES[family]
    tokenizer, model = tokenizer_class.from_pretrained(encoders[family]), model_class.from_pretrained(encoders[family]).eval()
    texts = (" ".join(["a"] * n) + end for n in range(1, 20) for end in ("", "!", " red", " red apple"))
    fits = next(text for text in texts if len(tokenizer(text).input_ids) == 20)
    captions = ["a red apple", "a green circle", "a red apple", "Ein gelbes Haus am Meer", "woman running: dark skin tone " * 20, "", fits]
    data = write_metadata(tmp_path / "data", captions)
    result = extract(data, tmp_path / "store", encoders[family], "--text-dtype", "f32", "--text-max-tokens", 20)
    assert "6 captions, 5 of them different" in result.stdout or "7 captions, 5 of them different" in result.stdout
    assert "1 samples have no caption" in result.stdout and "1 captions were longer than 20 tokens" in result.stdout
    assert "6 / 6 captions  " in result.stderr and "captions/s" in result.stderr, "new user, 12: captions are no images"
    info, texts, rows, samples, _ = read_text_store(tmp_path / "store" / f"text-{family}")
    assert info["complete"] and info["encoder"] == family and texts[0] == "" and len(texts) == 6
    assert samples == [[text.strip()] for text in captions]
    for text, features in zip(texts, rows):
        tokens = tokenizer(text, truncation=True, max_length=20, return_tensors="pt", padding="max_length" if family == "clip_text" else False)
        with torch.no_grad():
            want = model(input_ids=tokens["input_ids"]).last_hidden_state[0]
        assert_close(features, want)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    """(folder, tokenizer, model) of a Gemma 2 whose attention slides."""
    folder = tmp_path_factory.mktemp("gemma")
    MAKERS["gemma"](folder)
    torch.manual_seed(0)
    config = Gemma2Config(hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=8, intermediate_size=48,
                          vocab_size=5100, query_pre_attn_scalar=8, sliding_window=7, attn_implementation="eager")
    model = Gemma2Model(config).eval()
    model.save_pretrained(folder)
    return folder, GemmaTokenizer.from_pretrained(folder), model


def test_captions_after_an_instruction(gemma, tmp_path):
    """Gemma 2 computes what the captions begin with once; a sample without one has the empty text, and no instruction."""
    folder, tokenizer, model = gemma
    captions = ["a red apple", "a green circle by the sea", "", "two birds", "woman running"]
    data = write_metadata(tmp_path / "data", captions)
    instruction = "Given a prompt, describe every detail of the picture that it asks for, its colours and its light. User Prompt: "
    stores = []
    for batch in (2, 32):
        extract(data, tmp_path / f"store-{batch}", folder, "--text-dtype", "f32", "--caption-prefix", instruction,
                "--text-batch", batch)
        stores.append(read_text_store(tmp_path / f"store-{batch}" / "text-gemma2")[1:3])
    for texts, rows in stores:
        assert texts[0] == "" and sorted(texts[1:]) == sorted(instruction + text for text in captions if text)
        for text, features in zip(texts, rows):
            with torch.no_grad():
                assert_close(features, model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0], 2e-4)


def test_an_instructions_rows_are_not_kept(gemma, tmp_path):
    """Sana's: captions are cut at their own length, and of the instruction the first and the last row remain."""
    folder, tokenizer, model = gemma
    captions = ["a red apple", "a green circle by the sea, and more than fits into so few tokens", "", "two birds"]
    data = write_metadata(tmp_path / "data", captions)
    instruction, most = "Given a prompt, describe every detail of the picture:\n- its colours\n- its light\nUser Prompt: ", 12
    (tmp_path / "instruction.txt").write_text(instruction + "\n")
    hidden = len(tokenizer.encode(instruction)) - 2

    def wanted(text):
        tokens = tokenizer(instruction + text if text else "", return_tensors="pt", truncation=True, max_length=hidden + most,
                           padding="max_length")
        with torch.no_grad():
            rows = model(**tokens).last_hidden_state[0]
        kept = [0, *range(-most + 1, 0)] if text else range(most)  # as SanaPipeline.encode_prompt
        return rows[kept][tokens["attention_mask"][0][kept].bool()]

    for name, given in (("text", instruction), ("file", tmp_path / "instruction.txt")):
        extract(data, tmp_path / name, folder, "--text-dtype", "f32", "--caption-instruction", given,
                "--text-max-tokens", most)
        info, texts, rows = read_text_store(tmp_path / name / "text-gemma2")[:3]
        assert sorted(texts) == sorted(captions) and info["instruction"] == instruction and info["num_truncated"] == 1
        for text, features in zip(texts, rows):
            assert_close(features, wanted(text), 2e-4)


@pytest.mark.parametrize("family", ["bert", "clip_text", "t5_encoder"])
def test_an_instruction_needs_an_encoder_that_begins_texts(encoders, tmp_path, family):
    data = write_metadata(tmp_path / "data", ["a red apple"])
    assert_fails("--caption-prefix", *command(data, tmp_path / "store", "--text-encoder", encoders[family],
                                              "--caption-instruction", "Describe: "))


def test_several_captions_weights_and_kinds(encoders, tmp_path):
    several = [{"text": "long one", "weight": 3, "kind": "long"}, "short"]
    data = write_metadata(tmp_path / "data", [{"captions": several}, {"caption": ["x", "y"]}, "short"])
    extract(data, tmp_path / "store", encoders["bert"], "--caption-prefix", "<", "--caption-suffix", ">",
            "--text-name", "two")
    info, _, rows, samples, captions = read_text_store(tmp_path / "store" / "text-two")
    assert samples == [["<long one>", "<short>"], ["<x>", "<y>"], ["<short>"]]
    assert captions["weight"].tolist() == [3, 1, 1, 1, 1]
    assert [info["kinds"][kind] for kind in captions["kind"].tolist()] == ["long", "caption", "caption", "caption", "caption"]
    assert rows[0].dtype == torch.float16


def write_layout(layout, folder):
    """Three pictures captioned "one", "two", "three" as `layout` has it."""
    words = ["one", "two", "three"]
    if layout == "txt":
        for word in words:
            picture(0).save(folder / f"{word}.png")
            (folder / f"{word}.txt").write_text(word + "\n")
    elif layout == "webdataset":
        with tarfile.open(folder / "a.tar", "w") as tar:
            for index, word in enumerate(words):
                picture(0).save(folder / "x.png")
                tar.add(folder / "x.png", f"{index}.png")
                name = f"{index}.json" if index else f"{index}.txt"
                (folder / "x").write_text(json.dumps({"caption": word}) if index else word)
                tar.add(folder / "x", name)
        (folder / "x").unlink(), (folder / "x.png").unlink()
    elif layout == "data_info":
        (folder / "InternImgs").mkdir(), (folder / "InternData").mkdir()
        for word in words:
            picture(0).save(folder / "InternImgs" / f"{word}.png")
        items = [{"path": f"{word}.png", "prompt": word, "width": SIZE, "height": SIZE, "ratio": 1} for word in words]
        (folder / "InternData" / "data_info.json").write_text(json.dumps(items))
    elif layout == "png-text":
        for index, word in enumerate(words):
            text = PngImagePlugin.PngInfo()
            (text.add_itxt if index else text.add_text)("Title", word, zip=index == 2)
            picture(0).save(folder / f"{index}.png", pnginfo=text)
    else:
        for word in words:
            picture(0).save(folder / f"{word}-12.png")


@pytest.mark.parametrize("layout", ["txt", "webdataset", "data_info", "png-text", "file-names"])
def test_layouts(encoders, tmp_path, layout):
    data = tmp_path / "data"
    data.mkdir()
    write_layout(layout, data)
    more = ["--captions", layout] if layout in ("png-text", "file-names") else []
    extract(data, tmp_path / "store", encoders["bert"], *more)
    assert sorted(read_text_store(tmp_path / "store" / "text-bert")[3]) == [["one"], ["three"], ["two"]]


@pytest.mark.slow
def test_text_is_added_to_a_store_and_the_same_command_continues(kiln, encoders, tmp_path):
    out = tmp_path / "store"
    data = write_metadata(tmp_path / "data", [f"picture number {index}" for index in range(40)])
    succeed(*command(data, out))
    add = ["extract", "--data", data, "--out", out, "--text-encoder", encoders["bert"]]
    succeed(*add)
    folder = out / "text-bert"
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    (folder / "features-00000.safetensors").unlink()
    info = json.loads((folder / "text.json").read_text()) | {"complete": False, "captions_xxh3": "", "shards_xxh3": [], "num_truncated": 0}
    (folder / "text.json").write_text(json.dumps(info))
    succeed(*add)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert "nothing to do" in kiln(*add).stdout
    for change, expected in ((["--text-max-tokens", 7], "--text-max-tokens"), (["--text-encoder", encoders["t5_encoder"], "--text-name", "bert"], "the text encoder"),
                             (["--caption-prefix", "a "], "--caption-prefix")):
        assert_refused([*(add[:-2] if change[0] == "--text-encoder" else add), *change], expected)


def test_hardening_high_1_damaged_captions_are_named(kiln, encoders, tmp_path):
    """By verify, and by training at the first read. Friction 25 too: inspect shows the text."""
    store = tmp_path / "store"
    data = write_metadata(tmp_path / "data", [f"picture number {index}" for index in range(6)])
    extract(data, store, encoders["bert"])
    assert "captions of text-bert" in kiln("store", "verify", store).stdout
    inspected = kiln("store", "inspect", store).stdout
    assert "text-bert" in inspected and "6 different captions" in inspected
    features = store / "text-bert" / "features-00000.safetensors"
    content = bytearray(features.read_bytes())
    rows = load_file(features)["features"].numpy().tobytes()
    start = content.index(rows)
    content[start : start + len(rows)] = rows[: len(rows) // 2] + bytes(len(rows) - len(rows) // 2)
    features.write_bytes(content)
    assert_fails("features-00000", "store", "verify", store)
    assert_fails("is damaged: its features have changed", "train", "--model", "pixart", "--hidden-size", 24, "--depth",
                 1, "--num-heads", 2, "--patch-size", 4, "--data", store, "--image-size", SIZE, "--global-batch", 6,
                 "--max-steps", 3, "--device", "cpu", "--peak-tflops", 1, "--out", tmp_path / "run")


def test_ranks_write_the_same_store(encoders, tmp_path):
    data = write_metadata(tmp_path / "data", [f"picture number {index}" for index in range(12)])
    for ranks in (0, 2):
        extract(data, tmp_path / f"store-{ranks}", encoders["bert"], "--nproc", ranks)
    for path in (tmp_path / "store-0" / "text-bert").iterdir():
        assert path.read_bytes() == (tmp_path / "store-2" / "text-bert" / path.name).read_bytes(), path.name


@pytest.mark.slow
def test_errors_are_one_line(kiln, encoders, tmp_path):
    data, out = write_metadata(tmp_path / "data", [{}, {}]), tmp_path / "store"
    checks = [(["--text-encoder", encoders["bert"]], "none of the 2 samples"), (["--text-encoder", tmp_path / "none"], "no folder"),
              (["--text-encoder", encoders["bert"], "--captions", "x"], "expected data, png-text or file-names"),
              (["--text-encoder", encoders["bert"], "--captions", "file-names", "--text-max-tokens", 65], "1 to 64 for bert"),
              (["--text-encoder", encoders["bert"], "--threads", -1], "--threads expects 0 (all processors) to 1024, got -1")]
    succeed(*command(data, out))
    for arguments, expected in checks:
        assert_refused(["extract", "--data", data, "--out", out, *arguments], expected)
    assert "give --autoencoder" in kiln("extract", "--data", data, "--out", out).stderr
    (data / "metadata.jsonl").write_bytes(b'{"file_name": "0.png", "text": "\xc3("}\n')
    assert kiln("extract", "--data", data, "--out", out, "--text-encoder", encoders["bert"]).returncode == 1
