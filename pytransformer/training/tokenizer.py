# SPDX-License-Identifier: Apache-2.0
"""Byte-pair tokenizers, trained with the `tokenizers` library (the extra `models`)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..extras import require
from ..models import _files

PAD, UNKNOWN, START, END, MASK = "<pad>", "<unk>", "<s>", "</s>", "<mask>"
SPECIAL = (PAD, UNKNOWN, START, END, MASK)  # the first ids of every tokenizer, in this order
_PURPOSE = "training and loading tokenizers"


class Tokenizer:
    """A map from text to token ids and back; `<s>` and `</s>` are also BERT's [CLS] and [SEP]."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        ids = {name: inner.token_to_id(name) for name in SPECIAL}
        if missing := [name for name, number in ids.items() if number is None]:
            raise ValueError(
                f"Tokenizer: no token {', '.join(missing)}; expected a tokenizer made by"
                " Tokenizer.train"
            )
        self.pad_id, self.unknown_id, self.start_id, self.end_id, self.mask_id = ids.values()

    @classmethod
    def train(
        cls, texts: Iterable[str], vocabulary: int, *, special: Sequence[str] = ()
    ) -> Tokenizer:
        """Train byte-pair merges (Sennrich et al. 2016, section 3.2) up to `vocabulary` tokens.

        Numbers and punctuation never merge with letters. Spaces become "▁", so that decoding
        restores the text.

        Args:
            texts: the training texts.
            vocabulary: max number of tokens, including the special ones and every character of the
                texts.
            special: further tokens that are never split, such as a delimiter.
        """
        tokenizers = require("tokenizers", "models", _PURPOSE)
        inner = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=UNKNOWN))
        inner.normalizer = tokenizers.normalizers.NFC()
        space = tokenizers.pre_tokenizers.Metaspace()
        apart = [tokenizers.pre_tokenizers.Digits(), tokenizers.pre_tokenizers.Punctuation()]
        inner.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([space, *apart])
        inner.decoder = tokenizers.decoders.Metaspace()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocabulary, special_tokens=[*SPECIAL, *special], show_progress=False
        )
        inner.train_from_iterator(texts, trainer)
        return cls(inner)

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Read the output of `save`.

        Raises:
            ValueError: the file is not a tokenizer.
            OSError: the file cannot be read.
        """
        tokenizers = require("tokenizers", "models", _PURPOSE)
        try:
            text = Path(path).read_text(encoding="utf-8")
            inner = tokenizers.Tokenizer.from_str(text)
        except OSError:
            raise
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{path} is not a tokenizer: {error}") from error
        return cls(inner)

    def save(self, path: str | Path) -> None:
        _files.write_text(Path(path), self._inner.to_str())

    def __len__(self) -> int:
        """Return the number of tokens."""
        return self._inner.get_vocab_size()

    @property
    def fingerprint(self) -> str:
        """Return a hash that is equal for tokenizers with equal encodings.

        A model works only with the tokenizer it was trained with.
        """
        return hashlib.sha256(self._inner.to_str().encode()).hexdigest()[:16]

    def id(self, token: str) -> int:
        """Return the id of one token.

        Raises:
            ValueError: there is no such token.
        """
        number = self._inner.token_to_id(token)
        if number is None:
            raise ValueError(f"Tokenizer: no token {token!r} among {len(self)}")
        return number

    def encode(self, text: str) -> list[int]:
        """Return the ids of the text's tokens, without `<s>` and `</s>`."""
        return self._inner.encode(text, add_special_tokens=False).ids

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        return [
            encoding.ids
            for encoding in self._inner.encode_batch(list(texts), add_special_tokens=False)
        ]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of the ids, without special tokens."""
        return self._inner.decode([int(i) for i in ids], skip_special_tokens=True)

    def tokens(self, ids: Iterable[int]) -> list[str]:
        """Return each token as written in the vocabulary, for the labels of an attention map."""
        return [self._inner.id_to_token(int(i)) for i in ids]


def check_tokenizer(
    name: str, tokenizer: Tokenizer, vocabulary: int, fingerprint: str | None = None
) -> None:
    """Raise unless the tokenizer and the model belong together.

    Raises:
        ValueError: the sizes differ, or the model was trained with another tokenizer.
    """
    if len(tokenizer) != vocabulary:
        raise ValueError(
            f"{name}: the tokenizer has {len(tokenizer)} tokens, and the model was trained with"
            f" {vocabulary}"
        )
    if fingerprint is not None and tokenizer.fingerprint != fingerprint:
        raise ValueError(
            f"{name}: another tokenizer (fingerprint {tokenizer.fingerprint}) than the one that the"
            f" model was trained with ({fingerprint}): its ids mean other tokens"
        )
