"""`draftwood train pack`: the tokenizer in K2's tiktoken format, then the corpus as packed token files.

The tokenizer is byte-level BPE with K2's exact split pattern: ids 0 .. V-257 are merge ranks, the last 256 are special
tokens with K2's names at K2's offsets. Token files are uint16, little endian:

- `corpus.bin`, `held.bin`: shuffled documents, [EOS] after every one; with `--shards N` the corpus is `corpus-0.bin` ..
  `corpus-(N-1).bin`, dealt out document by document;
- `pairs.bin`, `held_pairs.bin`: shuffled chats in K2's format, each ending in <|im_end|>, the next one right behind it;
- `pairs.idx.npy`, `held_pairs.idx.npy`: uint32 [n, 2], where a pair starts and where its answer starts (the id after
  `<think></think>`). The last pair ends with the file.

Everything that travels is written as `.xz` next to `meta.json`.
"""

from __future__ import annotations

import argparse
import base64
import json
import random
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

from draftwood.errors import ConfigError
from draftwood.train.files import SHARDS, compress, read_lines, report, sha256

PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
SPECIALS = 256
#: K2's names by their distance from the first special id (163,584 there).
NAMED = {
    0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 3: "<|im_user|>", 4: "<|im_assistant|>", 6: "<|start_header_id|>",
    7: "<|end_header_id|>", 9: "[EOT]", 10: "<|im_system|>", 11: "<|tool_calls_section_begin|>",
    12: "<|tool_calls_section_end|>", 13: "<|tool_call_begin|>", 14: "<|tool_call_argument_begin|>",
    15: "<|tool_call_end|>", 17: "<|im_middle|>", 18: "<|media_begin|>", 19: "<|media_content|>", 20: "<|media_end|>",
    21: "<|media_pad|>", 22: "<think>", 23: "</think>", 254: "[UNK]", 255: "[PAD]",
}  # fmt: skip
#: K2 lists these two as ordinary added tokens, so a decoder that skips specials still shows them.
NOT_SPECIAL = ("<think>", "</think>")
BATCH = 1000
#: Share of documents that begin with a signature and are cut once, and of all other documents' lines that are.
SIGNATURE_CUTS, LINE_CUTS = 0.6, 1 / 60


def special_tokens(base: int) -> dict[str, int]:
    """All 256 special tokens by name, from id `base` on; the unnamed are `<|reserved_token_ID|>`."""
    return {NAMED.get(offset, f"<|reserved_token_{base + offset}|>"): base + offset for offset in range(SPECIALS)}


def train_bpe(texts: Iterable[str], ranks: int) -> Any:
    """A Hugging Face byte-level BPE of `ranks` tokens; its ids are merge ranks, bytes first."""
    try:
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError:
        raise ConfigError("training a tokenizer needs `tokenizers`; install draftwood[train]") from None
    if ranks < 256:
        raise ConfigError(f"a vocabulary needs the 256 bytes and {SPECIALS} special tokens; --vocab is too small")
    bpe = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PATTERN), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=ranks, initial_alphabet=alphabet, show_progress=False))
    if bpe.get_vocab_size() != ranks:
        raise ConfigError(f"the text yields {bpe.get_vocab_size()} tokens, {ranks} asked; give more text or less --vocab")
    return bpe


def byte_of() -> dict[str, int]:
    """GPT-2's printable stand-in characters, back to the bytes that they stand for."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + index): byte for index, byte in enumerate(others)}


def mergeable_ranks(bpe: Any) -> dict[bytes, int]:
    """The trained vocabulary as tiktoken's table: token bytes -> rank."""
    back = byte_of()
    return {bytes(back[char] for char in token): rank for token, rank in bpe.get_vocab().items()}


def encoding(ranks: dict[bytes, int], name: str = "nano") -> Any:
    """The tiktoken Encoding of a rank table, with K2's pattern and special tokens."""
    import tiktoken

    return tiktoken.Encoding(name, pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special_tokens(len(ranks)))


