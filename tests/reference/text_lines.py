"""Lines of text in many languages, and odd ones, for the tests of tokenizers."""

import functools
import random
import xml.etree.ElementTree
from pathlib import Path

STAMPS = Path("/usr/share/tuxpaint/stamps")  # Debian's tuxpaint-stamps-default: captions in 77 languages
ANNOTATIONS = Path("/usr/share/unicode/cldr/common/annotations")  # Debian's unicode-cldr-core: names of emoji

ODD = ["", " ", "   ", "\t", "\n", " a  b ", "a\tb\u3000c", "\u00a0q\u00a0", "a\r\nb", "\u2028z", "a\u0085b", "\x00", "a\x00b", "a\x01b",
       "\x7f", "\ufeffx", "\u200bz", "so\u00adft", "x\u200dy", "\ufffd", "\ue000", "\U000e0001", "1234 5,678.90", "½ ™ № ﬁ ﷺ",
       "don't you'll we've I'm he's they'd you're", "''s 'S 'LL", "!!??...", "a!b?c", "$5 + 3 = 8 ^ 2 ~ `x` | y", "İstanbul ISTANBUL ı",
       "ΑΣ ΟΔΥΣΣΕΥΣ ς", "ẞ STRASSE straße", "ǅ ǲ", "Ⅷ ⅷ ② ٣ ५", "日本語のテキスト、漢字。", "한국어 문장", "ภาษาไทย", "हिन्दी क्षि",
       "עִבְרִית", "العَرَبِيَّة", "𝒜𝕓𝖈 𐐀𐐨", "😀👍🏽👨‍👩‍👧‍👦🏳️‍🌈🇩🇪", "ﾊﾝｶｸ ｶﾞ", "ＦＵＬＬ　ｗｉｄｔｈ", "Ⓚ ㎏ ㏂", "x" * 120, "ü" * 101, "a" * 99 + " " + "b" * 100,
       "▁a ▁ b", "##ing", "</w>", "<0x41>", "<|STARTOFTEXT|> a", "᠎x", "\u1734 \u1885 \ua9bd \U000111c9 \u166d", "𞤀𞤁"]


@functools.cache
def lines():
    """12,000 and a few: names of emoji in every language there is, captions where the stamps are installed, odd ones."""
    names = []
    for path in sorted(ANNOTATIONS.glob("*.xml")):
        found = [f"{element.get('cp')} {element.text}" for element in xml.etree.ElementTree.parse(path).iter("annotation")]
        names += random.Random(path.name).sample(found, min(len(found), 100))
    assert names, f"{ANNOTATIONS} is missing: install unicode-cldr-core"
    captions = set()
    for path in STAMPS.rglob("*.txt"):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            captions.add(line.partition("=")[2] if "=" in line[:12] else line)
    chosen = random.Random(0).sample(sorted(captions), min(len(captions), 6000))
    return chosen + random.Random(0).sample(names, 12000 - len(chosen)) + ODD
