"""What every backend does."""

from __future__ import annotations

import asyncio
import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Sequence
from functools import cached_property
from typing import Any, TypeVar

import torch

Self = TypeVar("Self", bound="AsyncLM")


class Token(bytes):
    """A token's bytes, and its id. Tokens are equal when their ids are: several may have the same
    bytes.

    Attributes:
        token_id: index into a distribution.
    """

    token_id: int

    def __new__(cls, token_id: int, byte_string: bytes) -> Token:
        token = super().__new__(cls, byte_string)
        token.token_id = token_id
        return token

    @property
    def byte_string(self) -> bytes:
        """The bytes alone."""
        return bytes(self)

    def __eq__(self, other: object) -> bool:
        return self.token_id == other.token_id if isinstance(other, Token) else bytes(self) == other

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.token_id)

    def __repr__(self) -> str:
        return f"Token({self.token_id}, {bytes(self)!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Token, (self.token_id, bytes(self))


class AsyncLM(ABC):
    """A language model that is asked for next-token log-probabilities. The names of its methods and
    of their arguments are those of genlm-backend.

    Attributes:
        tokenizer: the model's, or None when it was not loaded.
        vocab_size: number of log-probabilities of a token.
    """

    tokenizer: Any
    vocab_size: int

    @cached_property
    def byte_vocab(self) -> list[Token]:
        """Every token of the tokenizer as bytes, by id; `ValueError` when it cannot be told."""
        if self.tokenizer is None:
            raise ValueError("there is no tokenizer: the model was loaded without one")
        return token_bytes(self.tokenizer)

    @cached_property
    def str_vocab(self) -> list[str]:
        """Every token as text, by id; as the tokenizer writes it when it is not UTF-8 by itself."""
        found = []
        for token in self.byte_vocab:
            try:
                found.append(token.decode())
            except UnicodeDecodeError:
                found.append(str(self.tokenizer.convert_ids_to_tokens(token.token_id)))
        return found

    @abstractmethod
    def next_token_logprobs(
        self, token_ids: Sequence[int], *, lora_name: str | None = None
    ) -> Awaitable[torch.Tensor]:
        """Log-probabilities `[vocab]` float32 of the token after a prompt."""

    @abstractmethod
    def next_token_logprobs_sync(
        self, token_ids: Sequence[int], *, lora_name: str | None = None
    ) -> torch.Tensor:
        """`next_token_logprobs` for callers without an event loop."""

    def batch_next_token_logprobs(
        self, token_ids_list: Sequence[Sequence[int]], *, lora_name: str | None = None
    ) -> Awaitable[torch.Tensor]:
        """Log-probabilities `[batch, vocab]` float32; row i belongs to prompt i."""
        return asyncio.to_thread(
            self.batch_next_token_logprobs_sync, token_ids_list, lora_name=lora_name
        )

    def batch_next_token_logprobs_sync(
        self, token_ids_list: Sequence[Sequence[int]], *, lora_name: str | None = None
    ) -> torch.Tensor:
        """`batch_next_token_logprobs` for callers without an event loop."""
        check_prompts(token_ids_list)
        rows = [self.next_token_logprobs_sync(p, lora_name=lora_name) for p in token_ids_list]
        return torch.stack(rows)

    @abstractmethod
    async def sample(
        self,
        prompt_token_ids: Sequence[int],
        max_tokens: int,
        eos_token_ids: Sequence[int] | None = None,
        temperature: float = 1.0,
        seed: int | None = None,
    ) -> list[int]:
        """Tokens of a completion, without the token of `eos_token_ids` that ended it: by default
        those that the model itself ends with."""

    async def batch_sample(
        self,
        prompt_token_ids_list: Sequence[Sequence[int]],
        max_tokens: int,
        eos_token_ids: Sequence[int] | None = None,
        temperature: float = 1.0,
        seed: int | None = None,
        **options: Any,
    ) -> list[list[int]]:
        """A completion for each prompt, all with the same seed; options as `sample` takes them."""
        check_prompts(prompt_token_ids_list)
        samples = (
            self.sample(prompt, max_tokens, eos_token_ids, temperature, seed, **options)
            for prompt in prompt_token_ids_list
        )
        return list(await asyncio.gather(*samples))

    def clear_cache(self) -> None:
        """Forget earlier answers."""

    def reset_async_queries(self) -> None:
        """Give up the queries that nobody will wait for any more."""

    def cleanup(self) -> None:
        """Free what the model holds. Safe to call again."""

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.cleanup()

    async def __aenter__(self: Self) -> Self:
        return self

    async def __aexit__(self, *raised: object) -> None:
        await asyncio.to_thread(self.cleanup)


def check_prompts(prompts: Any) -> None:
    """Raise `ValueError` unless there are several prompts, or one, to be gone through."""
    try:
        count = len(prompts)
    except TypeError:
        raise ValueError(
            f"the prompts are {type(prompts).__name__}; give a list of lists of token ids"
        ) from None
    if not count:
        raise ValueError("no prompts were given; give at least one")


_SAMPLE = "Ab 1,\n\u00e9 \u6f22\u2603"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def token_bytes(tokenizer: Any) -> list[Token]:
    """Every token of a tokenizer of `transformers` as bytes, by id.

    Tokens are written in one of two ways: a character for each byte (GPT-2's alphabet), or text
    with a sign for the space and `<0xE2>` for bytes that are no text (SentencePiece).

    Raises:
        ValueError: when they are written in another, such as WordPiece, which drops spaces.
    """
    added = {token_id: text for text, token_id in tokenizer.get_added_vocab().items()}
    # Of which some may be nobody's, so that there are fewer tokens than ids.
    ids = range(max(len(tokenizer), 1 + max(tokenizer.get_vocab().values(), default=-1)))
    names = tokenizer.convert_ids_to_tokens(list(ids))
    alphabet = _byte_alphabet()
    by_byte = all(
        name is None or i in added or alphabet.keys() >= set(name) for i, name in enumerate(names)
    )
    tokens = []
    for i, name in enumerate(names):
        if i in added or name is None:
            found = added.get(i, "").encode()
        elif by_byte:
            found = bytes(alphabet[character] for character in name)
        elif (byte := _BYTE.fullmatch(name)) is not None:
            found = bytes.fromhex(byte[1])
        else:
            found = name.replace("\u2581", " ").encode()
        tokens.append(Token(i, found))
    encoded = tokenizer.encode(_SAMPLE, add_special_tokens=False)
    if b"".join(tokens[i] for i in encoded).removeprefix(b" ") != _SAMPLE.encode():
        raise ValueError(
            f"tokens of {type(tokenizer).__name__} are not pieces of text that add up to the whole:"
            f" {_SAMPLE!r} is {tokenizer.convert_ids_to_tokens(encoded)}"
        )
    return tokens


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's character for each byte: itself where it can be seen, else one from 256 on."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(256 + i): b for i, b in enumerate(hidden)}