def write_tokenizer(folder: Path, ranks: dict[bytes, int], context: int) -> None:
    """Write `tiktoken.model`, `tokenizer_config.json` and `special_tokens_map.json` as K2 lays them out."""
    lines = (f"{base64.b64encode(token).decode()} {rank}" for token, rank in sorted(ranks.items(), key=lambda it: it[1]))
    (folder / "tiktoken.model").write_text("\n".join(lines) + "\n", encoding="ascii")
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    added = {
        str(rank): {"content": name, **flags, "special": name not in NOT_SPECIAL}
        for name, rank in special_tokens(len(ranks)).items()
        if not name.startswith("<|reserved")
    }
    roles = {"bos_token": "[BOS]", "eos_token": "[EOS]", "unk_token": "[UNK]", "pad_token": "[PAD]"}
    extra = ["<|im_end|>", "<|im_user|>", "<|im_assistant|>", "[EOT]", "<|im_system|>", "<|im_middle|>"]
    config = {
        "added_tokens_decoder": added,
        "additional_special_tokens": extra,
        **roles,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
        "tokenizer_class": "TikTokenTokenizer",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    mapping = {**roles, "additional_special_tokens": extra}
    (folder / "special_tokens_map.json").write_text(json.dumps(mapping, indent=2) + "\n", encoding="utf-8")


def read_ranks(path: Path) -> dict[bytes, int]:
    """Read a `tiktoken.model` file."""
    try:
        pairs = (line.split() for line in path.read_text(encoding="ascii").splitlines() if line)
        return {base64.b64decode(token): int(rank) for token, rank in pairs}
    except (OSError, ValueError) as error:
        raise ConfigError(f"tokenizer file {path} is no tiktoken rank table ({error})") from None


def differing(bpe: Any, enc: Any, texts: list[str]) -> tuple[int, int]:
    """(documents whose ids differ between the trained BPE and its tiktoken form, documents compared)."""
    ours = enc.encode_ordinary_batch(texts, num_threads=2)
    theirs = bpe.encode_batch(texts, add_special_tokens=False)
    return sum(a != b.ids for a, b in zip(ours, theirs, strict=True)), len(texts)


def cuts(text: str, rng: random.Random) -> list[int]:
    """Offsets at which to encode `text` in pieces: ends of lines, before the newline, where a prompt might end.

    BPE joins punctuation with the newline behind it, so whole text never has a newline after the token `):`, only what
    follows a colon on the same line. A prompt that ends there must still go on with a new line: some texts are cut so.
    """
    ends = [found.start() for found in re.finditer(r"\n", text)]
    if not text.startswith(("def ", "class ")):
        return [end for end in ends[:-1] if rng.random() < LINE_CUTS]
    if len(ends) < 2 or rng.random() >= SIGNATURE_CUTS:
        return []
    signature = next((end for end in ends if text[end - 1] == ":"), ends[0])
    return [signature if rng.random() < 0.6 else rng.choice(ends[: min(5, len(ends) - 1)])]


def documents(enc: Any, texts: list[str], rng: random.Random | None = None) -> Iterator[Any]:
    """Yield each document's ids, [EOS] last, as uint16 [n]; with `rng` some are encoded in pieces (see `cuts`)."""
    import numpy as np
    from tqdm import tqdm

    end = enc.n_vocab - SPECIALS + 1
    for start in tqdm(range(0, len(texts), BATCH), desc="documents", unit="k"):
        pieces: list[str] = []
        counts = []
        for text in texts[start : start + BATCH]:
            places = [0, *(cuts(text, rng) if rng else []), len(text)]
            pieces += [text[a:b] for a, b in pairwise(places)]
            counts.append(len(places) - 1)
        encoded = iter(enc.encode_ordinary_batch(pieces, num_threads=2))
        for count in counts:
            yield np.array([token for _ in range(count) for token in next(encoded)] + [end], dtype=np.uint16)


def chats(enc: Any, rows: list[dict]) -> Iterator[tuple[Any, int]]:
    """Yield each pair's ids uint16 [n] in K2's chat format, and the offset of its answer."""
    import numpy as np
    from tqdm import tqdm

    special = special_tokens(enc.n_vocab - SPECIALS)
    user, assistant = enc.encode_ordinary("user"), enc.encode_ordinary("assistant")
    head = [special["<|im_user|>"], *user, special["<|im_middle|>"]]
    turn = [special["<|im_end|>"], special["<|im_assistant|>"], *assistant, special["<|im_middle|>"]]
    turn += [special["<think>"], special["</think>"]]
    for start in tqdm(range(0, len(rows), BATCH), desc="pairs", unit="k"):
        part = rows[start : start + BATCH]
        asked = enc.encode_ordinary_batch([row["request"] for row in part], num_threads=2)
        answers = enc.encode_ordinary_batch([row["answer"] for row in part], num_threads=2)
        for request, answer in zip(asked, answers, strict=True):
            prompt = head + request + turn
            yield np.array([*prompt, *answer, special["<|im_end|>"]], dtype=np.uint16), len(prompt)


def write_documents(paths: list[Path], enc: Any, texts: list[str], limit: int, rng: random.Random | None = None) -> dict[str, Any]:
    """Deal documents out to the files until `limit` tokens (0: all); `rng` as for `documents`. Returns counts."""
    count = tokens = characters = 0
    with ExitStack() as stack:
        streams = [stack.enter_context(path.open("wb")) for path in paths]
        for text, ids in zip(texts, documents(enc, texts, rng), strict=False):
            if limit and tokens + len(ids) > limit:
                break
            streams[count % len(streams)].write(ids.astype("<u2").tobytes())
            count, tokens, characters = count + 1, tokens + len(ids), characters + len(text)
    return {"documents": count, "tokens": tokens, "characters": characters}


def write_chats(path: Path, enc: Any, rows: list[dict], limit: int) -> dict[str, Any]:
    """Write pairs until `limit` tokens (0: all), and their index beside `path`. Returns counts."""
    import numpy as np

    index: list[tuple[int, int]] = []
    tokens = answers = 0
    with path.open("wb") as stream:
        for ids, offset in chats(enc, rows):
            if limit and tokens + len(ids) > limit:
                break
            stream.write(ids.astype("<u2").tobytes())
            index.append((tokens, tokens + offset))
            tokens, answers = tokens + len(ids), answers + len(ids) - offset
    np.save(path.with_suffix(".idx.npy"), np.array(index, dtype=np.uint32).reshape(-1, 2))
    kinds: dict[str, int] = {}
    for row in rows[: len(index)]:
        kinds[row["kind"]] = kinds.get(row["kind"], 0) + 1
    return {"pairs": len(index), "tokens": tokens, "answer_tokens": answers, "kinds": kinds}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--text", type=Path, required=True, metavar="FOLDER", help="what `train corpus` wrote")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--vocab", type=int, default=8192, help="ids, the 256 special ones included")
    parser.add_argument("--context", type=int, default=4096, help="model_max_length of the tokenizer")
    parser.add_argument("--tokenizer", type=Path, metavar="FILE", help="use this tiktoken.model, train none")
    parser.add_argument("--sample", type=float, default=40e6, help="characters to train the tokenizer on")
    parser.add_argument("--corpus-tokens", type=float, default=0, help="most corpus tokens (0: all)")
    parser.add_argument("--shards", type=int, default=1, help="files that the corpus is dealt out to")
    parser.add_argument("--pair-tokens", type=float, default=0, help="most tokens of pairs (0: all)")
    parser.add_argument("--held-tokens", type=float, default=1e6, help="most held-out tokens, of documents and pairs each")
    parser.add_argument("--limit", type=float, default=50 * 2**20, help="most bytes of all that travels")
    parser.add_argument("--seed", type=int, default=1)


