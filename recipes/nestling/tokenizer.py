"""Train the byte-level BPE on the library group, then encode every group into build/nestling/tokens.npz."""

import argparse
import json
import shutil
import sysconfig
from pathlib import Path

import numpy as np
from common import CONTEXT, END_OF_TEXT, PAD, PROMPTS, TOKENIZER, TOKENS, VOCAB_SIZE
from corpus import Document, collect
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import AutoTokenizer

# An identifier or a run of signs takes one space before it along; digits come in threes; the
# last space of an indentation belongs to the word that follows, so that words look alike everywhere.
PIECES = r" ?[\p{L}_]+|\p{N}{1,3}| ?[^\s\p{L}\p{N}_]+|\s+(?!\S)|\s+"


def train(texts: list[str]) -> Tokenizer:
    """A BPE over bytes with all 256 of them in its alphabet: every text has an encoding and round-trips."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(END_OF_TEXT, normalized=False), AddedToken(PAD, normalized=False)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=True,
    )
    tokenizer.train_from_iterator(texts, trainer, length=len(texts))
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the two files that AutoTokenizer reads. Nothing is added, trimmed or cleaned up, either way."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": PAD,
        "add_bos_token": False,
        "add_eos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def encode(tokenizer: Tokenizer, documents: list[Document], end_of_text: int) -> tuple[np.ndarray, np.ndarray]:
    """All documents in one stream, each followed by end of text.

    Returns ids [num_tokens] uint16 and starts [num_documents] int32.
    """
    encoded = tokenizer.encode_batch([document.text for document in documents], add_special_tokens=False)
    rows = [np.array([*row.ids, end_of_text], dtype=np.uint16) for row in encoded]
    starts = np.cumsum([0, *map(len, rows)], dtype=np.int64)[:-1]
    return np.concatenate(rows), starts.astype(np.int32)


def check(folder: Path, texts: list[str]) -> None:
    """Every text survives encoding and decoding by what AutoTokenizer loads, and no token is added."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    hard = [" a", "a ", "\n\n \t x\r\n", "  def f( x ) :", " . , n't 's", "caf\u00e9 \u4e2d \U0001f40d\x00", "", " "]
    for text in [*hard, *texts]:
        assert tokenizer.decode(tokenizer.encode(text)) == text, repr(text[:80])
    assert tokenizer.encode("") == []


def main() -> None:
    """Train, save, check and encode."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stdlib", type=Path, default=Path(sysconfig.get_paths()["stdlib"]))
    args = parser.parse_args()

    documents = collect(args.stdlib)
    groups = {name: [d for d in documents if d.group == name] for name in ("library", "tests", "tables", "heldout")}
    tokenizer = train([document.text for document in groups["library"]])
    save(tokenizer, TOKENIZER)
    check(TOKENIZER, [document.text for document in groups["heldout"]])

    arrays = {}
    for name, members in tqdm(groups.items(), desc="encode"):
        arrays[name], arrays[f"{name}_starts"] = encode(tokenizer, members, tokenizer.token_to_id(END_OF_TEXT))
        characters = sum(len(document.text) for document in members)
        tqdm.write(f"{name:8} {len(arrays[name]):8} tokens, {characters / len(arrays[name]):.2f} characters a token")
    np.savez_compressed(TOKENS, **arrays)

    if PROMPTS.exists():
        lines = [json.loads(line)["prompt"] for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
        lengths = [len(tokenizer.encode(line).ids) for line in lines]
        print(f"prompts: {min(lengths)} to {max(lengths)} tokens, mean {sum(lengths) / len(lengths):.0f}")


if __name__ == "__main__":
    main()
