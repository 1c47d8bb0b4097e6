"""Difficult text for tokenizers, by kind of difficulty: used to verify engines and to check vocabularies."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

DIFFICULT: Mapping[str, str] = MappingProxyType(
    {
        "empty text": "",
        "plain English": "It wasn't the captain's, \"we'll\" see: 3.14159 of 1,000,000 -- didn't THEY'RE we've I'd 'sfoo",
        "white space": "  two  \t tabs\r\n\r\nand\n\n\n   lines\u00a0\u2003\u2028\u3000 \x0b\x0c\x85 end   ",
        "runs of white space": "a" + " " * 300 + "b" + "\n" * 300 + "\t" * 70 + "c" + " \n" * 50,
        "emoji": "\U0001f469\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466\U0001f44d\U0001f3fd\U0001f1e9\U0001f1ea\u2764\ufe0f "
        "\U0001f3f4\U000e0067\U000e0062\U000e007f",
        "Chinese, Japanese and Korean text": "\u6771\u4eac\u306f\u65e5\u672c\u306e\u9996\u90fd\u3067\u3059\u3002 \u4f60\u597d\uff0c"
        "\u4e16\u754c\uff01 \uc548\ub155\ud558\uc138\uc694 \uff71\uff72\uff73 \U00020000",
        "right-to-left text": "\u0645\u0631\u062d\u0628\u0627 \u0628\u0627\u0644\u0639\u0627\u0644\u0645\u060c \u0661\u0662\u0663 "
        "\u05e9\u05dc\u05d5\u05dd \u05e2\u05b7\u05dc \u200f\u202babc\u202c \u0640\u0640",
        "Indic and Thai text": "\u0928\u092e\u0938\u094d\u0924\u0947 \u0995\u09cd\u09b7 \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35\u0e04\u0e23"
        "\u0e31\u0e1a \u0f40\u0f0b \u0967\u0968\u0969",
        "composed and decomposed accents": "na\u00efve nai\u0308ve \u00c5 A\u030a \u1e9b\u0323 \ufb01 \u2460 \u01c5 \u0130\u0131 \u1e9e",
        "code": 'def f(x):\n\treturn x**2  # <tag>\n\n    if (a->b != NULL && i++ <= 0xFFu) { s = "\\n%d"; }\n/* ===== */\n',
        "control characters": "\x00\x01\x02\x1b[0m\x7f\x9f\ufeff\ufffe\uffff\u200b\u2060\ufffd\U0010ffff",
        "marks that look like special tokens": "one<|endoftext|>two <|endoftext|> <s>x</s> <pad> [CLS] [MASK][SEP] <unk> "
        "<extra_id_0> <|im_start|> <0x0A> \u2581x ##ing <|",
        "numbers": "1 12 123 1234 12345 123456 1e-10 \u00bd \u2167 \u0664\u0665 1.2.3 007 0000000000000000000000",
        "long words": "a" * 3000 + " " + "ab1" * 1000 + " " + "\u6771" * 1000 + " " + "!?" * 800 + "Loremipsum" * 300,
    }
)
