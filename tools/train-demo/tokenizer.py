"""Trains the demo checkpoint's tokenizer: byte-level BPE with Qwen's way of splitting text and its special tokens by name.

    python tokenizer.py --kjv kjv.txt

writes tokenizer.json and tokenizer_config.json into assets/demo. Ids: the BPE vocabulary first, then the added tokens, together VOCABULARY.
"""

import argparse
import json
import random
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

import generate

VOCABULARY = 4096
SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
# The added tokens of Qwen3.6 in its order; those with False are kept when special tokens are skipped in decoding.
ADDED = [("<|endoftext|>", True), ("<|im_start|>", True), ("<|im_end|>", True), ("<|object_ref_start|>", True), ("<|object_ref_end|>", True), ("<|box_start|>", True), ("<|box_end|>", True),
         ("<|quad_start|>", True), ("<|quad_end|>", True), ("<|vision_start|>", True), ("<|vision_end|>", True), ("<|vision_pad|>", True), ("<|image_pad|>", True), ("<|video_pad|>", True),
         ("<tool_call>", False), ("</tool_call>", False), ("<|fim_prefix|>", False), ("<|fim_middle|>", False), ("<|fim_suffix|>", False), ("<|fim_pad|>", False), ("<|repo_name|>", False), ("<|file_sep|>", False),
         ("<tool_response>", False), ("</tool_response>", False), ("<think>", False), ("</think>", False), ("<|audio_start|>", True), ("<|audio_end|>", True), ("<tts_pad>", True), ("<tts_text_bos>", True),
         ("<tts_text_eod>", True), ("<tts_text_bos_single>", True), ("<|audio_pad|>", True)]


def texts(kjv, documents=60_000):
    """What the merges are learned from: synthetic documents without their special tokens, and the whole KJV once."""
    rng, render = random.Random("tokenizer"), generate.Template()
    for _ in range(documents):
        text = generate.document(rng, render)
        for name, _ in ADDED:
            text = text.replace(name, "\n")
        yield text
    for passage in generate.kjv_passages(kjv)[0]:
        yield passage


def build(kjv):
    tok = Tokenizer(models.BPE())
    tok.normalizer = normalizers.NFC()
    tok.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(SPLIT), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)])
    tok.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY - len(ADDED), initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), special_tokens=[], show_progress=False)
    tok.train_from_iterator(texts(kjv), trainer)
    tok.add_tokens([AddedToken(name, normalized=False, special=special) for name, special in ADDED])
    return tok


def write(tok):
    """tokenizer.json, with the fields that the library leaves open spelled as in Qwen's file."""
    data = json.loads(tok.to_str())
    data["decoder"].update(add_prefix_space=False, trim_offsets=False, use_regex=False)
    data["model"].update(continuing_subword_prefix="", end_of_word_suffix="")
    (generate.ASSETS / "tokenizer.json").write_text(json.dumps(data, indent=2, ensure_ascii=False))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--kjv", type=Path, required=True)
    args = ap.parse_args()
    tok = build(args.kjv)
    assert tok.get_vocab_size() == VOCABULARY, tok.get_vocab_size()
    # The two spellings that tell thinking from not thinking have to be one token each.
    assert len(tok.encode("\n\n").ids) == len(tok.encode("\n").ids) == 1
    write(tok)
    config = {"add_prefix_space": False, "backend": "tokenizers", "bos_token": None, "clean_up_tokenization_spaces": False, "eos_token": "<|im_end|>", "errors": "replace",
              "model_max_length": 262144, "pad_token": "<|endoftext|>", "pretokenize_regex": SPLIT, "split_special_tokens": False, "tokenizer_class": "TokenizersBackend", "unk_token": None}
    (generate.ASSETS / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