def _sample(texts: list[str], rows: list[dict], size: float) -> Iterator[str]:
    """`size` characters for the tokenizer: three quarters documents, one quarter pairs."""
    for source, share in ((texts, 0.75), ([row["request"] + "\n" + row["answer"] for row in rows], 0.25)):
        left = size * share
        for text in source:
            if left <= 0:
                break
            left -= len(text)
            yield text


def _tokenizer(args: argparse.Namespace, data: dict[str, list]) -> tuple[dict[bytes, int], dict[str, int]]:
    """Rank table, and what the comparison with the trained BPE found (empty for a given table)."""
    if args.tokenizer:
        return read_ranks(args.tokenizer), {}
    bpe = train_bpe(_sample(data["train"], data["pairs"], args.sample), args.vocab - SPECIALS)
    ranks = mergeable_ranks(bpe)
    texts, size = [], 0
    for text in data["held"]:
        texts.append(text)
        size += len(text)
        if size > 3e6:
            break
    wrong, compared = differing(bpe, encoding(ranks), texts)
    return ranks, {"differing_documents": wrong, "compared_documents": compared, "compared_characters": size}


def _load(folder: Path, seed: int) -> dict[str, list]:
    """Texts of train and held, rows of pairs and held_pairs, each shuffled."""
    data: dict[str, list] = {}
    for name in ("train", "held", "pairs", "held_pairs"):
        rows = list(read_lines(folder / f"{name}.jsonl"))
        random.Random(seed).shuffle(rows)
        data[name] = rows if "pairs" in name else [row["text"] for row in rows]
    return data


def run(args: argparse.Namespace) -> int:
    if not 256 + SPECIALS <= args.vocab <= 65_536:
        raise ConfigError(f"--vocab {args.vocab}: token files are uint16, give {256 + SPECIALS} .. 65536")
    if not 1 <= args.shards <= SHARDS:
        raise ConfigError(f"--shards {args.shards}: give 1 .. {SHARDS}")
    data = _load(args.text, args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    ranks, compared = _tokenizer(args, data)
    enc = encoding(ranks)
    write_tokenizer(args.out, ranks, args.context)
    held = int(args.held_tokens)
    meta: dict[str, Any] = {"vocab": enc.n_vocab, "dtype": "uint16", "tokenizer": compared, "files": {}}
    corpus = ["corpus.bin"] if args.shards == 1 else [f"corpus-{i}.bin" for i in range(args.shards)]
    rng, paths = random.Random(args.seed), [args.out / name for name in corpus]
    meta["corpus"] = write_documents(paths, enc, data["train"], int(args.corpus_tokens), rng)
    meta["held"] = write_documents([args.out / "held.bin"], enc, data["held"], held)
    meta["pairs"] = write_chats(args.out / "pairs.bin", enc, data["pairs"], int(args.pair_tokens))
    meta["held_pairs"] = write_chats(args.out / "held_pairs.bin", enc, data["held_pairs"], held)
    for name in ("corpus", "held"):
        meta[name]["chars_per_token"] = round(meta[name]["characters"] / max(meta[name]["tokens"], 1), 4)
    total = _travel(args.out, meta, corpus)
    (args.out / "meta.json").write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")
    rows = [(f"{name} tokens", meta[name]["tokens"]) for name in ("corpus", "pairs", "held", "held_pairs")]
    report([*rows, ("bytes that travel", total)], meta)
    if total > args.limit:
        raise ConfigError(f"{total:,} bytes travel, --limit is {int(args.limit):,}; lower --corpus-tokens")
    return 0


def _travel(folder: Path, meta: dict[str, Any], corpus: list[str]) -> int:
    """Compress the token files and indices, note sizes and sums; returns the bytes that must travel."""
    names = [*corpus, "pairs.bin", "held.bin", "held_pairs.bin", "pairs.idx.npy", "held_pairs.idx.npy"]
    with ThreadPoolExecutor(2) as pool:  # lzma releases the interpreter lock
        list(pool.map(lambda name: compress(folder / name, folder / f"{name}.xz"), names))
    for name in names:
        meta["files"][name] = {"bytes": (folder / name).stat().st_size, "sha256": sha256(folder / name)}
    travel = [f"{name}.xz" for name in names] + ["tiktoken.model", "tokenizer_config.json", "special_tokens_map.json"]
    for name in travel:
        meta["files"][name] = {"bytes": (folder / name).stat().st_size, "sha256": sha256(folder / name)}
    meta["travel_bytes"] = sum(meta["files"][name]["bytes"] for name in travel)
    return meta["travel_bytes"]
